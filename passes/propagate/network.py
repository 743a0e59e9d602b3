"""Choose a layout for every definition and every use: build the cost network of a graph and solve it exactly.

Variables of the network: an op's strategy (one per mesh axis, combined), an input's layout, and for every value with
several readers its *shared* layout, which all readers convert from. So one redistribution serves all readers that want
the same layout, and the network stays pairwise. Costs are seconds: roofline compute of an op on its local shapes,
forward and backward, and the redistribution between the layouts at the two ends of an edge.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.layout import I, Layout, Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment, Placements, Strategy, stated
from autoshard.passes.ir.graph import Graph, Ref, TensorType
from autoshard.passes.propagate import cost as costs
from autoshard.passes.propagate.edges import EdgeTables, readings
from autoshard.passes.propagate.hints import Constraint
from autoshard.passes.propagate.op_space import OpSpaces
from autoshard.passes.search import CostNetwork, Memory, Solution, solve

log = logging.getLogger("autoshard.plan")


def propagate(
    graph: Graph, mesh: Mesh, constraints: Mapping[str, Constraint], memory_budget: float | None = None,
    given: Mapping[str, Layout] | None = None,
) -> Assignment:  # fmt: skip
    """The cheapest assignment of ``graph`` on ``mesh`` that satisfies ``constraints``.

    ``memory_budget``: bytes per rank for parameters, gradients and optimizer state. ``given``: layouts of the inputs
    that come in parts. Raises
    :class:`~autoshard.errors.PlanError` if nothing fits, :class:`~autoshard.errors.HintError` from constraints.
    """
    network = _Network(graph, mesh, constraints, given or {})
    network.build()
    solution = network.solve(memory_budget)
    return network.assignment(solution)


@dataclass
class _Network:
    graph: Graph
    mesh: Mesh
    constraints: Mapping[str, Constraint]
    given: Mapping[str, Layout] = field(default_factory=dict)
    variables: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    """variable → the placements (or choices) its states stand for; names: a value, "node:…", "shared:…", "out:i" """
    seconds: list[np.ndarray] = field(default_factory=list)
    index: dict[str, int] = field(default_factory=dict)
    links: list[tuple[str, Sequence[Placements], str, Sequence[Placements], str, np.ndarray | None]] = field(
        default_factory=list
    )
    """(variable, its placements of the value, other variable, its placements, value, mask or None)"""
    shared_states: dict[Any, tuple[Placements, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spaces = OpSpaces(self.graph, self.mesh)

    def build(self) -> None:
        graph = self.graph
        readers: dict[str, list[tuple[str, Sequence[Placements], np.ndarray | None]]] = {n: [] for n in graph.types}
        for node in graph.nodes:
            space = self.spaces[node]
            self._add(f"node:{node.name}", space.choices, space.seconds)
            for name, placed, mask in readings(node, space):
                readers[name].append((f"node:{node.name}", placed, mask))
        for i, out in enumerate(graph.outputs):
            if isinstance(out, Ref):
                states = self._output_states(out.name)
                self._add(f"out:{i}", states, np.zeros(len(states)))
                readers[out.name].append((f"out:{i}", states, None))
        for fqn, name in graph.mutations.items():
            states = ((R,) * self.mesh.ndim,)
            self._add(f"mutation:{fqn}", states, np.zeros(1))
            readers[name].append((f"mutation:{fqn}", states, None))
        for value in graph.inputs:
            states = self._input_states(value.name, value.kind)
            self._add(value.name, states, np.zeros(len(states)))
            self._connect(value.name, states, value.name, readers[value.name])
        for node in graph.nodes:
            for slot, name in enumerate(node.outputs):
                self._connect(f"node:{node.name}", self.spaces[node].outputs[slot], name, readers[name])

    def _add(self, variable: str, states: Sequence[Any], seconds: np.ndarray) -> None:
        self.index[variable] = len(self.seconds)
        self.variables[variable] = tuple(states)
        self.seconds.append(seconds)

    def _connect(
        self,
        variable: str,
        defined: Sequence[Placements],
        value: str,
        readers: list[tuple[str, Sequence[Placements], np.ndarray | None]],
    ) -> None:
        """Edges from a definition to its readers, through a shared-layout variable where there are several."""
        constraint = self.constraints.get(value)
        by_hint = constraint is not None and value not in self.graph.parameters
        if len(readers) > 1 or by_hint:
            states = self._shared_states(value, defined, readers)
            if by_hint and constraint is not None:
                states = constraint.allowed(states, self.graph.types[value], self.mesh)
            shared = f"shared:{value}"
            self._add(shared, states, np.zeros(len(states)))
            self.links.append((variable, defined, shared, states, value, None))
            variable, defined = shared, states
        for reader, placed, mask in readers:
            self.links.append((variable, defined, reader, placed, value, mask))

    def _shared_states(
        self,
        value: str,
        defined: Sequence[Placements],
        readers: list[tuple[str, Sequence[Placements], np.ndarray | None]],
    ) -> tuple[Placements, ...]:
        key = (self.graph.types[value], id(defined), *(id(placed) for _, placed, _ in readers))
        if key not in self.shared_states:
            union = dict.fromkeys(defined)
            for _, placed, _ in readers:
                union.update(dict.fromkeys(placed))
            if value in self.constraints:
                union.update(dict.fromkeys(_placeable(self.graph.types[value], self.mesh)))
            self.shared_states[key] = tuple(union)
        return self.shared_states[key]

    def _input_states(self, name: str, kind: str) -> tuple[Placements, ...]:
        """An input is given whole on every rank, or as it says; a parameter may be kept in shards."""
        type_ = self.graph.types[name]
        whole = I if type_.grad else R
        if kind != "parameter":
            return (stated(name, self.graph, self.mesh, self.given).placements,)
        states = _placeable(type_, self.mesh, replicated=whole)
        if name in self.constraints:
            states = self.constraints[name].allowed(states, type_, self.mesh, whole)
        return self._canonical(("parameter", type_, self.constraints.get(name)), states)

    def _output_states(self, name: str) -> tuple[Placements, ...]:
        """Scalars come back whole; other outputs keep a layout that can be put together again."""
        type_ = self.graph.types[name]
        whole = I if type_.grad else R
        if not type_.shape:
            return self._canonical(("scalar", type_.grad), ((whole,) * self.mesh.ndim,))
        return self._canonical(("output", type_), _placeable(type_, self.mesh, replicated=whole))

    def _canonical(self, key: Any, states: tuple[Placements, ...]) -> tuple[Placements, ...]:
        """The same tuple object for the same key, so that equal layers give identical tables."""
        return self.shared_states.setdefault(key, states)

    # --- solving ---

    def solve(self, memory_budget: float | None) -> Solution:
        tables = EdgeTables(self.graph, self.mesh)
        for _, a, _, b, value, _ in self.links:
            tables.collect(value, a)
            tables.collect(value, b)
        edges = tuple(
            (self.index[u], self.index[v], tables.table(value, a, b, mask)) for u, a, v, b, value, mask in self.links
        )
        network = CostNetwork(tuple(self.seconds), edges)
        log.info("cost network: %d variables, %d edges", len(self.seconds), len(edges))
        if memory_budget is None:
            return solve(network)
        return solve(network, memory=Memory(self._memory(), memory_budget))

    def _memory(self) -> tuple[np.ndarray, ...]:
        """Bytes per rank that each state of each variable keeps for the whole step."""
        usage = [np.zeros(len(s)) for s in self.seconds]
        for value in self.graph.inputs:
            if value.kind == "parameter":
                type_ = self.graph.types[value.name]
                states = self.variables[value.name]
                usage[self.index[value.name]] = np.array([state_bytes(type_, s, self.mesh) for s in states])
        return tuple(usage)

    def assignment(self, solution: Solution) -> Assignment:
        chosen = {v: states[solution.choice[self.index[v]]] for v, states in self.variables.items()}
        layouts: dict[str, Layout] = {}
        choices: dict[str, tuple[Strategy, ...]] = {}
        for value in self.graph.inputs:
            layouts[value.name] = Layout(self.mesh, chosen[value.name])
        for node in self.graph.nodes:
            space = self.spaces[node]
            state = solution.choice[self.index[f"node:{node.name}"]]
            choices[node.name] = space.choices[state]
            for slot, name in enumerate(node.outputs):
                layouts[name] = Layout(self.mesh, space.outputs[slot][state])
        shared = {v.removeprefix("shared:"): Layout(self.mesh, s) for v, s in chosen.items() if v.startswith("shared:")}
        outputs = tuple(
            Layout(self.mesh, chosen[f"out:{i}"]) if isinstance(out, Ref) else None
            for i, out in enumerate(self.graph.outputs)
        )
        given = frozenset(self.constraints)
        return Assignment(self.graph, self.mesh, layouts, shared, choices, outputs, solution, given)


def state_bytes(type_: TensorType, placements: Placements, mesh: Mesh) -> float:
    """Bytes per rank for a parameter: value, and when trained its gradient and Adam's two float32 moments."""
    numel = costs.local_numel(type_, placements, mesh)
    each = type_.dtype.itemsize
    return numel * (2 * each + 2 * max(4, each) if type_.grad else each)


def _placeable(type_: TensorType, mesh: Mesh, replicated: Placement | None = None) -> tuple[Placements, ...]:
    """Every assignment of shards that leaves each rank a chunk; whole axes are ``replicated`` (None: R and I)."""
    whole: tuple[Placement, ...] = (replicated,) if replicated is not None else (R, I) if type_.grad else (R,)
    per_axis = [
        (*whole, *(Shard(d) for d, n in enumerate(type_.shape) if ranks > 1 and int(n) >= ranks and not type_.unknown))
        for ranks in mesh.shape
    ]
    return tuple(p for p in itertools.product(*per_axis) if _leaves_chunks(type_.shape, p, mesh))


def _leaves_chunks(shape: tuple[int, ...], placements: Placements, mesh: Mesh) -> bool:
    ranks = (
        math.prod(r for p, r in zip(placements, mesh.shape, strict=True) if p == Shard(d)) for d in range(len(shape))
    )
    return all(int(n) >= cut or cut == 1 for n, cut in zip(shape, ranks, strict=True))
