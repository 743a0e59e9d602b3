"""Permutation of rows by segments, as received by an all-to-all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Order(NamedTuple):
    """Rows of segments [a, b], reordered as the segments of the transpose."""

    lengths: Sequence[Sequence[int]]
    """of the segments, [a, b]"""
    numbers: tuple[torch.Tensor, torch.Tensor] | None
    """index of each row in the other order, both ways; None: few segments, concatenated instead"""

    def turned(self) -> Order:
        """The inverse order."""
        return Order([*zip(*self.lengths, strict=True)], self.numbers and self.numbers[::-1])

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Rows ``x`` in this order."""
        if self.numbers is not None:
            return x.index_select(0, self.numbers[0])
        columns = len(self.lengths[0])
        segments = x.split_with_sizes([n for row in self.lengths for n in row])
        return torch.cat([s for number in range(columns) for s in segments[number::columns]])


FEW = 64
"""segments up to which concatenation is faster than gathering rows by index"""


def by_columns(lengths: Sequence[Sequence[int]], device: torch.device) -> Order:
    """The order of rows in segments of ``lengths`` [a, b] as segments of the transpose [b, a]."""
    columns, rows = len(lengths[0]), sum(map(sum, lengths))
    if columns * len(lengths) <= FEW:
        return Order(lengths, None)
    starts = [0, *itertools.accumulate(itertools.chain.from_iterable(lengths))]
    turned = list(itertools.chain.from_iterable(zip(*lengths, strict=True)))
    places = [0, *itertools.accumulate(turned)]
    begins = (start for b in range(columns) for start in starts[b:-1:columns])
    ways = [start - place for start, place in zip(begins, places, strict=False)]  # source - target
    way, length = torch.tensor([ways, turned], device=device).unbind()
    numbers = torch.arange(rows, device=device)
    order = way.repeat_interleave(length, output_size=rows).add_(numbers)
    return Order(lengths, (order, torch.empty_like(order).scatter_(0, order, numbers)))
