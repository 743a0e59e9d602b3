"""One rank's part of ring attention: tiles, masks, and messages, forward and backward, as per-rank
coroutines. A ``RingTask`` knows which keys arrive when, where they lie in the sequence, and what
masks them."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.attention import tile
from autoshard.runtime.attention.masked_attention import alibi_bias, is_document_mask, visible_pairs
from autoshard.runtime.attention.ring_geometry import (
    AttentionSpec,
    Band,
    RingStep,
    TileGroup,
    keys_at_step,
    longest_keys,
    received_half,
    ring_schedule,
    tile_groups,
    total_length,
    window_blocks,
)
from autoshard.runtime.attention.tile import Masking
from autoshard.runtime.operations.random import dropout_scaled
from autoshard.runtime.operations.reductions import upcast
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.rank_coroutines import Arrival, Hop, RankCoroutine, Tensors
from autoshard.runtime.transport.window import Chunks, Interval


class RingTask(NamedTuple):
    """The task of one rank in ring attention, or in attention over gathered keys and values."""

    move: Move
    me: int
    """this rank's number"""
    rows: tuple[Chunks, ...]
    """the queries of every rank"""
    columns: tuple[Chunks, ...]
    """the keys of every rank, or one entry that all ranks have"""
    spec: AttentionSpec
    folded: bool = False
    """whether rows are swapped into zigzag order"""

    @property
    def band(self) -> Band:
        """The keys that a query sees by position."""
        return self.spec.band

    @property
    def scale(self) -> float:
        """Factor of scores."""
        assert self.spec.scale is not None
        return self.spec.scale

    @property
    def some(self) -> bool:
        """Whether rows are computed in blocks."""
        return self.spec.sloped or self.band.before is not None

    @property
    def stops(self) -> tuple[RingStep, ...]:
        """The steps in which keys arrive."""
        return ring_schedule(self.rows, self.columns, self.band)

    def level(self, mask: Tensor | None) -> Tensor | None:
        """:func:`~autoshard.runtime.attention.tile.score_level` the mask; None for ALiBi slopes."""
        return None if self.spec.sloped else tile.score_level(mask)

    def holder(self, stop: RingStep) -> int:
        """The owner of the keys that are here at ``stop``."""
        return stop.holder(self.me, len(self.columns))

    def columns_at(self, stop: RingStep, holder: int | None = None) -> Chunks:
        """The keys of ``holder`` (default: the owner of the keys here) that arrive at ``stop``."""
        return keys_at_step(self.rows, self.columns, self.band, stop, self.holder(stop) if holder is None else holder)

    @property
    def swapped(self) -> list[tuple[Chunks, ...]]:
        """The intervals of each operand whose halves zigzag order swaps: queries, keys, values."""
        orders = [self.rows, self.columns, self.columns]
        return [of for of in orders if self.folded and len(of[self.me % len(of)]) > 1]

    def came(self, rows: Chunks) -> bool:
        """Whether some of ``rows`` came from the mirrored rank of the zigzag order."""
        start, length = self.rows[self.me][received_half(self.me, len(self.rows))]
        return any(start <= at < start + length for at, _ in rows)

    def hop(self, xs: Tensors, to: int, source: int, lengths: Sequence[int], longest: Sequence[int]) -> Hop:
        """Send ``xs``. ``lengths``: of what arrives; ``longest_keys``: the most that any rank sends."""
        shapes = tuple((*x.shape[:-2], n, x.shape[-1]) for x, n in zip(xs, lengths, strict=True))
        sent = [(*x.shape[:-2], n, x.shape[-1]) for x, n in zip(xs, longest, strict=True)]
        size = sum(math.prod(s) for s in sent) * xs[0].element_size()
        return Hop(self.move, to, source, xs, shapes, size)

    def longest(self, stop: RingStep) -> int:
        """The most keys that any rank sends for ``stop``."""
        return longest_keys(self.rows, self.columns, self.band, stop)

    def onward(self, xs: Tensors, of: RingStep, to: RingStep) -> Hop:
        """Send tensors of the keys here at ``of`` to the next rank that needs them; get alike."""
        n, own = len(self.columns), self.me if to.from_owner else self.holder(of)
        here, there = self.columns_at(RingStep() if to.from_owner else of, own), self.columns_at(to, own)
        sent = tuple(narrowed_keys(x, here, there) for x in xs)
        coming = total_length(self.columns_at(to))
        shift = (self.me + to.shift) % n, (self.me - to.shift) % n
        return self.hop(sent, *shift, [coming] * len(xs), [self.longest(to)] * len(xs))

    def home(self, xs: Tensors, of: RingStep) -> Hop:
        """Return gradients of the keys here to their owner; receive those of this rank's keys."""
        n = len(self.columns)
        coming = total_length(self.columns_at(of, self.me))
        shift = (self.me - of.offset) % n, (self.me + of.offset) % n
        return self.hop(xs, *shift, [coming] * len(xs), [self.longest(of)] * len(xs))

    def swap(
        self, xs: Tensors, of: Sequence[tuple[Chunks, ...]], back: bool
    ) -> Generator[Hop, Arrival, tuple[Tensors, Arrival]]:
        """Begin to swap first halves with the mirrored rank: (tensors, a call that completes them).
        ``of``: per tensor the intervals of every rank. ``back``: from zigzag to sequence
        order."""
        ranks = len(self.rows)
        mirror = ranks - 1 - self.me
        at = received_half(self.me, ranks)
        halves = [_split_for_swap(x, c[self.me], at, back) for x, c in zip(xs, of, strict=True)]
        coming = [c[mirror][received_half(mirror, ranks)][1] if back else c[self.me][at][1] for c in of]
        longest = [max(intervals[received_half(r, ranks)][1] for r, intervals in enumerate(c)) for c in of]
        arrival = yield self.hop(tuple(sent for _, sent in halves), mirror, mirror, coming, longest)
        made, gaps = [], []
        for (stays, _), length in zip(halves, coming, strict=True):
            whole, kept = empty_sequence(stays, stays.shape[-2] + length), stays.shape[-2]
            lengths = (kept, length) if at and not back else (length, kept)
            first, last = whole.split(lengths, -2)
            (first if at and not back else last).copy_(stays)
            gaps.append(last if at and not back else first)
            made.append(whole)

        def filled() -> Tensors:
            for gap, came in zip(gaps, arrival() if gaps else (), strict=True):
                gap.copy_(came)
            gaps.clear()
            return tuple(made)

        return tuple(made), filled


