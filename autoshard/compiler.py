"""The pipeline from a captured graph to a plan, a program and source. Reads top to bottom as the recipe."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard import stages
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.codegen.emit import Source, codegen
from autoshard.passes.ir.assignment import canonical
from autoshard.passes.ir.graph import Graph, Symbols
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import noting
from autoshard.passes.ir.verify import check_graph, check_program
from autoshard.passes.lower.blocks import hoisted
from autoshard.passes.lower.bucket import bucket
from autoshard.passes.lower.lowering import lower, narrowed
from autoshard.passes.lower.together import together
from autoshard.passes.propagate.hints import Constraint, resolve
from autoshard.passes.propagate.network import propagate, state_bytes
from autoshard.passes.rules.checks import check_random, check_rules
from autoshard.plans.describe import describe
from autoshard.plans.follow import assignment_of
from autoshard.plans.plan import Plan
from autoshard.progress import stage

log = logging.getLogger("autoshard.plans")


@dataclass(frozen=True)
class Compiled:
    """All stages of one compilation; each prints itself."""

    graph: Graph
    program: Program
    plan: Plan
    source: Source

    @property
    def symbols(self) -> Symbols:
        """The lengths it was not fixed to, and what must hold of them."""
        return self.program.graph.symbols


def build(
    graph: Graph,
    mesh: Mesh,
    *,
    hints: Mapping[str, Any] | None = None,
    memory_budget: float | None = None,
    strict: bool = False,
    plan: Plan | None = None,
    parameters: Mapping[str, Layout] | None = None,
    title: str = "model",
) -> Compiled:
    """Plan, lower and emit ``graph``. ``plan``: use its choices; ``parameters``: layouts that are already fixed."""
    check_graph(graph)
    check_random(graph)
    dump = stages.captured(graph)
    if strict:
        check_rules(graph)
    with noting() as noted:
        if plan is None:
            constraints = resolve(hints, graph, mesh) | _fixed(parameters or {}, graph)
            with stage("planning"):
                assignment = propagate(graph, mesh, constraints, _budget(graph, mesh, memory_budget))
        else:
            assignment = assignment_of(plan, graph, mesh)
        program = bucket(hoisted(together(lower(graph, assignment))))
    program = narrowed(program, noted)
    check_program(program)
    result = Compiled(graph, program, describe(program, title), codegen(program, title))
    stages.compiled(result, dump)
    return result


def _fixed(parameters: Mapping[str, Layout], graph: Graph) -> dict[str, Constraint]:
    """Layouts that an earlier compilation gave the parameters."""
    found = {}
    for value in graph.inputs:
        if value.kind == "parameter" and value.fqn in parameters:
            layout, grad = parameters[value.fqn], graph.types[value.name].grad
            placements = (canonical(p, grad) for p in layout.placements)  # I and R differ in the gradient
            axes = tuple(zip(layout.mesh.axes, placements, strict=True))
            found[value.name] = Constraint(value.fqn, value.fqn, axes)
    return found


def _budget(graph: Graph, mesh: Mesh, memory_budget: float | None) -> float | None:
    """Bytes per rank for parameters and optimizer state; None where even whole copies fit."""
    budget = memory_budget if memory_budget is not None else 0.8 * mesh.hardware.memory_bytes
    whole = (canonical(Layout(mesh).placements[0], True),) * mesh.ndim
    needed = sum(state_bytes(graph.types[i.name], whole, mesh) for i in graph.inputs if i.kind == "parameter")
    return budget if needed > budget else None
