"""The Lagrangian relaxation at given prices, solved exactly: one recorded elimination, replayed."""

from __future__ import annotations

import math
import sys
from collections import Counter

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.exact.eliminate import Eliminator, Order
from autoshard.passes.search.exact.prune import NO_CHOICE
from autoshard.passes.search.exact.tables import Tables
from autoshard.passes.search.network import Array, Choice
from autoshard.passes.search.rows.stacked import Open, Stacked, undecided, value
from autoshard.passes.search.rows.tape import Tape

# Limits in entries for elimination at every price: the largest join (as if all strategies differed),
# all tables, all joins.
LARGEST_JOIN = 10_000_000_000
ALL_TABLES = 50_000_000
ALL_JOINS = 500_000_000
# Work of reading out a node's choice, in entries.
NODE_WORK = 40_000
# Bits for the sum of all costs: sums are exact and independent of their order.
GRID_BITS = 50


def easy(problem: Stacked) -> Elimination | None:
    """The elimination of ``problem`` with the smallest joins; None if these are too large."""
    left = undecided(problem)
    work = Eliminator(Tables(), list(left.problem.sizes))
    for scope in left.problem.factors:
        work.touch(scope)
    joined, order = work.cheapest_order(LARGEST_JOIN)
    if math.isinf(joined):
        return None
    planned = Elimination(problem, order, left)
    return planned if planned.tape.entries <= ALL_TABLES and planned.tape.work <= ALL_JOINS else None


class Elimination:
    """The elimination of all nodes; equal tables with equal prices are joined once."""

    def __init__(self, problem: Stacked, order: Order, left: Open | None = None) -> None:
        """``left``: the undecided problem, if known."""
        self._count, self._open = len(problem.sizes), left or undecided(problem)
        core = self._open.problem
        self._uses = Counter(core.factors.values())
        self._stacks = [core.stacks[number] for number in self._uses]
        self.tape = Tape([core.store.maps[number] for number in self._uses])
        self._work = Eliminator(self.tape, list(core.sizes))
        numbers = {base: number for number, base in enumerate(self._uses)}
        for scope, base in core.factors.items():
            self._work.insert(scope, numbers[base])
        self._work.run(len(core.sizes), sys.maxsize, order)

    @property
    def work(self) -> int:
        """Entries that a solve computes, plus the work of reading out choices."""
        return self.tape.work + NODE_WORK * self._count

    def solve(self, prices: Array, unit: float = 1.0) -> tuple[Choice, float]:
        """The cheapest choice, and its value: ``unit`` × cost + row sums at ``prices``."""
        self.tape.play(self._priced(prices, unit))
        total = self._work.constant + float(value(self._open.decided, prices, unit))
        if math.isinf(total):
            raise PlanError(NO_CHOICE)
        found = self._work.back_substitute({}, len(self._work.steps))
        chosen = np.zeros(self._count, dtype=np.intp)
        chosen[self._open.nodes] = [found[k] for k in range(len(self._open.nodes))]
        return tuple(chosen.tolist()), total

    def _priced(self, prices: Array, unit: float) -> list[Array]:
        arrays = [value(stack, prices, unit) for stack in self._stacks]
        largest = [float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) for array in arrays]
        total = sum(most * uses for most, uses in zip(largest, self._uses.values(), strict=True))
        exponent = math.frexp(total)[1] - GRID_BITS
        return [np.ldexp(np.rint(np.ldexp(array, -exponent)), exponent) for array in arrays]
