"""Geometry of ring attention: positions per rank, zigzag order, tiles, ring steps. Numbers only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from autoshard.runtime.transport.communicator import Axes
from autoshard.runtime.transport.window import Chunks, Interval, chunks

WINDOW_BLOCK_ROWS = 1024
"""rows of a tile under a sliding window: a larger tile computes more pairs that the window hides"""


class Band(NamedTuple):
    """Mask by position: query i sees keys i - ``before`` to i + ``after``; None: no limit."""

    before: int | None = None
    after: int | None = None

    def pairs(self, queries: int, keys: int) -> float:
        """Number of (query, key) pairs that the band shows."""
        return self._up_to(queries, keys, self.after) - (
            0.0 if self.before is None else self._up_to(queries, keys, -self.before - 1)
        )

    @staticmethod
    def _up_to(queries: int, keys: int, after: int | None) -> float:
        """Pairs whose key is at most ``after`` positions behind the query."""
        if after is None:
            return float(queries * keys)
        first, full = max(0, -after), min(queries, keys - after - 1)  # rows that see some, and that see all
        rising = max(0, full - first)
        least = first + after + 1
        return rising * (2 * least + rising - 1) / 2 + (queries - max(first, full)) * float(keys) * (first < queries)


ALL_KEYS, CAUSAL = Band(), Band(None, 0)


@dataclass(frozen=True)
class AttentionSpec:
    """Attention in tiles: what a query sees, how scores are weighed, how it is sharded."""

    queries: int | None = None
    keys: int | None = None
    """global lengths; None: that of the operand"""
    axes: Axes = ()
    """mesh axes that shard the sequence"""
    before: int | None = None
    after: int | None = None
    """see :class:`Band`"""
    scale: float | None = None
    """factor of scores; None: 1 / √width"""
    sloped: bool = False
    """whether the mask has ALiBi slopes [..., h, 1, 1] (Press et al. 2022): slope · (key position -
    query position) is added"""
    soft_cap: float | None = None
    """scaled scores x become cap · tanh(x / cap) before the mask (Gemma 2)"""
    dropout_p: float = 0.0
    """probability that a weight is dropped"""
    shape: Sequence[int] = ()
    """of dropout equal to one device's: global shape of the weights [..., s, t]"""
    cuts: Mapping[int, Axes] | None = None
    """the axes that shard each dim of ``shape`` but the last two"""
    batch: int | None = None
    """see :func:`~autoshard.runtime.dropout`"""
    folded: bool = False
    """zigzag order: mirrored ranks swap first halves before and after, which balances causal work"""
    carried: bool = False
    """whether sharded operands and the result are in zigzag order already; nothing is swapped"""
    helpers: bool = False
    """whether early ranks of a ring compute for late ones"""
    pieces: int = 1
    batches: int = 1
    """head chunks in which keys and values are gathered, and batch chunks of each"""

    @property
    def band(self) -> Band:
        """The keys that a query sees by position."""
        return Band(self.before, self.after)


@lru_cache(maxsize=1024)
def rank_spans(size: int, ranks: tuple[int, ...], folded: bool) -> tuple[Chunks, ...]:
    """Per rank of a ring over axes of these sizes: its intervals of a sequence of ``size``.
    ``folded``: zigzag order, where each chunk's first half is swapped with the mirrored rank's:
    under a causal mask early and late halves balance. The late half sees more of the rank's own
    keys, while others arrive."""
    cut = chunks(size, ranks)
    if not folded:
        return tuple((c,) for c in cut)
    halves = [_interval_halves(c) for c in cut]
    pairs = [(second, halves[-1 - i][0]) for i, (_, second) in enumerate(halves)]
    return tuple(pair[:: 1 if received_half(i, len(cut)) else -1] for i, pair in enumerate(pairs))


def query_and_key_spans(
    queries: int, keys: int, ranks: tuple[int, ...], folded: bool, carried: bool = False
) -> tuple[tuple[Chunks, ...], tuple[Chunks, ...]]:
    """:func:`rank_spans` of queries and keys of a ring. ``keys_at_step``: both arrive in zigzag
    order. With two ranks zigzag queries alone balance the work: all keys are there after one
    hop."""
    return rank_spans(queries, ranks, folded or carried), rank_spans(
        keys, ranks, carried or (folded and math.prod(ranks) > 2)
    )


def received_half(rank: int, ranks: int) -> int:
    """Index (1 on early ranks, else 0) of the zigzag interval that came from the mirrored rank."""
    return int(2 * rank < ranks - 1)


