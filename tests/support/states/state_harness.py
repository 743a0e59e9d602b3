"""What cases of states share: their register, a model, and comparisons with the unsharded one."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard import CaptureError

Case = Callable[[autoshard.Mesh], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def one_graph(function: Case) -> Case:
    """``function`` with ``parts=None`` in its compilations: a model that is not one graph is refused."""

    @functools.wraps(function)
    def run(mesh: autoshard.Mesh) -> None:
        defaults: Any = inspect.unwrap(autoshard.compile).__kwdefaults__
        defaults["parts"] = None
        try:
            function(mesh)
        finally:
            defaults["parts"] = "auto"

    return run


class Block(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """A tied head, dropout, and a batch norm: modes, flags and written buffers all count."""

    def __init__(self, p: float = 0.0, tied: bool = True) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 8)
        self.layers = nn.ModuleList(Block(8, p) for _ in range(2))
        self.bn = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.emb(ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.bn(x.flatten(0, 1)))
        return F.cross_entropy(logits, ids.flatten().roll(1)), logits


class Smooth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 12), nn.Linear(12, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:
        y = self.norm(self.b(torch.tanh(self.a(x))))
        return (F.cross_entropy(y, torch.arange(4) % 3) + y.softmax(-1).pow(3).sum(),)


def ids(rows: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 12, (rows, 3), generator=torch.Generator().manual_seed(seed))


def pair(
    mesh: autoshard.Mesh, make: Callable[[], nn.Module], *args: Any, train: bool = True, **options: Any
) -> tuple[nn.Module, Any]:
    """The unsharded model in float64 and the same sharded, compiled for ``args``."""
    torch.manual_seed(0)
    model = make().double().train(train)
    return model, autoshard.compile(copy.deepcopy(model), mesh, args, **options)


def full(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def close(given: Any, expected: Any, what: str = "", rtol: float = 1e-9) -> None:
    given, expected = full(given).detach(), full(expected).detach()
    assert given.dtype == expected.dtype, f"{what}: {given.dtype}, not {expected.dtype}"
    torch.testing.assert_close(given, expected, rtol=rtol, atol=rtol * float(expected.abs().max()) + 1e-300, msg=None)


def same_gradients(sharded: Any, model: nn.Module, rtol: float = 1e-9) -> None:
    """Of the same parameters, and the same on every rank: each rank compares with the unsharded model's."""
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    given = sharded.full_gradients()
    assert given.keys() == expected.keys()
    largest = max(float(g.abs().max()) for g in expected.values())
    for name, g in expected.items():
        assert given[name].dtype == g.dtype
        torch.testing.assert_close(given[name], g, rtol=rtol, atol=rtol * largest, msg=lambda m, n=name: f"{n}: {m}")


def same_state(sharded: Any, model: nn.Module, rtol: float = 1e-9) -> None:
    given = sharded.full_state_dict()
    for name, t in model.state_dict().items():
        torch.testing.assert_close(given[name], t, rtol=rtol, atol=rtol, msg=lambda m, n=name: f"{n}: {m}")


def steps(model: nn.Module, sharded: Any, *batches: Any, seed: int = 0) -> None:
    """A step of SGD with momentum on every batch: loss, gradients, weights and buffers agree."""
    pairs = (
        (model, torch.optim.SGD(model.parameters(), 0.1, 0.9)),
        (sharded, torch.optim.SGD(sharded.parameters(), 0.1, 0.9)),
    )
    for batch in batches:
        losses = []
        for module, optimizer in pairs:
            torch.manual_seed(seed)
            optimizer.zero_grad()
            losses.append(full(module(batch)[0]))
            losses[-1].backward()
        close(losses[1], losses[0], "loss")
        same_gradients(sharded, model)
        for _, optimizer in pairs:
            optimizer.step()
        same_state(sharded, model)


def both(model: nn.Module, sharded: Any, change: Callable[[Any], Any]) -> None:
    for module in (model, sharded):
        change(module)


@contextlib.contextmanager
def refused(text: str, error: type[Exception] = CaptureError) -> Iterator[None]:
    with pytest.raises(error, match=text):
        yield


def rows(n: int = 4, width: int = 8, seed: int = 1) -> torch.Tensor:
    return torch.randn(n, width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class Of(nn.Module):
    """A linear layer, and a function of it and the input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.lin, self.function = nn.Linear(8, 8), function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self.lin, *inputs)


def once(model: nn.Module, sharded: Any, *inputs: torch.Tensor) -> None:
    """The outputs agree, and the gradients of their sum."""
    both(model, sharded, lambda m: m.zero_grad())
    outputs = []
    for module in (model, sharded):
        torch.manual_seed(3)
        outputs.append(full(module(*inputs)))
        outputs[-1].square().sum().backward()
    close(outputs[1], outputs[0])
    same_gradients(sharded, model)
