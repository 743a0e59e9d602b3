"""Zigzag (load-balanced) order of a sequence dim, and the conversion from and to sequence order.

In zigzag order each of n ranks holds one early and one late block, see
:func:`~autoshard.runtime.attention.order.spans`. Operations that work position by position shard a
tensor in zigzag order like any other. Only attention has to know the order."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from autoshard.runtime.attention.order import received, spans
from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.handed_on import register
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.profiling import named
from autoshard.runtime.transport.relay import Hop, Journey
from autoshard.runtime.transport.round_trip import Trip, round_trip


@torch.library.custom_op("autoshard::folded", mutates_args=())
def folded_op(x: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """``x`` with ``dim`` (divisible by ``ranks``) brought from sequence order into zigzag order."""
    return reordered(x, dim, ranks, back=False)


@torch.library.custom_op("autoshard::unfolded", mutates_args=())
def unfolded_op(x: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    """The inverse of :func:`folded_op`: zigzag order to sequence order."""
    return reordered(x, dim, ranks, back=True)


def _fake(x: torch.Tensor, dim: int, ranks: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _differentiate(op: Any, inverse: Any) -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.form = inputs[1:]

    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return inverse(gradient, *ctx.form), None, None

    op.register_fake(_fake)
    register(op, backward, save)


_differentiate(folded_op, unfolded_op)
_differentiate(unfolded_op, folded_op)


def folded(x: torch.Tensor, dim: int, ranks: int, axes: Axes = ()) -> torch.Tensor:
    """``x`` brought into zigzag order along ``dim``: unsharded, or sharded by ``axes``."""
    return _brought(x, dim, ranks, axes, back=False)


def unfolded(x: torch.Tensor, dim: int, ranks: int, axes: Axes = ()) -> torch.Tensor:
    """``x`` brought from zigzag order along ``dim`` into sequence order; else as :func:`folded`."""
    return _brought(x, dim, ranks, axes, back=True)


def _brought(x: torch.Tensor, dim: int, ranks: int, axes: Axes, back: bool) -> torch.Tensor:
    comm = current()
    names = comm.active(axes)
    if not names:
        return reordered(x, dim, ranks, back)
    move, me = named(Move("S", "S", names, order=names), always=True), comm.index(names)

    def ahead(x: torch.Tensor) -> Journey:
        return _swapped(move, me, ranks, x, dim, back)

    def behind(gradients: Any, saved: Any, wanted: Any) -> Journey:
        return _swapped(move, me, ranks, gradients[0], dim, not back)

    return round_trip(comm, Trip(f"the folded order of a sequence ({', '.join(names)})", ahead, behind), x)[0]


def reordered(x: torch.Tensor, dim: int, ranks: int, back: bool) -> torch.Tensor:
    """All of local ``x`` into zigzag order (``back``: out of it), half a chunk at a time."""
    order = list(itertools.chain.from_iterable(spans(x.shape[dim], (ranks,), True)))
    there = sorted(order)
    held, wanted = (order, there) if back else (there, order)
    parts = dict(zip(held, x.split([length for _, length in held], dim), strict=True))
    return torch.cat([parts[interval] for interval in wanted], dim)


def _swapped(move: Move, me: int, ranks: int, x: torch.Tensor, dim: int, back: bool) -> Journey:
    """This rank's chunk after it has swapped first halves with the mirrored rank of the ring."""
    mirror, early = ranks - 1 - me, bool(received(me, ranks))
    first = x.shape[dim] - x.shape[dim] // 2
    at = x.shape[dim] - first if early and back else 0  # early ranks hold the received half last
    sent = x.narrow(dim, at, first).contiguous()
    stays = x.narrow(dim, first if at == 0 else 0, x.shape[dim] - first)
    size = float(math.prod(sent.shape) * sent.element_size())
    arrival = yield Hop(move, mirror, mirror, (sent,), (tuple(sent.shape),), size)
    (came,) = arrival()
    return (torch.cat([stays, came] if early and not back else [came, stays], dim),)
