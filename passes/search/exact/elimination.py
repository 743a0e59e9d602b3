"""Exact min-plus bucket elimination of nodes on interned cost tables; equal joins are computed once.

Source: Bertelè and Brioschi, Nonserial Dynamic Programming (1972); Dechter, Bucket Elimination (1999)."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.passes.search.arrays import (
    Classes,
    CompactMatrix,
    ContentNumbers,
    Matrix,
    broadcast_sum,
    by_first_appearance,
    joint_classes,
    stored_values,
    take_slices,
    transpose_matrix,
)
from autoshard.passes.search.network import Array, CostNetwork

# Entries per block of a join, so that temporaries stay in cache.
BLOCK = 1 << 16
# Entries of a join without blocks.
AT_ONCE = 2 * BLOCK
# Entries up to which a partial sum is materialised.
MOST_SUMMED = 1 << 20

FactorSpan = tuple[int, tuple[int, ...]]
"""a table and the ascending axes of a join that it spans"""


class DenseTables(list[Array]):
    """Arrays by number; a compact one (``folded``) is expanded on first access."""

    def __init__(self) -> None:
        super().__init__()
        self.folded: dict[int, CompactMatrix] = {}

    def __getitem__(self, number: int) -> Array:  # type: ignore[override]
        array: Array = super().__getitem__(number)
        if number in self.folded and not array.size:
            array = self[number] = self.folded[number].whole()
        return array


class Tables:
    """Float64 tables of any rank, numbered by first appearance, with memoised operations."""

    def __init__(self) -> None:
        self.arrays: list[Array] = DenseTables()
        self._by_id: dict[int, tuple[Matrix, int]] = {}  # keeps the array alive, so that its id is unique
        self._contents = ContentNumbers()
        self._memo: dict[tuple[object, ...], int] = {}
        self._classes: dict[tuple[int, int], Classes] = {}
        self._compact: dict[int, Array] = {}

    def intern(self, array: Matrix) -> int:
        """Number of a table, by identity or content. The array must not change afterwards."""
        known = self._by_id.get(id(array))
        if known is not None:
            return known[1]
        array_c = np.asarray(stored_values(array), dtype=np.float64, order="C")
        maps = (array.rows.tobytes(), array.columns.tobytes()) if isinstance(array, CompactMatrix) else None
        number = self._contents.number(array_c, maps, lambda n: stored_values(self.matrix(n)), len(self.arrays))
        if number == len(self.arrays) and isinstance(self.arrays, DenseTables) and isinstance(array, CompactMatrix):
            self.arrays.folded[number] = array
            self.arrays.append(np.empty((0, 0)))
        elif number == len(self.arrays):
            self.arrays.append(array_c)
        self._by_id[id(array)] = (array, number)
        return number

    def matrix(self, a: int) -> Matrix:
        """A table as given, maybe compact."""
        folded = self.arrays.folded.get(a) if isinstance(self.arrays, DenseTables) else None
        return self.arrays[a] if folded is None else folded

    def at(self, a: int, index: tuple[int | None, ...]) -> Array:
        """The entries along the only axis whose index is None."""
        return self.arrays[a][tuple(slice(None) if i is None else i for i in index)]

    def add(self, a: int, b: int) -> int:
        a, b = min(a, b), max(a, b)
        return self._remember(("add", a, b), lambda: self.arrays[a] + self.arrays[b])

    def transpose(self, a: int) -> int:
        return self._remember(("transpose", a), lambda: transpose_matrix(self.matrix(a)))

    def move_last(self, a: int, axis: int) -> int:
        """The table with one axis moved to the end."""
        key = "move", a, axis
        if key not in self._memo and axis == self.arrays[a].ndim - 1:
            self._memo[key] = a
        return self._remember(key, lambda: np.moveaxis(self.arrays[a], axis, -1))

    def squeeze(self, a: int, axis: int) -> int:
        """The table without an axis of length 1."""
        return self._remember(("squeeze", a, axis), lambda: self.arrays[a].squeeze(axis))

    def take(self, a: int, kept: Sequence[Classes | None]) -> int:
        """The sub-table of ``kept`` indices per axis (None: all)."""
        key = ("take", a, *(None if k is None else k.tobytes() for k in kept))

        def compute() -> Array:
            array = self.matrix(a)
            if isinstance(array, CompactMatrix):
                sides = zip((array.rows, array.columns), kept, strict=True)
                return array.values[np.ix_(*(side if k is None else side[k] for side, k in sides))]
            for axis, k in enumerate(kept):
                array = array if k is None else array.take(k, axis)
            return array

        return self._remember(key, compute)

    def _remember(self, key: tuple[object, ...], compute: Callable[[], Matrix]) -> int:
        number = self._memo.get(key)
        if number is None:
            number = self._memo[key] = self.intern(compute())
        return number

    def classes(self, a: int, axis: int) -> Classes:
        """Class of equal slices of every index along ``axis``, in order of appearance."""
        known = self._classes.get((a, axis))
        if known is None:
            matrix = self.matrix(a)
            rows = np.ascontiguousarray(np.moveaxis(stored_values(matrix), axis, 0))
            seen: dict[bytes, int] = {}
            known = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in rows], dtype=np.intp)
            if isinstance(matrix, CompactMatrix):
                known = by_first_appearance(known[(matrix.rows, matrix.columns)[axis]])[1]
            self._classes[a, axis] = known
        return known

    def compact(self, a: int) -> Array:
        """The matrix with one slice of each class."""
        if a not in self._compact:
            matrix = self.matrix(a)
            maps = (
                (matrix.rows, matrix.columns)
                if isinstance(matrix, CompactMatrix)
                else tuple(map(np.arange, matrix.shape))
            )
            first = [np.unique(self.classes(a, axis), return_index=True)[1] for axis in (0, 1)]
            self._compact[a] = np.ascontiguousarray(
                take_slices(take_slices(stored_values(matrix), maps[0][first[0]], 0), maps[1][first[1]], 1)
            )
        return self._compact[a]

    def eliminate(self, factors: tuple[FactorSpan, ...], rank: int) -> int:
        """min over the last of ``rank`` + 1 axes of the sum of ``factors``: (table, ascending axes
        that it spans, the last included)."""
        return self._remember(("eliminate", factors, rank), lambda: self._eliminate(factors, rank))

    def _eliminate(self, factors: tuple[FactorSpan, ...], rank: int) -> Array:
        kept, where = zip(*(self._representatives(factors, axis, rank) for axis in range(rank + 1)), strict=True)
        parts = []
        for table, axes in factors:
            part = self.arrays[table]
            for position, axis in enumerate(axes):
                part = part.take(kept[axis], position)
            # the eliminated axis first, the others broadcast
            part = np.moveaxis(part, -1, 0)
            shape = [part.shape[0]] + [1] * rank
            for position, axis in enumerate(axes[:-1]):
                shape[axis + 1] = part.shape[position + 1]
            parts.append(np.ascontiguousarray(part).reshape(shape))
        reduced = min_sum(parts, tuple(len(k) for k in kept[:-1]))
        for axis in range(rank):
            if len(kept[axis]) != len(where[axis]):
                reduced = reduced.take(where[axis], axis)
        return reduced

    def _representatives(self, factors: tuple[FactorSpan, ...], axis: int, rank: int) -> tuple[Classes, Classes]:
        """(representatives of the classes along one axis, class of every index). On the eliminated
        axis a vector only decides which member of a class is cheapest."""
        spanning = [(t, axes) for t, axes in factors if axis in axes]
        keys = [self.classes(t, axes.index(axis)) for t, axes in spanning if len(axes) > 1]
        size = self.arrays[spanning[0][0]].shape[spanning[0][1].index(axis)]
        same = joint_classes(keys)[1] if keys else np.zeros(size, dtype=np.intp)
        if axis < rank:
            order = np.arange(size)
        else:
            own: Array = sum((self.arrays[t] for t, axes in spanning if len(axes) == 1), np.zeros(size))
            order = np.argsort(own, kind="stable")
        where = np.empty(size, dtype=np.intp)
        where[order] = by_first_appearance(same[order])[1]
        return order[np.unique(where[order], return_index=True)[1]], where


def min_sum(parts: list[Array], shape: tuple[int, ...]) -> Array:
    """min over axis 0 of the broadcast sum of ``parts``; their other axes are 1 or full."""
    if not shape:
        return np.asarray(sum(parts[1:], parts[0]).min(), dtype=np.float64)
    parts = sorted(parts, key=lambda part: part.size)  # small sums first, large broadcasts once
    if len(parts[0]) * math.prod(shape) <= AT_ONCE:
        return np.asarray(
            broadcast_sum(sum(parts[1:-1], parts[0]), parts[-1]).min(axis=0) if len(parts) > 1 else parts[0].min(axis=0)
        )
    # Lead with an axis along which most parts are constant: their sum is computed once.
    spans = [{k for k, length in enumerate(part.shape[1:]) if length > 1} for part in parts]
    differ = [set[int]().union(*(span for span in spans if k in span)) - {k} for k in range(len(shape))]
    lead = min(range(len(shape)), key=lambda k: (shape[k] == 1, math.prod(shape[i] for i in differ[k])))
    parts = [np.moveaxis(part, 1 + lead, 1) for part in parts]
    shape = (shape[lead], *shape[:lead], *shape[lead + 1 :])
    inner = math.prod(shape[1:])
    same = [part for part in parts if part.shape[1] == 1]
    if len(same) > 1 and len(parts[0]) * inner <= MOST_SUMMED:
        parts = [*(part for part in parts if part.shape[1] > 1), sum(same[1:], same[0])]
        parts.sort(key=lambda part: part.size)
    result = np.empty(shape)
    step = max(1, BLOCK // max(inner, 1))
    for start in range(0, shape[0], step):
        block = slice(start, min(start + step, shape[0]))
        cut = [part[:, block] if part.shape[1] > 1 else part for part in parts]
        out = result[block]
        out.fill(np.inf)
        temporary = np.empty_like(out)
        for s in range(parts[0].shape[0]):
            small = sum((part[s] for part in cut[1:-1]), cut[0][s])
            if len(cut) > 1:
                broadcast_sum(small, cut[-1][s], out=temporary)
                np.minimum(out, temporary, out=out)
            else:
                np.minimum(out, small, out=out)
    return np.moveaxis(result, 0, lead)


Scope = tuple[int, ...]
Order = Callable[[int, Sequence[int]], int]
"""score of a node from its number of strategies and its neighbours'; the least goes first"""


