"""Which positions of a sequence each rank of a ring holds, and which of its tiles a causal mask shows. Numbers only."""

from __future__ import annotations

from typing import NamedTuple

from autoshard.runtime.window import Chunks, Interval, chunks


def spans(size: int, ranks: tuple[int, ...], folded: bool) -> tuple[Chunks, ...]:
    """By number in a ring of axes of so many ranks: the intervals of a sequence of ``size`` that it holds.

    ``folded``: every chunk's second half has been swapped with that of the rank mirrored in the ring. In a causal
    mask the work of a row grows with its position, so that an early and a late half make every rank's work the same.
    """
    cut = chunks(size, ranks)
    if not folded:
        return tuple((c,) for c in cut)
    halves = [_halves(c) for c in cut]
    return tuple((first, halves[-1 - i][1]) for i, (first, _) in enumerate(halves))


def _halves(interval: Interval) -> tuple[Interval, Interval]:
    start, length = interval
    first = length - length // 2
    return (start, first), (start + first, length // 2)


def length_of(intervals: Chunks) -> int:
    """Positions in all of them."""
    return sum(length for _, length in intervals)


class Tile(NamedTuple):
    """One interval of the queries against one of the keys."""

    rows: Interval
    columns: Interval
    aligned: bool = False
    """whether row i sees the columns up to i, as numbered in the tile: what kernels call causal"""
    partial: bool = False
    """whether a causal mask hides some of it in another way"""

    @property
    def pairs(self) -> float:
        """Pairs of query and key that it computes."""
        (start, length), (first, count) = self.rows, self.columns
        if not (self.aligned or self.partial):
            return length * count
        rising = max(0, min(start + length, first + count) - max(start, first))  # rows that see up to their own column
        least = max(start, first) + 1 - first
        return rising * (2 * least + rising - 1) / 2 + max(0, start + length - max(start, first + count)) * count


def tiles(queries: Chunks, keys: Chunks, causal: bool) -> list[Tile]:
    """The tiles of some rows and columns; what a causal mask hides wholly is left out, as far as tiles can."""
    found = []
    for rows in queries:
        for first, count in keys:
            start, length = rows
            if not length or not count or (causal and first >= start + length):
                continue
            before = min(max(0, start - first), count) if causal else count  # all rows see these
            if before:
                found.append(Tile(rows, (first, before)))
            if before < count:
                found.append(Tile(rows, (first + before, count - before), first + before == start, first > start))
    return found


def work(queries: int, keys: int, ranks: tuple[int, ...], folded: bool, cut_keys: bool = True) -> list[float]:
    """Pairs of query and key that each rank computes under a causal mask. ``cut_keys``: whether keys are cut, too."""
    rows = spans(queries, ranks, folded)
    columns = spans(keys, ranks, folded) if cut_keys else (((0, keys),),)
    return [sum(t.pairs for c in columns for t in tiles(mine, c, True)) for mine in rows]
