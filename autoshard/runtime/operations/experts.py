"""Mixture of experts: all-to-all dispatch of rows to experts, expert MLPs, weighted combine.

No capacity limit: every row is computed. Where axes shard both experts and rows, rows go to their
experts by an all-to-all. Its sizes are exchanged first, and the host waits for them once (GShard,
Lepikhin et al. 2020; MegaBlocks, Gale et al. 2022)."""

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
    """``x`` [..., w] through experts ``ids`` [..., k], summed by ``weights`` [..., k] → [..., v].

    An expert is ``activation(x @ first) @ second``; ``gated``: ``first`` makes [gate, up], and
    ``activation(gate) * up`` goes into ``second``. Experts are dim 0: ``first`` [e, h, w],
    ``second`` [e, v, h] as of linear layers; ``transposed``: [e, w, h], [e, h, v]. Biases: [e, h],
    [e, v]. An id outside 0 … e - 1, for example -1, adds nothing. ``limit``, ``shift``:
    ``activation(min(gate, limit)) * (clamp(up, -limit, limit) + shift)``. ``interleaved``: gate and
    up features alternate instead of lying one after the other."""
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
    """:func:`experts_op` on this rank's rows and its ``expert_axes`` shard of ``count`` experts.

    Rows go through an all-to-all over ``exchange_axes``, some of ``expert_axes``. Over the other
    axes each rank gives the summand of its own experts (P). ``hidden_axes`` shard the ``hidden``
    features between the products: results are P. There ``first`` is sharded as one dim, so most
    ranks have only gates or only ups. They exchange slices of the weights or, if rows are few,
    products."""
    top, count = ids.shape[-1], count or first.shape[0]
    if not expert_axes and not _is_known(ids):  # zeros: no host sync for their count
        known = (ids >= 0) & (ids < count)
        ids, weights = ids.where(known, 0), weights.where(known, 0)
        x = x.masked_fill(~known.any(-1, keepdim=True), 0)
    held = _held(count, expert_axes, exchange_axes, ids.device)
    computed, found = _routes(ids.reshape(-1), held)
    flat = x.reshape(-1, x.shape[-1])
    slots = slots_of(computed, flat.shape[0], top)
    rows = dealt(flat, slots)
    routes = found()  # the sizes have had that time to arrive
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
        if first_bias is not None:  # then the product is not split
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
    """Whether ranks exchange gate and up products: fewer ``rows`` than ``weights`` per feature."""
    return rows < weights


def _of_rows(bias: torch.Tensor, ends: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The expert's bias for each row."""
    numbers = torch.arange(rows.shape[0], device=ends.device, dtype=ends.dtype)
    return bias.index_select(0, torch.searchsorted(ends, numbers, right=True))


def _is_known(ids: torch.Tensor) -> bool:
    """Whether the host reads ``ids`` without a device sync."""
    return ids.device.type in ("cpu", "meta")


class _Held(NamedTuple):
    """The experts of the ranks that exchange rows."""

    comm: Communicator | None
    axes: tuple[str, ...]
    ranks: int
    most: int
    """the most experts of one rank"""
    together: int
    """experts of all these ranks"""
    places: torch.Tensor | None
    """expert → rank · most + number there; ranks · most if no rank has it. None: all local"""
    sizes: Move | None
    """the all-to-all of the number of rows per expert"""


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
    """Where rows go, and how they lie there."""

    splits: Splits | None
    """the all-to-all: rows arrive by rank and stay by expert; None: no exchange"""
    ends: torch.Tensor
    """where the rows of each local expert end; a rank may hold fewer experts than ``most``"""


def _routes(ids: torch.Tensor, held: _Held) -> tuple[torch.Tensor, Callable[[], _Routes]]:
    """Computed slots (flat ``ids``) by rank and expert; a call that waits for their routes."""
    if ids.is_meta:
        slots, balanced = _balanced(ids, held)
        return slots, lambda: balanced
    # An id that is no expert gets the last place.
    if held.places is None:
        keys = ids.where((ids >= 0) & (ids < held.most), held.most)
    else:
        keys = held.places[ids.clamp(-1, held.places.shape[0] - 1)]
    cells = held.ranks * held.most
    slots = keys.argsort(stable=True)
    sent = torch.bincount(keys, minlength=cells)[:cells]
    if held.places is None or held.comm is None or held.sizes is None:
        ends = sent.cumsum(0, dtype=torch.int32)  # slots of other ranks' experts come last
        every = held.places is None and not _is_known(ids)
        return slots if every else slots[: int(sent.sum())], lambda: _Routes(None, ends)
    comm, sent = held.comm, sent.view(held.ranks, -1)
    arrive = comm.start(held.sizes, sent, comm.phase)
    arrived = known = None
    if ids.device.type == "cpu":
        gone = sent.tolist()
    else:  # one host sync
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
    """Routes on meta tensors: every expert gets as many rows."""
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
