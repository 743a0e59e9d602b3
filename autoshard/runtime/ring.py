"""Ring attention (Liu et al. 2023): queries stay, keys and values go round, results merge by log-sum-exp.

Queries, keys and values are cut along the sequence. In every step a rank computes with the keys and values that it has,
while it sends them to the next one. In the backward they go round once more, and their gradients behind them: a
gradient starts at the rank after the keys' owner, and every rank adds its part. Nothing of the size of the whole
sequence is ever held, and of a causal mask what is hidden is neither computed nor stored.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime import tile
from autoshard.runtime.communicator import Axes, Communicator, current
from autoshard.runtime.move import Move
from autoshard.runtime.profiling import named
from autoshard.runtime.random import noise_like, part, scaled
from autoshard.runtime.relay import Arrival, Hop, Journey, Tensors, travel
from autoshard.runtime.ring_order import Tile, length_of, spans, tiles
from autoshard.runtime.softmax import wide
from autoshard.runtime.tile import Masking
from autoshard.runtime.window import Chunks, Interval


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    *,
    queries: int,
    keys: int,
    axes: Axes,
    folded: bool = False,
    shape: Sequence[int] = (),
    cuts: Mapping[int, Axes] | None = None,
    batch: int | None = None,
) -> torch.Tensor:
    """Attention with queries, keys and values cut along the sequence by ``axes``: S → S.

    query [..., s, e], key [..., t, e], value [..., t, d], attn_mask [..., s, whole t]; ``queries`` and ``keys``: the
    global lengths. Key and value may have fewer heads, each of which several query heads share. ``folded``: ranks that
    are mirrored in the ring swap second halves before and after, so that a causal mask leaves all ranks the same work.
    No second derivative.

    For dropout, which hits what it hits on one device: ``shape``, the global one of the weights [..., s, t]; ``cuts``, the
    axes that cut each of its dims but the last two; ``batch`` as in :func:`~autoshard.runtime.dropout`.
    """
    comm = current()
    names = comm.active(axes)
    ranks = tuple(comm.mesh[a] for a in names)
    folded = folded and bool(names)
    rows, columns = (spans(n, ranks, folded) for n in (queries, keys))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    move = named(Move("S", "S", names, order=names), always=True)
    job = _Job(move, comm.index(names), rows, columns, is_causal, scale, folded, dropout_p)
    kept = None
    if 0.0 < dropout_p < 1.0:
        kept = part(noise_like(query, dropout_p, shape, (), batch) != 0, cuts or {})
        kept = torch.cat([kept.narrow(-2, *span) for span in rows[job.me]], -2)
    out = _run(comm, job, (query, key, value), attn_mask, kept)
    return out * 0.0 if dropout_p == 1.0 else out


def causal_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None = None,
    *,
    queries: int,
    axes: Axes,
    folded: bool = False,
) -> torch.Tensor:
    """Causal attention of queries cut by ``axes``, of a global length ``queries``, over whole keys and values.

    ``folded``: as in :func:`ring_attention`; queries alone are swapped.
    """
    comm = current()
    names = comm.active(axes)
    folded = folded and bool(names)
    rows = spans(queries, tuple(comm.mesh[a] for a in names), folded)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    move = named(Move("S", "S", names, order=names), always=True)
    job = _Job(move, comm.index(names), rows, (((0, key.shape[-2]),),), True, scale, folded)
    return _run(comm, job, (query, key, value), None, None)


class _Job(NamedTuple):
    """What one rank of a ring does."""

    move: Move
    me: int
    """its number"""
    rows: tuple[Chunks, ...]
    """the queries of every rank"""
    columns: tuple[Chunks, ...]
    """the keys of every rank, or those that all have"""
    causal: bool
    scale: float
    folded: bool = False
    dropout_p: float = 0.0

    @property
    def steps(self) -> int:
        """How many parts of the keys there are, each of which comes by."""
        return len(self.columns)

    @property
    def swapped(self) -> list[tuple[Chunks, ...]]:
        """What the folded order swaps of queries, keys and values: of what is cut, whose intervals."""
        return [self.rows, *([self.columns] * 2 if self.steps > 1 else [])]

    def hop(self, xs: Tensors, to: int, source: int, lengths: Sequence[int], longest: Sequence[int]) -> Hop:
        """``xs`` to a rank; ``lengths``: of the sequences that come; ``longest``: of those that any rank sends."""
        shapes = tuple((*x.shape[:-2], n, x.shape[-1]) for x, n in zip(xs, lengths, strict=True))
        sent = [(*x.shape[:-2], n, x.shape[-1]) for x, n in zip(xs, longest, strict=True)]
        size = sum(math.prod(s) for s in sent) * xs[0].element_size()
        return Hop(self.move, to, source, xs, shapes, size)

    def onward(self, xs: Tensors, holder: int) -> Hop:
        """Something of the keys of rank ``holder`` to the next rank; the same of the rank before it comes."""
        n = self.steps
        each = [length_of(c) for c in self.columns]
        coming = each[(holder - 1) % n]
        return self.hop(xs, (self.me + 1) % n, (self.me - 1) % n, [coming] * len(xs), [max(each)] * len(xs))

    def swap(self, xs: Tensors, of: Sequence[tuple[Chunks, ...]], back: bool) -> Generator[Hop, Arrival, Tensors]:
        """Second halves with the mirrored rank; ``of``: per tensor whose intervals, those of rows or of columns.

        ``back``: from what it holds folded to what it holds else.
        """
        mirror = len(self.rows) - 1 - self.me
        halves = [(x[..., : c[self.me][0][1], :], x[..., c[self.me][0][1] :, :]) for x, c in zip(xs, of, strict=True)]
        coming = [c[self.me if not back else mirror][1][1] for c in of]
        longest = [max(n for _, (_, n) in c) for c in of]
        arrival = yield self.hop(tuple(b for _, b in halves), mirror, mirror, coming, longest)
        pairs = zip(halves, arrival(), strict=True)
        return tuple(torch.cat([a, b], -2) for (a, _), b in pairs)


def _forward(job: _Job, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, kept: Any) -> Journey:
    """→ result, its log-sum-exp, and the queries, keys and values in the order of the ring."""
    if job.folded:
        query, key, value = yield from _swapped(job, (query, key, value), False)
    result, own = _Result(job, query, value), (key, value)
    for step in range(job.steps):
        holder, arrival = (job.me - step) % job.steps, None
        if step < job.steps - 1:
            arrival = yield job.onward((key, value), holder)
        for t, (q, k, v), masking in _tiles(job, holder, query, key, value, mask, kept):
            result.add(t.rows, *tile.forward(q, k, v, masking, job.scale))
        if arrival is not None:
            key, value = arrival()
    out, sums = result.whole(query.dtype)
    if job.folded:
        (out,) = yield from job.swap((out,), (job.rows,), True)
    return out, sums, query, *own


def _backward(job: _Job, gradient: torch.Tensor, saved: Sequence[Any]) -> Journey:
    """→ gradients of queries, keys and values."""
    query, key, value, mask, kept, out, sums = saved
    if job.folded:
        gradient, out = yield from job.swap((gradient, out), (job.rows, job.rows), False)
    mine = torch.zeros_like(wide(query))
    own: Tensors = ()
    behind: Arrival | None = None
    for step in range(job.steps):
        holder, arrival = (job.me - step) % job.steps, None
        if step < job.steps - 1:
            arrival = yield job.onward((key, value), holder)
        theirs: Tensors = (torch.zeros_like(wide(key)), torch.zeros_like(wide(value)))
        for t, (q, k, v), masking in _tiles(job, holder, query, key, value, mask, kept):
            at = _spot(job.rows[job.me], t.rows)
            g, o, s = gradient.narrow(-2, *at), out.narrow(-2, *at), sums.narrow(-1, *at)
            dq, dk, dv = tile.backward(g, q, k, v, o, s, masking, job.scale)
            mine.narrow(-2, *at).add_(dq)
            for total, more in zip(theirs, (dk, dv), strict=True):
                total.narrow(-2, *_spot(job.columns[holder], t.columns)).add_(more)
        if step == 0:
            own = theirs
        else:
            if behind is not None:
                theirs = _summed(theirs, behind())
            behind = yield job.onward(theirs, holder)
        if arrival is not None:
            key, value = arrival()
    own = own if behind is None else _summed(own, behind())
    mine, *own_ = (x.to(query.dtype) for x in (mine, *own))
    if job.folded:
        return (yield from _swapped(job, (mine, *own_), True))
    return mine, *own_


def _summed(xs: Tensors, ys: Tensors) -> Tensors:
    return tuple(x.add_(y) for x, y in zip(xs, ys, strict=True))


def _swapped(job: _Job, xs: Tensors, back: bool) -> Generator[Hop, Arrival, Tensors]:
    """Something of queries, keys and values in the folded order; what is not cut stays."""
    cut = len(job.swapped)
    moved = yield from job.swap(xs[:cut], job.swapped, back)
    return *moved, *xs[cut:]


def _spot(intervals: Chunks, interval: Interval) -> Interval:
    """Where an interval of the sequence lies in a tensor that holds ``intervals``."""
    before = 0
    for start, length in intervals:
        if start <= interval[0] and sum(interval) <= start + length:
            return before + interval[0] - start, interval[1]
        before += length
    raise RuntimeMismatchError(f"positions {interval} are not among {intervals}")


def _tiles(
    job: _Job,
    holder: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    kept: torch.Tensor | None,
) -> Generator[tuple[Tile, Tensors, Masking]]:
    """What this rank computes with the keys of rank ``holder``. ``mask`` and ``kept``: of its rows and all columns."""
    for t in tiles(job.rows[job.me], job.columns[holder], job.causal):
        rows, columns = _spot(job.rows[job.me], t.rows), _spot(job.columns[holder], t.columns)
        bias, noise = None, None
        if mask is not None:
            bias = mask if mask.shape[-1] == 1 else mask.narrow(-1, *t.columns)
            bias = bias if mask.dim() < 2 or mask.shape[-2] == 1 else bias.narrow(-2, *rows)
        elif t.partial:
            row = torch.arange(t.rows[0], sum(t.rows), device=query.device)
            bias = torch.arange(t.columns[0], sum(t.columns), device=query.device) <= row.unsqueeze(-1)
        if kept is not None:
            noise = scaled(wide(kept.narrow(-2, *rows).narrow(-1, *t.columns).to(query.dtype)), job.dropout_p)
        cut = query.narrow(-2, *rows), key.narrow(-2, *columns), value.narrow(-2, *columns)
        yield t, cut, Masking(t.aligned, bias, noise)


class _Result:
    """What a rank's rows have so far, interval by interval."""

    def __init__(self, job: _Job, query: torch.Tensor, value: torch.Tensor) -> None:
        self.rows, self.like, self.width = job.rows[job.me], query, value.shape[-1]
        self.parts: dict[Interval, tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, rows: Interval, out: torch.Tensor, sums: torch.Tensor) -> None:
        """Results over more keys."""
        self.parts[rows] = tile.merge(*self.parts[rows], out, sums) if rows in self.parts else (out, sums)

    def whole(self, dtype: torch.dtype) -> Tensors:
        """All rows, with their log-sum-exps."""
        found = [self.parts[r] for r in self.rows if r in self.parts]
        if not found:  # no rows, or no keys
            rows = self.like.shape[:-1]
            return self.like.new_zeros((*rows, self.width)), wide(self.like).new_full(rows, -torch.inf)
        return torch.cat([out for out, _ in found], -2).to(dtype), torch.cat([sums for _, sums in found], -1)


