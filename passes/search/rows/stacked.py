"""A cost network with its rows: every table is a stack of cost and row quantities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.arrays import (
    Classes,
    CompactMatrix,
    ContentNumbers,
    Matrix,
    by_first_appearance,
    joint_classes,
    stored_values,
    take_slices,
)
from autoshard.passes.search.exact.elimination import Scope
from autoshard.passes.search.network import Array, Choice, CostNetwork, LinearRow


class Stacks:
    """Interned stacks of tables, by identity of their parts first, then by content. Matrices store
    equal slices along an axis once, in order of first appearance."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        """stored slices of each"""
        self.maps: list[tuple[Classes, ...]] = []
        """per axis of each, the slice of every index"""
        self._by_id: dict[tuple[object, ...], int] = {}
        self._by_parts: dict[tuple[object, ...], int] = {}
        self._contents = ContentNumbers()

    def number(self, cost: Matrix, amounts: Sequence[Matrix | None], transposed: bool = False) -> int:
        """Number of the stack; None: zeros, dropped at the end."""
        key = (transposed, id(cost), *(None if part is None else id(part) for part in amounts))
        if key not in self._by_id:
            while amounts and amounts[-1] is None:
                amounts = amounts[:-1]
            zeros = np.zeros(stored_values(cost).shape)
            parts = [stored_values(cost), *(zeros if part is None else stored_values(part) for part in amounts)]
            maps = (cost.rows, cost.columns) if isinstance(cost, CompactMatrix) else None
            number = self.of(np.stack(parts, dtype=np.float64), maps)
            self._by_id[key] = self.transposed(number) if transposed else number
        return self._by_id[key]

    def known_as(self, number: int) -> tuple[Matrix, tuple[Matrix | None, ...]]:
        """Cost and amounts of a stack as views (None: zeros)."""
        cost, *amounts = self.arrays[number]
        parts = tuple(part if part.any() else None for part in amounts)
        if cost.ndim == 1:
            return cost, parts
        maps = self.maps[number]
        return CompactMatrix(cost, *maps), tuple(None if part is None else CompactMatrix(part, *maps) for part in parts)

    def know(self, parts: Mapping[int, tuple[Matrix, tuple[Matrix | None, ...]]], rows: int) -> None:
        """Find stacks by these tables only, of networks with this number of rows."""
        self._by_id = {}
        for number, (cost, amounts) in parts.items():
            padded = (*amounts, *(None,) * (rows - len(amounts)))
            key = (False, id(cost), *(None if part is None else id(part) for part in padded))
            self._by_id[key] = number

    def add(self, a: int, b: int) -> int:
        return self.summed(Counter((a, b)))

    def transposed(self, number: int) -> int:
        if ("transposed", number) not in self._by_parts:
            stack, maps = self.arrays[number].swapaxes(-1, -2), self.maps[number][::-1]
            self._by_parts["transposed", number] = self._numbered(stack, maps)
        return self._by_parts["transposed", number]

    def beside(self, number: int, axis: int, index: int = 0) -> Array:
        """Entries of the other node's strategies given strategy ``index`` along ``axis``."""
        maps = self.maps[number]
        return self.arrays[number].take(maps[axis][index], axis + 1)[:, maps[1 - axis]]

    def alone(self, number: int, axis: int) -> int:
        """Of a stack of pairs, :meth:`beside` of the only strategy along ``axis``."""
        if ("alone", number, axis) not in self._by_parts:
            self._by_parts["alone", number, axis] = self.of(self.beside(number, axis))
        return self._by_parts["alone", number, axis]

    def diagonal(self, number: int) -> int:
        """Of a stack of pairs, the entries of equal choices."""
        rows, columns = self.maps[number]
        return self.of(self.arrays[number][:, rows, columns])

    def whole(self, number: int) -> Array:
        """The full stack."""
        if self.arrays[number].ndim == 2:
            return self.arrays[number]
        rows, columns = self.maps[number]
        return self.arrays[number][:, rows[:, None], columns]

    def at(self, number: int, choice: Sequence[int]) -> Array:
        """Cost and amounts of one strategy per axis."""
        places = (m[s] for m, s in zip(self.maps[number], choice, strict=True))
        return self.arrays[number][(slice(None), *places)]

    def restricted(self, number: int, kept: Sequence[Classes | None]) -> int:
        """The stack of ``kept`` indices per axis; None: all."""
        stack, maps = self.arrays[number], self.maps[number]
        if stack.ndim == 2:
            return self.of(stack if kept[0] is None else stack.take(kept[0], 1))
        left = [m if k is None else m[k] for m, k in zip(maps, kept, strict=True)]
        orders = [by_first_appearance(m) for m in left]
        if any(len(used) < n for (used, _), n in zip(orders, stack.shape[1:], strict=True)):
            return self.of(stack, left)
        # all slices remain, so they still differ
        whole = take_slices(take_slices(stack, orders[0][0], 1), orders[1][0], 2)
        return self._numbered(whole, tuple(where for _, where in orders))

    def summed(self, counts: Mapping[int, int]) -> int:
        """Σ count × stack."""
        key = tuple(sorted(counts.items()))
        if len(key) == 1:
            return self._multiple(*key[0])
        if ("summed", key) not in self._by_parts:
            axes = [joint_classes(maps) for maps in zip(*(self.maps[number] for number, _ in key), strict=True)]
            length = max(len(self.arrays[number]) for number in counts)
            total = np.zeros((length, *(len(first) for first, _ in axes)))
            for number, many in key:
                part = self.arrays[number]
                for axis, (first, _) in enumerate(axes):
                    part = part.take(self.maps[number][axis][first], axis + 1)
                total[: len(part)] += many * part
            self._by_parts["summed", key] = self.of(total, [where for _, where in axes])
        return self._by_parts["summed", key]

    def _multiple(self, number: int, many: int) -> int:
        """count × stack."""
        if many == 1:
            return number
        if ("summed", number, many) not in self._by_parts:
            self._by_parts["summed", number, many] = self._numbered(many * self.arrays[number], self.maps[number])
        return self._by_parts["summed", number, many]

    def of(self, stack: Array, maps: Sequence[Classes] | None = None) -> int:
        """``maps``: of a compact stack of matrices."""
        if stack.ndim == 2:
            maps = (np.arange(stack.shape[1]),)
        else:
            found = list(maps or map(np.arange, stack.shape[1:]))
            for axis in (1, 2):
                used, where = by_first_appearance(found[axis - 1])
                stack = take_slices(stack, used, axis)
                same, first = row_classes(stack if axis == 1 else stack.swapaxes(1, 2))
                stack, found[axis - 1] = take_slices(stack, first, axis), same[where]
            maps = tuple(found)
        return self._numbered(stack, tuple(maps))

    def _numbered(self, stack: Array, maps: tuple[Classes, ...]) -> int:
        """Number of a stack without repeated slices."""
        stack = np.ascontiguousarray(stack)
        key = tuple(where.tobytes() for where in maps)
        number = self._contents.number(stack, key, self.arrays.__getitem__, len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(stack)
            self.maps.append(maps)
        return number


@dataclass(frozen=True)
class Stacked:
    """``factors``: scope (i,) or (i, j), i < j → number in ``store`` of a stack, float64 [1 +
    quantities, n_i] or compact [1 + quantities, n_i, n_j]: cost, then amounts; missing ones are
    zero. Row r sums quantity r."""

    sizes: tuple[int, ...]
    factors: Mapping[Scope, int]
    store: Stacks
    limits: Array
    prices: Array

    @property
    def stacks(self) -> Sequence[Array]:
        return self.store.arrays

    @property
    def scale(self) -> Array:
        """Per row the largest possible sum plus the limit."""
        used = set(self.factors.values())
        most = {n: np.abs(self.stacks[n][1:]).max(axis=tuple(range(1, self.stacks[n].ndim))) for n in used}
        total = np.zeros(len(self.limits))
        for number in self.factors.values():
            total[: len(most[number])] += most[number]
        return np.maximum(total + np.abs(self.limits), 1e-300)

    @property
    def cost_scale(self) -> float:
        """Largest possible cost."""
        most = {n: np.abs(self.stacks[n][0]) for n in set(self.factors.values())}
        largest = {n: float(costs[np.isfinite(costs)].max(initial=0.0)) for n, costs in most.items()}
        return sum(largest[n] for n in self.factors.values())

    def sums(self, choice: Choice) -> Array:
        """Cost without priced excess, then the sum of every row."""
        entries: dict[tuple[int, ...], int] = {}  # equal layers that choose alike share an entry
        at = [entries.setdefault((n, *(choice[i] for i in scope)), len(entries)) for scope, n in self.factors.items()]
        values = np.zeros((len(entries), 1 + len(self.limits)))
        for row, (number, *place) in zip(values, entries, strict=True):
            entry = self.store.at(number, place)
            row[: len(entry)] = entry
        return values[at].sum(axis=0)

    def used(self, choice: Choice) -> Array:
        return self.sums(choice)[1:]

    def total(self, choice: Choice) -> float:
        """Cost with priced excess; every row has a finite price."""
        cost, *used = self.sums(choice).tolist()
        return float(cost + np.maximum(np.array(used) - self.limits, 0.0) @ self.prices)

    def priced(self, weights: Array, unit: float = 1.0) -> CostNetwork:
        """``unit`` × costs + row sums at prices ``weights``. Equal tables share an array."""
        made = {number: priced_table(self.stacks[number], weights, unit) for number in set(self.factors.values())}
        pairs = {number for scope, number in self.factors.items() if len(scope) == 2}
        folded = {number: CompactMatrix(made[number], *self.store.maps[number]) for number in pairs}
        nodes = tuple(made[self.factors[i,]] for i in range(len(self.sizes)))
        edges = tuple((s[0], s[1], folded[number]) for s, number in self.factors.items() if len(s) == 2)
        return CostNetwork(nodes, edges)

    def costless(self) -> Stacked:
        """With zero costs; forbidden choices stay forbidden."""
        made: dict[int, int] = {}
        for number in self.factors.values():
            if number not in made:
                stack = self.stacks[number]
                costless = np.concatenate([np.where(np.isinf(stack[:1]), np.inf, 0.0), stack[1:]])
                made[number] = self.store.of(costless, self.store.maps[number])
        return replace(self, factors={scope: made[number] for scope, number in self.factors.items()})

    def restricted(self, kept: Mapping[int, Classes]) -> Stacked:
        """Only the ``kept`` strategies of these nodes, renumbered."""
        made: dict[tuple[object, ...], int] = {}
        keys = {i: k.tobytes() for i, k in kept.items()}

        def table(scope: Scope, number: int) -> int:
            key = (number, *(keys.get(i) for i in scope))
            if key not in made:
                made[key] = self.store.restricted(number, [kept.get(i) for i in scope])
            return made[key]

        factors = {scope: table(scope, number) for scope, number in self.factors.items()}
        sizes = tuple(len(kept[i]) if i in kept else n for i, n in enumerate(self.sizes))
        return replace(self, sizes=sizes, factors=factors)


class UndecidedProblem(NamedTuple):
    """A problem whose nodes are undecided."""

    problem: Stacked
    nodes: Classes
    """nodes of the full problem with several strategies"""
    decided: Array
    """cost and quantities between decided nodes"""

    @property
    def alone(self) -> Stacked:
        """The problem with the decided part in its first node's table; it must have a node."""
        store, first = self.problem.store, self.problem.factors[0,]
        own = store.arrays[first]
        total = np.zeros((len(self.decided), own.shape[1]))
        total[: len(own)] = own
        return replace(self.problem, factors={**self.problem.factors, (0,): store.of(total + self.decided[:, None])})


def undecided(problem: Stacked) -> UndecidedProblem:
    """``problem`` without one-strategy nodes; their tables with others become the others' own."""
    nodes = [i for i, n in enumerate(problem.sizes) if n > 1]
    at = {i: k for k, i in enumerate(nodes)}
    store, counts, decided = problem.store, dict[Scope, Counter[int]](), Counter[int]()
    for i in nodes:
        counts[at[i],] = Counter()
    for scope, number in problem.factors.items():
        where = tuple(at[i] for i in scope if i in at)
        if len(where) < len(scope) == 2 and where:
            number = store.alone(number, 1 if scope[0] in at else 0)
        (counts.setdefault(where, Counter()) if where else decided)[number] += 1
    total = np.zeros(1 + len(problem.limits))
    for number, many in sorted(decided.items()):
        stack = store.arrays[number]
        total[: len(stack)] += many * stack.reshape(-1)
    factors = {where: store.summed(counter) for where, counter in sorted(counts.items())}
    left = replace(problem, sizes=tuple(problem.sizes[i] for i in nodes), factors=factors)
    return UndecidedProblem(left, np.array(nodes, dtype=np.intp), total)


def priced_table(stack: Array, weights: Array, unit: float) -> Array:
    """``unit`` × cost + amounts × ``weights``; forbidden entries stay inf."""
    table: Array = np.where(np.isinf(stack[0]), np.inf, 0.0) if unit == 0 else stack[0] * unit
    for amounts, weight in zip(stack[1:], weights.tolist(), strict=False):
        table = table + weight * amounts if weight else table
    return table


def row_classes(stack: Array) -> tuple[Classes, Classes]:
    """Of a stack [quantities, rows, columns]: class of every row, first row of every class."""
    seen: dict[bytes, int] = {}
    rows = np.ascontiguousarray(stack.swapaxes(0, 1))
    found = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in rows], dtype=np.intp)
    return found, np.unique(found, return_index=True)[1]


