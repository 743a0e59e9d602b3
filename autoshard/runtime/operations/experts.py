"""Mixtures of experts: rows go to the experts that a router chose for them, and come back weighted.

Without capacity: every row is computed. Where experts are cut by axes that cut the rows as well, rows travel by an
all-to-all whose sizes are exchanged first; the host waits for them once (Lepikhin et al. 2020, GShard; Gale et al. 2022,
MegaBlocks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from autoshard.runtime.operations.gated import DERIVATIVES, activation_of, gated_by, gated_products
from autoshard.runtime.operations.grouped import product
from autoshard.runtime.operations.halo import split
from autoshard.runtime.operations.slots import collected, dealt, slots_of
from autoshard.runtime.operations.whole_op import differentiate
from autoshard.runtime.transport.communicator import Axes, Communicator, current
from autoshard.runtime.transport.move import Move, Splits
from autoshard.runtime.transport.segments import by_columns


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
    if not expert_axes and not _is_known(ids):  # what goes to none is computed, as zeros: how many is not waited for
        known = (ids >= 0) & (ids < count)
        ids, weights = ids.where(known, 0), weights.where(known, 0)
        x = x.masked_fill(~known.any(-1, keepdim=True), 0)
    held = _held(count, expert_axes, exchange_axes, ids.device)
    computed, found = _routes(ids.reshape(-1), held)
    flat = x.reshape(-1, x.shape[-1])
    slots = slots_of(computed, flat.shape[0], top)
    rows = dealt(flat, slots)
    routes = found()  # what ranks tell each other of their rows has had that time to arrive
    rows = _exchanged(rows, held, routes.splits)
    back = None if routes.splits is None else routes.splits.backward()
    ends = routes.ends[: first.shape[0]]
    dim, apart = 2 if transposed else 1, gated and hidden_axes and not interleaved
    plain = (first_bias, second_bias, limit, shift, interleaved) == (None, None, None, 0, False)
    if gated and plain and not apart and activation in DERIVATIVES:
        out = gated_products(rows, *((first, second) if transposed else (first.mT, second.mT)), ends, activation)
    else:
        of_rows = exchanges_rows(ids.numel(), first.numel() // max(1, first.shape[dim]))
        parts = split(first, dim, (hidden, hidden), hidden_axes) if apart and not of_rows else [first]
        made = [product(rows, part if transposed else part.mT, ends) for part in parts]
        if first_bias is not None:  # which is not taken apart
            made = [made[0] + _of_rows(first_bias, ends, rows)]
        if apart and of_rows:
            made = split(made[0], 1, (hidden, hidden), hidden_axes)
        act = activation_of(activation)
        mid = gated_by(act, made, limit, shift, interleaved) if gated else act(made[0])
        out = product(mid, second if transposed else second.mT, ends)
        if second_bias is not None:
            out = out + _of_rows(second_bias, ends, rows)
    out = _exchanged(out, held, back)
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


def _is_known(ids: torch.Tensor) -> bool:
    """Whether the host need not wait for what they say."""
    return ids.device.type in ("cpu", "meta")


class _Held(NamedTuple):
    """Which experts the ranks that exchange rows hold."""

    comm: Communicator | None
    axes: tuple[str, ...]
    ranks: int
    most: int
    """how many a rank holds at most"""
    together: int
    """how many all of them hold"""
    places: torch.Tensor | None
    """per expert, and for none: rank · most + number there; ranks · most where none of them holds it. None: all are here"""
    sizes: Move | None
    """how they tell each other how many rows go to each of their experts"""


def _held(count: int, expert_axes: Axes, exchange_axes: Axes, device: torch.device) -> _Held:
    if not expert_axes:
        return _Held(None, (), 1, count, count, None, None)
    comm = current()
    cut, axes = comm.active(expert_axes), comm.active(exchange_axes)
    known = ("experts", count, cut, axes, device)
    if known not in comm.memo:
        parts = comm.chunks(count, cut)
        ranks = comm.group(axes)
        most = parts[0][1]
        places = [len(ranks) * most] * (count + 1)
        for number, rank in enumerate(ranks):
            start, length = parts[comm.group(cut, rank).index(rank)]
            places[start : start + length] = range(number * most, number * most + length)
        together = sum(place < len(ranks) * most for place in places)
        row_each = Splits((1,) * len(ranks), (1,) * len(ranks), comm.index(axes))
        sizes = Move("S", "S", axes, 0, splits=row_each) if axes else None
        comm.memo[known] = len(ranks), most, together, torch.tensor(places, device=device), sizes
    return _Held(comm, axes, *comm.memo[known])


class _Routes(NamedTuple):
    """Where rows go and how they lie there."""

    splits: Splits | None
    """from the rank that has them to that of their expert, where they come by rank and stay by expert; None: they stay"""
    ends: torch.Tensor
    """where the rows of each of this rank's experts end; it may hold fewer than most"""


