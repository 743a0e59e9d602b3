"""The search problem under liveness: a memory limit at each moment, and propagation of that limit.

Source: Mackworth, Consistency in networks of relations (1977); Savelsbergh, Preprocessing and probing techniques for mixed
integer programming problems (1994)."""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import PlanError
from autoshard.passes.search.arrays import Classes
from autoshard.passes.search.network import Array, CostNetwork, LinearRow
from autoshard.passes.search.rows.lagrangian import Dominance
from autoshard.passes.search.rows.stacked import stack_rows

Integers = NDArray[np.intp]

# Tolerated relative excess: rounding of the sum.
SLACK = 1e-12


@dataclass(frozen=True)
class Memory:
    """A memory limit in bytes. ``usage[i]``: float64 [n_i], bytes of node i's strategies.

    ``intervals[i]`` = [start, end): node i's liveness; the limit holds at every time.
    """

    usage: tuple[Array, ...]
    limit: float
    intervals: tuple[tuple[int, int], ...]


class LivenessProblem:
    """Rows are the moments that can bind; node i is live in rows first[i] ≤ r < last[i].

    Nodes live in row r hold at most ``room[r]``. Rows with room for every choice are dropped.
    """

    def __init__(
        self, network: CostNetwork, usage: Sequence[Array], first: Integers, last: Integers, room: Array
    ) -> None:
        most = np.array([u.max() for u in usage])
        self.network = network
        self.first, self.last, self.room, self._rows = _binding_rows(most, first, last, room)
        self.count = len(self.room)
        alive = (self.first < self.last).tolist()
        self.usage = tuple(u if lives else np.zeros(len(u)) for u, lives in zip(usage, alive, strict=True))
        self.beside: list[list[tuple[int, Array]]] = [[] for _ in usage]
        """edges per node: (other node, costs [own strategy, other strategy])"""
        for i, j, matrix in network.matrices:
            self.beside[i].append((j, matrix))
            self.beside[j].append((i, matrix.T))

    @classmethod
    def of(cls, network: CostNetwork, memory: Memory) -> LivenessProblem:
        nodes = network.nodes
        if len(memory.usage) != len(nodes) or any(u.shape != v.shape for u, v in zip(memory.usage, nodes, strict=True)):
            raise PlanError("memory: usage needs one vector per node, as long as the node's costs")
        if memory.limit <= 0:
            raise PlanError(f"memory: the limit must be positive, got {memory.limit}")
        first, last, count = liveness_rows(memory.intervals)
        return cls(network, memory.usage, first, last, np.full(count, memory.limit * (1 + SLACK)))

    @property
    def limit(self) -> float:
        """The memory limit."""
        return self.scale / (1 + SLACK)

    @property
    def scale(self) -> float:
        """Largest room of a row."""
        return float(self.room.max(initial=1e-300))

    @cached_property
    def supports(self) -> list[list[tuple[int, NDArray[np.bool_]]]]:
        """Edges per node that forbid pairs: (other node, allowed [own, other strategy])."""
        found: list[list[tuple[int, NDArray[np.bool_]]]] = [[] for _ in self.usage]
        known: dict[int, NDArray[np.bool_] | None] = {}
        for i, j, matrix in self.network.matrices:
            if id(matrix) not in known:
                allowed = np.isfinite(matrix)
                known[id(matrix)] = None if allowed.all() else allowed
            table = known[id(matrix)]
            if table is not None:
                found[i].append((j, table))
                found[j].append((i, table.T))
        return found

    def without_beaten(self) -> tuple[LivenessProblem, list[Classes]]:
        """Without strategies dominated in cost and memory; and the original numbers of the rest."""
        nothing = (None,) * len(self.network.matrices)
        problem = stack_rows(self.network, [LinearRow(self.usage, nothing, self.scale)])
        left, numbers = Dominance(problem).run()
        usage = [u[k] for u, k in zip(self.usage, numbers, strict=True)]
        return LivenessProblem(left.priced(np.zeros(1)), usage, self.first, self.last, self.room), numbers

    def restricted(self, kept: Sequence[Classes]) -> LivenessProblem:
        """Only the ``kept`` strategies of every node, renumbered."""
        nodes = tuple(costs[k] for costs, k in zip(self.network.nodes, kept, strict=True))
        usage = [u[k] for u, k in zip(self.usage, kept, strict=True)]
        return LivenessProblem(CostNetwork(nodes, self.cut(kept)), usage, self.first, self.last, self.room)

    def cut(self, kept: Sequence[Classes]) -> tuple[tuple[int, int, Array], ...]:
        """The edges of the ``kept`` strategies; shared arrays stay shared."""
        made: dict[tuple[int, bytes, bytes], Array] = {}
        keys = [k.tobytes() for k in kept]
        edges = []
        for i, j, matrix in self.network.matrices:
            key = id(matrix), keys[i], keys[j]
            if key not in made:
                whole = matrix.shape == (len(kept[i]), len(kept[j]))
                made[key] = matrix if whole else matrix[np.ix_(kept[i], kept[j])]
            edges.append((i, j, made[key]))
        return tuple(edges)

    def part(self, nodes: Sequence[int], choice: Sequence[int], used: Array, spare: bool = False) -> LivenessProblem:
        """The subproblem of ``nodes``; others keep ``choice``, which holds ``used`` [rows].

        ``spare``: exceeded rows may stay so, but not worsen.
        """
        numbers = {node: k for k, node in enumerate(nodes)}
        costs, edges = [], []
        room = self.room - used
        room = np.maximum(room, 0.0) if spare else room
        for node, k in numbers.items():
            total = self.network.nodes[node]
            for other, matrix in self.beside[node]:
                if other not in numbers:
                    total = total + matrix[:, choice[other]]
                elif other > node:
                    edges.append((k, numbers[other], matrix))
            costs.append(total)
            room[self.first[node] : self.last[node]] += self.usage[node][choice[node]]
        index = np.array(nodes, dtype=np.intp)
        usage = [self.usage[node] for node in nodes]
        return LivenessProblem(
            CostNetwork(tuple(costs), tuple(edges)), usage, self.first[index], self.last[index], room
        )

    def sums(self, held: Array) -> Array:
        """Bytes held per row."""
        change = np.zeros(self.count + 1)
        np.add.at(change, self.first, held)
        np.add.at(change, self.last, -held)
        return np.cumsum(change)[:-1]

    def held(self, choice: Sequence[int]) -> Array:
        return np.array([usage[s] for usage, s in zip(self.usage, choice, strict=True)])

    def judge(self, choice: Sequence[int]) -> tuple[int, float, float]:
        """(tables that forbid a choice, total excess over rows, cost without forbidden entries)."""
        network = self.network
        costs = np.array(
            [vector[s] for vector, s in zip(network.nodes, choice, strict=True)]
            + [matrix[choice[i], choice[j]] for i, j, matrix in network.matrices]
        )
        excess = float(np.maximum(self.sums(self.held(choice)) - self.room, 0.0).sum())
        never = np.isinf(costs)
        return int(never.sum()), excess, float(costs[~never].sum())

    def touched(self, nodes: Collection[int], choice: Sequence[int]) -> tuple[int, float]:
        """Of the tables of ``nodes``: (forbidding tables, cost without forbidden entries)."""
        costs = [float(self.network.nodes[node][choice[node]]) for node in nodes]
        for node in nodes:
            for other, matrix in self.beside[node]:
                if other not in nodes or other < node:
                    costs.append(float(matrix[choice[node], choice[other]]))
        return sum(map(math.isinf, costs)), sum(c for c in costs if not math.isinf(c))

    def weights(self, prices: Array) -> Array:
        """Price of a byte of each node, over all its rows."""
        total = np.concatenate([[0.0], np.cumsum(prices)])
        weights: Array = total[self.last] - total[self.first]
        return weights

    def gathered(self, prices: Array) -> Array:
        """Prices of the original rows as prices of these rows."""
        rows, begins = self._rows
        return np.add.reduceat(prices[rows], begins) if len(rows) else np.zeros(0)

    def cost_of(self, node: int, choice: Sequence[int]) -> Array:
        """Costs of a node's strategies given the others' choices."""
        total = self.network.nodes[node]
        for other, matrix in self.beside[node]:
            total = total + matrix[:, choice[other]]
        return total

    def excess_of(self, node: int, used: Array, own: float) -> Array:
        """Excess over a node's rows per strategy; ``used``: per row, including its ``own``."""
        usage, alive = self.usage[node], slice(self.first[node], self.last[node])
        rest = used[alive] - own - self.room[alive]
        if not len(rest) or rest.max() + usage.max() <= 0:
            return np.zeros(len(usage))
        levels, where = np.unique(usage, return_inverse=True)
        excess: Array = np.maximum(rest[:, None] + levels, 0.0).sum(axis=0)[where]
        return excess


