"""Ring attention of one rank as a coroutine: tiles and messages, forward and backward."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import torch

from autoshard.runtime.attention import tile
from autoshard.runtime.attention.job import Job, Sum, masking_of, narrowed, row_of, sink_of, sinks_gradient, spot
from autoshard.runtime.attention.order import (
    Stop,
    Stretch,
    blocks,
    stretches,
)
from autoshard.runtime.attention.tile import Masking
from autoshard.runtime.operations.softmax import wide
from autoshard.runtime.transport.relay import Arrival, Journey, Tensors
from autoshard.runtime.transport.window import Chunks, Interval


def forward(
    job: Job, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any, mask: Any, kept: Any
) -> Journey:
    """→ result, and what the backward needs, in ring (zigzag) order."""
    folding: Arrival = tuple  # nothing to wait for
    if job.folded:
        (query, *_), folding = yield from job.swap((query, key, value)[: len(job.swapped)], job.swapped, False)
        if len(job.swapped) > 1:
            query, key, value = folding()
    result, own, level = Result(job, query, value), (key, value), job.level(mask)
    for stop, following in _paired(job.stops):
        arrival = None
        if following is not None:
            arrival = yield job.onward(own if following.fresh else (key, value), stop, following)
        for t, (q, k, v), masking in tiles(job, stop, query, key, value, (mask, level), kept):
            if job.folded and job.came(t.rows):
                folding()
            result.add(t.rows, *tile.forward(q, k, v, masking, job.scale))
        if arrival is not None:
            key, value = arrival()
    folding()  # needed even if no received row sees a key
    out, sums = result.whole(query.dtype, sink_of(job, sinks, level, query))
    plain = out
    if job.folded:
        (plain,), unfolding = yield from job.swap((out,), (job.rows,), True)
        unfolding()
    return plain, query, *own, sinks, mask, kept, out, sums


def backward(job: Job, gradient: torch.Tensor, saved: Sequence[Any]) -> Journey:
    """→ gradients of queries, keys, values and sinks."""
    query, key, value, sinks, mask, kept, out, sums = saved
    folding: Arrival = tuple  # nothing to wait for
    if job.folded:
        (gradient,), folding = yield from job.swap((gradient,), (job.rows,), False)
    mine, own, level = Sum(query), (key, value), job.level(mask)
    owns: Tensors = ()
    behind: Arrival | None = None
    before = Stop()
    for stop, following in _paired(job.stops):
        arrival = None
        if following is not None:
            arrival = yield job.onward(own if following.fresh else (key, value), stop, following)
        found = tiles(job, stop, query, key, value, (mask, level), kept)
        theirs = gradients(job, stop, found, (key, value), (gradient, out, sums), mine, folding)
        if not stop.offset:
            owns = theirs
        else:
            if behind is not None and not stop.fresh:
                theirs = _summed(theirs, behind())
            elif behind is not None:
                _come_home(job, owns, behind, before)
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
        _come_home(job, owns, behind, before)
    of_keys: Sequence[torch.Tensor] = [x.to(query.dtype) for x in owns]
    of_sinks = sinks_gradient(job, sinks, level, query, gradient, out, sums)
    if len(job.swapped) > 1:
        (of_rows, *of_keys), unfolding = yield from job.swap((of_rows, *of_keys), job.swapped, True)
    unfolding()
    return of_rows, *of_keys, of_sinks


def _summed(xs: Tensors, ys: Tensors) -> Tensors:
    return tuple(x.add_(y) for x, y in zip(xs, ys, strict=True))


def _come_home(job: Job, owns: Tensors, behind: Arrival, stop: Stop) -> None:
    """Add the gradients of this rank's keys that return from ``stop``."""
    for x, y in zip(owns, behind(), strict=True):
        narrowed(x, job.columns[job.me], job.columns_at(stop, job.me)).add_(y)


def _paired(stops: Sequence[Stop]) -> Iterator[tuple[Stop, Stop | None]]:
    """Every stop with the next one."""
    return zip(stops, (*stops[1:], None), strict=True)


