"""Zigzag (load-balanced) order of a sequence dim
(:func:`~autoshard.runtime.attention.ring_geometry.rank_spans`), and its conversion from and to
sequence order. Only attention has to know it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.attention.ring_geometry import rank_spans, received_half
from autoshard.runtime.transport.autograd import register_backward
from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.coroutine_autograd import CoroutinePair, apply_coroutines
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.profiling import with_module
from autoshard.runtime.transport.rank_coroutines import Hop, RankCoroutine


@torch.library.custom_op("autoshard::folded", mutates_args=())
def to_zigzag_op(x: Tensor, dim: int, ranks: int) -> Tensor:
    """``x`` with ``dim`` (divisible by ``ranks``) brought from sequence order into zigzag order."""
    return zigzag_reordered(x, dim, ranks, back=False)


@torch.library.custom_op("autoshard::unfolded", mutates_args=())
def from_zigzag_op(x: Tensor, dim: int, ranks: int) -> Tensor:
    """The inverse of :func:`to_zigzag_op`: zigzag order to sequence order."""
    return zigzag_reordered(x, dim, ranks, back=True)


def _fake_zigzag(x: Tensor, dim: int, ranks: int) -> Tensor:
    return x.new_empty(x.shape)


def _register_inverse(op: Any, inverse: Any) -> None:
    def save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.form = inputs[1:]

    def backward(ctx: Any, gradient: Tensor) -> Any:
        return inverse(gradient, *ctx.form), None, None

    op.register_fake(_fake_zigzag)
    register_backward(op, backward, save)


_register_inverse(to_zigzag_op, from_zigzag_op)
_register_inverse(from_zigzag_op, to_zigzag_op)


def to_zigzag(x: Tensor, dim: int, ranks: int, axes: Axes = ()) -> Tensor:
    """``x`` brought into zigzag order along ``dim``: unsharded, or sharded by ``axes``."""
    return _zigzag_moved(x, dim, ranks, axes, back=False)


def from_zigzag(x: Tensor, dim: int, ranks: int, axes: Axes = ()) -> Tensor:
    """``x`` brought from zigzag order along ``dim`` into sequence order: :func:`to_zigzag`."""
    return _zigzag_moved(x, dim, ranks, axes, back=True)


def _zigzag_moved(x: Tensor, dim: int, ranks: int, axes: Axes, back: bool) -> Tensor:
    comm = current()
    names = comm.active(axes)
    if not names:
        return zigzag_reordered(x, dim, ranks, back)
    move, me = with_module(Move("S", "S", names, order=names), always=True), comm.index(names)

    def ahead(x: Tensor) -> RankCoroutine:
        return _swap_first_halves(move, me, ranks, x, dim, back)

    def behind(gradients: Any, saved: Any, wanted: Any) -> RankCoroutine:
        return _swap_first_halves(move, me, ranks, gradients[0], dim, not back)

    return apply_coroutines(
        comm, CoroutinePair(f"the zigzag order of a sequence ({', '.join(names)})", ahead, behind), x
    )[0]


def zigzag_reordered(x: Tensor, dim: int, ranks: int, back: bool) -> Tensor:
    """All of local ``x`` into zigzag order (``back``: out of it), half a chunk at a time."""
    order = list(itertools.chain.from_iterable(rank_spans(x.shape[dim], (ranks,), True)))
    there = sorted(order)
    held, wanted = (order, there) if back else (there, order)
    parts = dict(zip(held, x.split([length for _, length in held], dim), strict=True))
    return torch.cat([parts[interval] for interval in wanted], dim)


def _swap_first_halves(move: Move, me: int, ranks: int, x: Tensor, dim: int, back: bool) -> RankCoroutine:
    """This rank's chunk after it has swapped first halves with the mirrored rank of the ring."""
    mirror, early = ranks - 1 - me, bool(received_half(me, ranks))
    first = x.shape[dim] - x.shape[dim] // 2
    at = x.shape[dim] - first if early and back else 0  # early ranks hold the received half last
    sent = x.narrow(dim, at, first).contiguous()
    stays = x.narrow(dim, first if at == 0 else 0, x.shape[dim] - first)
    size = float(math.prod(sent.shape) * sent.element_size())
    arrival = yield Hop(move, mirror, mirror, (sent,), (tuple(sent.shape),), size)
    (came,) = arrival()
    return (torch.cat([stays, came] if early and not back else [came, stays], dim),)
