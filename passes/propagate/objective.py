"""What an assignment costs: the sum that the search minimises, evaluated on one choice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from autoshard.layout import R
from autoshard.passes.ir.assignment import Assignment, Placements
from autoshard.passes.propagate import cost as costs
from autoshard.passes.propagate.edges import conversion_seconds
from autoshard.passes.propagate.op_space import internal_collectives, signature
from autoshard.passes.rules import rule_for


@dataclass(frozen=True)
class Objective:
    """Seconds of one step on the busiest rank."""

    compute: Mapping[str, float]
    """per node"""
    internal: float
    """collectives inside the ops' local forms"""
    conversions: float
    """between the layouts of definitions and uses"""

    @property
    def compute_s(self) -> float:
        return sum(self.compute.values())

    @property
    def comm_s(self) -> float:
        return self.internal + self.conversions


def objective(assignment: Assignment) -> Objective:
    """The objective of the search on ``assignment``, whether it was searched for or given."""
    graph, mesh = assignment.graph, assignment.mesh
    ops: dict[object, tuple[float, float]] = {}
    compute: dict[str, float] = {}
    internal = 0.0
    for node in graph.nodes:
        choice = assignment.choices[node.name]
        key = (signature(node, graph), choice)
        if key not in ops:
            placed = (
                *(assignment.use(node, i) for i in range(len(node.inputs))),
                *(assignment.made(node, i) for i in range(len(node.outputs))),
            )
            flops = costs.node_flops(node, graph, rule_for(node.op))
            inside = internal_collectives(node, graph, mesh, choice, placed)
            ops[key] = (
                costs.node_seconds(node, graph, mesh, choice, flops, placed),
                sum(costs.internal_cost(c, mesh)[1] for c in inside),
            )
        compute[node.name], sent = ops[key]
        internal += sent
    prices: dict[object, float] = {}
    conversions = 0.0
    for value, src, dst in _conversions(assignment):
        if src == dst:
            continue
        parameter = value in graph.parameters
        case = (graph.types[value], src, dst, parameter)
        if case not in prices:
            prices[case] = float(conversion_seconds(graph.types[value], mesh, (src,), (dst,), parameter)[0, 0])
        conversions += prices[case]
    return Objective(compute, internal, conversions)


def _conversions(assignment: Assignment) -> Iterator[tuple[str, Placements, Placements]]:
    """(value, from, to): definition → shared layout, and from there to each reader."""
    for value, found in wanted(assignment).items():
        if value in assignment.shared:
            yield value, assignment.layouts[value].placements, assignment.shared[value].placements
        for placed in found:
            yield value, assignment.source(value).placements, placed


def wanted(assignment: Assignment) -> dict[str, list[Placements]]:
    """Value → the layouts asked of it: one per reading operation and layout, per output, per value written back."""
    graph = assignment.graph
    found: dict[str, list[Placements]] = {name: [] for name in graph.types}
    for node in graph.nodes:
        for name, placed in dict.fromkeys((n, assignment.use(node, i)) for i, n in enumerate(node.inputs)):
            found[name].append(placed)
    for out, layout in zip(graph.outputs, assignment.outputs, strict=True):
        if layout is not None:
            found[out.name].append(layout.placements)
    for name in graph.mutations.values():
        found[name].append((R,) * assignment.mesh.ndim)
    return found