# --- the backward needs all ranks at once: one node for those of this process, and one on each that holds what it needs ---


class _Visit(NamedTuple):
    """A rank that comes with its part."""

    job: _Job
    operands: Tensors
    masks: tuple[torch.Tensor | None, torch.Tensor | None]
    """the mask, and which weights dropout keeps"""
    held: dict[str, Any]
    """where its node leaves what the backward needs"""


def _run(
    comm: Communicator, job: _Job, given: Tensors, mask: torch.Tensor | None, kept: torch.Tensor | None
) -> torch.Tensor:
    held: dict[str, Any] = {}
    what = f"ring attention along {', '.join(job.move.axes)}, {'causal' if job.causal else 'of all keys'}"
    visit = _Visit(job, given, (mask, kept), held)
    made: Tensors = comm.meet(what, visit, lambda visits: _joint(comm, visits))
    out, sums, *operands = made
    if not out.requires_grad:
        return out
    needed = (*(x.detach() for x in operands), mask, kept, sums)
    result: torch.Tensor = _Hold.apply(out, held, *needed)  # type: ignore[no-untyped-call]
    return result


def _joint(comm: Communicator, visits: Sequence[_Visit]) -> list[Tensors]:
    """Of every rank: the result, its log-sum-exp, and the queries, keys and values in the order of the ring."""
    phase, made = comm.phase, list[Tensors]()
    xs = [x for visit in visits for x in visit.operands]
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        outs: Tensors = _Ring.apply(comm, visits, phase, made, *xs)  # type: ignore[no-untyped-call]
        return [(out, *rest[1:]) for out, rest in zip(outs, made, strict=True)]
    return _ahead(comm, visits, phase, xs)