def _interval_halves(interval: Interval) -> tuple[Interval, Interval]:
    start, length = interval
    first = length - length // 2
    return (start, first), (start + first, length // 2)


def total_length(intervals: Chunks) -> int:
    return sum(length for _, length in intervals)


class Tile(NamedTuple):
    """One interval of queries against one of keys."""

    rows: Interval
    columns: Interval
    aligned: bool = False
    """whether local row i sees local columns 0 … i, as causal kernels do"""
    partial: bool = False
    """whether a mask hides some pairs in another way"""

    @property
    def pairs(self) -> float:
        """Computed (query, key) pairs; kernels skip most of those beyond the diagonal."""
        band = CAUSAL if self.aligned else ALL_KEYS
        return band.pairs(self.rows[1], self.columns[1])


def band_tiles(queries: Chunks, keys: Chunks, band: Band, some: bool = False) -> list[Tile]:
    """Tiles of queries and keys without those that are fully masked. ``some``: blocks of rows."""
    stretches = [b for rows in queries for b in (window_blocks(rows) if some and band.before is None else [rows])]
    return [t for rows in stretches for columns in keys for t in _band_tiles_of_pair(rows, columns, band)]


class TileGroup(NamedTuple):
    """Adjacent tiles in local memory, computed by one kernel."""

    rows: Chunks
    columns: Chunks
    aligned: bool = False
    """as :attr:`Tile.aligned`, in local positions"""
    partial: bool = False


def tile_groups(
    queries: Chunks, keys: Chunks, band: Band, apart: bool = False, some: bool = False
) -> tuple[TileGroup, ...]:
    """:func:`band_tiles` merged into as few kernels as possible, unless ``apart``: halves of zigzag
    order merge where they see the same keys."""
    found = {(rows, columns): band_tiles((rows,), (columns,), band, some) for rows in queries for columns in keys}
    whole = {at for at, several in found.items() if several == [Tile(*at)]}
    aligned = {at for at, several in found.items() if several == [Tile(*at, aligned=True)]}
    if not apart and {at for at, several in found.items() if several} == whole | aligned:
        rows, columns = (tuple(dict.fromkeys(at[i] for at in found if at in whole)) for i in (0, 1))
        if not aligned and whole == set(itertools.product(rows, columns)):
            return (TileGroup(rows, columns),) if whole else ()
        below = set(itertools.combinations(queries[::-1], 2))  # a later interval and an earlier one
        if aligned == {(rows, rows) for rows in queries} and whole == below:
            return (TileGroup(queries, queries, True),)
    return tuple(
        TileGroup((t.rows,), (t.columns,), t.aligned, t.partial) for several in found.values() for t in several
    )


def _band_tiles_of_pair(rows: Interval, columns: Interval, band: Band) -> Iterator[Tile]:
    (start, length), (first, count) = rows, columns
    if not length or not count:
        return
    if band.before is not None:
        for block in window_blocks(rows):
            low, high = max(first, block[0] - band.before), first + count
            high = high if band.after is None else min(high, sum(block) + band.after)
            if low < high:
                yield Tile(block, (low, high - low), partial=not _sees_all(block, (low, high - low), band))
        return
    if band.after is None:
        yield Tile(rows, columns)
        return
    start += band.after  # last key that the first row sees
    if first >= start + length:
        return
    count = min(count, start + length - first)  # no row sees later keys
    before = min(max(0, start - first), count)  # keys that all rows see
    if before:
        yield Tile(rows, (first, before))
    if before < count:
        yield Tile(rows, (first + before, count - before), first + before == start, first > start)


def window_blocks(rows: Interval) -> list[Interval]:
    """Blocks of at most :data:`WINDOW_BLOCK_ROWS` rows, for a window that ends on both sides."""
    return [(i, min(WINDOW_BLOCK_ROWS, sum(rows) - i)) for i in range(rows[0], sum(rows), WINDOW_BLOCK_ROWS)]


def _sees_all(rows: Interval, columns: Interval, band: Band) -> bool:
    last_row, last_column = sum(rows) - 1, sum(columns) - 1
    begins = band.before is None or columns[0] >= last_row - band.before
    return begins and (band.after is None or last_column <= rows[0] + band.after)


class RingStep(NamedTuple):
    """One step of a ring: the keys of the rank ``offset`` before this one are here."""

    offset: int = 0
    shift: int = 0
    """distance that the keys moved since the previous stop"""
    from_owner: bool = True
    """whether they come from their owner instead of the previous holder"""
    home: bool = True
    """whether their gradients return to the owner from here instead of moving on"""

    def holder(self, rank: int, ranks: int) -> int:
        """The owner of the keys."""
        return (rank - self.offset) % ranks


@lru_cache(maxsize=1024)
def ring_schedule(rows: tuple[Chunks, ...], columns: tuple[Chunks, ...], band: Band) -> tuple[RingStep, ...]:
    """The schedule of all keys: around the ring, or under a window to the ranks that see some."""
    n = len(columns)
    if band.before is None:
        return (RingStep(), *(RingStep(i, 1, i == 1, i == n - 1) for i in range(1, n)))
    seen = [i for i in range(1, n) if any(band_tiles(rows[r], columns[(r - i) % n], band) for r in range(n))]
    return (RingStep(), *(RingStep(i, i) for i in seen))


def keys_at_step(
    rows: tuple[Chunks, ...], columns: tuple[Chunks, ...], band: Band, stop: RingStep, holder: int
) -> Chunks:
    """The keys of rank ``holder`` that arrive at ``stop``; under a window only the visible ones."""
    whole = band.before is None or not stop.offset
    return columns[holder] if whole else _visible_columns(rows, columns, band, stop, holder)


@lru_cache(maxsize=4096)
def longest_keys(rows: tuple[Chunks, ...], columns: tuple[Chunks, ...], band: Band, stop: RingStep) -> int:
    """The most keys that any rank sends to ``stop``."""
    return max(total_length(keys_at_step(rows, columns, band, stop, r)) for r in range(len(columns)))


@lru_cache(maxsize=4096)
def _visible_columns(
    rows: tuple[Chunks, ...], columns: tuple[Chunks, ...], band: Band, stop: RingStep, holder: int
) -> Chunks:
    seen = [t.columns for t in band_tiles(rows[(holder + stop.offset) % len(rows)], columns[holder], band)]
    if not seen:
        return ((columns[holder][0][0], 0),)
    first = min(start for start, _ in seen)
    return ((first, max(map(sum, seen)) - first),)


@lru_cache(maxsize=1024)
def pairs_per_rank(
    queries: int, keys: int, ranks: tuple[int, ...], folded: bool, cut_keys: bool = True, band: Band = CAUSAL
) -> tuple[float, ...]:
    """(query, key) pairs each rank computes under a mask. ``cut_keys``: keys are sharded, too."""
    rows, columns = query_and_key_spans(queries, keys, ranks, folded)
    columns = columns if cut_keys else (((0, keys),),)
    return tuple(sum(t.pairs for c in columns for t in band_tiles(mine, c, band)) for mine in rows)


class HelperShare(NamedTuple):
    """What a rank computes in one step of a balanced causal ring."""

    rows: Interval
    columns: Interval
    helps: bool = False
    """whether the rows belong to another rank and the columns to this one"""

    @property
    def pairs(self) -> float:
        """Computed (query, key) pairs."""
        return float(self.rows[1] * self.columns[1])


@lru_cache(maxsize=1024)
def helper_shares(cut: tuple[Chunks, ...]) -> tuple[tuple[HelperShare, ...], ...]:
    """Per step and rank of a balanced ring of n: the tile besides its own diagonal tile. In step t
    = 1 … n/2 a rank computes its rows over the columns of the rank t before it. The first t
    ranks, which have none, help the last t: own columns over the rows of the rank t before,
    modulo n. For t = n / 2 two ranks share a tile."""
    n = len(cut)
    return tuple(tuple(_helper_share(cut, rank, step) for rank in range(n)) for step in range(1, n // 2 + 1))


def _helper_share(cut: tuple[Chunks, ...], rank: int, step: int) -> HelperShare:
    helps, other = rank < step, (rank - step) % len(cut)
    ((start, length),), (columns,) = (cut[other], cut[rank]) if helps else (cut[rank], cut[other])
    if 2 * step == len(cut):
        own = length - length // 2
        start, length = (start + own, length - own) if helps else (start, own)
    return HelperShare((start, length), columns, helps)


@lru_cache(maxsize=1024)
def longest_exchanged(cut: tuple[Chunks, ...]) -> tuple[tuple[int, int], ...]:
    """Per step of a balanced ring: the most rows, and the most columns, that a rank sends."""
    return tuple(
        (max(s.rows[1] for s in ranks if s.helps), max(s.columns[1] for s in ranks if not s.helps))
        for ranks in helper_shares(cut)
    )


def balanced_pairs_per_rank(size: int, ranks: tuple[int, ...]) -> tuple[float, ...]:
    """(query, key) pairs that each rank of a balanced causal ring computes."""
    cut = rank_spans(size, ranks, False)
    own = [CAUSAL.pairs(rows[0][1], rows[0][1]) for rows in cut]
    return tuple(pairs + sum(step[rank].pairs for step in helper_shares(cut)) for rank, pairs in enumerate(own))
