"""Dominated strategies: another one is better at all prices of the rows, whatever the rest chooses.

The gain of b over a is concave in the prices. So only corners of the price box and its unbounded
directions count. Source: Goldstein, Efficient rotamer elimination applied to protein side-chains
(1994).
"""

from __future__ import annotations

import itertools
import math
import time

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.exact.prune import EASY_COMPARISONS, NO_CHOICE, least_difference
from autoshard.passes.search.folded import Classes
from autoshard.passes.search.network import Array
from autoshard.passes.search.rows.stacked import Stacked, value

Probe = tuple[float, Array]
"""weight of a unit of cost, and of every quantity"""
Key = tuple[tuple[int, int], ...]
"""the tables at a node: (number, axis; −1 for its own vector)"""

# With more soft rows there are too many corners: then each row must gain on its own.
MAX_CORNERS = 3
# A relative gain below this may be rounding.
NOISE = 1e-12


def probes(problem: Stacked) -> list[Probe]:
    soft = np.flatnonzero(np.isfinite(problem.prices))
    single = np.eye(len(problem.prices))
    if len(soft) > MAX_CORNERS:
        return [(1.0, np.zeros(len(single))), *((0.0, row) for row in single)]
    most = np.where(np.isfinite(problem.prices), problem.prices, 0.0)
    corners = {tuple(most * single[list(chosen)].sum(axis=0)) for chosen in _subsets(soft.tolist())}
    hard = np.flatnonzero(np.isinf(problem.prices))
    # the most decisive first: most nodes keep all after it
    first, *rest = ((1.0, np.array(corner)) for corner in sorted(corners, reverse=True))
    return [first, *((0.0, single[r]) for r in hard), *rest]


def _subsets(members: list[int]) -> list[tuple[int, ...]]:
    return [chosen for n in range(len(members) + 1) for chosen in itertools.combinations(members, n)]


class Dominance:
    """Answers are memoised by a node's tables, so equal layers cost as one."""

    def __init__(self, problem: Stacked, deadline: float = math.inf) -> None:
        """After ``deadline``, only forbidden strategies are removed."""
        self.problem, self.deadline = problem, deadline
        self.probes = probes(problem)
        self._kept: dict[Key, Classes] = {}
        self._least: dict[tuple[int, int, int], Array] = {}

    def run(self) -> tuple[Stacked, list[Classes]]:
        """(problem without dominated strategies, those kept). PlanError: a node has none."""
        numbers = [np.arange(n) for n in self.problem.sizes]
        waiting = set(range(len(numbers)))
        around: list[list[tuple[int, ...]]] = [[] for _ in numbers]
        for scope in self.problem.factors:
            for node in scope:
                around[node].append(scope)
        while waiting:
            found = {node: self.kept(node, around[node]) for node in sorted(waiting)}
            found = {node: kept for node, kept in found.items() if len(kept) < self.problem.sizes[node]}
            if not all(map(len, found.values())):
                raise PlanError(NO_CHOICE)
            self.problem = self.problem.restricted(found)
            waiting = {other for node in found for scope in around[node] for other in scope}
            for node, kept in found.items():
                numbers[node] = numbers[node][kept]
        return self.problem, numbers

    def kept(self, node: int, scopes: list[tuple[int, ...]]) -> Classes:
        factors = self.problem.factors
        key = tuple(sorted((factors[s], s.index(node) if len(s) == 2 else -1) for s in scopes))
        if key not in self._kept:
            self._kept[key] = self._compute(self.problem.sizes[node], key)
        return self._kept[key]

    def _compute(self, size: int, key: Key) -> Classes:
        stacks = self.problem.stacks
        forbidden = np.zeros(size, dtype=bool)
        for number, axis in key:
            never = np.isinf(stacks[number][0])
            forbidden |= never if axis < 0 else never.all(axis=1 - axis)[self.problem.store.maps[number][axis]]
        feasible = np.flatnonzero(~forbidden)
        if len(feasible) < 2 or time.perf_counter() > self.deadline:
            return feasible
        edges = [(number, axis) for number, axis in key if axis >= 0]
        if not all(self._is_easy(number, axis) for number, axis in edges):
            return feasible
        worse, better = np.ones((2, len(feasible), len(feasible)), dtype=bool)
        better[:] = False
        for k, (unit, weights) in enumerate(self.probes):
            own = sum((value(stacks[n], weights, unit) for n, axis in key if axis < 0), np.zeros(size))[feasible]
            gain = own[:, None] - own[None, :]
            for number, axis in edges:
                at = self.problem.store.maps[number][axis][feasible]
                gain += self.least(number, axis, k)[np.ix_(at, at)]
            worse &= gain >= 0
            better |= gain > NOISE * np.abs(own).max()
            if worse.sum() == len(feasible):  # no strategy dominates another
                return feasible
        index = np.arange(len(feasible))
        kept: Classes = feasible[~(worse & (better | (index[None, :] < index[:, None]))).any(axis=1)]
        return kept

    def _is_easy(self, number: int, axis: int) -> bool:
        """Whether comparing all slices of a stack along an axis is cheap."""
        stack = self.problem.stacks[number]
        return int(stack[0].size * stack.shape[1 + axis]) * len(self.probes) <= EASY_COMPARISONS

    def least(self, number: int, axis: int, probe: int) -> Array:
        """Least saving of one class of slices over another, at a probe."""
        if (number, axis, probe) not in self._least:
            unit, weights = self.probes[probe]
            found = value(self.problem.stacks[number], weights, unit)
            self._least[number, axis, probe] = least_difference(found if axis == 0 else found.T)
        return self._least[number, axis, probe]
