"""One rank's task in ring attention: which keys arrive when, where they lie, what masks them."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.attention import tile
from autoshard.runtime.attention.banded import by_distance, is_documents
from autoshard.runtime.attention.order import Band, Stop, Stretch, carried, length_of, longest, received, stops
from autoshard.runtime.attention.tile import Masking
from autoshard.runtime.operations.random import scaled
from autoshard.runtime.operations.softmax import wide
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.relay import Arrival, Hop, Tensors
from autoshard.runtime.transport.window import Chunks, Interval


class Job(NamedTuple):
    """The task of one rank in ring attention, or in attention over gathered keys and values."""

    move: Move
    me: int
    """this rank's number"""
    rows: tuple[Chunks, ...]
    """the queries of every rank"""
    columns: tuple[Chunks, ...]
    """the keys of every rank, or one entry that all ranks have"""
    band: Band
    scale: float
    folded: bool = False
    dropout_p: float = 0.0
    sloped: bool = False
    """whether the mask has ALiBi slopes"""
    soft_cap: float | None = None
    pieces: int = 1
    """number of head chunks in which keys and values are gathered, if they are"""
    batches: int = 1
    """number of batch chunks of each head chunk"""
    carried: bool = False
    """whether gathered keys and values arrive in zigzag order"""

    @property
    def some(self) -> bool:
        """Whether rows are computed in blocks."""
        return self.sloped or self.band.before is not None

    @property
    def stops(self) -> tuple[Stop, ...]:
        """The steps in which keys arrive."""
        return stops(self.rows, self.columns, self.band)

    def level(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """:func:`~autoshard.runtime.attention.tile.level_of` the mask; None for ALiBi slopes."""
        return None if self.sloped else tile.level_of(mask)

    def holder(self, stop: Stop) -> int:
        """The owner of the keys that are here at ``stop``."""
        return stop.holder(self.me, len(self.columns))

    def columns_at(self, stop: Stop, holder: int | None = None) -> Chunks:
        """The keys of ``holder`` (default: the owner of the keys here) that arrive at ``stop``."""
        return carried(self.rows, self.columns, self.band, stop, self.holder(stop) if holder is None else holder)

    @property
    def swapped(self) -> list[tuple[Chunks, ...]]:
        """The intervals of each operand whose halves zigzag order swaps: queries, keys, values."""
        orders = [self.rows, self.columns, self.columns]
        return [of for of in orders if self.folded and len(of[self.me % len(of)]) > 1]

    def came(self, rows: Chunks) -> bool:
        """Whether some of ``rows`` came from the mirrored rank of the zigzag order."""
        start, length = self.rows[self.me][received(self.me, len(self.rows))]
        return any(start <= at < start + length for at, _ in rows)

    def hop(self, xs: Tensors, to: int, source: int, lengths: Sequence[int], longest: Sequence[int]) -> Hop:
        """Send ``xs``. ``lengths``: of what arrives; ``longest``: the most that any rank sends."""
        shapes = tuple((*x.shape[:-2], n, x.shape[-1]) for x, n in zip(xs, lengths, strict=True))
        sent = [(*x.shape[:-2], n, x.shape[-1]) for x, n in zip(xs, longest, strict=True)]
        size = sum(math.prod(s) for s in sent) * xs[0].element_size()
        return Hop(self.move, to, source, xs, shapes, size)

    def longest(self, stop: Stop) -> int:
        """The most keys that any rank sends for ``stop``."""
        return longest(self.rows, self.columns, self.band, stop)

    def onward(self, xs: Tensors, of: Stop, to: Stop) -> Hop:
        """Send tensors of the keys here at ``of`` to the next rank that needs them; get alike."""
        n, own = len(self.columns), self.me if to.fresh else self.holder(of)
        here, there = self.columns_at(Stop() if to.fresh else of, own), self.columns_at(to, own)
        sent = tuple(narrowed(x, here, there) for x in xs)
        coming = length_of(self.columns_at(to))
        shift = (self.me + to.shift) % n, (self.me - to.shift) % n
        return self.hop(sent, *shift, [coming] * len(xs), [self.longest(to)] * len(xs))

    def home(self, xs: Tensors, of: Stop) -> Hop:
        """Return gradients of the keys here to their owner; receive those of this rank's keys."""
        n = len(self.columns)
        coming = length_of(self.columns_at(of, self.me))
        shift = (self.me - of.offset) % n, (self.me + of.offset) % n
        return self.hop(xs, *shift, [coming] * len(xs), [self.longest(of)] * len(xs))

    def swap(
        self, xs: Tensors, of: Sequence[tuple[Chunks, ...]], back: bool
    ) -> Generator[Hop, Arrival, tuple[Tensors, Arrival]]:
        """Begin to swap first halves with the mirrored rank: (tensors, a call that completes them).

        ``of``: per tensor the intervals of every rank. ``back``: from zigzag to sequence order."""
        ranks = len(self.rows)
        mirror = ranks - 1 - self.me
        at = received(self.me, ranks)
        halves = [_halves(x, c[self.me], at, back) for x, c in zip(xs, of, strict=True)]
        coming = [c[mirror][received(mirror, ranks)][1] if back else c[self.me][at][1] for c in of]
        longest = [max(intervals[received(r, ranks)][1] for r, intervals in enumerate(c)) for c in of]
        arrival = yield self.hop(tuple(sent for _, sent in halves), mirror, mirror, coming, longest)
        made, gaps = [], []
        for (stays, _), length in zip(halves, coming, strict=True):
            whole, kept = row_of(stays, stays.shape[-2] + length), stays.shape[-2]
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
    job: Job,
    t: Stretch,
    rows: Interval,
    query: torch.Tensor,
    masks: tuple[torch.Tensor | None, torch.Tensor | None],
    kept: torch.Tensor | None,
) -> Masking:
    """The masking of tile ``t``; ``rows``: where its rows lie in mask, level and ``kept``."""
    mask, level = masks
    pairs = t.rows[0], t.columns[0]
    bias, noise, aligned = None, None, t.aligned and mask is None
    if t.partial or aligned is not t.aligned:
        bias = _shown(*pairs, job.band, query.device)
    if mask is not None and is_documents(mask):
        same = mask.narrow(-1, *pairs[0]).mT == mask.narrow(-1, *pairs[1])
        bias = same if bias is None else bias & same
    elif mask is not None:
        if job.sloped:
            more = by_distance(mask, *pairs)
        else:
            more = mask if mask.shape[-1] == 1 else mask.narrow(-1, *pairs[1])
            more = tile.rows_of(more, *rows)
        bias = (
            more if bias is None else bias & more if more.dtype == torch.bool else more.masked_fill(~bias, -torch.inf)
        )
    if kept is not None:
        noise = scaled(wide(kept.narrow(-2, *rows).narrow(-1, *pairs[1]).to(query.dtype)), job.dropout_p)
    own_level = None if level is None else tile.rows_of(level, *rows)
    return Masking(aligned, bias, noise, own_level, job.soft_cap)


