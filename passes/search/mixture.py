"""Choices between those that the prices give: k of L equal layers take one, the rest the other.

At the best prices the cheapest choices differ, and the best of all is nearly a mixture of them. Here the first nodes pay the
prices at which one choice was the cheapest, the next ones those of another; what passes from one to the other is optimal.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from autoshard.passes.search.network import Array
from autoshard.passes.search.prices import Search
from autoshard.passes.search.relaxation import Elimination

# Mixtures tried at effort 1.
TRIALS = 16
# A hard row's excess counts this many times its price while the borders are moved.
HARD = 3.0


def mix(search: Search, enough: float, effort: float) -> int:
    """Move the borders between the parts of a mixture to the cheapest choice; returns how many were tried."""
    part = search.part
    mixture = sorted(part.mixture, key=lambda weighted: tuple(weighted[1].slope))
    if part.elimination is None or len(mixture) < 2:
        return 0
    borders = _Borders(search, part.elimination, np.array([cut.prices for _, cut in mixture]))
    return borders.move(np.cumsum([weight for weight, _ in mixture])[:-1], enough, math.ceil(TRIALS * effort))


class _Borders:
    """The nodes up to a border pay one row of ``prices`` [parts, rows], those after it the next."""

    def __init__(self, search: Search, elimination: Elimination, prices: Array) -> None:
        self.search, self.elimination, self.prices = search, elimination, prices
        self.count = len(search.part.problem.sizes)
        most = search.part.problem.prices
        self.charge = np.where(np.isinf(most), HARD * prices.max(axis=0), most)
        self.tried: dict[tuple[int, ...], float] = {}

    def value(self, borders: tuple[int, ...]) -> float:
        """The cost of the choice that these borders give, hard rows' excess at a price of their own."""
        if borders not in self.tried:
            segment = np.searchsorted(np.array(borders), np.arange(self.count), side="right").tolist()
            planned = Elimination(self.elimination.problem, self.elimination.order, segment)
            choice, _ = planned.solve(self.prices)
            self.search.solved += 1
            cost, over = self.search.offer(self.search.part.original(choice))
            self.tried[borders] = cost + float(np.maximum(over, 0.0) @ self.charge)
        return self.tried[borders]

    def move(self, parts: Array, enough: float, trials: int) -> int:
        """Shift one border after the other, by ever less."""
        best = tuple(int(round(part * self.count)) for part in parts)
        self.value(best)
        step = self.count // 8
        while (
            step and len(self.tried) < trials and self.search.gap(self.search.bound) > enough and not self.search.late
        ):
            found = best
            for k, shift in itertools.product(range(len(best)), (-step, step)):
                moved = (*best[:k], best[k] + shift, *best[k + 1 :])
                if (
                    list(moved) == sorted(moved)
                    and moved[0] >= 0
                    and moved[-1] <= self.count
                    and len(self.tried) < trials
                ):
                    found = min(found, moved, key=self.value)
            if len(set(self.tried.values())) == 1:
                break  # what differs lies in a few places, not in many layers
            if found == best:
                step //= 2
            best = found
        return len(self.tried)