def masking_of(
    job: RingTask,
    t: TileGroup,
    rows: Interval,
    query: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    kept: Tensor | None,
) -> Masking:
    """The masking of tile ``t``; ``rows``: where its rows lie in mask, level and ``kept``."""
    mask, level = masks
    pairs = t.rows[0], t.columns[0]
    bias, noise, aligned = None, None, t.aligned and mask is None
    if t.partial or aligned is not t.aligned:
        bias = visible_pairs(*pairs, job.band, query.device)
    if mask is not None and is_document_mask(mask):
        same = mask.narrow(-1, *pairs[0]).mT == mask.narrow(-1, *pairs[1])
        bias = same if bias is None else bias & same
    elif mask is not None:
        if job.spec.sloped:
            more = alibi_bias(mask, *pairs)
        else:
            more = mask if mask.shape[-1] == 1 else mask.narrow(-1, *pairs[1])
            more = tile.narrowed_rows(more, *rows)
        bias = (
            more if bias is None else bias & more if more.dtype == torch.bool else more.masked_fill(~bias, -torch.inf)
        )
    if kept is not None:
        noise = dropout_scaled(upcast(kept.narrow(-2, *rows).narrow(-1, *pairs[1]).to(query.dtype)), job.spec.dropout_p)
    own_level = None if level is None else tile.narrowed_rows(level, *rows)
    return Masking(aligned, bias, noise, own_level, job.spec.soft_cap)


def sink_scores(sinks: Tensor | None, level: Tensor | None, query: Tensor) -> Any:
    """The sink score of every row [..., h, s]; None without sinks."""
    if sinks is None:
        return None
    rows = upcast(sinks).unsqueeze(-1).expand(query.shape[:-1])
    return rows if level is None else rows - level.squeeze(-1)


def sinks_gradient(sinks: Tensor | None, level: Tensor | None, query: Tensor, *results: Tensor) -> Any:
    """Gradient of ``sinks`` [h]; ``results``: gradient of the result, result, log-sum-exp."""
    if sinks is None:
        return None
    gradient, out, sums = results
    weights = (sink_scores(sinks, level, query) - sums).exp()
    lost = -weights * (upcast(gradient) * upcast(out)).sum(-1)
    return lost.sum_to_size(lost.shape[-2], 1).view_as(sinks).to(sinks.dtype)


