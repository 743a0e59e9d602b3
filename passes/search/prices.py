"""Lagrangian prices of the rows: a bound on the cheapest choice, and choices that are nearly the cheapest.

For prices p between 0 and what the rows cost, L(p) = min over choices of cost + p · (used − limits) is a lower bound.
Source: Held and Karp (1971); Kelley, The cutting-plane method (1960), in a box, for its maximum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import highspy
import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.network import Array, CostNetwork, Solution
from autoshard.passes.search.stacked import Choice, Stacked

Relaxed = Callable[[CostNetwork, float], Solution]
"""solves a network without rows, until a deadline"""

# The gap that counts as none, and the part of the bound that a step must promise to be made.
GAP = 1e-9
LEAST_STEP = 1e-6


@dataclass(frozen=True)
class Cut:
    """A choice seen: L(p) ≤ cost + p · slope. It was the cheapest at ``prices``."""

    choice: Choice
    cost: float
    slope: Array
    prices: Array


@dataclass
class Search:
    """The state of one search: the best choice, the best bound and the prices that give it."""

    problem: Stacked
    relaxed: Relaxed
    deadline: float
    bound: float = -math.inf
    prices: Array = field(default_factory=lambda: np.zeros(0))
    total: float = math.inf
    choice: Choice | None = None
    cuts: list[Cut] = field(default_factory=list)
    solved: int = 0

    def __post_init__(self) -> None:
        self.slack = self.problem.slack

    def offer(self, choice: Choice) -> tuple[float, Array]:
        """Take a choice if it is the best; returns its cost and by how much it exceeds the limits."""
        cost, over = self.problem.cost(choice), self.problem.used(choice) - self.problem.limits
        paid = over > self.slack
        total = cost + float((over[paid] * self.problem.prices[paid]).sum())
        if total < self.total:
            self.choice, self.total = choice, total
        return cost, over

    def relax(self, prices: Array) -> tuple[Cut, float]:
        """The cheapest choice at ``prices``, and the bound that it gives."""
        found = self.relaxed(self.problem.priced(prices), self.deadline)
        self.solved += 1
        cost, over = self.offer(found.choice)
        cut = Cut(found.choice, cost, over, prices)
        if all(c.choice != cut.choice for c in self.cuts):
            self.cuts.append(cut)
        return cut, found.lower_bound - float(prices @ self.problem.limits)

    @property
    def closed(self) -> bool:
        return self.choice is not None and self.total - self.bound <= GAP * abs(self.total)

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.deadline


def maximise_bound(search: Search, iterations: int, gap: float = GAP, deadline: float = math.inf) -> None:
    """Prices that maximise L, by cutting planes in a box around the best prices."""
    count = len(search.problem.limits)
    prices, radius = np.zeros(count), np.full(count, math.inf)
    for step in range(iterations):
        try:
            cut, value = search.relax(prices)
        except PlanError:
            if step == 0:
                raise
            return
        better = value > search.bound
        if better:
            search.bound, search.prices = value, prices
        elif np.isfinite(radius).all():
            radius = radius / 2
        near = search.choice is not None and search.total - search.bound <= gap * abs(search.total)
        if near or count == 0 or search.late or time.perf_counter() > deadline:
            return
        if not np.isfinite(radius).all():
            radius = _first_radius(search, cut)
        prices, model, held = _master(search, radius)
        if held and better:
            radius = radius * 2
        if model - search.bound <= LEAST_STEP * abs(model):
            if not held:
                return
            radius = radius * 4


def _first_radius(search: Search, cut: Cut) -> Array:
    """The box to begin with: the rows' prices, where the limit is hard a few times the cost over what is too much."""
    unit = 8 * max(abs(cut.cost), 1e-300)
    most = np.maximum(np.abs(cut.slope), 1e-3 * np.maximum(np.abs(search.problem.limits), 1e-300))
    hard = np.where(cut.slope > 0, unit / most, unit / most.max(initial=1e-300))
    return np.where(np.isfinite(search.problem.prices), search.problem.prices, hard)


def _master(search: Search, radius: Array) -> tuple[Array, float, bool]:
    """The cutting-plane model in the box: (its best prices, its value, whether the radius keeps it from better ones)."""
    centre, most = search.prices, search.problem.prices
    count = len(centre)
    low, high = np.maximum(0.0, centre - radius), np.minimum(most, centre + radius)
    unit = np.where(radius > 0, radius, 1.0)  # of the prices
    cost = max(abs(cut.cost) for cut in search.cuts) or 1.0
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    for a, b in zip(low / unit, high / unit, strict=True):
        highs.addVar(float(a), float(b))
    highs.addVar(-highspy.kHighsInf, highspy.kHighsInf)
    highs.changeColCost(count, -1.0)
    index = np.arange(count + 1)
    for cut in search.cuts:
        row = np.append(-cut.slope * unit / cost, 1.0)
        highs.addRow(-highspy.kHighsInf, cut.cost / cost, count + 1, index, row)
    highs.run()
    solution = np.asarray(highs.getSolution().col_value)
    prices = np.clip(solution[:count] * unit, low, high)
    at_low = (prices <= low + 1e-9 * radius) & (low > 0)
    at_high = (prices >= high - 1e-9 * radius) & (high < most)
    return prices, float(solution[count] * cost), bool((at_low | at_high).any())
