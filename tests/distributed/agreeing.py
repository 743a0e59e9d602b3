"""What the checks of agreement_worker.py compile and look at: one small model, and what is said about it."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from checks import assert_close, mesh
from torch import nn

import autoshard

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


class Net(nn.Module):
    """Parameters that are cut and whole, a buffer that is written, one that is not, and a constant."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 8, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(8, dtype=torch.float64)
        self.last = nn.Linear(8, 4, dtype=torch.float64)
        self.register_buffer("scale", torch.rand(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(self.norm(self.first(x)).tanh()) * self.scale).square().mean()


HINTS: dict[str, Any] = {"first.weight": autoshard.Shard(0), "last.weight": "replicate", "x": autoshard.Shard(0)}


def compiled(model: nn.Module, *args: Any, **options: Any) -> Any:
    axis = next(iter(mesh().axes))
    return autoshard.compile(model, autoshard.Mesh({axis: 2}, hardware="ideal_network"), args, **options)


@contextmanager
def checks(text: str) -> Iterator[None]:
    """Modules made inside are checked so."""
    with mock.patch.dict(os.environ, {"AUTOSHARD_CHECK": text}):
        yield


@contextmanager
def warnings_of_ours() -> Iterator[list[str]]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("autoshard")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.propagate = True


def assert_step_alike(sharded: Any, reference: nn.Module, x: torch.Tensor = X) -> None:
    """Loss, gradients, and weights after a step of SGD."""
    for model in (sharded, reference):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss = model(x)
        loss.backward()
        if model is sharded:
            assert_close(sharded.full_gradients(), expected(reference, x), "gradient of")
        optimizer.step()
        optimizer.zero_grad()
    assert_close(sharded.full_state_dict(), reference.state_dict(), "weight")


def expected(reference: nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the unsharded model, which is left as it was."""
    other = copy.deepcopy(reference)
    other(x).backward()
    return {n: p.grad for n, p in other.named_parameters() if p.grad is not None}