class GradientSum:
    """Gradients of slices of ``like``, accumulated in float32 or wider."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.total: Tensor | None = None

    def add(self, at: Interval, more: Tensor) -> None:
        """Add ``more`` at positions ``at``, and take over its memory."""
        if self.total is None and at == (0, self.like.shape[-2]):
            self.total = upcast(more)
        else:
            self.total = self.whole()
            self.total.narrow(-2, *at).add_(more)

    def whole(self) -> Tensor:
        return torch.zeros_like(upcast(self.like)) if self.total is None else self.total


def empty_sequence(like: Tensor, length: int) -> Tensor:
    """An empty sequence of ``length`` in the layout [..., t, h, d], as models go on with it."""
    *lead, _, width = like.shape
    if not lead:
        return like.new_empty(length, width)
    return like.new_empty(*lead[:-1], length, lead[-1], width).transpose(-2, -3)


def narrowed_keys(x: Tensor, here: Chunks, there: Chunks) -> Tensor:
    """The interval ``there`` of a tensor that holds ``here``, or all of it."""
    return x if here == there else x.narrow(-2, *position_of(here, there[0]))


def position_of(intervals: Chunks, interval: Interval, *more: Interval) -> Interval:
    """Where an interval of the sequence, and ``more`` right behind it, lie among ``intervals``."""
    if more:
        return position_of(intervals, interval)[0], interval[1] + total_length(more)
    before = 0
    for start, length in intervals:
        if start <= interval[0] and sum(interval) <= start + length:
            return before + interval[0] - start, interval[1]
        before += length
    raise RuntimeMismatchError(f"positions {interval} are not among {intervals}")


def _split_for_swap(x: Tensor, held: Chunks, at: int, folded: bool) -> tuple[Tensor, Tensor]:
    """(half that stays, half that the mirrored rank has in the other order). ``held``: the
    intervals in zigzag order, number ``at`` from the mirrored rank; ``folded``: whether ``x`` is
    in it now."""
    stay = held[1 - at][1]
    if at and folded:
        return x[..., :stay, :], x[..., stay:, :]
    return x[..., x.shape[-2] - stay :, :], x[..., : x.shape[-2] - stay, :]


def ring_forward(
    job: RingTask, query: Tensor, key: Tensor, value: Tensor, sinks: Any, mask: Any, dropout_mask: Any
) -> RankCoroutine:
    """→ result, and what the backward needs, in ring (zigzag) order."""
    folding: Arrival = tuple  # nothing to wait for
    if job.folded:
        (query, *_), folding = yield from job.swap((query, key, value)[: len(job.swapped)], job.swapped, False)
        if len(job.swapped) > 1:
            query, key, value = folding()
    result, own, level = MergedRows(job, query, value), (key, value), job.level(mask)
    for stop, following in zip(job.stops, (*job.stops[1:], None), strict=True):
        arrival = None
        if following is not None:
            arrival = yield job.onward(own if following.from_owner else (key, value), stop, following)
        for t, (q, k, v), masking in masked_tiles(job, stop, query, key, value, (mask, level), dropout_mask):
            if job.folded and job.came(t.rows):
                folding()
            result.add(t.rows, *tile.tile_forward(q, k, v, masking, job.scale))
        if arrival is not None:
            key, value = arrival()
    folding()  # needed even if no received row sees a key
    out, sums = result.whole(query.dtype, sink_scores(sinks, level, query))
    plain = out
    if job.folded:
        (plain,), unfolding = yield from job.swap((out,), (job.rows,), True)
        unfolding()
    return plain, query, *own, sinks, mask, dropout_mask, out, sums


def ring_backward(job: RingTask, gradient: Tensor, saved: Sequence[Any]) -> RankCoroutine:
    """→ gradients of queries, keys, values and sinks."""
    query, key, value, sinks, mask, dropout_mask, out, sums = saved
    folding: Arrival = tuple  # nothing to wait for
    if job.folded:
        (gradient,), folding = yield from job.swap((gradient,), (job.rows,), False)
    mine, own, level = GradientSum(query), (key, value), job.level(mask)
    owns: Tensors = ()
    behind: Arrival | None = None
    before = RingStep()
    for stop, following in zip(job.stops, (*job.stops[1:], None), strict=True):
        arrival = None
        if following is not None:
            arrival = yield job.onward(own if following.from_owner else (key, value), stop, following)
        found = masked_tiles(job, stop, query, key, value, (mask, level), dropout_mask)
        theirs = step_gradients(job, stop, found, (key, value), (gradient, out, sums), mine, folding)
        if not stop.offset:
            owns = theirs
        else:
            if behind is not None and not stop.from_owner:
                theirs = _added_in_place(theirs, behind())
            elif behind is not None:
                _add_returned_gradients(job, owns, behind, before)
            behind = yield job.home(theirs, stop) if stop.home or not following else job.onward(theirs, stop, following)
            before = stop
        if arrival is not None:
            key, value = arrival()
    folding()
    of_rows = mine.whole().to(query.dtype)
    unfolding: Arrival = tuple
    if job.folded and len(job.swapped) == 1:
        (of_rows,), unfolding = yield from job.swap((of_rows,), job.swapped, True)
    if behind is not None:
        _add_returned_gradients(job, owns, behind, before)
    of_keys: Sequence[Tensor] = [x.to(query.dtype) for x in owns]
    of_sinks = sinks_gradient(sinks, level, query, gradient, out, sums)
    if len(job.swapped) > 1:
        (of_rows, *of_keys), unfolding = yield from job.swap((of_rows, *of_keys), job.swapped, True)
    unfolding()
    return of_rows, *of_keys, of_sinks


def _added_in_place(xs: Tensors, ys: Tensors) -> Tensors:
    return tuple(x.add_(y) for x, y in zip(xs, ys, strict=True))


def _add_returned_gradients(job: RingTask, owns: Tensors, behind: Arrival, stop: RingStep) -> None:
    """Add the gradients of this rank's keys that return from ``stop``."""
    for x, y in zip(owns, behind(), strict=True):
        narrowed_keys(x, job.columns[job.me], job.columns_at(stop, job.me)).add_(y)


