"""Pruning of strategies: dead-end elimination, and lower bounds by sequential message passing.
Source: Goldstein, Efficient rotamer elimination applied to protein side-chains (1994); Kolmogorov, Convergent tree-reweighted
message passing (2006), in the reparametrisation form of SRMP (2015)."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import PlanError
from autoshard.passes.search.arrays import Classes, CompactMatrix, broadcast_sum
from autoshard.passes.search.exact.elimination import BLOCK, Eliminator, Pruned, Scope, Tables
from autoshard.passes.search.limits import LIMITS
from autoshard.passes.search.network import Array

NO_CHOICE = "no choice of strategies is feasible: every choice has a forbidden cost"
# Stands for inf where inf − inf would arise; above every sum of finite costs.
HUGE = 1e300


class Pruner:
    """Prunes an eliminator's nodes. Memoised by a node's tables, so equal layers cost as one."""

    def __init__(self, tables: Tables, deadline: float = math.inf) -> None:
        """Nothing is removed after ``deadline``."""
        self.tables, self.deadline = tables, deadline
        self._least: dict[tuple[int, int], Array] = {}
        self._kept: dict[tuple[object, ...], Classes] = {}
        self.most = LIMITS.max_comparisons

    def run(self, network: Eliminator, most: int = LIMITS.max_comparisons) -> int:
        """Remove strategies to a fixed point (factors of at most two nodes); how many. ``most``:
        comparisons per table. Raises PlanError if a node has no feasible strategy."""
        if most != self.most:
            self.most = most
            self._kept.clear()
        waiting = sorted(network.alive)
        removed = 0
        while waiting:
            changed: set[int] = set()
            for node in waiting:
                if time.perf_counter() > self.deadline:
                    return removed
                kept = self.kept(network, node)
                if not len(kept):
                    raise PlanError(NO_CHOICE)
                if len(kept) < network.sizes[node]:
                    removed += network.sizes[node] - len(kept)
                    restrict(network, node, kept)
                    changed.update(network.neighbours(node))
            waiting = sorted(changed)
        return removed

    def kept(self, network: Eliminator, node: int) -> Classes:
        """Indices of strategies to keep; empty if the network is infeasible."""
        scopes = sorted(network.touching[node])
        key = tuple(sorted((network.factors[scope], scope.index(node), len(scope)) for scope in scopes))
        known = self._kept.get(key)
        if known is None:
            known = self._kept[key] = self._compute(network.sizes[node], key)
        return known

    def _compute(self, size: int, key: tuple[tuple[int, int, int], ...]) -> Classes:
        own: Array = np.zeros(size)
        for table, axis, rank in key:
            array = self.tables.arrays[table]
            own = own + (array if rank == 1 else np.where(np.isinf(array.min(1 - axis)), np.inf, 0.0))
        feasible = np.flatnonzero(np.isfinite(own))
        # gain[a, b]: least saving of b over a, whatever the neighbours choose
        gain = own[feasible, None] - own[None, feasible]
        for table, axis, rank in key:
            if rank == 2:
                least = self.least(table, axis)
                if least is None:
                    return feasible
                classes = self.tables.classes(table, axis)[feasible]
                gain += least[np.ix_(classes, classes)]
        index = np.arange(len(feasible))
        beaten = (gain > 0) | ((gain == 0) & (index[None, :] < index[:, None]))
        return feasible[~beaten.any(axis=1)]

    def least(self, table: int, axis: int) -> Array | None:
        """[a, b] = min over x of E[a, x] − E[b, x] for classes of slices a, b; None: too large."""
        if (table, axis) not in self._least:
            rows, columns = (int(self.tables.classes(table, k).max()) + 1 for k in (axis, 1 - axis))
            if rows**2 * columns > self.most:
                return None
            compact = self.tables.compact(table)
            self._least[table, axis] = least_difference(np.ascontiguousarray(compact if axis == 0 else compact.T))
        return self._least[table, axis]


def restrict(network: Eliminator, node: int, kept: Classes) -> None:
    """Keep only some of a node's strategies."""
    for scope in sorted(network.touching[node]):
        axes = [kept if other == node else None for other in scope]
        network.factors[scope] = network.tables.take(network.factors[scope], axes)
    network.sizes[node] = len(kept)
    network.steps.append(Pruned(node, tuple(kept.tolist())))


