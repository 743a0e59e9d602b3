"""Branch and bound under liveness: where a choice exceeds the limit, the largest node branches.

It holds less, or it holds that much and others make room. Each leaf is bounded at its own prices,
which follow the subgradient from leaf to leaf. Source: Land and Doig (1960); Held and Karp (1971);
Polyak, Minimization of unsmooth functionals (1969).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.arrays import Classes
from autoshard.passes.search.exact.elimination import Eliminator, Tables
from autoshard.passes.search.exact.pruning import Pruner
from autoshard.passes.search.exact.solver import (
    ExactSearch,
    finish_reduced,
    finish_search,
    is_eliminable,
    network_on_grid,
)
from autoshard.passes.search.network import Array, Choice, CostNetwork, NotFoundError, Solution
from contest.liveness import Domains, LivenessProblem

Cheaper = Callable[[CostNetwork, float, float], Solution]
"""(network, upper limit of cost, deadline) → cheapest choice; empty: none, or not found"""

# Largest join without pruning first, sweeps, entries of all joins, and of these per second.
LITTLE_JOIN = 100_000
FEW_SWEEPS = 30
JOINED = 1_000_000_000
JOINED_PER_SECOND = 100_000_000
# A relative gap that counts as none.
LEAF_GAP = 1e-9
# Assumed relative excess of a leaf's best choice over its bound while none is known, and the share of
# it that a price step aims at.
ASSUMED_GAP = 0.2
POLYAK_STEP = 0.5


def solve_below(network: CostNetwork, upper: float, deadline: float) -> Solution:
    """The cheapest choice that quick methods find below ``upper``; empty if none is known."""
    pruner = Pruner(Tables(), deadline)
    work = Eliminator.of(network_on_grid(network), pruner.tables)
    run = ExactSearch(work, pruner, deadline, milp=False, upper=upper, most_sweeps=FEW_SWEEPS)
    run.most_joined = min(JOINED, JOINED_PER_SECOND * max(deadline - time.perf_counter(), 0.0))
    try:
        exact = finish_search(run) if is_eliminable(work, LITTLE_JOIN) else finish_reduced(run)
    except NotFoundError:
        return Solution((), math.inf, run.bound, False)
    except PlanError:
        return Solution((), math.inf, math.inf, False)
    if not exact and not run.incumbent:
        return Solution((), math.inf, run.bound, False)
    choice = work.back_substitute(dict(run.incumbent), run.mark)
    chosen = tuple(choice[node] for node in range(len(network.nodes)))
    cost = network.cost(chosen)
    return Solution(chosen, cost, cost if exact else min(run.bound, cost), exact)


@dataclass(frozen=True)
class Leaf:
    """Choices among ``domains``, with lower ``bound``."""

    bound: float
    domains: Domains
    prices: Array


@dataclass
class Tree:
    """The open leaves. ``upper``: ignore costlier choices."""

    lives: LivenessProblem
    cheaper: Cheaper
    deadline: float
    upper: float
    choice: Choice | None = None
    """the best found"""
    latest: Choice | None = None
    """the cheapest of the last leaf, feasible or not, with its prices"""
    prices: Array = field(init=False)
    leaves: list[tuple[float, int, Leaf]] = field(default_factory=list)
    diving: Leaf | None = None
    """the next leaf on the way down (diving)"""
    made: int = 0
    looked: int = 0
    stuck: float = math.inf
    """least bound of abandoned leaves"""

    def __post_init__(self) -> None:
        self.prices = np.zeros(self.lives.count)

    @property
    def complete(self) -> bool:
        """Whether all choices below ``upper`` were searched."""
        return not self.open and math.isinf(self.stuck)

    @property
    def open(self) -> bool:
        return bool(self.leaves) or self.diving is not None

    def put(self, leaf: Leaf) -> None:
        self.made += 1
        heapq.heappush(self.leaves, (leaf.bound, -self.made, leaf))

    def give_up(self) -> None:
        self.stuck, self.leaves, self.diving = self.bound, [], None

    @property
    def bound(self) -> float:
        """Lower bound of all choices of the tree, at most ``upper``."""
        least = self.leaves[0][0] if self.leaves else math.inf
        diving = math.inf if self.diving is None else self.diving.bound
        return min(least, diving, self.stuck, self.upper)

    def search(self, most: int) -> None:
        """Search up to ``most`` leaves: a child of the last (diving) or the least bound, in
        turn."""
        for _ in range(most):
            if time.perf_counter() > self.deadline:
                return
            down = self.diving is not None and self.looked % 2 == 0
            leaf = None if down else self._least()
            if leaf is None:
                leaf, self.diving = self.diving, None
            if leaf is None:
                return
            children = self._look(leaf)
            if children and self.diving is None:
                self.diving = children.pop(0)
            for child in children:
                self.put(child)

    def _least(self) -> Leaf | None:
        """The leaf of the least bound, if below ``upper``."""
        while self.leaves:
            leaf = heapq.heappop(self.leaves)[2]
            if not self._dear(leaf.bound):
                return leaf
        return None

    def _dear(self, bound: float) -> bool:
        return bound >= self.upper - LEAF_GAP * abs(self.upper)

    def _look(self, leaf: Leaf) -> list[Leaf]:
        """Children of a leaf, the more promising first."""
        self.looked, self.latest = self.looked + 1, None
        if self._dear(leaf.bound):
            return []
        lives, kept = self.lives, leaf.domains.kept
        weights = lives.weights(leaf.prices)
        paid = float(leaf.prices @ lives.room)
        nodes = tuple(
            costs[k] + w * usage[k] if w else costs[k]
            for costs, usage, k, w in zip(lives.network.nodes, lives.usage, kept, weights.tolist(), strict=True)
        )
        found = self.cheaper(CostNetwork(nodes, lives.cut(kept)), self.upper + paid, self.deadline)
        bound = max(leaf.bound, found.lower_bound - paid)
        if self._dear(bound):
            return []
        if not found.choice:
            self.stuck = min(self.stuck, bound)
            return []
        choice = tuple(int(k[s]) for k, s in zip(kept, found.choice, strict=True))
        self.latest, self.prices = choice, leaf.prices
        over = lives.sums(lives.held(choice)) - lives.room
        if not (over > 0).any():
            cost = lives.network.cost(choice)
            if cost < self.upper:
                self.choice, self.upper = choice, cost
            if self._dear(bound):
                return []
        split = self._split(leaf, choice, over)
        if split is None:
            self.stuck = min(self.stuck, bound)
            return []
        prices = self._stepped(leaf.prices, over, bound)
        node, parts = split
        children = [leaf.domains.narrowed(lives, {node: part}, self.deadline) for part in parts]
        return [Leaf(bound, domains, prices) for domains in children if domains is not None]

    def _stepped(self, prices: Array, over: Array, bound: float) -> Array:
        direction = np.where((over > 0) | (prices > 0), over, 0.0)
        length = float(direction @ direction)
        if not length:
            return prices
        aim = min(self.upper, bound + ASSUMED_GAP * abs(bound) + 1e-9)
        stepped: Array = np.maximum(prices + POLYAK_STEP * (aim - bound) / length * direction, 0.0)
        return stepped

    def _split(self, leaf: Leaf, choice: Choice, over: Array) -> tuple[int, tuple[Classes, Classes]] | None:
        """A node, and its strategies in two parts: at least its present bytes, and less."""
        lives, domains = self.lives, leaf.domains
        held = lives.held(choice)
        for row in np.argsort(-over, kind="stable").tolist():
            if over[row] <= 0 and not leaf.prices[row]:
                continue
            alive = (lives.first <= row) & (row < lives.last)
            node = int(np.argmax(np.where(alive, held - domains.least, -1.0)))
            part, level = domains.kept[node], held[node]
            if level <= domains.least[node] or not alive[node]:
                node = int(np.argmax(np.where(alive, domains.most - domains.least, -1.0)))
                part, level = domains.kept[node], domains.most[node]
                if not alive[node] or level <= domains.least[node]:
                    continue
            usage = lives.usage[node][part]
            return node, (part[usage >= level], part[usage < level])
        return None
