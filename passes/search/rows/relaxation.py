"""The Lagrangian relaxation at given prices, solved exactly by an elimination recorded on a tape.

The elimination is planned once and replayed with other numbers. A table stores equal slices once per axis, with a map from
indices to slices: strategies that ask the same of a neighbour share a slice, so most tables are many times smaller."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.arrays import Classes, grid_exponent, joint_classes, on_grid
from autoshard.passes.search.exact.elimination import Eliminator, FactorSpan, Order, Tables, min_sum
from autoshard.passes.search.exact.pruning import NO_CHOICE
from autoshard.passes.search.limits import LIMITS
from autoshard.passes.search.network import Array, Choice
from autoshard.passes.search.rows.stacked import Stacked, UndecidedProblem, priced_table, undecided

Maps = tuple[Classes, ...]
"""per axis the slice of every index"""


def needed_slices(slices: Classes, first: Classes) -> Classes | None:
    """Slices that ``first`` asks for; None: all, in order."""
    wanted = slices[first]
    return None if np.array_equal(wanted, np.arange(int(slices.max()) + 1)) else wanted


def take_indices(array: Array, kept: Sequence[Classes | None]) -> Array:
    """The kept indices of every axis; None: all."""
    for axis, indices in enumerate(kept):
        array = array if indices is None else array.take(indices, axis)
    return array


class Tape(Tables):
    """Tables are equal if they are computed equally from the initial tables."""

    def __init__(self, maps: Sequence[Maps]) -> None:
        """``maps`` of the initial tables."""
        super().__init__()
        self.maps = list(maps)
        self._computed: list[Callable[[], Array]] = []
        self._joint: dict[tuple[int, ...], tuple[Classes, Classes]] = {}
        self._held: dict[int, Classes] = {}
        self.entries = sum(map(self._size, self.maps))
        """of all tables"""
        self.work = 0
        """entries of all joins"""

    @staticmethod
    def _size(maps: Maps) -> int:
        return math.prod(int(m.max()) + 1 for m in maps)

    def play(self, arrays: Sequence[Array]) -> None:
        """Compute everything from the initial tables, given as slices."""
        self.arrays = [*arrays]
        for compute in self._computed:
            self.arrays.append(compute())

    def at(self, a: int, index: tuple[int | None, ...]) -> Array:
        maps = self.maps[a]
        row: Array = self.arrays[a][tuple(slice(None) if i is None else m[i] for m, i in zip(maps, index, strict=True))]
        return row[maps[index.index(None)]]

    def add(self, a: int, b: int) -> int:
        a, b = min(a, b), max(a, b)
        first, where = zip(*map(self._together, zip(self.maps[a], self.maps[b], strict=True)), strict=True)
        at_a = [needed_slices(m, f) for m, f in zip(self.maps[a], first, strict=True)]
        at_b = [needed_slices(m, f) for m, f in zip(self.maps[b], first, strict=True)]
        return self._record(
            ("add", a, b), where, lambda: take_indices(self.arrays[a], at_a) + take_indices(self.arrays[b], at_b)
        )

    def move_last(self, a: int, axis: int) -> int:
        maps = self.maps[a]
        if axis == len(maps) - 1:
            return a
        moved = (*maps[:axis], *maps[axis + 1 :], maps[axis])
        return self._record(("move", a, axis), moved, lambda: np.moveaxis(self.arrays[a], axis, -1))

    def squeeze(self, a: int, axis: int) -> int:
        maps = self.maps[a]
        return self._record(("squeeze", a, axis), maps[:axis] + maps[axis + 1 :], lambda: self.arrays[a].squeeze(axis))

    def eliminate(self, factors: tuple[FactorSpan, ...], rank: int) -> int:
        key = ("eliminate", factors, rank)
        if key in self._memo:
            return self._memo[key]
        first, where = zip(*(self._representatives(factors, axis, rank) for axis in range(rank + 1)), strict=True)
        joined, vectors = [], []
        for table, axes in factors:
            maps = self.maps[table]
            if len(axes) == 1:
                vectors.append((table, maps[0]))
            else:
                at = [needed_slices(m, first[axis]) for m, axis in zip(maps, axes, strict=True)]
                joined.append((table, axes, at))
        self.work += math.prod(map(len, first))
        order = np.argsort(where[rank], kind="stable")
        starts = np.searchsorted(where[rank][order], np.arange(len(first[rank])))

        def compute() -> Array:
            parts = []
            for table, axes, at in joined:
                part = np.moveaxis(take_indices(self.arrays[table], at), -1, 0)
                shape = [part.shape[0]] + [1] * rank
                for position, axis in enumerate(axes[:-1]):
                    shape[axis + 1] = part.shape[position + 1]
                parts.append(np.ascontiguousarray(part).reshape(shape))
            if vectors:
                own: Array = sum((self.arrays[table][m] for table, m in vectors), np.zeros(len(order)))
                parts.append(np.minimum.reduceat(own[order], starts).reshape([-1] + [1] * rank))
            return min_sum(parts, tuple(map(len, first[:-1])))

        return self._record(key, where[:-1], compute)

    def _record(self, key: tuple[object, ...], maps: Maps, compute: Callable[[], Array]) -> int:
        if key not in self._memo:
            self._memo[key] = len(self.maps)
            self.maps.append(maps)
            self._computed.append(compute)
            self.entries += self._size(maps)
        return self._memo[key]

    def _together(self, maps: Sequence[Classes]) -> tuple[Classes, Classes]:
        key = tuple(map(id, maps))
        if key not in self._joint:
            self._held.update(zip(key, maps, strict=True))  # alive, so that its id is unique
            self._joint[key] = joint_classes(maps)
        return self._joint[key]

    def _representatives(self, factors: tuple[FactorSpan, ...], axis: int, rank: int) -> tuple[Classes, Classes]:
        """(representatives of equal slices along an axis of the join, class of every index). On the
        eliminated axis vectors do not distinguish strategies: the cheapest of a class counts."""
        spanning = [(t, axes) for t, axes in factors if axis in axes and (len(axes) > 1 or rank == 0)]
        if not spanning:  # vectors only: each spans this axis
            size = max(len(self.maps[t][0]) for t, _ in factors)
            return np.zeros(1, dtype=np.intp), np.zeros(size, dtype=np.intp)
        return self._together([self.maps[t][axes.index(axis)] for t, axes in spanning])


def planned_elimination(problem: Stacked) -> Elimination | None:
    """The elimination of ``problem`` with the smallest joins; None if these are too large."""
    left = undecided(problem)
    work = Eliminator(Tables(), list(left.problem.sizes))
    for scope in left.problem.factors:
        work.touch(scope)
    joined, order = work.cheapest_order(LIMITS.largest_row_join)
    if math.isinf(joined):
        return None
    planned = Elimination(problem, order, left)
    return planned if planned.tape.entries <= LIMITS.all_tables and planned.tape.work <= LIMITS.all_joins else None


class Elimination:
    """The elimination of all nodes; equal tables with equal prices are joined once."""

    def __init__(self, problem: Stacked, order: Order, left: UndecidedProblem | None = None) -> None:
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
        return self.tape.work + LIMITS.node_work * self._count

    def solve(self, prices: Array, unit: float = 1.0) -> tuple[Choice, float]:
        """The cheapest choice, and its value: ``unit`` × cost + row sums at ``prices``."""
        self.tape.play(self._priced(prices, unit))
        total = self._work.constant + float(priced_table(self._open.decided, prices, unit))
        if math.isinf(total):
            raise PlanError(NO_CHOICE)
        found = self._work.back_substitute({}, len(self._work.steps))
        chosen = np.zeros(self._count, dtype=np.intp)
        chosen[self._open.nodes] = [found[k] for k in range(len(self._open.nodes))]
        return tuple(chosen.tolist()), total

    def _priced(self, prices: Array, unit: float) -> list[Array]:
        arrays = [priced_table(stack, prices, unit) for stack in self._stacks]
        exponent = grid_exponent(zip(arrays, self._uses.values(), strict=True))
        return [on_grid(exponent, array) for array in arrays]
