"""A problem at given prices, solved exactly, many times: the elimination is planned once and repeated with other numbers."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.eliminate import Eliminator, Order
from autoshard.passes.search.network import Array
from autoshard.passes.search.prune import NO_CHOICE
from autoshard.passes.search.stacked import Choice, Stacked, value
from autoshard.passes.search.tables import Tables
from autoshard.passes.search.tape import Tape

# Entries of the largest join of a problem that is eliminated at every price (as if no two strategies were alike), of all
# its tables, and of all its joins.
LARGEST_JOIN = 10_000_000_000
ALL_TABLES = 50_000_000
ALL_JOINS = 500_000_000
# A node's share of a solution takes as long as so many entries.
NODE_WORK = 40_000
# Bits kept for the sum of all costs: sums are exact and do not depend on their order.
GRID_BITS = 50


def easy(problem: Stacked) -> Elimination | None:
    """The elimination of ``problem`` in the order of the smallest joins; None where they are too large."""
    work = Eliminator(Tables(), list(problem.sizes))
    for scope in problem.factors:
        work.touch(scope)
    joined, order = work.cheapest_order(LARGEST_JOIN)
    if math.isinf(joined):
        return None
    planned = Elimination(problem, order)
    return planned if planned.tape.entries <= ALL_TABLES and planned.tape.work <= ALL_JOINS else None


class Elimination:
    """The elimination of all of a problem; equal tables with equal prices are joined once."""

    def __init__(self, problem: Stacked, order: Order, segment: Sequence[int] | None = None) -> None:
        """``segment``: of every node which of several prices it pays (None: all the same); an edge pays as its first node."""
        self.problem = problem
        self.order = order
        segment = segment if segment is not None else [0] * len(problem.sizes)
        bases = {scope: (number, segment[scope[0]]) for scope, number in sorted(problem.factors.items())}
        self._uses = Counter(bases.values())
        compact = {number: problem.store.compact(number) for number, _ in self._uses}
        self._stacks = [compact[number][0] for number, _ in self._uses]
        self.tape = Tape([compact[number][1] for number, _ in self._uses])
        self._work = Eliminator(self.tape, list(problem.sizes))
        numbers = {base: number for number, base in enumerate(self._uses)}
        for scope, base in bases.items():
            self._work.insert(scope, numbers[base])
        self._work.run(len(problem.sizes), sys.maxsize, order)

    @property
    def work(self) -> int:
        """Entries that a solution computes, and what the choices of so many nodes take beside that."""
        return self.tape.work + NODE_WORK * len(self.problem.sizes)

    def solve(self, weights: Array, unit: float = 1.0) -> tuple[Choice, float]:
        """The cheapest choice, and its value: ``unit`` times the cost and the rows' sums at prices [segments, rows]."""
        self.tape.play(self._priced(weights, unit))
        total = self._work.constant
        if math.isinf(total):
            raise PlanError(NO_CHOICE)
        chosen = self._work.back_substitute({}, len(self._work.steps))
        return tuple(chosen[node] for node in range(len(self.problem.sizes))), total

    def _priced(self, weights: Array, unit: float) -> list[Array]:
        uses = zip(self._stacks, self._uses, strict=True)
        arrays = [value(stack, weights[segment], unit) for stack, (_, segment) in uses]
        largest = [float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) for array in arrays]
        total = sum(most * uses for most, uses in zip(largest, self._uses.values(), strict=True))
        exponent = math.frexp(total)[1] - GRID_BITS
        return [np.ldexp(np.rint(np.ldexp(array, -exponent)), exponent) for array in arrays]
