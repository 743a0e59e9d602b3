"""The objective: predicted seconds of a step for one assignment, as the search minimizes it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from autoshard.hardware import Overlap
from autoshard.layout import Layout
from autoshard.passes.ir.assignment import Assignment, Placements, is_whole
from autoshard.passes.ir.known import signature
from autoshard.passes.propagate.edges import conversion_parts, made_again
from autoshard.passes.propagate.exchanges import exchanges
from autoshard.passes.propagate.keep import KeepTables, is_passive
from autoshard.passes.propagate.op_space import internal_collectives, traffic_on
from autoshard.passes.propagate.prices import cost as costs
from autoshard.passes.propagate.prices.bucketed import latency_shares
from autoshard.passes.propagate.prices.joined import joins, saved
from autoshard.passes.propagate.prices.step_time import Parts, movable_values, summed
from autoshard.passes.propagate.prices.travelling import NONE, beside
from autoshard.passes.propagate.prices.waiting import update_seconds, waiting
from autoshard.passes.propagate.prices.zero import stages_of
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.facts import can_redraw


@dataclass(frozen=True)
class Objective:
    """Predicted seconds of one step on the busiest rank."""

    operations: Mapping[str, OpSeconds]
    """per node"""
    conversions: Parts
    """redistributions between definitions and uses"""
    optimizer: float
    overlap: Overlap
    """speed of compute beside movable communication"""
    passes: int = 1
    """micro-batches per step"""
    again: Mapping[str, Parts] = field(default_factory=dict)
    """repeated in the backward: per recomputed node, and per value that is converted again"""

    @cached_property
    def parts(self) -> Parts:
        """Everything but the optimizer."""
        found = [op.parts for op in self.operations.values()]
        return summed((*found, self.conversions, *self.again.values()))

    @property
    def compute_s(self) -> float:
        return self.passes * float(self.parts.compute + self.parts.other) + self.optimizer

    @property
    def comm_s(self) -> float:
        """All communication."""
        return float(self.parts.communication(self.passes))

    @property
    def exposed_s(self) -> float:
        """Exposed communication: what compute does not hide."""
        return float(self.parts.exposed(self.overlap, self.passes))

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s


@dataclass(frozen=True)
class OpSeconds:
    """Seconds of one operation: compute, and collectives inside its local form."""

    compute: costs.Seconds
    inside: costs.Inside

    @property
    def again(self) -> Parts:
        """Seconds to recompute it in the backward."""
        launch = self.compute.launches[0]
        hides, waits, hidden = self.compute.forward - launch, self.inside.again, self.inside.hidden[0]
        return Parts(np.array(hides), np.array(launch), np.array(waits), hidden=np.array(hidden))

    @cached_property
    def parts(self) -> Parts:
        launches = sum(self.compute.launches)
        hides, waits = self.compute.step - launches, self.inside.step
        return Parts(np.array(hides), np.array(launches), np.array(waits), hidden=np.array(sum(self.inside.hidden)))


def objective(assignment: Assignment, optimizer: str = "adamw") -> Objective:
    """The objective of ``assignment``, whether searched or given."""
    graph, mesh = assignment.graph, assignment.mesh
    known: dict[object, OpSeconds] = {}
    touched, waits = traffic_on(graph, mesh), waiting(graph, mesh)
    operations: dict[str, OpSeconds] = {}
    for node in graph.nodes:
        choice = assignment.choices[node.name]
        traffic = touched.get(node.name)
        spares = {i for i, name in enumerate(node.inputs) if is_whole(assignment.source(name).placements)}
        key = (signature(node, graph.types), choice, traffic, *spares)
        if key not in known:
            placed = assignment.placed(node)
            flops = costs.node_flops(node, graph, rule_for(node.op))
            inside = [c for c in internal_collectives(node, graph, mesh, choice, placed) if c.spared not in spares]
            compute = costs.node_seconds(node, graph, mesh, choice, flops, placed, traffic).longer(waits.share)
            known[key] = OpSeconds(compute, costs.inside_seconds(inside, mesh, compute, waits.message))
        operations[node.name] = known[key]
    prices: dict[object, Parts] = {}
    conversions: list[Parts] = []
    movable, stages, shares = movable_values(graph), stages_of(graph, assignment.zero), latency_shares(graph, mesh)
    products = beside(graph, mesh)
    for value, src, dst, first in _conversions(assignment):
        if src == dst:
            continue
        near = products.get(value, NONE) if first else NONE
        case = (graph.types[value], src, dst, stages.get(value), value in movable, shares[value], near)
        if case not in prices:
            prices[case] = conversion_parts(case[0], mesh, (src,), (dst,), *case[3:], graph.passes)[0, 0]
        conversions.append(prices[case])
    conversions += [Parts(blocking=np.array(-x)) for x in _saved_together(assignment)]
    stored = [(graph.types[name], assignment.layouts[name].placements) for name in graph.parameters]
    update = math.fsum(update_seconds(optimizer, type_, placed, graph, mesh) for type_, placed in stored)
    for together in exchanges(graph, mesh, optimizer):
        latency, more = together.on_top(together.chosen(assignment))
        conversions.append(Parts(blocking=np.array(latency)))
        update += more
    again = _again(assignment, operations, movable)
    return Objective(operations, summed(conversions), update, mesh.overlap, graph.passes, again)


def _saved_together(assignment: Assignment) -> Iterator[float]:
    """Seconds saved by looked-up operands that share one message, per reading operation."""
    for node, values in joins(assignment.graph, assignment.mesh):
        read = [(i, name) for i, name in enumerate(node.inputs) if name in values]
        moves = ((n, assignment.source(n).placements, assignment.use(node, i)) for i, n in read)
        yield saved(assignment.graph, assignment.mesh, moves)


def _again(assignment: Assignment, operations: Mapping[str, OpSeconds], movable: frozenset[str]) -> dict[str, Parts]:
    """Seconds of recomputed operations and of redistributions repeated in the backward."""
    graph, mesh = assignment.graph, assignment.mesh
    found: dict[str, Parts] = {}
    prices: dict[object, Parts] = {}
    if not assignment.again and not assignment.shared_again:
        return found

    def convert(value: str, src: Placements, dst: Placements, waits: bool = False) -> None:
        case = graph.types[value], src, dst, value in movable or not waits
        if case not in prices:
            sides = [Layout(mesh, src)], [Layout(mesh, dst)]
            prices[case] = made_again(case[0], *sides, case[-1], latency_shares(graph, mesh).others)[0, 0]
        parts = prices[case]
        found[value] = found[value] + parts if value in found else parts

    for value in assignment.shared_again:
        convert(value, assignment.layouts[value].placements, assignment.shared[value].placements)
    keeps = KeepTables(graph, mesh)
    for node in graph.nodes:
        state = assignment.again.get(node.name, 0)
        if state == 2 or (state == 1 and can_redraw(node)):
            op = operations[node.name]
            found[node.name] = op.again
        if state:
            passive = is_passive(node)
            placed = [assignment.use(node, i) for i in range(len(node.inputs))]
            saves = frozenset() if passive or state == 2 else keeps.chosen(node, assignment)
            needed = (
                n for i, n in enumerate(zip(node.inputs, placed, strict=True)) if state == 2 or passive or i in saves
            )
            for name, uses in dict.fromkeys(needed):
                if name not in graph.parameters:
                    convert(name, assignment.source(name).placements, uses, state == 2)
    return found


def _conversions(assignment: Assignment) -> Iterator[tuple[str, Placements, Placements, bool]]:
    """(value, from, to, is first): definition → shared layout → each reader."""
    for value, found in wanted(assignment).items():
        if value in assignment.shared:
            yield value, assignment.layouts[value].placements, assignment.shared[value].placements, True
        for placed in found:
            yield value, assignment.source(value).placements, placed, value not in assignment.shared


def wanted(assignment: Assignment) -> dict[str, list[Placements]]:
    """Value → layouts read: one per reading operation and layout, output, and write-back."""
    graph = assignment.graph
    found: dict[str, list[Placements]] = {name: [] for name in graph.types}
    for node in graph.nodes:
        for name, placed in dict.fromkeys((n, assignment.use(node, i)) for i, n in enumerate(node.inputs)):
            found[name].append(placed)
    for out, layout in zip(graph.outputs, assignment.outputs, strict=True):
        if layout is not None:
            found[out.name].append(layout.placements)
    for fqn, name in graph.mutations.items():
        found[name].append(assignment.written(fqn).placements)
    return found