def _shown(rows: Interval, columns: Interval, band: Band, device: torch.device) -> torch.Tensor:
    """Which pairs of a tile the band shows: [rows, columns] bool, or [1 or rows, columns]."""
    row = torch.arange(rows[0], sum(rows), device=device).unsqueeze(-1)
    column = torch.arange(columns[0], sum(columns), device=device)
    shown = torch.ones_like(column, dtype=torch.bool) if band.after is None else column <= row + band.after
    return shown if band.before is None else shown & (column >= row - band.before)


def sink_of(job: Job, sinks: torch.Tensor | None, level: torch.Tensor | None, query: torch.Tensor) -> Any:
    """The sink score of every row [..., h, s]; None without sinks."""
    if sinks is None:
        return None
    rows = wide(sinks).unsqueeze(-1).expand(query.shape[:-1])
    return rows if level is None else rows - level.squeeze(-1)


def sinks_gradient(
    job: Job, sinks: torch.Tensor | None, level: torch.Tensor | None, query: torch.Tensor, *results: torch.Tensor
) -> Any:
    """Gradient of ``sinks`` [h]; ``results``: gradient of the result, result, log-sum-exp."""
    if sinks is None:
        return None
    gradient, out, sums = results
    weights = (sink_of(job, sinks, level, query) - sums).exp()
    lost = -weights * (wide(gradient) * wide(out)).sum(-1)
    return lost.sum_to_size(lost.shape[-2], 1).view_as(sinks).to(sinks.dtype)


class Sum:
    """Gradients of slices of ``like``, accumulated in float32 or wider."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self.total: torch.Tensor | None = None

    def add(self, at: Interval, more: torch.Tensor) -> None:
        """Add ``more`` at positions ``at``, and take over its memory."""
        if self.total is None and at == (0, self.like.shape[-2]):
            self.total = wide(more)
        else:
            self.total = self.whole()
            self.total.narrow(-2, *at).add_(more)

    def whole(self) -> torch.Tensor:
        return torch.zeros_like(wide(self.like)) if self.total is None else self.total


def row_of(like: torch.Tensor, length: int) -> torch.Tensor:
    """An empty sequence of ``length`` in the layout [..., t, h, d], as models go on with it."""
    *lead, _, width = like.shape
    if not lead:
        return like.new_empty(length, width)
    return like.new_empty(*lead[:-1], length, lead[-1], width).transpose(-2, -3)


def narrowed(x: torch.Tensor, here: Chunks, there: Chunks) -> torch.Tensor:
    """The interval ``there`` of a tensor that holds ``here``, or all of it."""
    return x if here == there else x.narrow(-2, *spot(here, there[0]))


def spot(intervals: Chunks, interval: Interval, *more: Interval) -> Interval:
    """Where an interval of the sequence, and ``more`` right behind it, lie among ``intervals``."""
    if more:
        return spot(intervals, interval)[0], interval[1] + length_of(more)
    before = 0
    for start, length in intervals:
        if start <= interval[0] and sum(interval) <= start + length:
            return before + interval[0] - start, interval[1]
        before += length
    raise RuntimeMismatchError(f"positions {interval} are not among {intervals}")


def _halves(x: torch.Tensor, held: Chunks, at: int, folded: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(half that stays, half that the mirrored rank has in the other order).

    ``held``: the intervals in zigzag order, where number ``at`` came from the mirrored rank;
    ``folded``: whether ``x`` is in zigzag order now."""
    stay = held[1 - at][1]
    if at and folded:
        return x[..., :stay, :], x[..., stay:, :]
    return x[..., x.shape[-2] - stay :, :], x[..., : x.shape[-2] - stay, :]
