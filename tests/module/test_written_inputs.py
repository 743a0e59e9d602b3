"""A forward that writes in place into its inputs: the caller's tensors get the values, as in eager."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import MESHES, assert_equal_training, ideal
from torch import nn

import autoshard
from autoshard import CaptureError

RANDOM = torch.Generator().manual_seed(0)


class Writes(nn.Module):
    """Clamps positions as transformers' question answering heads do, and moves its float input."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 9)

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = x.clone().view(-1, 6)
        x -= x.mean(0, keepdim=True) / 2
        positions.clamp_(0, 8)
        logits = self.lin(x)
        return nn.functional.cross_entropy(logits, positions), before


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 6, generator=RANDOM, dtype=torch.float64), torch.tensor([3, -2, 11, 8, 100])


@pytest.mark.parametrize("axes", [MESHES["tp2"], {"tp": 3}, MESHES["dp2tp2"]], ids=str)
def test_as_in_eager(axes: dict[str, int]) -> None:
    report = assert_equal_training(Writes(), axes, inputs(), steps=2)
    assert sum(c.kind == "input" for c in report.comparisons) == 4


def written(
    model: nn.Module, *args: torch.Tensor
) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...], autoshard.ShardedModule]:
    """The output on three ranks, what is left in the arguments, and the module."""
    args = tuple(x.clone() for x in args)
    module = autoshard.compile(copy.deepcopy(model), ideal({"tp": 3}), args)
    return module(*args), args, module


def test_outputs_do_not_see_what_is_written_back() -> None:
    x, positions = inputs()
    (_, before), left, _ = written(Writes().double(), x, positions)
    assert torch.equal(before, x)
    assert not torch.equal(left[0], x)


def gradient_error() -> float:
    """The largest error of a gradient of a module that writes into its inputs."""
    x, positions = inputs()
    model = Writes().double()
    (loss, _), left, module = written(model, x, positions)
    loss.backward()
    expected, _ = model(mine := x.clone(), yours := positions.clone())
    expected.backward()
    assert torch.allclose(left[0], mine, rtol=1e-12)
    assert torch.equal(left[1], yours)
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    gradients = module.full_gradients()
    assert gradients.keys() == wanted.keys()
    assert len(gradients) == 2
    return float(torch.stack([(gradients[n] - x).abs().max() for n, x in wanted.items()]).max())


def test_a_backward_sees_what_the_inputs_were() -> None:
    assert gradient_error() < 1e-12


def test_arguments_that_share_memory() -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * y

    both = torch.arange(8.0, dtype=torch.float64).reshape(4, 2)
    module = autoshard.compile(Adds(), ideal({"tp": 2}), both.clone().unbind(1), training=False)
    mine, other = both.clone(), both.clone()
    result, expected = module(*mine.unbind(1)), Adds()(*other.unbind(1))  # interleaved, and apart
    assert torch.equal(result, expected)
    assert torch.equal(mine, other)
    with pytest.raises(CaptureError, match="writes in place to its input 'x', which shares memory with input 'y'"):
        module(both[:, 0], both[:, 0])
    assert torch.equal(both[:, 0], torch.arange(0.0, 8.0, 2, dtype=torch.float64))


def test_all_lengths() -> None:
    x, positions = inputs()
    model = Writes().double()
    module = autoshard.compile(copy.deepcopy(model), ideal({"tp": 3}), (x.clone(), positions.clone()), dynamic=True)
    for n in (3, 5, 8):
        mine, yours = torch.randn(n, 6, generator=RANDOM, dtype=torch.float64), torch.arange(n) * 3 - 2
        theirs = (mine.clone(), yours.clone())
        assert torch.allclose(module(mine, yours)[0], model(*theirs)[0], rtol=1e-12)
        assert torch.allclose(mine, theirs[0], rtol=1e-12)
        assert torch.equal(yours, theirs[1])
    assert len(module.programs) == 1
