"""One search over several graphs that share tensors, such as the two of serving: a prompt, and a token after it.

Their cost networks lie side by side, the seconds of each times how often it runs, and an edge that allows equal layouts
alone joins what has to agree: a parameter in all graphs, a cache where it is given back and where it is taken. So the
solver that proves the plan of one graph proves that of all, and nothing is assumed about which of them matters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.propagate.network import Network, Variable
from autoshard.passes.propagate.planner import Planner
from autoshard.passes.search import CostNetwork, Row, Solution, solve

BESIDE = "beside"
"""among a solution's stats: the choices of the other networks"""

Place = tuple[int, str]
"""a graph, 0 for the main one, and a variable of its network"""


@dataclass
class Together:
    """The search of a main graph's network with those of ``others``. To be a planner's ``search``."""

    main: Planner
    others: Sequence[tuple[float, Planner]]
    """each with how often it runs for each run of the main graph"""
    same: Sequence[tuple[Place, Place]]
    """variables that have to agree; those that a network does not have are left out"""
    tables: dict[Any, np.ndarray] = field(default_factory=dict)
    """of the edges that join variables, equal ones once"""

    def __call__(
        self,
        network: CostNetwork,
        *,
        rows: Sequence[Row] = (),
        alike: Sequence[Hashable | None] = (),
        prices: Sequence[float] | None = None,
        **options: Any,
    ) -> Solution:
        """As :func:`~autoshard.passes.search.solve`. Cost and bound are of all graphs, the choices those of the main one."""
        nodes, edges, known = list(network.nodes), list(network.edges), [self._main(network)]
        starts, labels = [0], list(alike)
        more: list[Row] = []
        for number, (times, planner) in enumerate(self.others, 1):
            own, built = planner.network(limited=False)
            scaled = _scaled(built.network, times)
            start, first = len(nodes), len(edges)
            nodes += scaled.nodes
            edges += [(start + i, start + j, table) for i, j, table in scaled.edges]
            more += [_moved(row, start, first, times) for row in built.hiding]
            labels += [None if x is None else (number, x) for x in built.alike]
            starts.append(start)
            known.append(own)
        edges += self._joins(known, starts, nodes)
        joined = CostNetwork(tuple(nodes), tuple(edges))
        padded = [_filled(row, len(nodes), len(edges)) for row in (*rows, *more)]
        begin = None if prices is None else (*prices, *(0.0,) * (len(padded) - len(prices)))
        found = solve(joined, rows=padded, alike=labels, prices=begin, **options)
        beside = tuple(found.choice[a:b] for a, b in pairwise((*starts[1:], len(nodes))))
        main, stats = found.choice[: len(network.nodes)], {**found.stats, BESIDE: beside}
        return replace(found, choice=main, prices=found.prices[: len(rows)], stats=stats)

    def beside(self, found: Solution) -> list[Assignment]:
        """What a solution of this search chose for the other graphs."""
        sides = zip(self.others, found.stats[BESIDE], strict=True)
        return [p.network(limited=False)[0].assignment(replace(found, choice=own)) for (_, p), own in sides]

    def _main(self, network: CostNetwork) -> Network:
        """What the main graph's network is made of: of those with or without bytes the one that is searched."""
        made = (found for found, built in self.main.built.values() if len(built.network.nodes) == len(network.nodes))
        return next(found for found in made if _sizes(found) == [len(n) for n in network.nodes])

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


def _sizes(network: Network) -> list[int]:
    return [len(v.choices) * len(v.tags) for v in network.variables.values()]


def _equal(a: Variable, b: Variable, rows: int, columns: int) -> np.ndarray:
    """0 where both choose the same; a state's number is its tag's place times choices plus its choice."""
    equal = np.array([[x == y for y in b.choices] for x in a.choices])
    return np.where(np.tile(equal, (rows // len(a.choices), columns // len(b.choices))), 0.0, np.inf)


def _scaled(network: CostNetwork, times: float) -> CostNetwork:
    """With costs so many times as large; what shares a table still does."""
    made: dict[int, np.ndarray] = {}

    def scaled(table: np.ndarray) -> np.ndarray:
        if id(table) not in made:
            made[id(table)] = table * times
        return made[id(table)]

    return CostNetwork(tuple(map(scaled, network.nodes)), tuple((i, j, scaled(t)) for i, j, t in network.edges))


def _moved(row: Row, nodes: int, edges: int, times: float) -> Row:
    """``row`` of a network that has so many nodes and edges before it."""
    return Row((None,) * nodes + row.nodes, (None,) * edges + row.edges, row.limit, times * row.price)


def _filled(row: Row, nodes: int, edges: int) -> Row:
    return replace(
        row,
        nodes=row.nodes + (None,) * (nodes - len(row.nodes)),
        edges=row.edges + (None,) * (edges - len(row.edges)),
    )
