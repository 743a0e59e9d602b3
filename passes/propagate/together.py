"""One search over several graphs that share tensors, such as the two of serving: a prompt, and a token after it.

Their cost networks lie side by side, the seconds of each times how often it runs, and an edge that allows equal layouts
alone joins what has to agree: a parameter in all graphs, a cache where it is given back and where it is taken. So the
solver that proves the plan of one graph proves that of all, and nothing is assumed about which of them matters.
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
"""among a solution's stats: the choices of the other networks"""

Place = tuple[int, str]
"""a graph, 0 for the main one, and a variable of its network"""


@dataclass(frozen=True, eq=False)
class Joined(Prepared):
    """The network of a main graph, its nodes and rows first, with those of others. What is given and found of choices,
    limits and prices is that of the main one; cost and bound are of all."""

    starts: tuple[int, ...] = ()
    """the first node of each graph, and the number of all"""
    own: int = 0
    """rows of the main graph"""
    large: ClassVar[int] = 100_000
    """sooner than of one graph: calls are joined in every layer, so this is no chain, which is eliminated quickly"""

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
    """Has a planner search its graph with those of ``others``: to be its ``prepare``."""

    others: Sequence[tuple[float, Planner]]
    """each with how often it runs for each run of the main graph"""
    same: Sequence[tuple[Place, Place]]
    """variables that have to agree; those that a network does not have are left out"""
    tables: dict[Any, np.ndarray] = field(default_factory=dict)
    """of the edges that join variables, equal ones once"""

    @cached_property
    def built(self) -> list[tuple[Network, Built]]:
        """The networks of the others; memory is not searched for them."""
        return [planner.network(limited=False) for _, planner in self.others]

    def __call__(
        self,
        network: Network,
        costs: CostNetwork,
        rows: tuple[Row, ...],
        alike: Sequence[Hashable | None] | None,
    ) -> Prepared:
        """The main graph's ``network`` with these costs and rows, and the others."""
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
        """What a solution of this search chose for the other graphs."""
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
    """0 where both choose the same; a state's number is its tag's place times choices plus its choice."""
    equal = np.array([[x == y for y in b.choices] for x in a.choices])
    return np.where(np.tile(equal, (rows // len(a.choices), columns // len(b.choices))), 0.0, np.inf)


def _scaled(network: CostNetwork, times: float) -> CostNetwork:
    """With costs so many times as large; what shares a table still does."""
    made: dict[int, Matrix] = {}

    def scaled(table: Matrix) -> Matrix:
        if id(table) not in made:
            made[id(table)] = mapped(lambda x: x * times, table)
        return made[id(table)]

    return CostNetwork(
        tuple(vector * times for vector in network.nodes), tuple((i, j, scaled(t)) for i, j, t in network.edges)
    )


def _moved(row: Row, nodes: int, edges: int, times: float) -> Row:
    """``row`` of a network that has so many nodes and edges before it."""
    return Row((None,) * nodes + row.nodes, (None,) * edges + row.edges, row.limit, times * row.price)


def _filled(row: Row, nodes: int, edges: int) -> Row:
    return replace(
        row,
        nodes=row.nodes + (None,) * (nodes - len(row.nodes)),
        edges=row.edges + (None,) * (edges - len(row.edges)),
    )
