"""Choices between those that the prices give: k of L equal layers take one, the rest the other.

At the best prices the cheapest choices differ, and the best of all is nearly a mixture of them. Here the first nodes do as in
one of these choices, the next as in another, and what lies around the borders, or is joined to several parts, is free.
"""

from __future__ import annotations

import itertools
import math

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.exact.eliminate import by_join
from autoshard.passes.search.network import Array, Choice
from autoshard.passes.search.rows.flips import flipped
from autoshard.passes.search.rows.prices import Part, Search
from autoshard.passes.search.rows.relaxation import Elimination

# So many of all nodes are free on each side of a border: some layers.
FREE = 1 / 20
# The first step by which a border is moved, as a part of all nodes: what was free before is so no more.
STEP = 2 * FREE
# A hard row's excess counts this many times its price while the borders are moved.
HARD = 3.0


def mix(search: Search, part: Part, enough: float, trials: int) -> int:
    """Move the borders between the parts of a mixture to the cheapest choice; returns how many were tried."""
    mixture = sorted(part.mixture, key=lambda weighted: tuple(weighted[1].slope))
    if part.elimination is None or len(mixture) < 2:
        return 0
    borders = _Borders(search, part, [part.renumbered(cut.choice) for _, cut in mixture])
    return borders.move(np.cumsum([weight for weight, _ in mixture])[:-1], enough, trials)


class _Borders:
    """The nodes up to a border do as in one of ``choices``, those after it as in the next."""

    def __init__(self, search: Search, part: Part, choices: list[Choice]) -> None:
        self.search, self.part = search, part
        self.choices = np.array(choices)
        self.count = len(part.problem.sizes)
        most = part.problem.prices
        self.charge = np.where(np.isinf(most), HARD * part.prices, most)
        self.pairs = np.array([scope for scope in part.problem.factors if len(scope) == 2]).reshape(-1, 2)
        self.tried: dict[tuple[int, ...], float] = {}

    def value(self, borders: tuple[int, ...]) -> float:
        """The cost of the choice that these borders give, hard rows' excess at a price of their own; inf: there is none."""
        if borders not in self.tried:
            part = self.part.restricted({i: self.choices[k, i : i + 1] for i, k in self._fixed(borders)})
            elimination = Elimination(part.problem, by_join)
            self.search.solved += 1
            self.search.work += elimination.work
            try:
                choice, _ = elimination.solve(part.prices)
            except PlanError:  # the two choices do not meet, whatever lies between them
                self.tried[borders] = math.inf
                return math.inf
            whole = self.part.renumbered(part.original(choice))
            filled = flipped(self.part.problem, self.search.slack, whole)
            cost, over = self.search.offer(self.part.original(filled))
            self.tried[borders] = cost + float(np.maximum(over, 0.0) @ self.charge)
        return self.tried[borders]

    def _fixed(self, borders: tuple[int, ...]) -> list[tuple[int, int]]:
        """The nodes that do as in one of the choices, and in which."""
        nodes = np.arange(self.count)
        which = np.searchsorted(np.array(borders), nodes, side="right")
        free = np.zeros(self.count, dtype=bool)
        for border in borders:
            free |= np.abs(nodes - border + 0.5) < max(FREE * self.count, 2)
        first, second = self.pairs.T
        low, high = which.copy(), which.copy()
        for a, b in ((first, second), (second, first)):
            np.minimum.at(low, a, which[b])
            np.maximum.at(high, a, which[b])
        free |= low < high
        return [(int(i), int(which[i])) for i in np.flatnonzero(~free)]

    def move(self, parts: Array, enough: float, trials: int) -> int:
        """Shift one border after the other, by ever less."""
        best = tuple(round(part * self.count) for part in parts)
        self.value(best)
        step = max(int(STEP * self.count), 1)
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
            if found == best:
                step //= 2
            best = found
        return len(self.tried)