def liveness_rows(intervals: Sequence[tuple[int, int]]) -> tuple[Integers, Integers, int]:
    """A row per maximal set of nodes live at once: (first, last, number of rows)."""
    ends = sorted({end for start, end in intervals if start < end})
    starts = sorted({start for start, end in intervals if start < end})
    moments = []
    for start, following in zip(starts, [*starts, np.inf][1:], strict=True):
        if ends[bisect_left(ends, start + 1)] <= following:  # a node dies before the next is born
            moments.append(start)
    first = np.array([bisect_left(moments, start) for start, _ in intervals], dtype=np.intp)
    last = np.array([bisect_left(moments, max(interval)) for interval in intervals], dtype=np.intp)
    return first, last, len(moments)


def _binding_rows(
    most: Array, first: Integers, last: Integers, room: Array
) -> tuple[Integers, Integers, Array, tuple[Integers, Integers]]:
    """Rows that ``most`` per node can exceed; of rows with equal nodes the tightest. Last: (these
    rows, where among them rows of equal nodes begin)."""
    change = np.zeros(len(room) + 1)
    np.add.at(change, first, most)
    np.add.at(change, last, -most)
    sums = np.cumsum(change)[:-1]
    tight = np.flatnonzero(sums * (1 + SLACK) > room)
    first, last = np.searchsorted(tight, first), np.searchsorted(tight, last)
    room = room[tight]
    borders = np.unique(np.concatenate([first, last, [0, len(room)]]))
    if len(room):
        room = np.minimum.reduceat(room, borders[:-1])
    return np.searchsorted(borders, first), np.searchsorted(borders, last), room, (tight, borders[:-1])


