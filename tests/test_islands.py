"""float32 islands in float64 models agree to the last bit; hand-written derivatives are traced through."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness import assert_equal_training
from torch import nn

import autoshard
from autoshard.errors import CaptureError
from autoshard.passes import hazards, op_space


class Island(nn.Module):
    """A norm, a gate and a loss in float32, as many libraries compute them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 7)
        self.scale = nn.Parameter(torch.rand(32))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.up(x).float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.scale.float())
        h = h * torch.sigmoid(h.exp())
        return nn.functional.cross_entropy(self.down(h.to(x.dtype)).float().flatten(0, 1), y.flatten())


def example() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(5, 11, 32), torch.randint(0, 7, (5, 11))


@pytest.mark.parametrize("axes", [{"tp": 2}, {"tp": 3}, {"dp": 2, "tp": 2}], ids=str)
def test_islands_agree_to_the_last_bit(axes: dict[str, int]) -> None:
    report = assert_equal_training(Island(), axes, example(), steps=1)
    assert report.plan.cost.flops_per_rank < 0.7 * report.plan.cost.flops  # the float64 products stay divided


def test_islands_that_are_cut_anyhow_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with every strategy allowed, float32 sums over ranks show."""
    monkeypatch.setattr(op_space, "exact", lambda strategies, node, graph: strategies)
    monkeypatch.setattr(op_space, "is_single_in_double", lambda node, graph: False)
    with pytest.raises(AssertionError, match="DIVERGES"):
        assert_equal_training(Island(), {"tp": 3}, example(), steps=1)


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad


class Activated(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.up, self.down = function, nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.down(self.function.apply(self.up(x))).square().mean()
        return y


def test_a_librarys_backward_that_is_the_derivative_is_traced_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazards, "_is_a_librarys", lambda function: True)
    assert_equal_training(Activated(Cube), {"tp": 2}, (torch.randn(4, 8),), share=1.05)


@pytest.mark.parametrize(("function", "library"), [(StraightThrough, True), (StraightThrough, False), (Cube, False)])
def test_any_other_backward_is_refused(function: Any, library: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hazards, "_is_a_librarys", lambda function: library)
    with pytest.raises(CaptureError, match=rf"'{function.__name__}'.*drops its backward"):
        autoshard.plan(Activated(function), {"tp": 2}, (torch.randn(4, 8),))
    Activated(function)(torch.randn(4, 8)).backward()  # the function is as it was
    assert function.apply.__self__ is function