def _in_a_row(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Slices of a sequence, concatenated in the layout of :func:`row_of`."""
    if len(parts) == 1:
        return parts[0]
    lengths = [x.shape[-2] for x in parts]
    whole = row_of(parts[0], sum(lengths))
    for place, x in zip(whole.split(lengths, -2), parts, strict=True):
        place.copy_(x)
    return whole


def gradients(
    job: Job,
    stop: Stop,
    found: Iterable[tuple[Stretch, Tensors, Masking]],
    keys: Tensors,
    results: Tensors,
    mine: Sum,
    folding: Arrival,
) -> Tensors:
    """Gradients of the keys and values at ``stop``; those of the queries are added to ``mine``.

    ``found``: the :func:`tiles`; ``results``: gradient of the result, result and log-sum-exps of
    this rank's rows; ``folding``: waits for rows that the mirrored rank sends."""
    totals = tuple(map(Sum, keys))
    for t, (q, k, v), masking in found:
        if job.folded and job.came(t.rows):
            folding()
        at = spot(job.rows[job.me], *t.rows)
        g, o, s = (x.narrow(d, *at) for x, d in zip(results, (-2, -2, -1), strict=True))
        dq, *more = tile.backward(g, q, k, v, o, s, masking, job.scale)
        mine.add(at, dq)
        for total, x in zip(totals, more, strict=True):
            total.add(spot(job.columns_at(stop), *t.columns), x)
    return tuple(total.whole() for total in totals)


def tiles(
    job: Job,
    stop: Stop,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    masks: tuple[torch.Tensor | None, torch.Tensor | None],
    kept: torch.Tensor | None,
) -> Generator[tuple[Stretch, Tensors, Masking]]:
    """The tiles of this rank at ``stop``. Masks and ``kept`` cover its rows and all columns."""
    own, held = job.rows[job.me], job.columns_at(stop)
    apart = masks[0] is not None or kept is not None or job.some
    found = stretches(own, held, job.band, apart, job.some)
    for t in sorted(found, key=lambda t: job.came(t.rows)) if job.folded else found:  # pending rows last
        rows, columns = spot(own, *t.rows), spot(held, *t.columns)
        cut = query.narrow(-2, *rows), key.narrow(-2, *columns), value.narrow(-2, *columns)
        yield t, cut, masking_of(job, t, rows, query, masks, kept)


class Result:
    """Partial attention results of this rank's rows, merged by log-sum-exp."""

    def __init__(self, job: Job, query: torch.Tensor, value: torch.Tensor) -> None:
        self.rows, self.like, self.width = job.rows[job.me], query, value.shape[-1]
        self.parts: dict[Interval, tuple[torch.Tensor, torch.Tensor]] = {}
        self.blocks = [b for r in self.rows for b in (blocks(r) if job.some else [r])]

    def add(self, several: Chunks, out: torch.Tensor, sums: torch.Tensor) -> None:
        """Merge results over more keys."""
        lengths = [n for _, n in several]
        for rows, *part in zip(several, out.split(lengths, -2), sums.split(lengths, -1), strict=True):
            self.parts[rows] = tile.merge(*self.parts[rows], *part) if rows in self.parts else (part[0], part[1])

    def whole(self, dtype: torch.dtype, sinks: torch.Tensor | None) -> Tensors:
        """All rows, with log-sum-exps; ``sinks``: score of one more key per row, of value zero."""
        found = [self.parts[r] if r in self.parts else self.none(r[1]) for r in self.blocks if r[1]] or [self.none(0)]
        out, sums = _in_a_row([out for out, _ in found]), torch.cat([sums for _, sums in found], -1)
        if sinks is not None:
            out, sums = tile.merge(out, sums, torch.zeros_like(out), sinks)
        return out.to(dtype), sums

    def none(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Result and log-sum-exp of rows that see no key."""
        lead = self.like.shape[:-2]
        like = wide(self.like)
        return like.new_zeros((*lead, rows, self.width)), like.new_full((*lead, rows), -torch.inf)
