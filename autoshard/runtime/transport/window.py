"""Chunks of a sharded dim, windows over it, and the halo exchange they need. Numbers only."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

Interval = tuple[int, int]
"""(start, length)"""
Chunks = tuple[Interval, ...]


def chunks(size: int, ranks: Iterable[int]) -> Chunks:
    """``size`` split over axes of these sizes, outer to inner, like torch.chunk; may be empty."""
    parts: list[Interval] = [(0, size)]
    for n in ranks:
        parts = [piece for start, length in parts for piece in _split_interval(start, length, n)]
    return tuple(parts)


def _split_interval(start: int, length: int, ranks: int) -> list[Interval]:
    step = -(-length // ranks)
    ends = [min(i * step, length) for i in range(ranks + 1)]
    return [(start + a, b - a) for a, b in itertools.pairwise(ends)]


class Window(NamedTuple):
    """Result o reads operand positions o·stride - padding + k·dilation for 0 ≤ k < kernel;
    ``transposed``: operand i adds to the results i·stride - padding + k·dilation."""

    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    transposed: bool = False

    @property
    def reach(self) -> int:
        """Distance from the first to the last position of one window."""
        return self.dilation * (self.kernel - 1)

    def read(self, results: Interval) -> Interval:
        """Operand positions that ``results`` need; they may lie outside the operand."""
        start, length = results
        if not length:
            return 0, 0
        if not self.transposed:
            return start * self.stride - self.padding, (length - 1) * self.stride + self.reach + 1
        # First and last that reach the results; further if end results get the bias only.
        first, last = start + self.padding, start + length - 1 + self.padding
        low = min(first // self.stride, -((self.reach - first) // self.stride))
        high = max(last // self.stride, -((self.reach - last) // self.stride))
        return low, high - low + 1

    def surplus(self, results: Interval) -> int:
        """Transposed: results in front of these that the positions of :meth:`read` also make."""
        return results[0] - self.read(results)[0] * self.stride + self.padding


def clipped_interval(interval: Interval, size: int) -> Interval:
    low, high = (min(max(end, 0), size) for end in (interval[0], sum(interval)))
    return low, high - low


class Exchange(NamedTuple):
    """Intervals of one dim per rank of a group: held and wanted. Overlapping ones are summed."""

    held: Chunks
    wanted: Chunks

    def backward(self) -> Exchange:
        return Exchange(self.wanted, self.held)

    def piece(self, sender: int, receiver: int) -> Interval:
        """The part of what the receiver wants that the sender holds."""
        (start, length), (first, count) = self.held[sender], self.wanted[receiver]
        low = max(start, first)
        return low, max(0, min(start + length, first + count) - low)

    @property
    def received(self) -> int:
        """The most positions that any rank receives from others."""
        ranks = range(len(self.held))
        return max(sum(self.piece(s, r)[1] for s in ranks if s != r) for r in ranks)


class Halo(NamedTuple):
    """A window over a dim that is sharded in operand and result."""

    results: Chunks
    """chunks of the result"""
    reads: Chunks
    """positions that they read; they may lie outside the operand"""
    exchange: Exchange
    """from chunks of the operand to the positions read"""
    forward: int
    """the most positions that a rank receives"""


@lru_cache(maxsize=4096)
def halo_of(window: Window, size: int, to: int, ranks: tuple[int, ...]) -> Halo:
    """``size``, ``to``: global lengths of operand and result, sharded by axes of these sizes."""
    results = chunks(to, ranks)
    reads = tuple(map(window.read, results))
    moved = Exchange(chunks(size, ranks), tuple(clipped_interval(r, size) for r in reads))
    return Halo(results, reads, moved, moved.received)
