"""The recipe: from a model to a graph, an assignment of layouts, a program, a plan and source. Reads top to bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from autoshard import stages
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.capture import capture
from autoshard.passes.capture.exported.lengths import Dynamic
from autoshard.passes.codegen import Source, codegen
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph, Symbols
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import noting
from autoshard.passes.ir.verify import check_graph, check_program
from autoshard.passes.lower.blocks import hoisted
from autoshard.passes.lower.bucket import bucket
from autoshard.passes.lower.lowering import lower, narrowed
from autoshard.passes.lower.together import together
from autoshard.passes.propagate import propagate
from autoshard.passes.propagate.budget import binding
from autoshard.passes.propagate.hints import fixed, resolve
from autoshard.passes.rules.checks import check_random, check_rules
from autoshard.plans.describe import describe
from autoshard.plans.follow import assignment_of
from autoshard.plans.plan import Plan
from autoshard.progress import stage
from autoshard.runtime.autocast import without_autocast


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


@dataclass(frozen=True)
class Wishes:
    """What is asked of a plan beside the model and the mesh; see :func:`autoshard.compile`."""

    hints: Mapping[str, Any] | None = None
    memory_budget: float | None = None
    strict: bool = False
    plan: Plan | None = None
    """choices to follow instead of a search"""
    parameters: Mapping[str, Layout] | None = None
    """layouts that an earlier compilation gave the parameters"""
    inputs: tuple[Layout | None, ...] = ()
    """per leaf of the arguments the layout it comes in; None, or nothing: whole"""


def compiled(
    model: nn.Module,
    mesh: Mesh,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wishes: Wishes,
    *,
    training: bool | None = None,
    dynamic: Dynamic = False,
    title: str = "",
) -> Compiled:
    """``model`` compiled for arguments like these. ``training``, ``dynamic``: see :func:`capture`.

    Raises subclasses of :class:`~autoshard.errors.AutoshardError`; the model is left as it was.
    """
    graph = captured(model, args, kwargs, training=training, dynamic=dynamic)
    return build(graph, mesh, wishes, title=title or type(model).__name__)


def captured(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any) -> Graph:
    """The first stage. ``options``: see :func:`capture`."""
    with stage("capture"):
        return capture(model, args, kwargs, **options)


@without_autocast()  # its casts are in the graph
def build(graph: Graph, mesh: Mesh, wishes: Wishes | None = None, *, title: str = "model") -> Compiled:
    """The stages after capture. ``title`` names the model in plans and source."""
    wishes = wishes or Wishes()
    check_graph(graph)
    check_random(graph)
    if wishes.strict:
        check_rules(graph)
    dump = stages.captured(graph)

    with noting() as decided:  # what is decided about open lengths as in the example holds for the program
        assignment = _assignment(graph, mesh, wishes)
        program = lower(graph, assignment)
        program = together(program)
        program = hoisted(program)
        program = bucket(program)
    program = narrowed(program, decided)
    check_program(program)

    plan = describe(program, title)
    source = codegen(program, title)
    stages.compiled(plan, program, source.text, dump)
    return Compiled(graph, program, plan, source)


def _assignment(graph: Graph, mesh: Mesh, wishes: Wishes) -> Assignment:
    """The choices of a plan that is given, else the cheapest that hints, fixed parameters and memory allow."""
    given = {n: x for n, x in zip(graph.flat_inputs, wishes.inputs, strict=False) if n is not None and x is not None}
    if wishes.plan is not None:
        return assignment_of(wishes.plan, graph, mesh, given)
    constraints = resolve(wishes.hints, graph, mesh) | fixed(wishes.parameters or {}, graph)
    with stage("planning"):
        return propagate(graph, mesh, constraints, binding(wishes.memory_budget, graph, mesh), given)
