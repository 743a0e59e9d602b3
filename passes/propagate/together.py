"""Joint search over several graphs that share tensors, such as prefill and decode of serving.

Their cost networks lie side by side, seconds weighted by how often each graph runs. Edges that
allow only equal layouts tie a parameter in all graphs, and a KV cache where it is returned and
taken. So the solver proves the plan of all graphs at once.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.propagate.chosen import assigned
from autoshard.passes.propagate.network import Built, Network, Variable
from autoshard.passes.propagate.planner import Planner
from autoshard.passes.search import CostNetwork, Prepared, Row, Solution
from autoshard.passes.search.folded import Matrix, mapped
from autoshard.passes.search.network import FULL, Array, Effort

BESIDE = "beside"
"""key in a solution's stats: choices of the other networks"""

Place = tuple[int, str]
"""(graph number, 0 for the main one; variable of its network)"""


@dataclass(frozen=True, eq=False)
class Joined(Prepared):
    """Networks of several graphs, the main graph's nodes and rows first. Choices, limits and prices
    are of the main graph; cost and bound of all."""

    starts: tuple[int, ...] = ()
    """the first node of each graph, and the number of all"""
    own: int = 0
    """rows of the main graph"""
    large: ClassVar[int] = 100_000
    """lower than for one graph: calls are tied in every layer, so elimination is slower"""

    def restricted(self, nodes: tuple[Array, ...]) -> Prepared:
        """See :meth:`Prepared.restricted`."""
        return super().restricted((*nodes, *self.network.nodes[len(nodes) :]))

    def solve(
        self,
        limits: Sequence[float] | None = None,
        effort: Effort = FULL,
        time_limit: float = math.inf,
        prices: Sequence[float] | None = None,
    ) -> Solution:
        """See :meth:`Prepared.solve`."""
        if limits is not None:
            limits = (*limits, *(row.limit for row in self.rows[self.own :]))
        if prices is not None:
            prices = (*prices, *(0.0,) * (len(self.rows) - len(prices)))
        found = super().solve(limits, effort, time_limit, prices)
        main, *beside = (found.choice[a:b] for a, b in pairwise(self.starts))
        return replace(found, choice=main, prices=found.prices[: self.own], stats={**found.stats, BESIDE: beside})


@dataclass
class Together:
    """A planner's ``prepare`` that adds the networks of ``others`` to its search."""

    others: Sequence[tuple[float, Planner]]
    """(runs per run of the main graph, planner)"""
    same: Sequence[tuple[Place, Place]]
    """variables to tie; missing ones are skipped"""
    tables: dict[Any, np.ndarray] = field(default_factory=dict)
    """equality tables, interned"""

    @cached_property
    def built(self) -> list[tuple[Network, Built]]:
        """Networks of the other graphs; memory is not searched for them."""
        return [planner.network(limited=False) for _, planner in self.others]

    def __call__(
        self,
        network: Network,
        costs: CostNetwork,
        rows: tuple[Row, ...],
        alike: Sequence[Hashable | None] | None,
    ) -> Prepared:
        """The joint network: the main ``network`` with its costs and rows, and the others."""
        nodes, edges, starts = list(costs.nodes), list(costs.edges), [0]
        labels: list[Hashable | None] = list(alike or [None] * len(nodes))
        more: list[Row] = []
        for number, ((times, _), (_, built)) in enumerate(zip(self.others, self.built, strict=True), 1):
            scaled, start, first = _scaled(built.network, times), len(nodes), len(edges)
            nodes += scaled.nodes
            edges += [(start + i, start + j, table) for i, j, table in scaled.edges]
            more += [_moved(row, start, first, times) for row in built.hiding]
            labels += [None if x is None else (number, x) for x in built.alike]
            starts.append(start)
        edges += self._joins([network, *(found for found, _ in self.built)], starts, nodes)
        joined = CostNetwork(tuple(nodes), tuple(edges))
        padded = tuple(_filled(row, len(nodes), len(edges)) for row in (*rows, *more))
        return Joined(joined, padded, labels, starts=(*starts, len(nodes)), own=len(rows))

    def beside(self, found: Solution) -> list[Assignment]:
        """The assignments of the other graphs in a solution of this search."""
        sides = zip(self.built, found.stats[BESIDE], strict=True)
        return [assigned(network, replace(found, choice=own)) for (network, _), own in sides]

    def _joins(
        self, known: Sequence[Network], starts: Sequence[int], nodes: Sequence[np.ndarray]
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        numbers = [{name: i for i, name in enumerate(found.variables)} for found in known]
        for (a, first), (b, second) in self.same:
            if first not in numbers[a] or second not in numbers[b]:
                continue
            sides = starts[a] + numbers[a][first], starts[b] + numbers[b][second]
            states = known[a].variables[first], known[b].variables[second]
            key = tuple((x.choices, len(nodes[i])) for i, x in zip(sides, states, strict=True))
            if key not in self.tables:
                self.tables[key] = _equal(*states, *(len(nodes[i]) for i in sides))
            yield (*sides, self.tables[key])


def _equal(a: Variable, b: Variable, rows: int, columns: int) -> np.ndarray:
    """0 where choices are equal, else inf; state number = place of tag × choices + choice."""
    equal = np.array([[x == y for y in b.choices] for x in a.choices])
    return np.where(np.tile(equal, (rows // len(a.choices), columns // len(b.choices))), 0.0, np.inf)


def _scaled(network: CostNetwork, times: float) -> CostNetwork:
    """``network`` with costs times ``times``; shared tables stay shared."""
    made: dict[int, Matrix] = {}

    def scaled(table: Matrix) -> Matrix:
        if id(table) not in made:
            made[id(table)] = mapped(lambda x: x * times, table)
        return made[id(table)]

    return CostNetwork(
        tuple(vector * times for vector in network.nodes), tuple((i, j, scaled(t)) for i, j, t in network.edges)
    )


def _moved(row: Row, nodes: int, edges: int, times: float) -> Row:
    """``row`` padded in front by ``nodes`` and ``edges`` of earlier networks."""
    return Row((None,) * nodes + row.nodes, (None,) * edges + row.edges, row.limit, times * row.price)


def _filled(row: Row, nodes: int, edges: int) -> Row:
    return replace(
        row,
        nodes=row.nodes + (None,) * (nodes - len(row.nodes)),
        edges=row.edges + (None,) * (edges - len(row.edges)),
    )
