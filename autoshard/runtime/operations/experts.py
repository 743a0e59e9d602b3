"""Mixtures of experts: rows go to the experts that a router chose for them, and come back weighted.

Without capacity: every row is computed. Where experts are cut by axes that cut the rows as well, rows travel by an
all-to-all whose sizes are exchanged first; the host waits for them once (Lepikhin et al. 2020, GShard; Gale et al. 2022,
MegaBlocks).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from autoshard.runtime.operations.grouped import product
from autoshard.runtime.operations.halo import split
from autoshard.runtime.operations.slots import collected, dealt, regrouped, slots_of
from autoshard.runtime.operations.whole_op import differentiate
from autoshard.runtime.transport.communicator import Axes, Communicator, current
from autoshard.runtime.transport.handed_on import HandingOn
from autoshard.runtime.transport.move import Move, Splits

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
}


def activation_of(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """One of :data:`ACTIVATIONS`, or x · sigmoid(1.702 · x) as "swish 1.702"."""
    if not name.startswith("swish "):
        return ACTIVATIONS[name]
    slope = float(name.removeprefix("swish "))
    return lambda x: x * torch.sigmoid(x * slope)


@torch.library.custom_op("autoshard::experts", mutates_args=())
def experts_op(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    activation: str,
    gated: bool,
    transposed: bool,
    first_bias: torch.Tensor | None = None,
    second_bias: torch.Tensor | None = None,
    limit: float | None = None,
    shift: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Rows ``x`` [..., w], each through the experts ``ids`` [..., k], summed with ``weights`` [..., k] → [..., v].

    An expert is ``activation(x @ first) @ second``; ``gated``: ``first`` makes [gate, up], and
    ``activation(gate) * up`` goes into ``second``. Experts lie along dim 0: ``first`` [e, h, w] and ``second`` [e, v, h]
    as of linear layers, ``transposed`` [e, w, h] and [e, h, v]. Biases: [e, h] and [e, v]. An id that names no expert, such
    as -1, adds nothing. ``limit``, ``shift``: ``activation(min(gate, limit)) * (clamp(up, -limit, limit) + shift)``;
    ``interleaved``: gates and what they gate alternate, instead of lying one after the other.
    """
    form = activation, gated, transposed, first_bias, second_bias, limit, shift, interleaved
    return experts(x, ids, weights, first, second, *form)


