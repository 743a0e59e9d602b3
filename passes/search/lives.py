"""A limit on what choices hold at any time: a network whose nodes live and die."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import PlanError
from autoshard.passes.search.dominance import Dominance
from autoshard.passes.search.network import Array, CostNetwork, Memory, Row
from autoshard.passes.search.stacked import stack_rows
from autoshard.passes.search.tables import Classes

Integers = NDArray[np.intp]


class Lives:
    """The rows are the moments that matter; node i lives in the rows first[i] ≤ r < last[i]."""

    def __init__(self, network: CostNetwork, memory: Memory) -> None:
        nodes = network.nodes
        if len(memory.usage) != len(nodes) or any(u.shape != v.shape for u, v in zip(memory.usage, nodes, strict=True)):
            raise PlanError("memory: usage needs one vector per node, as long as the node's costs")
        if memory.limit <= 0:
            raise PlanError(f"memory: the limit must be positive, got {memory.limit}")
        self.network, self.usage, self.limit, self.intervals = network, memory.usage, memory.limit, memory.intervals
        self.beside: list[list[tuple[int, Array]]] = [[] for _ in nodes]
        """of every node the edges: (other node, costs [own strategy, the other's])"""
        for i, j, matrix in network.edges:
            self.beside[i].append((j, matrix))
            self.beside[j].append((i, matrix.T))
        most = np.array([usage.max() for usage in memory.usage])
        self.first, self.last = rows(memory.intervals or ((0, 1),) * len(nodes), most, memory.limit)
        self.count = int(self.last.max(initial=0))

    def without_beaten(self, deadline: float) -> tuple[Lives, list[Classes]]:
        """The same without strategies that cost and hold no less than another; and how those left are numbered here."""
        nothing = (None,) * len(self.network.edges)
        problem = stack_rows(self.network, [Row(self.usage, nothing, self.limit)])
        left, numbers = Dominance(problem, deadline).run()
        network = left.priced(np.zeros(1))
        usage = tuple(u[k] for u, k in zip(self.usage, numbers, strict=True))
        return Lives(network, Memory(usage, self.limit, self.intervals)), numbers

    def sums(self, held: Array) -> Array:
        """Per row the sum of what the nodes that live hold."""
        change = np.zeros(self.count + 1)
        np.add.at(change, self.first, held)
        np.add.at(change, self.last, -held)
        return np.cumsum(change)[:-1]

    def held(self, choice: Sequence[int]) -> Array:
        return np.array([usage[s] for usage, s in zip(self.usage, choice, strict=True)])

    def judge(self, choice: Sequence[int]) -> tuple[int, float, float]:
        """(how many tables forbid a choice, what it holds too much over all rows, the cost beside what is forbidden)."""
        network = self.network
        costs = [float(vector[s]) for vector, s in zip(network.nodes, choice, strict=True)]
        costs += [float(matrix[choice[i], choice[j]]) for i, j, matrix in network.edges]
        excess = float(np.maximum(self.sums(self.held(choice)) - self.limit * (1 + 1e-12), 0.0).sum())
        return sum(map(math.isinf, costs)), excess, sum(c for c in costs if not math.isinf(c))

    def weights(self, prices: Array) -> Array:
        """What a unit costs each node in all its rows."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        weights: Array = total[self.last] - total[self.first]
        return weights

    def cost_of(self, node: int, choice: Sequence[int]) -> Array:
        """What each strategy of a node costs beside the choices of the others."""
        total = self.network.nodes[node]
        for other, matrix in self.beside[node]:
            total = total + matrix[:, choice[other]]
        return total

    def excess_of(self, node: int, used: Array, own: float) -> Array:
        """What too much is held over the node's rows by each strategy of it; ``used``: per row, with its ``own``."""
        usage = self.usage[node]
        rest = used[self.first[node] : self.last[node]] - own - self.limit * (1 + 1e-12)
        if not len(rest) or rest.max() + usage.max() <= 0:
            return np.zeros(len(usage))
        levels, where = np.unique(usage, return_inverse=True)
        excess: Array = np.maximum(rest[:, None] + levels, 0.0).sum(axis=0)[where]
        return excess


def rows(intervals: Sequence[tuple[int, int]], most: Array, limit: float) -> tuple[Integers, Integers]:
    """The rows in which every node lives: one for each largest set of nodes that live at once and could be too much."""
    ends = sorted({end for start, end in intervals if start < end})
    starts = sorted({start for start, end in intervals if start < end})
    moments = []
    for start, following in zip(starts, [*starts, np.inf][1:], strict=True):
        if ends[bisect_left(ends, start + 1)] <= following:  # somebody dies before the next is born
            moments.append(start)
    first = np.array([bisect_left(moments, start) for start, _ in intervals], dtype=np.intp)
    last = np.array([bisect_left(moments, max(interval)) for interval in intervals], dtype=np.intp)
    change = np.zeros(len(moments) + 1)
    np.add.at(change, first, most)
    np.add.at(change, last, -most)
    before = np.concatenate([[0], np.cumsum(np.cumsum(change)[:-1] > limit)]).astype(np.intp)
    return before[first], before[last]