def by_join(own: int, others: Sequence[int]) -> int:
    """Entries of the join that eliminating a node computes."""
    return 0 if own == 1 else own * math.prod(others)


def by_result(own: int, others: Sequence[int]) -> int:
    """Entries of the table that eliminating a node leaves."""
    return 0 if own == 1 else math.prod(others)


# Greedy orders; on some networks the joins of one are a hundred times larger.
ORDERS: tuple[Order, ...] = (by_join, by_result)


@dataclass(frozen=True)
class EliminationStep:
    """An eliminated node and its factors: (scope, table), each scope with the node."""

    node: int
    factors: tuple[tuple[Scope, int], ...]


@dataclass(frozen=True)
class Pruned:
    """A node that kept some strategies; later steps number these from 0."""

    node: int
    kept: tuple[int, ...]


class Eliminator:
    """A shrinking network of factors, at most one per scope (an ascending tuple of nodes)."""

    def __init__(self, tables: Tables, sizes: list[int]) -> None:
        self.tables = tables
        self.sizes = list(sizes)
        self.factors: dict[Scope, int] = {}
        self.touching: list[set[Scope]] = [set() for _ in sizes]
        self.around: list[set[int]] = [set() for _ in sizes]  # nodes that share a scope with each node
        self.scalars: list[int] = []  # tables without an axis
        self.steps: list[EliminationStep | Pruned] = []
        self.alive = set(range(len(sizes)))

    @classmethod
    def of(cls, network: CostNetwork, tables: Tables) -> Eliminator:
        self = cls(tables, [vector.size for vector in network.nodes])
        for i, vector in enumerate(network.nodes):
            self.insert((i,), tables.intern(vector))
        for i, j, matrix in network.edges:
            table = tables.intern(matrix)
            self.insert(*(((i, j), table) if i < j else ((j, i), tables.transpose(table))))
        return self

    def copy(self) -> Eliminator:
        """The network with the same tables, without past steps."""
        new = Eliminator(self.tables, self.sizes)
        new.factors, new.touching = dict(self.factors), [set(scopes) for scopes in self.touching]
        new.around = [set(nodes) for nodes in self.around]
        new.scalars, new.alive = list(self.scalars), set(self.alive)
        return new

    def insert(self, scope: Scope, table: int) -> None:
        """Add a factor; factors of one scope are summed."""
        if not scope:
            self.scalars.append(table)
            return
        old = self.factors.get(scope)
        self.factors[scope] = table if old is None else self.tables.add(old, table)
        self.touch(scope)

    def touch(self, scope: Scope) -> None:
        for node in scope:
            self.touching[node].add(scope)
            self.around[node].update(scope)
            self.around[node].discard(node)

    def _left(self, node: int, scope: Scope) -> int:
        """Remove a factor of an eliminated node; the other nodes stay joined."""
        for other in scope:
            self.touching[other].discard(scope)
            self.around[other].discard(node)
        return self.factors.pop(scope)

    def forbid(self, scope: Scope, pairs: NDArray[np.bool_]) -> None:
        """Forbid pairs of strategies of two nodes."""
        table = self.tables.arrays[self.factors[scope]]
        if (pairs & np.isfinite(table)).any():
            self.factors[scope] = self.tables.intern(np.where(pairs, np.inf, table))

    def neighbours(self, node: int) -> Scope:
        return tuple(sorted(self.around[node]))

    def eliminate(self, node: int) -> Scope:
        """Replace a node's factors by their minimum over its strategies; returns neighbours."""
        if self.sizes[node] == 1:
            return self._fold(node)
        around = self.neighbours(node)
        place, last = {other: axis for axis, other in enumerate(around)}, (len(around),)
        step = EliminationStep(node, tuple([(scope, self._left(node, scope)) for scope in sorted(self.touching[node])]))
        spans = tuple(
            [
                (self._node_last(scope, table, node), tuple([place[k] for k in scope if k != node]) + last)
                for scope, table in step.factors
            ]
        )
        self.steps.append(step)
        self.alive.discard(node)
        self.insert(around, self.tables.eliminate(spans, len(around)))
        return around

    def _fold(self, node: int) -> Scope:
        """Eliminate a node with one strategy: its factors lose an axis."""
        around = self.neighbours(node)
        for scope in sorted(self.touching[node]):
            table = self.tables.squeeze(self._left(node, scope), scope.index(node))
            self.insert(tuple(other for other in scope if other != node), table)
        self.steps.append(EliminationStep(node, ()))
        self.alive.discard(node)
        return around

    def _node_last(self, scope: Scope, table: int, node: int) -> int:
        return table if scope[-1] == node else self.tables.move_last(table, scope.index(node))

    def priced(self, node: int, order: Order) -> int:
        return order(self.sizes[node], [self.sizes[other] for other in self.around[node]])

    def run(self, max_degree: int, max_weight: int, order: Order = by_join, deadline: float = math.inf) -> None:
        """Eliminate, cheapest first by ``order``, nodes of at most ``max_degree`` neighbours and
        ``max_weight``, until ``deadline``. Ties go to the oldest tables: equal positions of
        equal layers follow each other, so a chain of layers halves again and again, and its
        tables are memoised."""
        keys = (self._key(node, order, max_degree, max_weight) for node in sorted(self.alive))
        heap = [key for key in keys if key is not None]
        current = {key[-1]: key for key in heap}
        heapq.heapify(heap)
        while heap and time.perf_counter() < deadline:
            key = heapq.heappop(heap)
            node = key[-1]
            if current.get(node) != key:
                continue
            del current[node]
            for other in self.eliminate(node):
                current.pop(other, None)
                later = self._key(other, order, max_degree, max_weight)
                if later is not None:
                    current[other] = later
                    heapq.heappush(heap, later)

    def _key(
        self, node: int, order: Order, max_degree: int, max_weight: int
    ) -> tuple[int, tuple[int, ...], int] | None:
        """Position of a node in the order; None if it exceeds a limit."""
        if self.sizes[node] > 1 and len(self.around[node]) > max_degree:
            return None
        weight = self.priced(node, order)
        if weight > max_weight:
            return None
        return weight, tuple(sorted([self.factors[scope] for scope in self.touching[node]])), node

    def cheapest_order(self, max_weight: int) -> tuple[float, Order]:
        """(entries of all joins, order) of the fewest; infinite if all exceed ``max_weight``."""
        return min(((self.joined(order, max_weight), order) for order in ORDERS), key=lambda found: found[0])

    def joined(self, order: Order, max_weight: int, sizes: Mapping[int, int] | None = None) -> float:
        """Entries of all joins in this order; infinite if one exceeds ``max_weight``."""
        size = {node: self.sizes[node] for node in self.alive} if sizes is None else sizes
        many = {node for node in self.alive if size[node] > 1}
        around = {node: self.around[node] & many for node in many}

        def priced(node: int, order: Order) -> int:
            return order(size[node], [size[other] for other in around[node]])

        current = {node: priced(node, order) for node in sorted(around)}
        heap = [(w, node) for node, w in current.items()]
        heapq.heapify(heap)
        total = 0
        while heap:
            w, node = heapq.heappop(heap)
            if current.get(node) != w:
                continue
            join = w if order is by_join else priced(node, by_join)
            if join > max_weight:
                return math.inf
            total += join
            del current[node]
            near = around.pop(node)
            for other in near:
                around[other] = (around[other] | near) - {node, other}
                current[other] = priced(other, order)
                heapq.heappush(heap, (current[other], other))
        return total

    def back_substitute(self, choice: dict[int, int], mark: int) -> dict[int, int]:
        """Choices of all nodes from those after ``mark`` steps; ties go to the lowest index."""
        known: dict[object, int] = {}  # equal layers with equal neighbours choose alike
        for step in reversed(self.steps[:mark]):
            if isinstance(step, Pruned):
                choice[step.node] = step.kept[choice[step.node]]
                continue
            beside = tuple(
                (table, tuple(None if k == step.node else choice[k] for k in scope)) for scope, table in step.factors
            )
            if beside not in known:
                total: Array = np.zeros(())
                for table, index in beside:
                    total = total + self.tables.at(table, index)
                known[beside] = int(np.argmin(total))
            choice[step.node] = known[beside]
        return choice

    @property
    def strategies(self) -> int:
        return sum(self.sizes[node] for node in self.alive)

    @property
    def constant(self) -> float:
        """Cost of every choice."""
        return sum(float(self.tables.arrays[table]) for table in self.scalars)

    def cost(self, choice: dict[int, int]) -> float:
        return self.constant + sum(
            float(self.tables.matrix(table)[tuple(choice[node] for node in scope)])
            for scope, table in sorted(self.factors.items())
        )

    def core(self) -> Iterable[tuple[Scope, Array]]:
        return ((scope, self.tables.arrays[table]) for scope, table in sorted(self.factors.items()))