# Visits between clock reads.
OFTEN = 64


@dataclass(frozen=True)
class Domains:
    """``kept``: remaining strategies per node; ``least``, ``most``: the bytes that they hold."""

    kept: tuple[Classes, ...]
    least: Array
    most: Array

    @classmethod
    def of(cls, lives: LivenessProblem, deadline: float) -> Domains | None:
        """Without infeasible strategies. None: nothing is feasible."""
        every = tuple(np.arange(len(costs)) for costs in lives.network.nodes)
        zeros = np.zeros(len(every))
        allowed = {node: np.flatnonzero(np.isfinite(costs)) for node, costs in enumerate(lives.network.nodes)}
        return cls(every, zeros, zeros).narrowed(lives, allowed, deadline)

    def narrowed(self, lives: LivenessProblem, parts: Mapping[int, Classes], deadline: float) -> Domains | None:
        """Only ``parts`` of some nodes' strategies, propagated. None: nothing is feasible.

        Propagation stops at ``deadline``.
        """
        work = _Narrowing(lives, self)
        if not all(work.keep(node, part) for node, part in parts.items()):
            return None
        while work.waiting:
            if not work.supported(deadline) or not work.fit():
                return None
            if time.perf_counter() > deadline:
                break
        return Domains(tuple(work.kept), work.least, work.most)


class _Narrowing:
    def __init__(self, lives: LivenessProblem, domains: Domains) -> None:
        self.lives = lives
        self.kept = list(domains.kept)
        self.least, self.most = domains.least.copy(), domains.most.copy()
        self.waiting: set[int] = set()
        """nodes that lost strategies lately"""

    def keep(self, node: int, part: Classes) -> bool:
        """Keep only a part; returns whether there is one."""
        self.kept[node] = part
        if len(part):
            usage = self.lives.usage[node][part]
            self.least[node], self.most[node] = usage.min(), usage.max()
        self.waiting.add(node)
        return len(part) > 0

    def supported(self, deadline: float) -> bool:
        """Arc consistency: drop unsupported strategies; returns whether each node has some left."""
        visits = 0
        while self.waiting:
            beside = {other for node in self.waiting for other, _ in self.lives.supports[node]}
            self.waiting = set()
            for node in sorted(beside):
                visits += 1
                if visits % OFTEN == 0 and time.perf_counter() > deadline:
                    return True
                own = self.kept[node]
                stay = np.ones(len(own), dtype=bool)
                for other, allowed in self.lives.supports[node]:
                    theirs = self.kept[other]
                    if len(theirs) == 1:
                        stay &= allowed[own, theirs[0]]
                    else:
                        stay &= allowed[np.ix_(own, theirs)].any(axis=1)
                if not stay.all() and not self.keep(node, own[stay]):
                    return False
        return True

    def fit(self) -> bool:
        """Drop strategies that exceed the limit given the others' least; False: so does the
        least."""
        lives = self.lives
        if not lives.count:
            return True
        spare = SLACK * lives.scale
        room = lives.room - lives.sums(self.least) + spare
        if (room < 0).any():
            return False
        left = least_between(room, lives.first, lives.last)
        for node in np.flatnonzero(self.most - self.least > left).tolist():
            part = self.kept[node]
            self.keep(node, part[lives.usage[node][part] - self.least[node] <= left[node]])
        return True


def least_between(values: Array, first: Integers, last: Integers) -> Array:
    """min of values[first : last] per pair; infinite if empty."""
    found = np.full(len(first), np.inf)
    lengths, step, least = last - first, 1, values
    while step <= len(values):
        among = (step <= lengths) & (lengths < 2 * step)  # covered by two windows of this length
        found[among] = np.minimum(least[first[among]], least[last[among] - step])
        least = np.minimum(least[: len(least) - step], least[step:]) if len(least) > step else least[:0]
        step *= 2
    return found
