"""Local search under a memory limit at each moment: descent, large neighbourhood search.

Source: Shaw, Using constraint programming and local search methods to solve vehicle routing problems (1998); Aggarwal, Orlin
and Tai, Optimized crossover for the independent set problem (1997), for choices among the strategies of several solutions."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.passes.search.arrays import Classes
from autoshard.passes.search.network import Array, Choice
from contest.branch_and_bound import Cheaper, Leaf, Tree
from contest.liveness import Domains, LivenessProblem

# Finite cost of forbidden choices.
FORBIDDEN = 1e18


class Best:
    """The best choice so far: feasible if one is known, else the nearest to feasible."""

    def __init__(
        self,
        lives: LivenessProblem,
        choice: Choice,
        better: Callable[[float, Choice], None] = lambda cost, choice: None,
    ) -> None:
        """``better``: called with every better feasible choice."""
        self.lives, self.choice, self.better = lives, choice, better
        self.used = lives.sums(lives.held(choice))
        self._broken: set[int] | None = None
        self.forbidden, self.excess, self._cost = lives.judge(choice)

    @property
    def cost(self) -> float:
        """Infinite if no feasible choice is known."""
        return math.inf if self.forbidden or self.excess else self._cost

    def offer(self, choice: Choice) -> bool:
        """Keep a choice if it is the best; returns whether it is."""
        found = self.lives.judge(choice)
        if found >= (self.forbidden, self.excess, self._cost):
            return False
        self.choice, self._broken, (self.forbidden, self.excess, self._cost) = choice, None, found
        self.used = self.lives.sums(self.lives.held(choice))
        self._tell()
        return True

    def change(self, part: Mapping[int, int]) -> bool:
        """Change the strategies of some nodes if that is better; returns whether it is."""
        lives, choice = self.lives, list(self.choice)
        never, cost = lives.touched(part, choice)
        used = self.used.copy()
        for node, strategy in part.items():
            usage = lives.usage[node]
            used[lives.first[node] : lives.last[node]] += usage[strategy] - usage[choice[node]]
            choice[node] = strategy
        never_now, cost_now = lives.touched(part, choice)
        excess = float(np.maximum(used - lives.room, 0.0).sum())
        found = self.forbidden + never_now - never, excess, self._cost + cost_now - cost
        if found >= (self.forbidden, self.excess, self._cost):
            return False
        self.choice, self.used, (self.forbidden, self.excess, self._cost) = tuple(choice), used, found
        if self._broken is not None:
            self._broken.update(part)
        self._tell()
        return True

    def _tell(self) -> None:
        if math.isfinite(self.cost):
            self.better(self.cost, self.choice)

    @property
    def broken(self) -> list[int]:
        """Nodes of tables that forbid the choice, at least one per table."""
        lives, choice = self.lives, self.choice
        if self._broken is None:
            pairs = [(i, j) for i, j, matrix in lives.network.matrices if math.isinf(matrix[choice[i], choice[j]])]
            self._broken = {node for pair in pairs for node in pair}
        self._broken = {
            node
            for node in self._broken
            if any(math.isinf(matrix[choice[node], choice[other]]) for other, matrix in lives.beside[node])
        }
        return sorted(self._broken)


def descend(lives: LivenessProblem, start: Choice, price: float, passes: int, deadline: float) -> Choice:
    """From ``start`` to a choice that no move of one node betters; excess costs ``price`` a unit.

    The price doubles with every pass until nothing exceeds the limit.
    """
    choice = list(start)
    used = lives.sums(lives.held(choice))
    waiting = set(range(len(choice)))
    visits = 0
    for _ in range(passes):
        changed: set[int] = set()
        for node in sorted(waiting):
            if len(lives.usage[node]) == 1:
                continue
            visits += 1
            if visits % 64 == 0 and time.perf_counter() > deadline:
                return tuple(choice)
            own = float(lives.usage[node][choice[node]])
            total = np.minimum(lives.cost_of(node, choice), FORBIDDEN)
            total = total + price * lives.excess_of(node, used, own)
            best = int(np.argmin(total))
            if total[best] < total[choice[node]]:
                used[lives.first[node] : lives.last[node]] += lives.usage[node][best] - own
                choice[node] = best
                changed.update([node, *(other for other, _ in lives.beside[node])])
        waiting = changed
        if (used > lives.room).any():
            price *= 2
            waiting = set(range(len(choice)))
        elif not changed:
            break
    return tuple(choice)


# Leaves of a neighbourhood's tree; its nodes at first, at least, at most; the factor of growth.
# It does not grow while small ones improve the choice.
NEIGHBOURHOOD_LEAVES = 12
FIRST_NEIGHBOURHOOD = 20.0
MIN_NEIGHBOURHOOD = 8.0
MAX_NEIGHBOURHOOD = 2_000.0
GROWTH = 1.2
# Nodes of a window that is not halved; the share of the gap that is not worth a window.
MIN_HALVED_WINDOW = 50
NEGLIGIBLE_GAP = 1e-4
# Seconds of a neighbourhood under a time limit, and beyond which the next one is smaller.
SECONDS = 10.0
SLOW_SECONDS = 3.0
# Least relative improvement.
MIN_IMPROVEMENT = 1e-7
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
            if not left[seed] or gap[seed] < least or gap[seed] <= NEGLIGIBLE_GAP * gap[np.isfinite(gap)].sum():
                break
            if near:
                nodes = nodes_near(lives, seed, size, self.generator)
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
        if complete or better or len(nodes) < 2 * MIN_HALVED_WINDOW or time.perf_counter() > self.deadline:
            return better
        half = len(nodes) // 2
        parts = [self._window(part) for part in (nodes[:half], nodes[half:])]
        return any(parts)

    def step(self) -> bool:
        """Search one neighbourhood; returns whether the best choice is better now."""
        lives, begin = self.best.lives, time.perf_counter()
        kind = lives.count > 0 and self.tried % 4 == 3, self.tried % 2 == 1
        self.tried += 1
        size = self.sizes.setdefault(kind, FIRST_NEIGHBOURHOOD)
        if kind[0] and not self.best.forbidden:
            nodes = nodes_live_at(lives, self._row(), int(size), self.generator)
        else:
            nodes = nodes_near(lives, self._seed(), int(size), self.generator)
        better, complete = self._improve(sorted(nodes), few=kind[1])
        slow = math.isfinite(self.deadline) and time.perf_counter() - begin > SLOW_SECONDS
        if not complete or slow:
            size /= GROWTH
        elif not better:
            size *= GROWTH
        self.sizes[kind] = min(max(size, MIN_NEIGHBOURHOOD), MAX_NEIGHBOURHOOD, len(lives.usage))
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
        tree = Tree(lives, self.cheaper, deadline, before - MIN_IMPROVEMENT * abs(before) if known else math.inf)
        prices = np.zeros(lives.count) if self.prices is None else lives.gathered(self.prices)
        tree.put(Leaf(-math.inf, domains, prices))
        tree.search(NEIGHBOURHOOD_LEAVES)
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


def nodes_near(lives: LivenessProblem, seed: int, count: int, generator: np.random.Generator) -> list[int]:
    """``count`` nodes near ``seed``, breadth first, with at most 8 neighbours of each."""
    found, waiting = {seed: None}, deque([seed])
    while waiting and len(found) < count:
        near = [other for other, _ in lives.beside[waiting.popleft()] if other not in found]
        near = [near[k] for k in generator.permutation(len(near))[:8]]
        for other in near[: count - len(found)]:
            found[other] = None
            waiting.append(other)
    return list(found)


def nodes_live_at(lives: LivenessProblem, row: int, count: int, generator: np.random.Generator) -> list[int]:
    """``count`` nodes live in a row, or nearest to it."""
    away = np.maximum(lives.first - row, row + 1 - lives.last).clip(0) + generator.random(len(lives.first))
    away[lives.first >= lives.last] += lives.count
    return [int(node) for node in np.argsort(away, kind="stable")[:count]]
