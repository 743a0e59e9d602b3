"""Objects on a model whose own methods raise or return tensors: no compile asks them what it does not need."""

from __future__ import annotations

import collections
import contextlib
from typing import Any

import pytest
import torch
from harness import assert_equal_training
from torch import Tensor, nn

import autoshard

METHODS = tuple(
    "__len__ __bool__ __eq__ __ne__ __hash__ __iter__ __repr__ __str__ __getattr__ __contains__ __getitem__ __call__ "
    "__reduce_ex__ keys values items".split()
)
BASES = (object, tuple, list, dict, set, frozenset, str, int, float, complex, bytes, collections.deque,
         collections.OrderedDict, collections.UserDict, collections.UserList)  # fmt: skip
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def _raises(self: Any, *_: Any) -> Any:
    raise NotImplementedError


def _tensor(self: Any, *_: Any) -> Any:
    return torch.zeros(2)


def _hostile(base: type, method: str, answer: Any) -> Any:
    kind = type("Hostile", (base,), {method: answer, "__deepcopy__": lambda self, memo: self})
    if base in (tuple, list, set, frozenset, collections.deque):
        return kind((1, 2))
    if base in (dict, collections.OrderedDict):
        return kind(a=1)
    return kind()


class Holds(nn.Module):
    """``things`` in attributes of their own, in a list and in a dictionary."""

    shared: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, things: dict[str, Any]) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        vars(self).update(things)
        self.all, self.named = list(things.values()), things

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def things(base: type) -> dict[str, Any]:
    found = {}
    for answer in (_raises, _tensor):
        for method in METHODS:
            with contextlib.suppress(Exception):  # one that cannot be made
                found[f"{base.__name__}_{method.strip('_')}{answer.__name__}"] = _hostile(base, method, answer)
    return found


@pytest.mark.parametrize("base", BASES, ids=lambda base: base.__name__)
def test_on_a_model(base: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """In its attributes, those of its class, and global names beside it."""
    held = things(base)
    assert len(held) > 16
    for name, x in held.items():
        monkeypatch.setattr(Holds, name, x, raising=False)
        monkeypatch.setitem(globals(), name, x)
    monkeypatch.setattr(Holds, "shared", dict(held))
    assert_equal_training(Holds(held), {"tp": 2}, (X,), share=1.2)


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, other: Any) -> Tensor:
        return self.up(x).square().mean()


CLASSES = "__getattribute__", "__dataclass_fields__"
"""what an argument is asked beside :data:`METHODS`"""


@pytest.fixture(scope="module")
def sharded() -> autoshard.ShardedModule:
    return autoshard.compile(Takes(), {"tp": 2}, (X, 3), parts=None)


@pytest.mark.one_graph
@pytest.mark.parametrize("method", [*METHODS, *CLASSES])
def test_as_an_argument(method: str, sharded: autoshard.ShardedModule) -> None:
    """It is refused by name, in compile and in calls, alone and in a list."""
    refused = 0
    for base in (object, dict, collections.UserDict):
        x = None
        with contextlib.suppress(Exception):  # one that cannot be made
            x = _hostile(base, method, _raises)
        uses = (sharded, x), (sharded, [x]), (lambda *args: autoshard.compile(Takes(), {"tp": 2}, args), x)
        for use, given in () if x is None else uses:
            with pytest.raises(autoshard.AutoshardError, match=r"(?i)hostile"):
                use(X, given)
            refused += 1
    assert refused >= 6
