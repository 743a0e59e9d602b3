"""The cheapest assignment of a graph, with and without a limit on what its choices hold."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.hints import Constraint, Limit
from autoshard.passes.propagate.keep import KeepTables
from autoshard.passes.propagate.network import Built, Network
from autoshard.passes.propagate.op_space import AskedOf, OpSpaces
from autoshard.passes.propagate.recompute import Recompute, hinted, offer
from autoshard.passes.search import CostNetwork, Solution, solve

log = logging.getLogger("autoshard.plan")

EFFORT = 0.1
"""of searches under a limit, as a part of what proofs take"""


def propagate(graph: Graph, mesh: Mesh, constraints: Mapping[str, Constraint | Limit]) -> Assignment:
    """The cheapest assignment of ``graph`` on ``mesh`` that satisfies ``constraints``, whatever memory it takes.

    Raises :class:`~autoshard.errors.HintError` from constraints.
    """
    return Planner(graph, mesh, constraints).cheapest()


class Planner:
    """Searches of one graph on one mesh; what they have in common is made once."""

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        constraints: Mapping[str, Constraint | Limit],
        optimizer: str = "adamw",
        asked: Mapping[str, AskedOf] | None = None,
        recompute: Recompute = "none",
        regather: bool = False,
        given: Mapping[str, Layout] | None = None,
        zero: Mapping[str, int] | None = None,
        flying: int = 0,
        effort: float = 1.0,
    ) -> None:
        """``asked``: node name → what its strategies are restricted to, by an expert's plan; ``regather``: see
        :func:`~autoshard.passes.propagate.recompute.offer`; ``given``: layouts of the inputs that come in parts;
        ``zero``: see :attr:`~autoshard.passes.ir.assignment.Assignment.zero`; ``flying``: of a stage of a pipeline, the
        micro-batches that it keeps something for at once; ``effort``: of the search, as a part of what proofs take."""
        self.flying, self.effort = flying, effort
        self.given, self.zero = given or {}, zero or {}
        self.graph, self.mesh, self.constraints, self.optimizer = graph, mesh, constraints, optimizer
        self.spaces, self.keeps = OpSpaces(graph, mesh, asked), KeepTables(graph, mesh)
        recompute = hinted(graph, recompute)
        self.offer = offer(graph, recompute, regather)
        self.plain = not graph.training or (recompute in ("auto", "none") and not regather)
        """whether nothing has to be made again"""
        self.built: dict[bool, tuple[Network, Built]] = {}

    @cached_property
    def keeping(self) -> Planner | None:
        """The same searches where gathered parameters are kept (ZeRO-2) instead of gathered again, which takes less time.

        Only those that nobody asked anything of; None where there are none, and on an ideal network, where bytes only break
        ties and parameters are cut for what they compute alone.
        """
        free = self.graph.parameters - self.constraints.keys()
        if self.zero or self.flying or not (self.graph.training and free and self.mesh.hardware.node.latency):
            return None
        other = copy.copy(self)
        other.zero, other.built = dict.fromkeys(sorted(free), 2), {}
        return other

    def cheapest(self) -> Assignment:
        """The fewest seconds, whatever memory it takes."""
        network, built = self._network(limited=not self.plain)
        return network.assignment(solve(built.network, rows=built.hiding, effort=self.effort))

    def within(self, limit: float, budget: float | None = None) -> tuple[Assignment, float]:
        """The fewest seconds where what the choices hold at the end of the forward is at most ``limit`` bytes per rank, and
        at the end of the backward at most ``budget`` (None: ``limit``); and what they hold at the end of the forward.

        Raises :class:`~autoshard.errors.PlanError` where nothing is that small.
        """
        network, built = self._network(limited=True)
        kept, stays = built.kept
        rows = [*built.hiding, replace(kept, limit=limit), replace(stays, limit=limit if budget is None else budget)]
        found = solve(built.network, rows=rows, effort=min(EFFORT, self.effort))
        return network.assignment(found), _used(built, found)

    def least(self) -> tuple[Assignment, float]:
        """What holds least at the end of the forward; and how much that is."""
        network, built = self._network(limited=True)
        row, seconds = built.kept[0], built.network
        nodes = tuple(_smallest(s, row.nodes[i]) for i, s in enumerate(seconds.nodes))
        edges = tuple((a, b, _smallest(s, row.edges[i])) for i, (a, b, s) in enumerate(seconds.edges))
        found = solve(CostNetwork(nodes, edges))
        found = replace(found, cost=seconds.cost(found.choice), lower_bound=0.0, exact=False)
        return network.assignment(found), _used(built, found)

    def held(self, assignment: Assignment) -> float:
        """Bytes that the choices of ``assignment``, which makes nothing again, hold at the end of the forward."""
        network, built = self._network(limited=True)
        nodes = []
        for (name, variable), seconds in zip(network.variables.items(), built.network.nodes, strict=True):
            allowed = network.states_of(name, variable, assignment)
            only = np.full(len(seconds), np.inf)
            only[allowed] = 0.0
            nodes.append(only)
        forbidden: dict[int, np.ndarray] = {}
        for *_, table in built.network.edges:
            forbidden.setdefault(id(table), np.where(np.isinf(table), np.inf, 0.0))
        edges = tuple((a, b, forbidden[id(table)]) for a, b, table in built.network.edges)
        return _used(built, solve(CostNetwork(tuple(nodes), edges)))

    def _network(self, limited: bool) -> tuple[Network, Built]:
        """The network; ``limited``: with bytes, and with what may be made again."""
        if limited not in self.built:
            what = self.graph, self.mesh, self.constraints, self.spaces, self.keeps
            more = self.optimizer, self.given, self.zero, max(1, self.flying)
            network = Network(*what, self.offer if limited else None, *more)
            built = network.build()
            self.built[limited] = network, built
            states = sum(map(len, built.network.nodes))
            log.info(
                "cost network: %d variables, %d states, %d edges",
                len(built.network.nodes),
                states,
                len(built.network.edges),
            )
        return self.built[limited]


def _used(built: Built, found: Solution) -> float:
    return built.kept[0].used(built.network, found.choice)


def _smallest(seconds: np.ndarray, held: np.ndarray | None) -> np.ndarray:
    """Bytes; of equals the fewest seconds; what is forbidden stays so."""
    return seconds * 1e-3 + (0.0 if held is None else held)
