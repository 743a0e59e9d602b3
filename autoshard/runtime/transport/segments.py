"""Rows that lie in segments, put into another order of these."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch


class Order(NamedTuple):
    """Rows that lie in segments, one after another, in the order of the transpose of these."""

    lengths: Sequence[Sequence[int]]
    """of the segments, [a, b]"""
    numbers: tuple[torch.Tensor, torch.Tensor] | None
    """where each of the rows lies in the other order, and there and back; None: the few segments are put together anew"""

    def turned(self) -> Order:
        """The other way."""
        return Order([*zip(*self.lengths, strict=True)], self.numbers and self.numbers[::-1])

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Rows ``x`` in this order."""
        if self.numbers is not None:
            return x.index_select(0, self.numbers[0])
        columns = len(self.lengths[0])
        segments = x.split_with_sizes([n for row in self.lengths for n in row])
        return torch.cat([s for number in range(columns) for s in segments[number::columns]])


FEW = 64
"""segments that are put together in less time than their rows are numbered, and gathered"""


def by_columns(lengths: Sequence[Sequence[int]], device: torch.device) -> Order:
    """Of rows on ``device`` in segments of ``lengths`` [a, b], one after another: the order in segments of its transpose."""
    columns, rows = len(lengths[0]), sum(map(sum, lengths))
    if columns * len(lengths) <= FEW:
        return Order(lengths, None)
    starts = [0, *itertools.accumulate(itertools.chain.from_iterable(lengths))]
    turned = list(itertools.chain.from_iterable(zip(*lengths, strict=True)))
    places = [0, *itertools.accumulate(turned)]
    begins = (start for b in range(columns) for start in starts[b:-1:columns])
    ways = [start - place for start, place in zip(begins, places, strict=False)]  # from there to here
    way, length = torch.tensor([ways, turned], device=device).unbind()
    numbers = torch.arange(rows, device=device)
    order = way.repeat_interleave(length, output_size=rows).add_(numbers)
    return Order(lengths, (order, torch.empty_like(order).scatter_(0, order, numbers)))
