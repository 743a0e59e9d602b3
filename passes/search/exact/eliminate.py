"""Min-plus bucket elimination: a node's factors become one factor of its neighbours.

Source: Bertelè and Brioschi, Nonserial Dynamic Programming (1972); Dechter, Bucket Elimination
(1999).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.passes.search.exact.tables import Tables
from autoshard.passes.search.network import Array, CostNetwork

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
class Step:
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
        self.steps: list[Step | Pruned] = []
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
        """Join the nodes of ``scope``."""
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
        step = Step(node, tuple([(scope, self._left(node, scope)) for scope in sorted(self.touching[node])]))
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
        self.steps.append(Step(node, ()))
        self.alive.discard(node)
        return around

    def _node_last(self, scope: Scope, table: int, node: int) -> int:
        return table if scope[-1] == node else self.tables.move_last(table, scope.index(node))

    def priced(self, node: int, order: Order) -> int:
        return order(self.sizes[node], [self.sizes[other] for other in self.around[node]])

    def run(self, max_degree: int, max_weight: int, order: Order = by_join, deadline: float = math.inf) -> None:
        """Eliminate, cheapest first, nodes of at most ``max_degree`` neighbours and ``max_weight``
        by ``order``.

        Ends at ``deadline``. Ties go to the node with the oldest tables: so equal positions of
        equal layers follow each other, a chain of equal layers halves again and again, and its
        tables are memoised.
        """
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

    def cheapest_order(self, max_weight: int, sizes: Mapping[int, int] | None = None) -> tuple[float, Order]:
        """(entries of all joins, order): the order with the fewest.

        Infinite if each order has a join above ``max_weight``. ``sizes``: numbers of strategies to
        assume instead of the present ones.
        """
        return min(((self.joined(order, max_weight, sizes), order) for order in ORDERS), key=lambda found: found[0])

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
        """Strategies of all remaining nodes."""
        return sum(self.sizes[node] for node in self.alive)

    @property
    def constant(self) -> float:
        """Cost of every choice."""
        return sum(float(self.tables.arrays[table]) for table in self.scalars)

    def cost(self, choice: dict[int, int]) -> float:
        """Cost of a choice for all remaining nodes."""
        return self.constant + sum(
            float(self.tables.matrix(table)[tuple(choice[node] for node in scope)])
            for scope, table in sorted(self.factors.items())
        )

    def core(self) -> Iterable[tuple[Scope, Array]]:
        return ((scope, self.tables.arrays[table]) for scope, table in sorted(self.factors.items()))
