"""The cheapest assignment of a graph, with and without a limit on what its choices hold."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

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
from autoshard.passes.search import CostNetwork, solve

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
        given: Mapping[str, Layout] | None = None,
    ) -> None:
        """``asked``: node name → what its strategies are restricted to, by an expert's plan. ``given``: layouts of the
        inputs that come in parts."""
        self.given = given or {}
        self.graph, self.mesh, self.constraints, self.optimizer = graph, mesh, constraints, optimizer
        self.spaces, self.keeps = OpSpaces(graph, mesh, asked), KeepTables(graph, mesh)
        self.recompute = recompute = hinted(graph, recompute)
        self.offers = {"none": offer(graph, "none"), "asked": offer(graph, recompute)}
        self.built: dict[str, tuple[Network, Built]] = {}

    @property
    def stages(self) -> tuple[str, ...]:
        """What may be made again: first nothing, where that is left to the search."""
        return ("none", "asked") if self.recompute == "auto" and self.graph.training else ("asked",)

    def cheapest(self) -> Assignment:
        """The fewest seconds, whatever memory it takes."""
        plain = self.recompute in ("auto", "none") or not self.graph.training
        network, built = self._network("" if plain else "asked")
        return network.assignment(solve(built.network, rows=built.hiding))

    def within(self, limit: float, stage: str) -> tuple[Assignment, float]:
        """The fewest seconds where what the choices hold is at most ``limit`` bytes per rank; and what they hold.

        Raises :class:`~autoshard.errors.PlanError` where nothing is that small.
        """
        network, built = self._network(stage)
        rows = [*built.hiding, *(replace(row, limit=limit) for row in built.kept)]
        found = solve(built.network, rows=rows, effort=EFFORT)
        return network.assignment(found), max(row.used(built.network, found.choice) for row in built.kept)

    def least(self, stage: str) -> tuple[Assignment, float]:
        """What holds least at the end of the forward; and how much that is at any time."""
        network, built = self._network(stage)
        row, seconds = built.kept[0], built.network
        nodes = tuple(_smallest(s, row.nodes[i]) for i, s in enumerate(seconds.nodes))
        edges = tuple((a, b, _smallest(s, row.edges[i])) for i, (a, b, s) in enumerate(seconds.edges))
        found = solve(CostNetwork(nodes, edges))
        found = replace(found, cost=seconds.cost(found.choice), lower_bound=0.0, exact=False)
        return network.assignment(found), max(row.used(seconds, found.choice) for row in built.kept)

    def _network(self, stage: str) -> tuple[Network, Built]:
        """The network of a stage; "": without bytes."""
        if stage not in self.built:
            what = self.graph, self.mesh, self.constraints, self.spaces, self.keeps
            network = Network(*what, self.offers.get(stage), self.optimizer, self.given)
            built = network.build()
            self.built[stage] = network, built
            states = sum(map(len, built.network.nodes))
            log.info(
                "cost network: %d variables, %d states, %d edges",
                len(built.network.nodes),
                states,
                len(built.network.edges),
            )
        return self.built[stage]


def _smallest(seconds: np.ndarray, held: np.ndarray | None) -> np.ndarray:
    """Bytes; of equals the fewest seconds; what is forbidden stays so."""
    return seconds * 1e-3 + (0.0 if held is None else held)
