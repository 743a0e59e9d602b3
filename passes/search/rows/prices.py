"""Lagrangian prices of the rows: a lower bound, and choices that are nearly the cheapest.

For 0 ≤ p ≤ the rows' prices, L(p) = min over choices of cost + p · (used − limits) is a bound.
Source: Held and Karp (1971); Kelley, The cutting-plane method (1960), in a box.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import highspy
import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.folded import Classes
from autoshard.passes.search.highs import run, solver
from autoshard.passes.search.network import GAP, Array, Choice, CostNetwork, Solution
from autoshard.passes.search.rows.dominance import Dominance
from autoshard.passes.search.rows.relaxation import Elimination, easy
from autoshard.passes.search.rows.stacked import Stacked

Relaxed = Callable[[CostNetwork, float, Choice | None], Solution]
"""solves a network without rows by quick methods: (network, deadline, known choice)"""

Prices = Sequence[float] | None
"""of rows"""

# Least relative gain that a step must promise.
LEAST_STEP = 1e-6
# Tolerated excess of a row relative to its largest sum: rounding.
SLACK = 1e-13


Known = dict[tuple[bytes, float], tuple[Choice, float, bool]]
"""solutions by prices and unit of the cost"""


@dataclass(frozen=True)
class Cut:
    """A cutting plane from a known choice: L(p) ≤ cost + p · slope."""

    choice: Choice
    cost: float
    slope: Array


@dataclass(frozen=True, eq=False)
class Reduced:
    """``whole`` without strategies that are dominated at all prices, for any limits."""

    whole: Stacked
    known: Known = field(default_factory=dict)
    """its solutions"""

    @cached_property
    def left(self) -> tuple[Stacked, tuple[Classes, ...]]:
        """The remaining problem, and original strategy numbers. PlanError: a node has none."""
        problem, numbers = Dominance(self.whole).run()
        return problem, tuple(numbers)

    @cached_property
    def elimination(self) -> Elimination | None:
        return easy(self.left[0])


@dataclass
class Part:
    """The choices of ``problem``: their best bound, and the prices that give it.

    ``numbers``: original strategy numbers per node; choices use these. ``mixture``: weights of the
    cuts whose mean is optimal if choices could be mixed.
    """

    problem: Stacked
    numbers: tuple[Classes, ...]
    prices: Array
    bound: float = -math.inf
    cuts: list[Cut] = field(default_factory=list)
    mixture: list[tuple[float, Cut]] = field(default_factory=list)
    known: Known = field(default_factory=dict)
    reduced: Reduced | None = None
    """the source of its problem, which has other limits"""

    @cached_property
    def elimination(self) -> Elimination | None:
        return easy(self.problem) if self.reduced is None else self.reduced.elimination

    def restricted(self, kept: Mapping[int, Classes]) -> Part:
        """With only some strategies of these nodes."""
        numbers = tuple(number[kept[i]] if i in kept else number for i, number in enumerate(self.numbers))
        left = {i: set(numbers[i].tolist()) for i in kept}
        cuts = [cut for cut in self.cuts if all(cut.choice[i] in strategies for i, strategies in left.items())]
        return replace(
            self, problem=self.problem.restricted(kept), numbers=numbers, cuts=cuts, mixture=[], known={}, reduced=None
        )

    def original(self, choice: Sequence[int]) -> Choice:
        """A choice of the problem in original numbers."""
        return tuple(int(number[s]) for number, s in zip(self.numbers, choice, strict=True))

    def renumbered(self, choice: Choice) -> Choice:
        """A choice in original numbers, renumbered for this problem."""
        return tuple(int(np.searchsorted(number, s)) for number, s in zip(self.numbers, choice, strict=True))


class Search:
    """State of a search: best choice, lower bound, and the remaining part of the choices."""

    def __init__(
        self,
        problem: Stacked,
        relaxed: Relaxed,
        deadline: float,
        prices: Prices = None,
        reduced: Reduced | None = None,
    ) -> None:
        """``prices``: initial; ``reduced``: of the problem under any limits."""
        self.first = problem
        self.relaxed, self.deadline = relaxed, deadline
        self.total, self.bound = math.inf, -math.inf
        self.choice: Choice | None = None
        self.slack = SLACK * problem.scale
        self.solved = self.work = 0
        reduced = reduced or Reduced(problem)
        left, numbers = reduced.left
        left = replace(left, limits=problem.limits)
        start = np.zeros(len(problem.limits)) if prices is None else np.minimum(np.array(prices), problem.prices)
        self.part = Part(left, numbers, start, known=reduced.known, reduced=reduced)
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

    def cheapest(self, part: Part, prices: Array, unit: float = 1.0) -> tuple[Choice, float, bool]:
        """(best choice at ``prices`` and cost ``unit``, bound of its value, whether exact)."""
        key = prices.tobytes(), unit
        if key not in part.known:
            part.known[key] = self._cheapest(part, prices, unit)
        return part.known[key]

    def _cheapest(self, part: Part, prices: Array, unit: float) -> tuple[Choice, float, bool]:
        self.solved += 1
        once = self.solved == 1 and not prices.any()  # often the only solve, which needs no recorded elimination
        if once or part.elimination is None:
            known = min(part.cuts, key=lambda cut: unit * cut.cost + float(prices @ cut.slope), default=None)
            start = None if known is None else part.renumbered(known.choice)
            found = self.relaxed(part.problem.priced(prices, unit), self.deadline, start)
            if found.exact or part.elimination is None:
                return part.original(found.choice), found.lower_bound, found.exact
        self.work += part.elimination.work
        choice, value = part.elimination.solve(prices, unit)
        return part.original(choice), value, True

    def cut(self, part: Part, choice: Choice) -> None:
        """Offer a choice and add its cutting plane."""
        cost, slope = self.offer(choice)
        if all(cut.choice != choice for cut in part.cuts):
            part.cuts.append(Cut(choice, cost, slope))

    def relax(self, part: Part, prices: Array) -> float:
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
        return self.gap(self.bound) <= GAP

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.deadline


def maximise_bound(search: Search, part: Part, iterations: int, gap: float = GAP, reach: float = 1.0) -> None:
    """Maximise a part's bound by cutting planes in a box (trust region) around its prices.

    An inherited bound is valid: a subset of choices costs no less. ``reach``: first box, as a share
    of all possible prices.
    """
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
        if search.gap(part.bound) <= gap or count == 0 or search.late:
            return
        if not np.isfinite(radius).all():
            radius = reach * _first_radius(part)
        prices, model, held = _master(part, radius)
        if held and better:
            radius = radius * 2
        if model - part.bound <= LEAST_STEP * abs(model):
            if not held:
                return
            radius = radius * 4


def _first_radius(part: Part) -> Array:
    """First box: the rows' prices; for hard limits, a multiple of cost per excess."""
    cut, problem = part.cuts[0], part.problem
    unit = 8 * (max(abs(cut.cost) for cut in part.cuts) or problem.cost_scale or 1.0)
    most = np.maximum(np.abs(cut.slope), 1e-3 * np.maximum(np.abs(problem.limits), 1e-300))
    hard = np.where(cut.slope > 0, unit / most, unit / most.max(initial=1e-300))
    return np.where(np.isfinite(problem.prices), problem.prices, hard)


def _master(part: Part, radius: Array) -> tuple[Array, float, bool]:
    """The cutting-plane model in the box: (best prices, value, whether the box binds)."""
    centre, most = part.prices, part.problem.prices
    count = len(centre)
    low, high = np.maximum(0.0, centre - radius), np.minimum(most, centre + radius)
    unit = np.where(radius > 0, radius, 1.0)  # of the prices
    cost = max(abs(cut.cost) for cut in part.cuts) or 1.0
    highs = solver()
    for a, b in zip(low / unit, high / unit, strict=True):
        highs.addVar(float(a), float(b))
    highs.addVar(-highspy.kHighsInf, highspy.kHighsInf)
    highs.changeColCost(count, -1.0)
    index = np.arange(count + 1)
    for cut in part.cuts:
        row = np.append(-cut.slope * unit / cost, 1.0)
        highs.addRow(-highspy.kHighsInf, cut.cost / cost, count + 1, index, row)
    run(highs)
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
