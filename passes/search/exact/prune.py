"""Dead-end elimination: removes strategies that are infeasible or that another one dominates.

Source: Goldstein, Efficient rotamer elimination applied to protein side-chains (1994).
"""

from __future__ import annotations

import math
import time

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.broadcast import added
from autoshard.passes.search.exact.eliminate import Eliminator, Pruned
from autoshard.passes.search.exact.tables import BLOCK, Tables
from autoshard.passes.search.folded import Classes
from autoshard.passes.search.network import Array

NO_CHOICE = "no choice of strategies is feasible: every one meets a forbidden cost"
# Stands for inf where inf − inf would arise; above every sum of finite costs.
HUGE = 1e300
# Row comparisons per table beyond which pruning does not pay: while bounds may prune, and at all.
EASY_COMPARISONS = 20_000_000
MAX_COMPARISONS = 1_000_000_000


class Pruner:
    """Prunes an eliminator's nodes. Memoised by a node's tables, so equal layers cost as one."""

    def __init__(self, tables: Tables, deadline: float = math.inf) -> None:
        """Nothing is removed after ``deadline``."""
        self.tables, self.deadline = tables, deadline
        self._least: dict[tuple[int, int], Array] = {}
        self._kept: dict[tuple[object, ...], Classes] = {}
        self.most = MAX_COMPARISONS

    def run(self, network: Eliminator, most: int = MAX_COMPARISONS) -> int:
        """Remove strategies to a fixed point; returns how many. Factors span at most two nodes.

        ``most``: comparisons per table. Raises PlanError if a node has no feasible strategy.
        """
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
        kept: Classes = feasible[~beaten.any(axis=1)]
        return kept

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
        result[block] = added(array[:, block, None], less[:, None, :]).min(axis=0)
    return result
