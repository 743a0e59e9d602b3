"""A number that the ranks sum while the step goes on: a loss, whose value its backward never reads."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from autoshard.runtime.transport.differentiable import Differentiable
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.profiling import recorded

_UNREAD = {torch.Tensor.backward} | {
    getattr(torch.Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad", "grad_fn")
}
"""what need not know the sum"""


class Arriving(torch.Tensor):
    """A number that is NaN until its sum is there. Whoever reads it waits; from then on it is a plain tensor.

    ``x.backward()`` reads nothing: the sum is waited for when the backward ends, and at the latest when the next call begins.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _UNREAD and type(args[0]) is Arriving:
            arrived((args[1:], kwargs))
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        arrived((args, kwargs))
        return func(*args, **kwargs)


def arrived(tree: Any) -> None:
    """Wait for the numbers in ``tree``."""
    for x in pytree.tree_leaves(tree):
        if type(x) is Arriving and (coming := x.__dict__.get("_sum")) is not None:
            coming.arrive()


class Sum:
    """A sum under way, and the number that it becomes."""

    def __init__(self, total: torch.Tensor, work: Any, number: torch.Tensor) -> None:
        self.total, self.work, self.number = total, work, weakref.ref(number)

    def arrive(self) -> None:
        """Wait for it. Raises :class:`~autoshard.errors.CommunicationError` where it cannot come, whenever it is asked."""
        self.work.wait()
        number = self.number()
        if type(number) is Arriving:
            with torch._C.DisableTorchFunctionSubclass():
                number.data.copy_(self.total)  # autograd does not count it as a write
            number.__class__ = torch.Tensor  # type: ignore[assignment]
            number.__dict__.pop("_sum", None)  # pickle would take it along


def comes_later(comm: Any, move: Move, x: torch.Tensor) -> bool:
    """Whether a forward goes on during this ``move``. With other backends than gloo the device waits, and not the host."""
    is_sum = move.verb == "all_reduce" and move.op == "sum" and not x.ndim
    return is_sum and comm.phase == "forward" and comm.process_group(move.axes).gloo


def begin_sum(comm: Any, move: Move, x: torch.Tensor, phase: str) -> Any:
    """Begin to sum ``x`` in place, on ranks of torch.distributed; what is returned has ``wait()``."""
    group = comm.process_group(move.axes)
    comm.record("all_reduce", move.axes, phase, move.ring_bytes(x, group.size))
    comm.during(move, phase)
    with recorded(comm, move, phase):
        return comm.begin(group, dist.all_reduce, x)


class Summed(Differentiable):
    """A sum of numbers as a node of the autograd graph, begun in the forward."""

    @staticmethod
    def forward(ctx: Any, comm: Any, move: Move, phase: str, x: torch.Tensor) -> torch.Tensor:
        total, number = x.clone(), torch.full_like(x, torch.nan)
        ctx.comm, ctx.move = comm, move
        ctx.sum = Sum(total, begin_sum(comm, move, total, phase), number)
        comm.notes.common.under_way.append(ctx.sum.arrive)
        number.__class__, number.__dict__["_sum"] = Arriving, ctx.sum
        return number

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        torch.autograd.Variable._execution_engine.queue_callback(ctx.sum.arrive)
        return Differentiable.backward(ctx, gradient)
