"""Checks of agreement_worker.py on what ranks are told of one another's calls."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from agreeing import Net, X, checks, compiled
from checks import assert_all_raise, assert_close, mesh
from torch import nn

import autoshard
from autoshard.errors import RuntimeMismatchError
from autoshard.module.dtensors.module_dtensor import is_owned

RANK = 0
"""see agreement_worker.py"""

FAILED = (
    "the ranks disagree on whether an earlier call failed (their collectives are out of step: restart all processes)"
)


def a_failure_of_one_after_its_last_collective() -> None:
    """The other rank has waited for nothing, and does not know: the next call is refused on both."""

    def fail(*args: object) -> None:
        raise MemoryError("no memory left")

    sharded = compiled(Net(), X)
    with mock.patch.object(sharded._comm.notes.common, "failed_in", set()), torch.no_grad():
        hook = sharded.register_forward_hook(fail if RANK else lambda *args: None)
        with pytest.raises(MemoryError) if RANK else contextlib.nullcontext():
            sharded(X)
        hook.remove()
        assert_all_raise(RuntimeMismatchError, FAILED, lambda: sharded(X))
    sharded(X)


def arguments_without_a_repr_of_their_own() -> None:
    """Python writes where they lie in memory, which is no difference between the ranks."""

    class Power:
        exponent = 2

    class Batch:
        def __init__(self, by: Power) -> None:
            self.x, self.by = X, by

    class Raised(Net):
        def forward(self, batch: Batch) -> torch.Tensor:
            return super().forward(batch.x) ** batch.by.exponent

    made = [Power() for _ in range(1 + 99 * RANK)]
    addresses: list[Any] = [None, None]
    dist.all_gather_object(addresses, id(made[-1]))
    assert addresses[0] != addresses[1]
    compiled(Raised(), Batch(made[-1]))(Batch(made[-1]))


def a_hook_of_one_rank() -> None:
    """On a module inside, after it was compiled: another program there."""
    sharded = compiled(Net(), X)
    text = "the ranks disagree on the state of the call: .* forward hooks"
    hook = sharded.last.register_forward_hook(lambda module, given, made: 2 * made) if RANK else None
    with pytest.raises(RuntimeMismatchError, match=text):
        sharded(X)
    if hook is not None:
        hook.remove()
    assert_close({"": sharded(X)}, {"": Net()(X)}, "loss")


def other_meetings() -> None:
    """Between calls one rank does something else than the other; they can go on afterwards."""
    sharded = compiled(Net(), X)
    text = "the ranks disagree on the call they make: rank 1 differs from rank 0"
    assert_all_raise(RuntimeMismatchError, text, sharded.full_gradients if RANK else sharded.full_state_dict)
    assert_close(sharded.full_state_dict(), Net().state_dict(), "weight")


def numbers_are_compared_whole() -> None:
    sharded = compiled(Net(), X)
    for bit in (0, 30, 61):
        text = "the ranks disagree on a number: rank 1 differs from rank 0"
        assert_all_raise(RuntimeMismatchError, text, lambda n=RANK << bit: sharded._agreement.agree(("a number", n)))


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.cat([table(ids) for table in self.tables], 1).square().mean()


def tables_of_one_owner_are_no_replicas() -> None:
    """Other ranks have nothing of them, and a check of replicas does not take that for a difference."""
    ids = torch.arange(8)
    with checks("replicas"):
        sharded = compiled(Tables(), ids, like={"tp": "table-wise"})
    assert any(map(is_owned, sharded.parameters()))
    sharded(ids)


class Named(Net):
    def forward(self, x: torch.Tensor, by: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * by.sum() + sum(i * x.sum() for i, x in enumerate(more.values()))


def named_arguments_in_another_order() -> None:
    """What a forward names is in its order. What it takes as it comes is another call, as to its program."""
    x, by = X, torch.ones(3, dtype=torch.float64)
    own = {"by": by, "x": x} if RANK else {"x": x, "by": by}
    sharded = autoshard.compile(Named(), mesh(), (), own)
    for given in (own, {"x": x, "by": by}):
        assert_close({"": sharded(**given)}, {"": Named()(x, by)}, "loss")
    assert len(sharded.programs) == 1
    more = {"c": by, "d": 2 * by}
    assert_close({"": sharded(x, by, **more)}, {"": Named()(x, by, **more)}, "loss")
    more = dict(reversed(more.items())) if RANK else more
    assert_all_raise(
        RuntimeMismatchError, "the ranks disagree on the shapes and dtypes", lambda: sharded(x, by, **more)
    )
