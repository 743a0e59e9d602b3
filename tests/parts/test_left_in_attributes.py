"""What a forward leaves in attributes for code outside: losses, caches by key, sizes; in parts and in one graph."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import ideal
from torch import Tensor, nn

import autoshard

LEAVES = {
    "none": (None, lambda old, loss: loss),
    "tensor": (torch.zeros((), dtype=torch.float64), lambda old, loss: loss),
    "many": (torch.zeros(3, dtype=torch.float64), lambda old, loss: loss),
    "new dict": ({}, lambda old, loss: {"loss": loss}),
    "dict": ({}, lambda old, loss: old.update(loss=loss) or old),
    "tuple": (None, lambda old, loss: (loss, loss.detach())),
}
"""attribute in __init__, and what a forward makes of it and a loss"""


class _Gate(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        start, self.leave = LEAVES[kind]
        self.left = copy.deepcopy(start)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        self.left = self.leave(self.left, h.square().mean())
        return self.down(h)


class _Around(nn.Module):
    """Reads what its module leaves, in code between parts."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.gate, self.head = _Gate(kind), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.gate(x)
        if y.sum().item() > 1e9:
            return self.head(x)
        return self.head(y) + _loss(self.gate.left)


def _loss(left: object) -> Tensor:
    found = left["loss"] if isinstance(left, dict) else left[0] if isinstance(left, tuple) else left
    assert isinstance(found, Tensor)
    return found


def _same_gradients(model: nn.Module, sharded: nn.Module, losses: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-12)
    for loss, module in zip(losses, (model, sharded), strict=True):
        module.zero_grad()
        loss.backward()
    for (name, p), (_, q) in zip(model.named_parameters(), sharded.named_parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("kind", LEAVES)
def test_a_loss_that_is_left_for_the_training_loop(kind: str) -> None:
    torch.manual_seed(0)
    model = _Gate(kind).double()
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"tp": 2}))
    for _ in range(2):
        x = torch.randn(4, 8, dtype=torch.float64)
        losses = [(m(x).square().mean() + _loss(m.left)) for m in (model, sharded)]
        _same_gradients(model, sharded, (losses[0], losses[1]))
    assert sharded.parts == ("up", "down")


@pytest.mark.parametrize("kind", ["none", "many", "dict"])
def test_a_loss_that_is_left_for_the_code_between_parts(kind: str) -> None:
    torch.manual_seed(0)
    model = _Around(kind).double()
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"tp": 2}))
    for _ in range(2):
        x = torch.randn(4, 8, dtype=torch.float64)
        _same_gradients(model, sharded, (model(x).square().sum(), sharded(x).square().sum()))
        torch.testing.assert_close(_loss(sharded.gate.left), _loss(model.gate.left), rtol=1e-9, atol=1e-12)
    assert sharded.parts == ("gate.up", "gate.down", "head")


class _Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.size = nn.Conv2d(1, 8, 2, 2), (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(x)
        self.size = tuple(y.shape[2:])
        return y.flatten(2).transpose(1, 2)


class _Image(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = _Patches(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.patches(x)
        if y.sum().item() > 1e9:
            return y
        return self.head(y).transpose(1, 2).unflatten(2, self.patches.size)


def test_sizes_that_are_left_for_the_code_between_parts() -> None:
    model = _Image().double()
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"tp": 2}))
    for size in (4, 6, 4):
        x = torch.randn(2, 1, size, size, dtype=torch.float64)
        torch.testing.assert_close(sharded(x), model(x), rtol=1e-9, atol=1e-12)
    assert sharded.parts == ("patches.project", "head")


class _Detached(_Gate):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x).relu()
        self.left = h.square().mean().detach()
        return self.down(h)


def test_a_detached_number_leaves_one_graph() -> None:
    sharded = autoshard.compile(_Detached("none").double(), ideal({"tp": 2}))
    sharded(torch.randn(4, 8, dtype=torch.float64))
    assert sharded.parts == ("",)
