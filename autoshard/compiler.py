"""The compiler, top to bottom: model → graph → layouts → program, plan, source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from autoshard import stages
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.capture import capture
from autoshard.passes.capture.exported.lengths import Dynamic
from autoshard.passes.codegen import codegen
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.memory import Memory
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import noting
from autoshard.passes.ir.verify import check_graph, check_program
from autoshard.passes.lower.lowering import narrowed
from autoshard.passes.memory import fitting, tried
from autoshard.passes.microbatch import MicroBatches, in_parts
from autoshard.passes.propagate.experts import Expert, asked_by, beside, like_of, met, usual
from autoshard.passes.propagate.hints import comes_in, fixed, goes_out, held, in_time, resolve
from autoshard.passes.propagate.planner import Planner
from autoshard.passes.rules.checks import check_random, check_rules
from autoshard.plans.compiled import Compiled
from autoshard.plans.describe import describe
from autoshard.plans.follow import assignment_of, check_asked
from autoshard.plans.orders import in_cheaper_order
from autoshard.plans.plan import Plan
from autoshard.plans.stages import in_stages
from autoshard.plans.wishes import Wishes
from autoshard.progress import seldom_collected, stage
from autoshard.runtime.autocast import without_autocast


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
    """``model`` compiled for these arguments. ``training``, ``dynamic``: see :func:`capture`.

    Raises subclasses of :class:`~autoshard.errors.AutoshardError`; the model is left unchanged.
    """
    graph = captured(model, args, kwargs, training=training, dynamic=dynamic, precision=wishes.mixed_precision)
    wishes = replace(wishes, like=like_of(model, wishes.like))
    return build(graph, mesh, wishes, title=title or type(model).__name__)


@seldom_collected()
def captured(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any) -> Graph:
    """Capture alone. ``options``: see :func:`capture`."""
    with stage("capture"):
        return capture(model, args, kwargs, **options)


@seldom_collected()
@without_autocast()  # the graph has its casts
def build(graph: Graph, mesh: Mesh, wishes: Wishes | None = None, *, title: str = "model") -> Compiled:
    """All stages after capture. ``title`` names the model in plans and source."""
    wishes, dump = wishes or Wishes(), stages.captured(graph)
    check_random(graph)
    always, cuts = wishes.stages is not None, in_time(wishes.hints, graph, mesh, known=wishes.known)
    found = in_parts(graph, wishes.parts, partial(_built, mesh, wishes, title), _seconds, always, cuts)
    stages.compiled(found.plan, found.program, lambda: found.source.text, dump)
    return found


def _built(mesh: Mesh, wishes: Wishes, title: str, graph: Graph, micro: MicroBatches | None) -> Compiled:
    """The stages after ``graph``, that of one micro-batch if there are several."""
    if wishes.stages is not None:
        return in_stages(graph, mesh, wishes, title, micro, planned)
    graph, program, plan = in_cheaper_order(graph, wishes.plan, lambda part: planned(part, mesh, wishes, title))
    return Compiled(graph, program, plan, partial(codegen, program, title, plan.recomputed), micro)


def _seconds(found: Compiled) -> float:
    return found.plan.cost.total_s


def planned(graph: Graph, mesh: Mesh, wishes: Wishes, title: str = "model") -> tuple[Program, Plan]:
    """Program and plan of a graph."""
    check_graph(graph)
    if wishes.strict:
        check_rules(graph)
    with noting() as decided:  # decisions on open lengths become conditions of the program
        by_plan = None if wishes.plan is None else Expert(text=wishes.plan.like)
        expert = by_plan or asked_by(wishes.like, graph, mesh, known=wishes.known)
        expert, (program, memory) = met(expert, wishes.known, partial(_program, graph, mesh, wishes))
    program = narrowed(program, decided)
    check_program(program)
    plan = describe(program, title, wishes.optimizer, memory)
    mixed, notes = str(wishes.mixed_precision or ""), (*expert.notes, *plan.notes)
    return program, replace(plan, like=expert.text, mixed_precision=mixed, notes=notes)


def _program(graph: Graph, mesh: Mesh, wishes: Wishes, expert: Expert) -> tuple[Program, Memory]:
    """The given plan, else the cheapest within hints, fixed parameters and memory; simulated."""
    if wishes.plan is not None:
        check_asked(wishes.plan, wishes, graph, mesh)
        return tried(assignment_of(wishes.plan, graph, mesh, _given(graph, wishes)), wishes.optimizer, wishes.flying)
    with stage("planning"):
        search = partial(planner_of, graph, mesh, wishes)
        return fitting(search(expert), wishes.memory_budget, (partial(search, x) for x in usual(graph, mesh, expert)))


def _given(graph: Graph, wishes: Wishes) -> dict[str, Layout]:
    inputs = comes_in(wishes.inputs, graph)
    given_back = () if graph.training else graph.inputs
    taken = {i.fqn: inputs[i.name] for i in given_back if i.name in inputs}
    return {**inputs, **held(wishes.parameters, graph), **goes_out({**taken, **(wishes.states or {})}, graph)}


def planner_of(graph: Graph, mesh: Mesh, wishes: Wishes, expert: Expert, **more: Any) -> Planner:
    """The planner of ``graph`` under these options. ``more``: see :class:`Planner`."""
    hinted = resolve(wishes.hints, graph, mesh, known=wishes.known) | fixed(wishes.parameters or {}, graph)
    asked = wishes.optimizer, beside(expert, hinted, graph, mesh).asked, wishes.recompute, expert.regathers
    rest = _given(graph, wishes), expert.zero, wishes.flying, wishes.stays
    return Planner(graph, mesh, {**expert.limits, **hinted}, *asked, *rest, wishes.effort, **more)