def least_difference(array: Array) -> Array:
    """[a, b] = min over x of array[a, x] − array[b, x]."""
    result = np.empty((len(array), len(array)))
    array = np.ascontiguousarray(array.T)  # a minimum over the first axis takes half as long as over the last
    less = np.where(np.isinf(array), -HUGE, -array)
    step = max(1, BLOCK // array.size)
    for start in range(0, len(result), step):
        block = slice(start, start + step)
        result[block] = broadcast_sum(array[:, block, None], less[:, None, :]).min(axis=0)
    return result


_RELATIVE_NOISE = 1e-9
"""relative"""


KnownMessages = dict[tuple[int, int, bytes, bytes], tuple[Array, Array]]
"""messages of a pass by table (kept alive, so that its id is unique), axis, and costs moved in"""


def min_message(table: Array, moved: Array, axis: int) -> Array:
    """min along ``axis`` of a matrix plus ``moved``, a vector along it.
    In blocks: sums that leave the cache before their minimum take twice as long."""
    step = max(1, BLOCK // table.shape[1])
    if len(table) <= step:
        return broadcast_sum(table, moved if axis == 1 else moved[:, None]).min(axis=axis)
    blocks = [slice(start, start + step) for start in range(0, len(table), step)]
    if axis == 1:
        return np.concatenate([broadcast_sum(table[block], moved).min(axis=1) for block in blocks])
    return np.minimum.reduce([broadcast_sum(table[block], moved[block, None]).min(axis=0) for block in blocks])


def _deduplicated(tables: Tables, number: int) -> tuple[Array, list[Classes]]:
    """A matrix without equal slices, and per axis the slice of every index."""
    matrix = tables.matrix(number)
    if matrix.size < LIMITS.unfolded_entries:  # deduplication takes longer than it saves
        array = np.ascontiguousarray(tables.arrays[number])
        return array, [np.arange(n) for n in array.shape]
    if isinstance(matrix, CompactMatrix):
        return np.ascontiguousarray(matrix.values), [matrix.rows, matrix.columns]
    return tables.compact(number), [tables.classes(number, axis) for axis in (0, 1)]


def deduplicated_entries(network: Eliminator) -> int:
    """Entries of all matrices of a network, without equal slices."""
    counts = Counter(table for scope, table in network.factors.items() if len(scope) == 2)
    return sum(many * _deduplicated(network.tables, table)[0].size for table, many in counts.items())


class _Edge:
    """A matrix E[a, b] with costs moved into it: E + into[0][a] + into[1][b]. Equal slices are
    stored once in the shared ``table``; ``members`` maps each side's strategies to slices."""

    table: Array
    members: list[Classes]
    differ: list[bool]

    def __init__(self, tables: Tables, table: int, known: _Edge | None = None, single: bool = False) -> None:
        """``known``: an edge of the same table; ``single``: see :class:`Dual`."""
        if known is not None:
            self.table, self.members, self.differ = known.table, [*known.members], [*known.differ]
        else:
            self.table, self.members = _deduplicated(tables, table)
            if single:
                self.table = self.table.astype(cast(Any, np.float32))
            self.differ = [self._differ(side) for side in (0, 1)]
        self.moved_in = [np.zeros(len(members), self.table.dtype) for members in self.members]
        self.settled = [False, False]
        """per side: the message was moved out and nothing came in since, so it is zero"""

    def _differ(self, side: int) -> bool:
        """Whether every strategy has its own slice, in order."""
        return np.array_equal(self.members[side], np.arange(self.table.shape[side]))

    def move(self, side: int, change: Array) -> None:
        """Move a cost per strategy of a side into the edge."""
        self.moved_in[side] += change
        self.settled = [False, False]

    def taken(self, side: int, seen: KnownMessages | None = None) -> Array:
        """The message to a side, moved out. The other side's zero message stays zero."""
        message = self.message(side, seen)
        self.moved_in[side] -= message
        self.settled[side] = True
        return message

    def restrict(self, side: int, stay: Classes) -> None:
        self.settled[1 - side] = False
        self.moved_in[side] = self.moved_in[side][stay]
        self.members[side] = self.members[side][stay]
        found = np.zeros(self.table.shape[side], dtype=bool)  # several times faster than sorting
        found[self.members[side]] = True
        present = np.flatnonzero(found)
        if len(present) < 0.7 * len(found):
            self.table, self.members[side] = self.table.take(present, side), (np.cumsum(found) - 1)[self.members[side]]
        self.differ[side] = self._differ(side)

    def message(self, side: int, seen: KnownMessages | None = None) -> Array:
        """Least edge cost per strategy of a side. ``seen``: messages of equal edges."""
        if seen is None:
            least = self.least(side)
        else:
            key = id(self.table), side, self.members[1 - side].tobytes(), self.moved_in[1 - side].tobytes()
            if key not in seen:
                seen[key] = self.table, self.least(side)
            least = seen[key][1]
        return least[self.members[side]] + self.moved_in[side]

    def least(self, side: int) -> Array:
        """Least edge cost per slice of a side, without costs moved in from that side."""
        moved, members = self.moved_in[1 - side], self.members[1 - side]
        if not self.differ[1 - side]:
            moved = np.full(self.table.shape[1 - side], np.inf, self.table.dtype)
            np.minimum.at(moved, members, self.moved_in[1 - side])
        return min_message(self.table, moved, 1 - side)

    def row(self, side: int, strategy: int) -> Array:
        """Edge costs of the other side's strategies given ``strategy``, without moved costs."""
        return self.table.take(self.members[side][strategy], side)[self.members[1 - side]]

    def whole(self) -> Array:
        return self.table[np.ix_(*self.members)]


class Dual:
    """A reparametrisation of the core: costs move between nodes and edges, totals stay equal.
    ``bound``, the sum of all tables' minima, is a lower bound of the optimum and never falls."""

    def __init__(self, network: Eliminator, constant: float = 0.0, alike: bool = False, single: bool = False) -> None:
        """``constant``: added to the total; ``alike``: many edges will have equal messages;
        ``single``: float32, for messages that initialise another dual."""
        self.seen: KnownMessages | None = {} if alike else None
        self.order = sorted(network.alive)
        rank = {node: k for k, node in enumerate(self.order)}
        arrays = network.tables.arrays
        dtype: Any = np.float32 if single else np.float64
        self.node: dict[int, Array] = {
            i: np.array(arrays[network.factors[i,]], dtype) for i in self.order if (i,) in network.factors
        }
        for i in self.order:
            self.node.setdefault(i, np.zeros(network.sizes[i], dtype))
        self.edges: dict[Scope, _Edge] = {}
        known: dict[int, _Edge] = {}  # by table
        self.after: dict[int, list[Scope]] = {i: [] for i in self.order}
        self.before: dict[int, list[Scope]] = {i: [] for i in self.order}
        for scope, table in sorted(network.factors.items()):
            if len(scope) == 2:
                edge = self.edges[scope] = _Edge(network.tables, table, known.get(table), single)
                known.setdefault(table, edge)
                first, second = sorted(scope, key=rank.__getitem__)
                self.after[first].append(scope)
                self.before[second].append(scope)
        self.bound = network.constant + constant
        self.sizes = {i: network.sizes[i] for i in self.order}
        self.kept: dict[int, Classes] = {i: np.arange(n) for i, n in self.sizes.items()}

    def sweep(self, upper: float, deadline: float = math.inf, among: frozenset[int] | None = None) -> bool:
        """A forward and a backward pass; drops strategies whose bound exceeds ``upper``. False if
        ``deadline`` ends it early. ``among``: nodes to visit. Raises PlanError if no choice is
        feasible."""
        for order, ahead in ((self.order, self.after), (self.order[::-1], self.before)):
            if self.seen:
                self.seen.clear()
            for k, i in enumerate(order):
                if k % 256 == 0 and time.perf_counter() > deadline:
                    return False
                if among is None:
                    self._visit(i, ahead[i], upper)
                elif i in among:
                    self._visit(i, [scope for scope in ahead[i] if among.issuperset(scope)], upper)
        return True

    def _visit(self, i: int, ahead: list[Scope], upper: float) -> None:
        scopes = self.before[i] + self.after[i]
        for scope in scopes:
            if not self.edges[scope].settled[scope.index(i)]:
                self.node[i] += self.edges[scope].taken(scope.index(i), self.seen)
        least = float(self.node[i].min())
        if math.isinf(least):
            raise PlanError(NO_CHOICE)
        self.bound += least
        self.node[i] -= least
        # Rounding must not drop an optimum that equals ``upper``: the bound would pass it.
        most = upper - self.bound + _RELATIVE_NOISE * abs(upper)
        allowed = np.isfinite(self.node[i])  # inf − inf is NaN
        stays = allowed if math.isinf(most) else allowed & (self.node[i] <= most)
        if not stays.any():  # nothing costs so little
            stays = allowed
        if not stays.all():
            self._restrict(i, np.flatnonzero(stays))
        if ahead:
            share = self.node[i] / max(len(ahead), len(scopes) - len(ahead))
            for scope in ahead:
                self.edges[scope].move(scope.index(i), share)
            self.node[i] -= share * len(ahead)
            np.maximum(self.node[i], 0.0, out=self.node[i])  # rounding noise must not raise the bound

    def _message(self, scope: Scope, i: int) -> Array:
        """Least cost of the edge per strategy of ``i``."""
        return self.edges[scope].message(scope.index(i))

    def _restrict(self, i: int, stay: Classes) -> None:
        self.node[i] = self.node[i][stay]
        self.kept[i] = self.kept[i][stay]
        for scope in self.before[i] + self.after[i]:
            self.edges[scope].restrict(scope.index(i), stay)

    def too_dear(self, upper: float) -> Iterator[tuple[Scope, NDArray[np.bool_]]]:
        """Per edge the pairs of remaining strategies that no choice up to ``upper`` contains."""
        most = upper - self.bound + _RELATIVE_NOISE * abs(upper)
        for (i, j), edge in self.edges.items():
            least = edge.whole() + (edge.moved_in[0] + self.node[i])[:, None] + (edge.moved_in[1] + self.node[j])
            yield (i, j), least > most

    def decode(self) -> dict[int, int]:
        """A choice: each node takes the cheapest strategy given earlier nodes."""
        position: dict[int, int] = {}
        for i in self.order:
            total = self.node[i].copy()
            for scope in self.before[i]:
                edge, side = self.edges[scope], scope.index(i)
                total += edge.row(1 - side, position[scope[1 - side]]) + edge.moved_in[side]
            for scope in self.after[i]:
                if not self.edges[scope].settled[scope.index(i)]:
                    total += self._message(scope, i)
            position[i] = int(np.argmin(total))
        return {i: int(self.kept[i][s]) for i, s in position.items()}

    def moved(self, scope: Scope) -> tuple[Array, ...]:
        """Costs moved into an edge, per side and original strategy; 0 for dropped strategies."""
        found = []
        for i, moved in zip(scope, self.edges[scope].moved_in, strict=True):
            found.append(np.zeros(self.sizes[i], moved.dtype))
            found[-1][self.kept[i]] = moved
        return tuple(found)

    @property
    def strategies(self) -> int:
        return sum(map(len, self.kept.values()))