def stack_rows(network: CostNetwork, rows: Sequence[LinearRow], stacks: Stacks | None = None) -> Stacked:
    """The network with its rows. ``stacks``: shared with another problem of the same tables."""
    stacks = stacks or Stacks()
    for k, row in enumerate(rows):
        _check_row(network, row, k)
    factors: dict[Scope, int] = {}
    for i, vector in enumerate(network.nodes):
        factors[i,] = stacks.number(vector, [row.nodes[i] for row in rows])
    for e, (i, j, matrix) in enumerate(network.edges):
        scope = (min(i, j), max(i, j))
        number = stacks.number(matrix, [row.edges[e] for row in rows], transposed=i > j)
        factors[scope] = stacks.add(factors[scope], number) if scope in factors else number
    sizes = tuple(vector.size for vector in network.nodes)
    return Stacked(sizes, factors, stacks, np.array([r.limit for r in rows]), np.array([r.price for r in rows]))


def unstacked(problem: Stacked) -> tuple[CostNetwork, tuple[LinearRow, ...]]:
    """Network and rows as views of the stacks, which forget all other tables, so that the tables
    that ``problem`` came from can be released."""
    known = {number: problem.store.known_as(number) for number in set(problem.factors.values())}
    count = len(problem.limits)
    problem.store.know(known, count)

    def amounts(scopes: Sequence[Scope], row: int) -> tuple[Any, ...]:
        parts = (known[problem.factors[scope]][1] for scope in scopes)
        return tuple(part[row] if row < len(part) else None for part in parts)

    alone = [(i,) for i in range(len(problem.sizes))]
    pairs = [scope for scope in problem.factors if len(scope) == 2]
    edges = tuple((*scope, known[problem.factors[scope]][0]) for scope in pairs)
    network = CostNetwork(tuple(stored_values(known[problem.factors[scope]][0]) for scope in alone), edges)
    limits = zip(problem.limits.tolist(), problem.prices.tolist(), strict=True)
    rows = (LinearRow(amounts(alone, r), amounts(pairs, r), *limit) for r, limit in enumerate(limits))
    return network, tuple(rows)


def _check_row(network: CostNetwork, row: LinearRow, number: int) -> None:
    tables = [*network.nodes, *(matrix for _, _, matrix in network.edges)]
    amounts = [*row.nodes, *row.edges]
    if len(row.nodes) != len(network.nodes) or len(row.edges) != len(network.edges):
        raise PlanError(f"row {number} needs one entry per node and per edge of the network")
    if any(a is not None and a.shape != table.shape for a, table in zip(amounts, tables, strict=True)):
        raise PlanError(f"row {number}: an array of amounts and its costs have different shapes")
    if not all(np.isfinite(stored_values(a)).all() for a in {id(a): a for a in amounts if a is not None}.values()):
        raise PlanError(f"row {number}: amounts must be finite. Forbid a choice in the costs instead")
    if not math.isfinite(row.limit) or not row.price >= 0:
        raise PlanError(f"row {number} needs a finite limit and a price of at least 0, got {row.limit} and {row.price}")