def _routes(ids: torch.Tensor, held: _Held) -> tuple[torch.Tensor, Callable[[], _Routes]]:
    """The slots (rows of ``ids``, flat) that are computed, by rank and expert, and what waits for their routes, once."""
    if ids.is_meta:
        slots, balanced = _balanced(ids, held)
        return slots, lambda: balanced
    # Whatever names no expert has the last of the places.
    if held.places is None:
        keys = ids.where((ids >= 0) & (ids < held.most), held.most)
    else:
        keys = held.places[ids.clamp(-1, held.places.shape[0] - 1)]
    cells = held.ranks * held.most
    slots = keys.argsort(stable=True)
    sent = torch.bincount(keys, minlength=cells)[:cells]
    if held.places is None or held.comm is None or held.sizes is None:
        ends = sent.cumsum(0, dtype=torch.int32)  # slots of no expert here come last
        every = held.places is None and not _is_known(ids)
        return slots if every else slots[: int(sent.sum())], lambda: _Routes(None, ends)
    comm, sent = held.comm, sent.view(held.ranks, -1)
    arrive = comm.start(held.sizes, sent, comm.phase)
    arrived = known = None
    if ids.device.type == "cpu":
        gone = sent.tolist()
    else:  # the host waits, once
        arrived = arrive()
        gone, known = torch.stack([sent, arrived]).tolist()

    def routes() -> _Routes:
        arriving = arrive() if arrived is None else arrived
        come = arriving.tolist() if known is None else known
        order = by_columns(come, ids.device)
        splits = Splits(tuple(map(sum, gone)), tuple(map(sum, come)), comm.index(held.axes), after=order)
        return _Routes(splits, arriving.sum(0).cumsum(0, dtype=torch.int32))

    return slots[: sum(map(sum, gone))], routes


def _balanced(ids: torch.Tensor, held: _Held) -> tuple[torch.Tensor, _Routes]:
    """The routes of tensors without data: every expert gets as many rows."""
    ends = torch.empty(held.most, dtype=torch.int32, device="meta")
    if held.places is None:
        return torch.empty_like(ids), _Routes(None, ends)
    kept = -(-ids.numel() * held.together // (len(held.places) - 1))
    slots = ids.new_empty(kept)
    if held.comm is None or not held.axes:
        return slots, _Routes(None, ends)
    each = -(-kept // held.ranks)
    sent = (each,) * (held.ranks - 1)
    sent = (kept - sum(sent), *sent)
    order = by_columns([[n, *[0] * (held.most - 1)] for n in sent], ids.device)
    return slots, _Routes(Splits(sent, sent, 0, after=order), ends)


def _exchanged(x: torch.Tensor, held: _Held, splits: Splits | None) -> torch.Tensor:
    if held.comm is None or splits is None:
        return x
    return held.comm.apply(Move("S", "S", held.axes, 0, splits=splits), x)