@experts_op.register_fake
def _(x: torch.Tensor, *others: Any) -> torch.Tensor:
    second, transposed = others[3], others[6]
    return x.new_empty(*x.shape[:-1], second.shape[2 if transposed else 1])


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    activation: str = "silu",
    gated: bool = True,
    transposed: bool = False,
    first_bias: torch.Tensor | None = None,
    second_bias: torch.Tensor | None = None,
    limit: float | None = None,
    shift: float = 0.0,
    interleaved: bool = False,
    count: int | None = None,
    expert_axes: Axes = (),
    exchange_axes: Axes = (),
    hidden: int = 0,
    hidden_axes: Axes = (),
) -> torch.Tensor:
    """As :func:`experts_op`, with this rank's rows and its ``expert_axes`` part of ``count`` experts.

    Rows travel over ``exchange_axes``, some of ``expert_axes``: results are whole there. Over the others each rank
    gives the summand of its own experts. ``hidden_axes`` cut the ``hidden`` features between the products: results are
    summands. There ``first`` is cut as one dim, of which most ranks have gates only or none; they exchange their parts, of
    the weights or, where rows are few, of what these made of the rows.
    """
    top, count = ids.shape[-1], count or first.shape[0]
    if not expert_axes:  # what goes to none is computed as well, without a wait for how many there are
        known = (ids >= 0) & (ids < count)
        ids, weights = ids.where(known, 0), weights.where(known, 0)
    held = _held(count, expert_axes, exchange_axes)
    order, routes = _routes(ids.reshape(-1), held)
    flat = x.reshape(-1, x.shape[-1])
    slots = slots_of(order, flat.shape[0], top)
    rows = _exchanged(dealt(flat, slots), held, routes.splits)
    if routes.arriving is not None:
        rows = regrouped(rows, routes.arriving)
    ends = routes.ends[: first.shape[0]]
    dim, apart = 2 if transposed else 1, gated and hidden_axes and not interleaved
    of_rows = exchanges_rows(ids.numel(), first.numel() // max(1, first.shape[dim]))
    parts = split(first, dim, (hidden, hidden), hidden_axes) if apart and not of_rows else [first]
    made = [product(rows, part if transposed else part.mT, ends) for part in parts]
    if first_bias is not None:  # which is not taken apart
        made = [made[0] + _of_rows(first_bias, ends, rows)]
    if apart and of_rows:
        made = split(made[0], 1, (hidden, hidden), hidden_axes)
    act = activation_of(activation)
    if gated and len(made) == 1 and activation in _DERIVATIVES and (limit, shift, interleaved) == (None, 0, False):
        mid = _Gated.apply(made[0], activation)
    else:
        mid = gated_by(act, made, limit, shift, interleaved) if gated else act(made[0])
    if not transposed:
        second = second.mT
    out = product(mid, second, ends)
    if second_bias is not None:
        out = out + _of_rows(second_bias, ends, rows)
    if routes.arriving is not None:
        out = regrouped(out, routes.arriving.mT)
    out = _exchanged(out, held, None if routes.splits is None else routes.splits.backward())
    out = collected(out, weights.reshape(-1), slots).to(x.dtype)
    return out.view(*x.shape[:-1], out.shape[-1])


differentiate(experts_op, experts)


def exchanges_rows(rows: int, weights: int) -> bool:
    """Whether gates and what they gate are brought together after the product: ``rows`` are fewer than ``weights``, the
    elements of one of the features on a rank."""
    return rows < weights


def _of_rows(bias: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """For every one of ``rows`` that of its expert."""
    numbers = torch.arange(rows.shape[0], device=ends.device, dtype=ends.dtype)
    return bias.index_select(0, torch.searchsorted(ends, numbers, right=True))


def gated_by(
    activation: Callable[[torch.Tensor], torch.Tensor],
    made: list[torch.Tensor],
    limit: float | None = None,
    shift: float = 0.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """What goes into the second product; ``made``: gates and what they gate, in one or two tensors."""
    if len(made) == 1:
        gate, up = (made[0][..., 0::2], made[0][..., 1::2]) if interleaved else made[0].chunk(2, -1)
    else:
        gate, up = made
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return activation(gate) * (up + shift if shift else up)


_aten = torch.ops.aten
_DERIVATIVES: dict[str, Callable[..., Any]] = {
    "silu": _aten.silu_backward.grad_input,
    "gelu": _aten.gelu_backward.grad_input,
    "gelu_tanh": partial(_aten.gelu_backward.grad_input, approximate="tanh"),
}


class _Gated(HandingOn):
    """As :func:`gated_by`; gradients of gates, and of what they gate, are written where they belong, not put together."""

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = made.chunk(2, -1)
        active, ctx.activation = ACTIVATIONS[activation](gate), activation
        ctx.save_for_backward(made, active)
        return active * up

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        made, active = ctx.saved_tensors
        if torch.is_grad_enabled():  # it is to be differentiated
            out = gated_by(ACTIVATIONS[ctx.activation], [made])
            return *torch.autograd.grad(out, made, gradient, create_graph=True), None
        found = torch.empty_like(made)
        (gate, up), (of_gate, of_up) = made.chunk(2, -1), found.chunk(2, -1)
        torch.mul(gradient, active, out=of_up)
        torch.mul(gradient, up, out=of_gate)
        _DERIVATIVES[ctx.activation](of_gate, gate, grad_input=of_gate)
        return found, None


class _Held(NamedTuple):
    """Which experts the ranks that exchange rows hold."""

    comm: Communicator | None
    axes: tuple[str, ...]
    ranks: int
    most: int
    """how many a rank holds at most"""
    places: tuple[int, ...] | None
    """per expert, and for none: rank · most + number there; ranks · most where none of them holds it. None: all are here"""


def _held(count: int, expert_axes: Axes, exchange_axes: Axes) -> _Held:
    if not expert_axes:
        return _Held(None, (), 1, count, None)
    comm = current()
    cut, axes = comm.active(expert_axes), comm.active(exchange_axes)
    parts = comm.chunks(count, cut)
    ranks = comm.group(axes)
    most = max(1, parts[0][1])
    places = [len(ranks) * most] * (count + 1)
    for number, rank in enumerate(ranks):
        start, length = parts[comm.group(cut, rank).index(rank)]
        places[start : start + length] = range(number * most, number * most + length)
    return _Held(comm, axes, len(ranks), most, tuple(places))


class _Routes(NamedTuple):
    """Where rows go and how they lie there."""

    splits: Splits | None
    """None: they stay"""
    arriving: torch.Tensor | None
    """how many rows come from each rank for each expert here: they come by rank, and are multiplied by expert; None: they
    stay"""
    ends: torch.Tensor
    """where the rows of each of this rank's experts end; it may hold fewer than most"""


def _routes(ids: torch.Tensor, held: _Held) -> tuple[torch.Tensor, _Routes]:
    """The slots (rows of ``ids``, flat) that are computed, by rank and expert, and their routes."""
    if ids.is_meta:
        return _balanced(ids, held)
    # Whatever names no expert has the last of the places.
    keys = (
        ids
        if held.places is None
        else torch.tensor(held.places, device=ids.device)[ids.clamp(-1, len(held.places) - 1)]
    )
    cells = held.ranks * held.most
    slots = keys.argsort(stable=True)
    sent = torch.bincount(keys, minlength=cells)[:cells]
    if held.places is None:
        return slots, _Routes(None, None, sent.cumsum(0).to(torch.int32))
    if held.comm is None or not held.axes:  # those of other ranks come last
        return slots[: int(sent.sum())], _Routes(None, None, sent.cumsum(0).to(torch.int32))
    me, sent = held.comm.index(held.axes), sent.view(held.ranks, -1)
    row_each = Splits((1,) * held.ranks, (1,) * held.ranks, me)
    arriving = held.comm.apply(Move("S", "S", held.axes, 0, splits=row_each), sent)
    numbers = torch.stack([sent.sum(1), arriving.sum(1)]).tolist()  # the host waits, once
    splits = Splits(tuple(numbers[0]), tuple(numbers[1]), me)
    return slots[: sum(splits.sent)], _Routes(splits, arriving, arriving.sum(0).cumsum(0).to(torch.int32))


def _balanced(ids: torch.Tensor, held: _Held) -> tuple[torch.Tensor, _Routes]:
    """The routes of tensors without data: every expert gets as many rows."""
    ends = torch.empty(held.most, dtype=torch.int32, device="meta")
    if held.places is None:
        return torch.empty_like(ids), _Routes(None, None, ends)
    mine = sum(place < held.ranks * held.most for place in held.places)
    kept = -(-ids.numel() * mine // (len(held.places) - 1))
    slots = ids.new_empty(kept)
    if held.comm is None or not held.axes:
        return slots, _Routes(None, None, ends)
    each = -(-kept // held.ranks)
    sent = (each,) * (held.ranks - 1)
    splits = Splits((kept - sum(sent), *sent), (kept - sum(sent), *sent), 0)
    return slots, _Routes(splits, slots.new_empty(held.ranks, held.most), ends)


def _exchanged(x: torch.Tensor, held: _Held, splits: Splits | None) -> torch.Tensor:
    if held.comm is None or splits is None:
        return x
    return held.comm.apply(Move("S", "S", held.axes, 0, splits=splits), x)
