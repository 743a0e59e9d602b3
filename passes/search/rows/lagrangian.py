"""Lagrangian prices of rows: dominated strategies, a lower bound, choices near the optimum.

For prices p between 0 and the rows' own, L(p) = min over choices of cost + p · (used − limits) is a lower bound.
The gain of one strategy over another is concave in the prices, so the corners and unbounded directions decide dominance.
Source: Goldstein (1994), dead-end elimination; Held and Karp (1971); Kelley, The cutting-plane method (1960), in a box."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import highspy
import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.arrays import Classes
from autoshard.passes.search.exact.milp import highs_solver, run_highs
from autoshard.passes.search.exact.pruning import NO_CHOICE, least_difference
from autoshard.passes.search.exact.solver import solve_plain
from autoshard.passes.search.limits import LIMITS
from autoshard.passes.search.network import CLOSED_GAP, Array, Choice, Solution
from autoshard.passes.search.rows.relaxation import Elimination, planned_elimination
from autoshard.passes.search.rows.stacked import Stacked, priced_table

Probe = tuple[float, Array]
"""weight of a unit of cost, and of every quantity"""
Key = tuple[tuple[int, int], ...]
"""the tables at a node: (number, axis; −1 for its own vector)"""

# A relative gain below this may be rounding.
NOISE = 1e-12


def probes(problem: Stacked) -> list[Probe]:
    soft = np.flatnonzero(np.isfinite(problem.prices))
    single = np.eye(len(problem.prices))
    if len(soft) > LIMITS.max_corners:
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

    def __init__(self, problem: Stacked) -> None:
        self.problem = problem
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
        if len(feasible) < 2:
            return feasible
        edges = [(number, axis) for number, axis in key if axis >= 0]
        if not all(self._is_easy(number, axis) for number, axis in edges):
            return feasible
        worse, better = np.ones((2, len(feasible), len(feasible)), dtype=bool)
        better[:] = False
        for k, (unit, weights) in enumerate(self.probes):
            own = sum((priced_table(stacks[n], weights, unit) for n, axis in key if axis < 0), np.zeros(size))[feasible]
            gain = own[:, None] - own[None, :]
            for number, axis in edges:
                at = self.problem.store.maps[number][axis][feasible]
                gain += self.least(number, axis, k)[np.ix_(at, at)]
            worse &= gain >= 0
            better |= gain > NOISE * np.abs(own).max()
            if worse.sum() == len(feasible):  # no strategy dominates another
                return feasible
        index = np.arange(len(feasible))
        return feasible[~(worse & (better | (index[None, :] < index[:, None]))).any(axis=1)]

    def _is_easy(self, number: int, axis: int) -> bool:
        """Whether comparing all slices of a stack along an axis is cheap."""
        stack = self.problem.stacks[number]
        return int(stack[0].size * stack.shape[1 + axis]) * len(self.probes) <= LIMITS.easy_comparisons

    def least(self, number: int, axis: int, probe: int) -> Array:
        """Least saving of one class of slices over another, at a probe."""
        if (number, axis, probe) not in self._least:
            unit, weights = self.probes[probe]
            found = priced_table(self.problem.stacks[number], weights, unit)
            self._least[number, axis, probe] = least_difference(found if axis == 0 else found.T)
        return self._least[number, axis, probe]


RowPrices = Sequence[float] | None
"""of rows"""

# Tolerated excess of a row relative to its largest sum: rounding.
ROW_SLACK = 1e-13


KnownSolutions = dict[tuple[bytes, float], tuple[Choice, float, bool]]
"""solutions by prices and unit of the cost"""


@dataclass(frozen=True)
class CuttingPlane:
    """A cutting plane from a known choice: L(p) ≤ cost + p · slope."""

    choice: Choice
    cost: float
    slope: Array


@dataclass(frozen=True, eq=False)
class ReducedProblem:
    """``whole`` without strategies that are dominated at all prices, for any limits."""

    whole: Stacked
    known: KnownSolutions = field(default_factory=dict)
    """its solutions"""

    @cached_property
    def left(self) -> tuple[Stacked, tuple[Classes, ...]]:
        """The remaining problem, and original strategy numbers. PlanError: a node has none."""
        problem, numbers = Dominance(self.whole).run()
        return problem, tuple(numbers)

    @cached_property
    def elimination(self) -> Elimination | None:
        return planned_elimination(self.left[0])


@dataclass
class ChoicePart:
    """The choices of ``problem``: their best bound, and its prices. ``numbers``: original strategy
    numbers per node, used in choices. ``mixture``: weights of the cuts whose mean is optimal if
    choices mix."""

    problem: Stacked
    numbers: tuple[Classes, ...]
    prices: Array
    bound: float = -math.inf
    cuts: list[CuttingPlane] = field(default_factory=list)
    mixture: list[tuple[float, CuttingPlane]] = field(default_factory=list)
    known: KnownSolutions = field(default_factory=dict)
    reduced: ReducedProblem | None = None
    """the source of its problem, which has other limits"""

    @cached_property
    def elimination(self) -> Elimination | None:
        return planned_elimination(self.problem) if self.reduced is None else self.reduced.elimination

    def restricted(self, kept: Mapping[int, Classes]) -> ChoicePart:
        """With only some strategies of these nodes."""
        numbers = tuple(number[kept[i]] if i in kept else number for i, number in enumerate(self.numbers))
        left = {i: set(numbers[i].tolist()) for i in kept}
        cuts = [cut for cut in self.cuts if all(cut.choice[i] in strategies for i, strategies in left.items())]
        return replace(
            self, problem=self.problem.restricted(kept), numbers=numbers, cuts=cuts, mixture=[], known={}, reduced=None
        )

    def original(self, choice: Sequence[int]) -> Choice:
        return tuple(int(number[s]) for number, s in zip(self.numbers, choice, strict=True))

    def renumbered(self, choice: Choice) -> Choice:
        """A choice in original numbers, renumbered for this problem."""
        return tuple(int(np.searchsorted(number, s)) for number, s in zip(self.numbers, choice, strict=True))


class LagrangianSearch:
    """State of a search: best choice, lower bound, and the remaining part of the choices."""

    def __init__(
        self,
        problem: Stacked,
        prices: RowPrices = None,
        reduced: ReducedProblem | None = None,
    ) -> None:
        """``prices``: initial; ``reduced``: of the problem under any limits."""
        self.first = problem
        self.total, self.bound = math.inf, -math.inf
        self.choice: Choice | None = None
        self.slack = ROW_SLACK * problem.scale
        self.solved = self.work = 0
        reduced = reduced or ReducedProblem(problem)
        left, numbers = reduced.left
        left = replace(left, limits=problem.limits)
        start = np.zeros(len(problem.limits)) if prices is None else np.minimum(np.array(prices), problem.prices)
        self.part = ChoicePart(left, numbers, start, known=reduced.known, reduced=reduced)
        self.seen: dict[Choice, None] = {}
        self.begin = time.perf_counter()
        self.stats: dict[str, object] = {"rows": len(problem.limits)}

    def offer(self, choice: Choice) -> tuple[float, Array]:
        """Keep a choice if it is the best; returns its cost and its excess over the limits."""
        self.seen[choice] = None
        cost, *used = self.first.sums(choice).tolist()
        over = np.array(used) - self.first.limits
        paid = over > self.slack
        total = cost + float((over[paid] * self.first.prices[paid]).sum())
        if total < self.total:
            self.choice, self.total = choice, total
        return cost, over

    def cheapest(self, part: ChoicePart, prices: Array, unit: float = 1.0) -> tuple[Choice, float, bool]:
        """(best choice at ``prices`` and cost ``unit``, bound of its value, whether exact)."""
        key = prices.tobytes(), unit
        if key not in part.known:
            part.known[key] = self._cheapest(part, prices, unit)
        return part.known[key]

    def _cheapest(self, part: ChoicePart, prices: Array, unit: float) -> tuple[Choice, float, bool]:
        self.solved += 1
        once = self.solved == 1 and not prices.any()  # often the only solve, which needs no recorded elimination
        if once or part.elimination is None:
            known = min(part.cuts, key=lambda cut: unit * cut.cost + float(prices @ cut.slope), default=None)
            start = None if known is None else part.renumbered(known.choice)
            found = solve_plain(part.problem.priced(prices, unit), milp=False, start=start)
            if found.exact or part.elimination is None:
                return part.original(found.choice), found.lower_bound, found.exact
        self.work += part.elimination.work
        choice, value = part.elimination.solve(prices, unit)
        return part.original(choice), value, True

    def cut(self, part: ChoicePart, choice: Choice) -> None:
        """Offer a choice and add its cutting plane."""
        cost, slope = self.offer(choice)
        if all(cut.choice != choice for cut in part.cuts):
            part.cuts.append(CuttingPlane(choice, cost, slope))

    def relax(self, part: ChoicePart, prices: Array) -> float:
        """The bound at ``prices``; adds the choice and its cutting plane."""
        choice, value, _ = self.cheapest(part, prices)
        self.cut(part, choice)
        return value - float(prices @ part.problem.limits)

    def gap(self, bound: float) -> float:
        """Relative gap between the best choice and a bound."""
        return math.inf if self.choice is None else max(self.total - bound, 0.0) / (abs(self.total) or 1.0)

    def solution(self) -> Solution:
        """The best choice, which must exist."""
        assert self.choice is not None
        stats = {**self.stats, "solved": self.solved, "seconds": round(time.perf_counter() - self.begin, 3)}
        lower = self.total if self.closed else min(self.bound, self.total)
        return Solution(self.choice, self.total, lower, self.closed, stats, tuple(self.part.prices.tolist()))

    @property
    def closed(self) -> bool:
        return self.gap(self.bound) <= CLOSED_GAP


def maximise_bound(
    search: LagrangianSearch, part: ChoicePart, iterations: int, gap: float = CLOSED_GAP, reach: float = 1.0
) -> None:
    """Maximise a part's bound by cutting planes in a box (trust region) around its prices. An
    inherited bound is valid: a subset of choices costs no less. ``reach``: first box, a share of
    all prices."""
    count = len(part.problem.limits)
    prices, radius = part.prices, np.full(count, math.inf)
    for step in range(iterations):
        try:
            seen = step == 0 and part.bound > -math.inf
            value = part.bound if seen else search.relax(part, prices)
        except PlanError:
            if not part.known:  # it may be infeasible
                raise
            return
        better = value > part.bound
        if better:
            part.bound, part.prices = value, prices
        elif np.isfinite(radius).all():
            radius = radius / 2
        if search.gap(part.bound) <= gap or count == 0:
            return
        if not np.isfinite(radius).all():
            radius = reach * _first_radius(part)
        prices, model, held = _solve_master(part, radius)
        if held and better:
            radius = radius * 2
        if model - part.bound <= LIMITS.least_step * abs(model):
            if not held:
                return
            radius = radius * 4


def _first_radius(part: ChoicePart) -> Array:
    """First box: the rows' prices; for hard limits, a multiple of cost per excess."""
    cut, problem = part.cuts[0], part.problem
    unit = 8 * (max(abs(cut.cost) for cut in part.cuts) or problem.cost_scale or 1.0)
    most = np.maximum(np.abs(cut.slope), 1e-3 * np.maximum(np.abs(problem.limits), 1e-300))
    hard = np.where(cut.slope > 0, unit / most, unit / most.max(initial=1e-300))
    return np.where(np.isfinite(problem.prices), problem.prices, hard)


