"""The compiler, top to bottom: model → graph → layouts → program, plan, source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from autoshard import dumps
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.capture import capture
from autoshard.passes.capture.exported.symbolic_shapes import Dynamic
from autoshard.passes.codegen import codegen
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.memory import Memory
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import record_conditions
from autoshard.passes.ir.verify import check_graph, check_program
from autoshard.passes.lower.lowering import with_length_conditions
from autoshard.passes.memory import lower_and_simulate, search_within_memory
from autoshard.passes.microbatch import MicroBatches, choose_micro_batches
from autoshard.passes.propagate.hints import (
    fixed_parameters,
    given_input_layouts,
    kept_buffer_layouts,
    micro_batch_placements,
    resolve_hints,
    wanted_output_layouts,
)
from autoshard.passes.propagate.named_strategies import (
    NamedStrategy,
    baseline_strategies,
    expand_tp_plan,
    resolve_like,
    search_with_fallback,
    without_hinted,
)
from autoshard.passes.propagate.planner import Planner
from autoshard.passes.rules.restrictions import check_random, check_rules
from autoshard.plans.describe import describe_program
from autoshard.plans.options import CompileOptions
from autoshard.plans.plan import Compiled, Plan
from autoshard.plans.reuse import assignment_of, check_plan_options
from autoshard.plans.stages import compile_stages
from autoshard.plans.zigzag import plan_cheaper_order
from autoshard.progress import infrequent_gc, shown_progress
from autoshard.runtime.transport.torch_state import without_autocast


def compile_model(
    model: nn.Module,
    mesh: Mesh,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    opts: CompileOptions,
    *,
    training: bool | None = None,
    dynamic: Dynamic = False,
    title: str = "",
) -> Compiled:
    """``model`` compiled for these arguments. ``training``, ``dynamic``: see :func:`capture`.

    Raises subclasses of :class:`~autoshard.errors.AutoshardError`; the model is left unchanged.
    """
    graph = capture_graph(model, args, kwargs, training=training, dynamic=dynamic, precision=opts.mixed_precision)
    opts = replace(opts, like=expand_tp_plan(model, opts.like))
    return compile_graph(graph, mesh, opts, title=title or type(model).__name__)


@infrequent_gc()
def capture_graph(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], **options: Any) -> Graph:
    """Capture alone. ``options``: see :func:`capture`."""
    with shown_progress("capture"):
        return capture(model, args, kwargs, **options)


@infrequent_gc()
@without_autocast()  # the graph has its casts
def compile_graph(graph: Graph, mesh: Mesh, opts: CompileOptions | None = None, *, title: str = "model") -> Compiled:
    """All stages after capture. ``title`` names the model in plans and source."""
    opts, dump = opts or CompileOptions(), dumps.dump_graph(graph)
    check_random(graph)
    always, cuts = opts.stages is not None, micro_batch_placements(opts.hints, graph, mesh, known=opts.known)
    found = choose_micro_batches(
        graph, opts.parts, partial(_compile_micro_batch, mesh, opts, title), _predicted_seconds, always, cuts
    )
    dumps.dump_compilation(found.plan, found.program, lambda: found.source.text, dump)
    return found


def _compile_micro_batch(
    mesh: Mesh, opts: CompileOptions, title: str, graph: Graph, micro: MicroBatches | None
) -> Compiled:
    """The stages after ``graph``, that of one micro-batch if there are several."""
    if opts.stages is not None:
        return compile_stages(graph, mesh, opts, title, micro, plan_graph)
    graph, program, plan = plan_cheaper_order(graph, opts.plan, lambda part: plan_graph(part, mesh, opts, title))
    return Compiled(graph, program, plan, partial(codegen, program, title, plan.recomputed), micro)


def _predicted_seconds(found: Compiled) -> float:
    return found.plan.cost.total_s


def plan_graph(graph: Graph, mesh: Mesh, opts: CompileOptions, title: str = "model") -> tuple[Program, Plan]:
    """Program and plan of a graph."""
    check_graph(graph)
    if opts.strict:
        check_rules(graph)
    with record_conditions() as decided:  # decisions on open lengths become conditions of the program
        by_plan = None if opts.plan is None else NamedStrategy(text=opts.plan.like)
        expert = by_plan or resolve_like(opts.like, graph, mesh, known=opts.known)
        expert, (program, memory) = search_with_fallback(expert, opts.known, partial(_plan_program, graph, mesh, opts))
    program = with_length_conditions(program, decided)
    check_program(program)
    plan = describe_program(program, title, opts.optimizer, memory)
    mixed, notes = str(opts.mixed_precision or ""), (*expert.notes, *plan.notes)
    return program, replace(plan, like=expert.text, mixed_precision=mixed, notes=notes)


def _plan_program(graph: Graph, mesh: Mesh, opts: CompileOptions, expert: NamedStrategy) -> tuple[Program, Memory]:
    """The given plan, else the cheapest within hints, fixed parameters and memory; simulated."""
    if opts.plan is not None:
        check_plan_options(opts.plan, opts, graph, mesh)
        return lower_and_simulate(
            assignment_of(opts.plan, graph, mesh, _given_layouts(graph, opts)), opts.optimizer, opts.micro_batches_held
        )
    with shown_progress("planning"):
        search = partial(make_planner, graph, mesh, opts)
        return search_within_memory(
            search(expert), opts.memory_budget, (partial(search, x) for x in baseline_strategies(graph, mesh, expert))
        )


def _given_layouts(graph: Graph, opts: CompileOptions) -> dict[str, Layout]:
    inputs = given_input_layouts(opts.inputs, graph)
    given_back = () if graph.training else graph.inputs
    taken = {i.fqn: inputs[i.name] for i in given_back if i.name in inputs}
    return {
        **inputs,
        **kept_buffer_layouts(opts.parameters, graph),
        **wanted_output_layouts({**taken, **(opts.states or {})}, graph),
    }


def make_planner(graph: Graph, mesh: Mesh, opts: CompileOptions, expert: NamedStrategy, **more: Any) -> Planner:
    """The planner of ``graph`` under these options. ``more``: see :class:`Planner`."""
    hinted = resolve_hints(opts.hints, graph, mesh, known=opts.known) | fixed_parameters(opts.parameters or {}, graph)
    asked = opts.optimizer, without_hinted(expert, hinted, graph, mesh).asked, opts.recompute, expert.regathers
    rest = _given_layouts(graph, opts), expert.zero, opts.micro_batches_held, opts.keep_gathered
    return Planner(graph, mesh, {**expert.limits, **hinted}, *asked, *rest, opts.effort, **more)
