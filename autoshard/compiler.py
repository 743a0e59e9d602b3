"""The recipe: from a model to a graph, an assignment of layouts, a program, a plan and source. Reads top to bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autoshard import stages
from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.passes.capture import capture
from autoshard.passes.capture.exported.lengths import Dynamic
from autoshard.passes.codegen import Source, codegen
from autoshard.passes.ir.graph import Graph, Symbols
from autoshard.passes.ir.memory import Memory
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import noting
from autoshard.passes.ir.verify import check_graph, check_program
from autoshard.passes.lower.lowering import narrowed
from autoshard.passes.memory import fitting, lowered, simulate
from autoshard.passes.propagate.experts import asked_by
from autoshard.passes.propagate.hints import fixed, resolve
from autoshard.passes.propagate.planner import Planner
from autoshard.passes.rules.checks import check_random, check_rules
from autoshard.plans.describe import describe
from autoshard.plans.follow import assignment_of
from autoshard.plans.plan import Plan
from autoshard.progress import stage
from autoshard.runtime.autocast import without_autocast
from autoshard.wishes import Wishes


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
    wishes = replace(wishes, like=like_of(model, wishes.like))
    return build(graph, mesh, wishes, title=title or type(model).__name__)


def like_of(model: nn.Module, like: Any) -> Any:
    """``like`` with "tp_plan" as the plan that the model brings, as those of transformers do."""
    if like == "tp_plan":
        found = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
        if not found:
            raise PlanError(f"like='tp_plan': {type(model).__name__} has no tp_plan. Name a plan, such as 'megatron'")
        return dict(found)
    return {key: like_of(model, x) for key, x in like.items()} if isinstance(like, Mapping) else like


def captured(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any) -> Graph:
    """The first stage. ``options``: see :func:`capture`."""
    with stage("capture"):
        return capture(model, args, kwargs, **options)


@without_autocast()  # its casts are in the graph
def build(graph: Graph, mesh: Mesh, wishes: Wishes | None = None, *, title: str = "model") -> Compiled:
    """The stages after capture. ``title`` names the model in plans and source."""
    wishes = wishes or Wishes()
    dump = stages.captured(graph)
    program, plan = planned(graph, mesh, wishes, title)
    source = codegen(program, title)
    stages.compiled(plan, program, source.text, dump)
    return Compiled(graph, program, plan, source)


def planned(graph: Graph, mesh: Mesh, wishes: Wishes, title: str = "model") -> tuple[Program, Plan]:
    """The stages from a graph to a program and its plan."""
    check_graph(graph)
    check_random(graph)
    if wishes.strict:
        check_rules(graph)
    with noting() as decided:  # what is decided about open lengths as in the example holds for the program
        program, memory = _program(graph, mesh, wishes)
    program = narrowed(program, decided)
    check_program(program)
    plan = describe(program, title, wishes.optimizer, memory)
    return program, replace(plan, like=wishes.told)


def _program(graph: Graph, mesh: Mesh, wishes: Wishes) -> tuple[Program, Memory]:
    """What follows the plan that is given, else the cheapest that hints, fixed parameters and memory allow."""
    if wishes.plan is not None:
        program = lowered(assignment_of(wishes.plan, graph, mesh))
        return program, simulate(program, wishes.optimizer)
    given = resolve(wishes.hints, graph, mesh) | fixed(wishes.parameters or {}, graph)
    with stage("planning"):
        expert = asked_by(wishes.like, graph, mesh)
        asked = expert.asked, wishes.recompute, expert.regathers
        planner = Planner(graph, mesh, {**expert.limits, **given}, wishes.optimizer, *asked)
        return fitting(planner, wishes.memory_budget)