def _solve_master(part: ChoicePart, radius: Array) -> tuple[Array, float, bool]:
    """The cutting-plane model in the box: (best prices, value, whether the box binds)."""
    centre, most = part.prices, part.problem.prices
    count = len(centre)
    low, high = np.maximum(0.0, centre - radius), np.minimum(most, centre + radius)
    unit = np.where(radius > 0, radius, 1.0)  # of the prices
    cost = max(abs(cut.cost) for cut in part.cuts) or 1.0
    highs = highs_solver()
    for a, b in zip(low / unit, high / unit, strict=True):
        highs.addVar(float(a), float(b))
    highs.addVar(-highspy.kHighsInf, highspy.kHighsInf)
    highs.changeColCost(count, -1.0)
    index = np.arange(count + 1)
    for cut in part.cuts:
        row = np.append(-cut.slope * unit / cost, 1.0)
        highs.addRow(-highspy.kHighsInf, cut.cost / cost, count + 1, index, row)
    run_highs(highs)
    solution = highs.getSolution()
    found = np.asarray(solution.col_value)
    parts = np.abs(np.asarray(solution.row_dual)).tolist()
    if highs.getModelStatus() != highspy.HighsModelStatus.kOptimal or len(parts) != len(part.cuts):
        return centre, part.bound, False  # beyond the solver's precision
    part.mixture = [(weight, cut) for weight, cut in zip(parts, part.cuts, strict=True) if weight > 1e-6]
    prices = np.clip(found[:count] * unit, low, high)
    at_low = (prices <= low + 1e-9 * radius) & (low > 0)
    at_high = (prices >= high - 1e-9 * radius) & (high < most)
    return prices, float(found[count] * cost), bool((at_low | at_high).any())
