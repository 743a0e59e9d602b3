"""Mixtures of two near-best choices: k of L equal layers take one, the rest the other.

At the best prices several choices tie, and the optimum is almost a mixture of them. Nodes up to a
border follow one choice, later ones the next. Nodes near borders, or joined across parts, are free.
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

# Share of nodes that are free on each side of a border: some layers.
FREE = 1 / 20
# First shift of a border, as a share of nodes: beyond the nodes that were free.
STEP = 2 * FREE
# Factor on the price of a hard row's excess while borders move.
HARD = 3.0


def mix(search: Search, part: Part, enough: float, trials: int) -> int:
    """Move the borders of a mixture to the cheapest choice; returns the number of trials."""
    mixture = sorted(part.mixture, key=lambda weighted: tuple(weighted[1].slope))
    if part.elimination is None or len(mixture) < 2:
        return 0
    borders = _Borders(search, part, [part.renumbered(cut.choice) for _, cut in mixture])
    return borders.move(np.cumsum([weight for weight, _ in mixture])[:-1], enough, trials)


class _Borders:
    """Nodes up to a border follow one of ``choices``, later ones the next."""

    def __init__(self, search: Search, part: Part, choices: list[Choice]) -> None:
        self.search, self.part = search, part
        self.choices = np.array(choices)
        self.count = len(part.problem.sizes)
        most = part.problem.prices
        self.charge = np.where(np.isinf(most), HARD * part.prices, most)
        self.pairs = np.array([scope for scope in part.problem.factors if len(scope) == 2]).reshape(-1, 2)
        self.tried: dict[tuple[int, ...], float] = {}

    def value(self, borders: tuple[int, ...]) -> float:
        """Cost at these borders, with hard rows' excess at a price; inf if infeasible."""
        if borders not in self.tried:
            part = self.part.restricted({i: self.choices[k, i : i + 1] for i, k in self._fixed(borders)})
            elimination = Elimination(part.problem, by_join)
            self.search.solved += 1
            self.search.work += elimination.work
            try:
                choice, _ = elimination.solve(part.prices)
            except PlanError:  # the two choices are incompatible across the border
                self.tried[borders] = math.inf
                return math.inf
            whole = self.part.renumbered(part.original(choice))
            filled = flipped(self.part.problem, self.search.slack, whole)
            cost, over = self.search.offer(self.part.original(filled))
            self.tried[borders] = cost + float(np.maximum(over, 0.0) @ self.charge)
        return self.tried[borders]

    def _fixed(self, borders: tuple[int, ...]) -> list[tuple[int, int]]:
        """(node, number of the choice that it follows)."""
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
        """Shift one border after the other, in ever smaller steps."""
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