def _concatenated_rows(parts: Sequence[Tensor]) -> Tensor:
    """Slices of a sequence, concatenated in the layout of :func:`empty_sequence`."""
    if len(parts) == 1:
        return parts[0]
    lengths = [x.shape[-2] for x in parts]
    whole = empty_sequence(parts[0], sum(lengths))
    for place, x in zip(whole.split(lengths, -2), parts, strict=True):
        place.copy_(x)
    return whole


def step_gradients(
    job: RingTask,
    stop: RingStep,
    found: Iterable[tuple[TileGroup, Tensors, Masking]],
    keys: Tensors,
    results: Tensors,
    mine: GradientSum,
    folding: Arrival,
) -> Tensors:
    """Gradients of the keys and values at ``stop``; those of the queries are added to ``mine``.
    ``found``: the :func:`masked_tiles`; ``results``: gradient, result and log-sum-exps of this
    rank's rows; ``folding``: waits for rows that the mirrored rank sends."""
    totals = tuple(map(GradientSum, keys))
    for t, (q, k, v), masking in found:
        if job.folded and job.came(t.rows):
            folding()
        at = position_of(job.rows[job.me], *t.rows)
        g, o, s = (x.narrow(d, *at) for x, d in zip(results, (-2, -2, -1), strict=True))
        dq, *more = tile.tile_backward(g, q, k, v, o, s, masking, job.scale)
        mine.add(at, dq)
        for total, x in zip(totals, more, strict=True):
            total.add(position_of(job.columns_at(stop), *t.columns), x)
    return tuple(total.whole() for total in totals)


def masked_tiles(
    job: RingTask,
    stop: RingStep,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    masks: tuple[Tensor | None, Tensor | None],
    dropout_mask: Tensor | None,
) -> Generator[tuple[TileGroup, Tensors, Masking]]:
    """The tiles of this rank at ``stop``; masks cover its rows and all columns."""
    own, held = job.rows[job.me], job.columns_at(stop)
    apart = masks[0] is not None or dropout_mask is not None or job.some
    found = tile_groups(own, held, job.band, apart, job.some)
    for t in sorted(found, key=lambda t: job.came(t.rows)) if job.folded else found:  # pending rows last
        rows, columns = position_of(own, *t.rows), position_of(held, *t.columns)
        cut = query.narrow(-2, *rows), key.narrow(-2, *columns), value.narrow(-2, *columns)
        yield t, cut, masking_of(job, t, rows, query, masks, dropout_mask)


class MergedRows:
    """Partial attention results of this rank's rows, merged by log-sum-exp."""

    def __init__(self, job: RingTask, query: Tensor, value: Tensor) -> None:
        self.rows, self.like, self.width = job.rows[job.me], query, value.shape[-1]
        self.parts: dict[Interval, tuple[Tensor, Tensor]] = {}
        self.blocks = [b for r in self.rows for b in (window_blocks(r) if job.some else [r])]

    def add(self, several: Chunks, out: Tensor, sums: Tensor) -> None:
        """Merge results over more keys."""
        lengths = [n for _, n in several]
        for rows, *part in zip(several, out.split(lengths, -2), sums.split(lengths, -1), strict=True):
            self.parts[rows] = (
                tile.merge_by_log_sum_exp(*self.parts[rows], *part) if rows in self.parts else (part[0], part[1])
            )

    def whole(self, dtype: torch.dtype, sinks: Tensor | None) -> Tensors:
        """All rows, with log-sum-exps; ``sinks``: score of one more key per row, of value zero."""
        found = [self.parts[r] if r in self.parts else self.none(r[1]) for r in self.blocks if r[1]] or [self.none(0)]
        out, sums = _concatenated_rows([out for out, _ in found]), torch.cat([sums for _, sums in found], -1)
        if sinks is not None:
            out, sums = tile.merge_by_log_sum_exp(out, sums, torch.zeros_like(out), sinks)
        return out.to(dtype), sums

    def none(self, rows: int) -> tuple[Tensor, Tensor]:
        """Result and log-sum-exp of rows that see no key."""
        lead = self.like.shape[:-2]
        like = upcast(self.like)
        return like.new_zeros((*lead, rows, self.width)), like.new_full((*lead, rows), -torch.inf)
