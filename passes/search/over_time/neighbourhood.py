"""Large neighbourhood search: branch and bound re-optimises some nodes, others stay fixed.

Source: Shaw, Using constraint programming and local search methods to solve vehicle routing
problems (1998); Aggarwal, Orlin and Tai, Optimized crossover for the independent set problem
(1997), for choices among those of several solutions.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.passes.search.folded import Classes
from autoshard.passes.search.network import Array, Choice
from autoshard.passes.search.over_time.descent import FORBIDDEN, Best
from autoshard.passes.search.over_time.domains import Domains
from autoshard.passes.search.over_time.lives import Lives
from autoshard.passes.search.over_time.tree import Cheaper, Leaf, Tree

# Leaves of a neighbourhood's tree; its nodes at first, at least, at most; the factor of growth.
# It does not grow while small ones improve the choice.
LEAVES = 12
FIRST = 20.0
FEWEST = 8.0
MOST = 2_000.0
GROWTH = 1.2
# Nodes of a window that is not halved; the share of the gap that is not worth a window.
LEAST = 50
LITTLE = 1e-4
# Seconds of a neighbourhood under a time limit, and beyond which the next one is smaller.
SECONDS = 10.0
LONG = 3.0
# Least relative improvement.
BETTER = 1e-7
# Numbers of best strategies per node, by cost and score; number of last choices that count.
LIKELY = (0, 1, 2, 4, 8)
SEEN = 40


@dataclass
class Neighbourhoods:
    """Improves ``best``. ``seen``: near choices; ``scores``: per strategy, low is good."""

    best: Best
    cheaper: Cheaper
    deadline: float
    seen: list[Choice]
    scores: Sequence[Array]
    weights: Sequence[float]
    """price of a byte of each node"""
    prices: Array | None = None
    """initial prices of the rows in trees"""
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    tried: int = 0
    sizes: dict[tuple[bool, bool], float] = field(default_factory=dict)
    """size by kind of neighbourhood: (nodes of one row, few strategies)"""

    def aim(self, gaps: Callable[[Choice], Array], size: int, near: bool, least: float = 0.0) -> None:
        """Windows of ``size`` nodes around the largest excess over the bound, by ``gaps``, until it
        is small or below ``least``. Undecided windows are halved.

        ``near``: neighbours in the graph, otherwise in time.
        """
        best = self.best
        lives = best.lives
        order = np.argsort(lives.first + lives.last, kind="stable")
        place = np.argsort(order)
        left, gap = np.ones(len(best.lives.usage), dtype=bool), self._gaps(gaps)
        while time.perf_counter() < self.deadline:
            seed = int(np.argmax(np.where(left, gap, 0.0)))
            if not left[seed] or gap[seed] < least or gap[seed] <= LITTLE * gap[np.isfinite(gap)].sum():
                break
            if near:
                nodes = around(lives, seed, size, self.generator)
                left[nodes[: size // 2]] = False
            else:
                start = max(int(place[seed]) - size // 2, 0)
                nodes = order[start : start + size].tolist()
                left[nodes[size // 4 : size - size // 4]] = left[seed] = False
            if self._window(nodes):
                gap = self._gaps(gaps)

    def _gaps(self, gaps: Callable[[Choice], Array]) -> Array:
        """Infinite while the limit is exceeded, too."""
        lives = self.best.lives
        over = (self.best.used > lives.room).astype(np.float64)
        return np.where(lives.weights(over) > 0, np.inf, gaps(self.best.choice))

    def _window(self, nodes: list[int]) -> bool:
        """Improve some nodes, or each half if that is not optimal; returns whether it is better."""
        better, complete = self._improve(sorted(nodes), few=False)
        if complete or better or len(nodes) < 2 * LEAST or time.perf_counter() > self.deadline:
            return better
        half = len(nodes) // 2
        parts = [self._window(part) for part in (nodes[:half], nodes[half:])]
        return any(parts)

    def step(self) -> bool:
        """Search one neighbourhood; returns whether the best choice is better now."""
        lives, begin = self.best.lives, time.perf_counter()
        kind = lives.count > 0 and self.tried % 4 == 3, self.tried % 2 == 1
        self.tried += 1
        size = self.sizes.setdefault(kind, FIRST)
        if kind[0] and not self.best.forbidden:
            nodes = together(lives, self._row(), int(size), self.generator)
        else:
            nodes = around(lives, self._seed(), int(size), self.generator)
        better, complete = self._improve(sorted(nodes), few=kind[1])
        slow = math.isfinite(self.deadline) and time.perf_counter() - begin > LONG
        if not complete or slow:
            size /= GROWTH
        elif not better:
            size *= GROWTH
        self.sizes[kind] = min(max(size, FEWEST), MOST, len(lives.usage))
        return better

    def _seed(self) -> int:
        """A node whose choice is forbidden, else one live where the limit is exceeded, else any."""
        lives = self.best.lives
        among: Sequence[int] = range(len(lives.usage))
        if self.best.forbidden:
            among = self.best.broken or among
        elif self.best.excess:
            row = self._row()
            among = np.flatnonzero((lives.first <= row) & (row < lives.last)).tolist()
        return among[int(self.generator.integers(len(among)))]

    def _row(self) -> int:
        if self.best.excess:
            return int(np.argmax(self.best.used - self.best.lives.room))
        return int(self.generator.integers(self.best.lives.count))

    def _improve(self, nodes: list[int], few: bool) -> tuple[bool, bool]:
        """Re-optimise some nodes; returns (whether better, whether the search was complete)."""
        best, deadline = self.best, self.deadline
        if math.isfinite(deadline):
            deadline = min(deadline, time.perf_counter() + SECONDS)
        present = tuple(best.choice[node] for node in nodes)
        lives = best.lives.part(nodes, best.choice, best.used)
        domains = Domains.of(lives, deadline)
        if domains is None:  # infeasible given the others: then excess must not grow
            lives = best.lives.part(nodes, best.choice, best.used, spare=True)
            domains = Domains.of(lives, deadline)
        if domains is not None and few:
            domains = domains.narrowed(lives, self._few(nodes, domains), deadline)
        if domains is None:
            return False, True
        before = lives.network.cost(present)
        known = math.isfinite(before) and math.isfinite(best.cost)
        tree = Tree(lives, self.cheaper, deadline, before - BETTER * abs(before) if known else math.inf)
        prices = np.zeros(lives.count) if self.prices is None else lives.gathered(self.prices)
        tree.put(Leaf(-math.inf, domains, prices))
        tree.search(LEAVES)
        better = tree.choice is not None and best.change(dict(zip(nodes, tree.choice, strict=True)))
        return better, tree.complete

    def _few(self, nodes: list[int], domains: Domains) -> dict[int, Classes]:
        """Strategies seen lately, and the best given the neighbours and by score."""
        lives, choice = self.best.lives, self.best.choice
        many = int(self.generator.choice(LIKELY))
        seen = np.array([[seen[node] for node in nodes] for seen in (*self.seen[-SEEN:], choice)])
        found = {}
        for k, node in enumerate(nodes):
            beside = np.minimum(lives.cost_of(node, choice), FORBIDDEN) + self.weights[node] * lives.usage[node]
            orders = [np.argsort(score, kind="stable")[:many] for score in (beside, self.scores[node])]
            likely = np.concatenate([seen[:, k], *orders])
            found[k] = np.intersect1d(likely, domains.kept[k])
        return found


def around(lives: Lives, seed: int, count: int, generator: np.random.Generator) -> list[int]:
    """``count`` nodes near ``seed``, breadth first, with at most 8 neighbours of each."""
    found, waiting = {seed: None}, deque([seed])
    while waiting and len(found) < count:
        near = [other for other, _ in lives.beside[waiting.popleft()] if other not in found]
        near = [near[k] for k in generator.permutation(len(near))[:8]]
        for other in near[: count - len(found)]:
            found[other] = None
            waiting.append(other)
    return list(found)


def together(lives: Lives, row: int, count: int, generator: np.random.Generator) -> list[int]:
    """``count`` nodes live in a row, or nearest to it."""
    away = np.maximum(lives.first - row, row + 1 - lives.last).clip(0) + generator.random(len(lives.first))
    away[lives.first >= lives.last] += lives.count
    return [int(node) for node in np.argsort(away, kind="stable")[:count]]
