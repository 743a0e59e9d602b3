"""A program without a backward gives gradients all the same: its forward runs again, from the state it had."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from harness import ideal
from torch import nn

import autoshard
from autoshard.module.on_demand import Before


class Samples(nn.Module):
    """As models that sample in eval mode, or count their calls: the result depends on more than the arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 9)
        self.register_buffer("scale", torch.ones(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.lin(x + torch.randn_like(x)) * self.scale.clone()
        self.scale.mul_(2)
        return F.dropout(y, 0.3).square().mean()


def error(axes: dict[str, int]) -> float:
    """The largest error of the gradients of two calls, whose backward runs after other draws."""
    model = Samples().double().eval()
    sharded = autoshard.compile(copy.deepcopy(model), ideal(axes), (x := torch.randn(5, 6).double(),))
    assert not sharded.plan.training
    for module in model, sharded:
        torch.manual_seed(1)
        losses = [module(x), module(-x)]
        torch.rand(7)
        sum(losses).backward()  # type: ignore[union-attr]
        assert torch.equal(
            module.get_buffer("scale") if module is model else sharded.tensor("scale"), torch.full((9,), 4.0).double()
        )
    gradients = sharded.full_gradients()
    return max(float((gradients[n] - p.grad).abs().max()) for n, p in model.named_parameters() if p.grad is not None)


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_draws_and_buffers_are_those_of_the_forward(axes: dict[str, int]) -> None:
    assert error(axes) < 1e-12


def test_the_generators_go_on_from_where_they_were() -> None:
    sharded = autoshard.compile(Samples().eval(), ideal({"tp": 2}), (x := torch.randn(5, 6),))
    loss = sharded(x)
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(torch.get_rng_state(), state)


def test_other_draws_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the forward runs again from the present state."""

    @contextmanager
    def restored(self: Before) -> Iterator[None]:
        yield

    monkeypatch.setattr(Before, "restored", restored)
    assert error({"tp": 2}) > 1e-6


def test_an_input_that_changed_before_the_backward_is_seen() -> None:
    sharded = autoshard.compile(Samples().double().eval(), ideal({"x": 2}), (x := torch.randn(5, 6).double(),))
    loss = sharded(x)
    x.add_(1)
    with pytest.raises(autoshard.AutoshardError, match="an input was changed in place"):
        loss.backward()