def _ahead(comm: Communicator, visits: Sequence[_Visit], phase: str, xs: Sequence[torch.Tensor]) -> list[Tensors]:
    operands = zip(xs[::3], xs[1::3], xs[2::3], strict=True)
    journeys = [_forward(visit.job, *given, *visit.masks) for visit, given in zip(visits, operands, strict=True)]
    return travel(journeys, lambda hops: comm.exchange(hops, phase))


class _Ring(torch.autograd.Function):
    """The attention of all ranks of this process; the results are those of :class:`_Hold` where a gradient flows."""

    @staticmethod
    def forward(
        ctx: Any, comm: Communicator, visits: Sequence[_Visit], phase: str, made: list[Tensors], *xs: torch.Tensor
    ) -> Tensors:
        ctx.comm, ctx.jobs = comm, [(visit.job, visit.held) for visit in visits]
        made += _ahead(comm, visits, phase, xs)
        return tuple(out for out, *_ in made)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if not all(held for _, held in ctx.jobs):
            raise RuntimeMismatchError(
                "ring attention: a rank's result has no gradient, though that of another has one"
            )
        saved = [held.pop("saved") for _, held in ctx.jobs]
        journeys = [_backward(job, g, s) for (job, _), g, s in zip(ctx.jobs, gradients, saved, strict=True)]
        found = travel(journeys, lambda hops: ctx.comm.exchange(hops, "backward"))
        return None, None, None, None, *(x for xs in found for x in xs)


class _Hold(torch.autograd.Function):
    """One rank's result: holds what the backward needs, where autograd asks this rank's hooks, and hands it over there."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, held: dict[str, Any], *saved: torch.Tensor | None) -> torch.Tensor:
        *operands, sums = saved
        ctx.save_for_backward(*operands, out, sums)
        ctx.held = held
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.held["saved"] = ctx.saved_tensors
        return gradient, None, *(None,) * 6
