"""Ops that count in memory: on an operand whose dims lie in another order they mean what they mean on one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from harness import assert_equal_training
from torch import Tensor, nn

import autoshard
from autoshard.errors import CaptureError


class Net(nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.fn = nn.Linear(6, 6), fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.a(x)).square().sum()


def overwritten(y: Tensor) -> Tensor:
    y = y.transpose(0, 1).clone(memory_format=torch.preserve_format)
    y.as_strided((3, 2), (7, 1), 2).mul_(3)
    return y


WINDOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda y: y.as_strided((3, 4), (5, 1), 1),
    "transposed": lambda y: y.transpose(0, 1).as_strided((3, 4), (5, 1), 1),
    "permuted": lambda y: y.view(2, 2, 6).permute(2, 0, 1).as_strided((5, 6), (4, 1)),
    "overwritten": overwritten,
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_windows_on_memory(name: str, ranks: int) -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert_equal_training(Net(WINDOWS[name]), {"tp": ranks}, (x,))


@pytest.mark.parametrize(
    "fn", [lambda y: y[:, ::2].as_strided((2, 2), (6, 1)), lambda y: y[1:].as_strided((2, 2), (3, 1), 1)]
)
def test_memory_of_others_is_refused(fn: Callable[[Tensor], Tensor]) -> None:
    net = Net(fn)
    with pytest.raises(CaptureError, match="indexes the memory of a tensor that does not fill"):
        autoshard.plan(net, {"tp": 2}, (torch.randn(4, 6),))
