"""One graph, top to bottom: layouts within hints, known layouts and memory, program, plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from autoshard.errors import HintError, PlanError
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.codegen import codegen
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.memory import Memory
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.sizes import record_conditions
from autoshard.passes.ir.verify import check_graph, check_program
from autoshard.passes.lower.lowering import with_length_conditions
from autoshard.passes.memory import lower_and_simulate, search_with_offload, search_within_memory
from autoshard.passes.microbatch import AUTO
from autoshard.passes.propagate.hints import (
    fixed_parameters,
    given_input_layouts,
    kept_buffer_layouts,
    resolve_hints,
    wanted_output_layouts,
)
from autoshard.passes.propagate.loss_chunks import chunk_losses, logits_bytes, why_unchunked
from autoshard.passes.propagate.named_strategies import (
    InfeasibleStrategyError,
    NamedStrategy,
    baseline_strategies,
    given_up,
    resolve_like,
)
from autoshard.passes.propagate.planner import ALONE, Planner, SearchSettings
from autoshard.passes.propagate.zigzag import to_zigzag_order, zigzag_ranks
from autoshard.passes.rules.restrictions import check_rules
from autoshard.passes.search.candidates import Candidates
from autoshard.passes.search.limits import OUTER_LIMITS
from autoshard.plans.describe import describe_program
from autoshard.plans.options import NOTHING_KNOWN, CompileOptions, KnownLayouts
from autoshard.plans.plan import Compiled, Plan
from autoshard.plans.reuse import assignment_of, check_plan_options
from autoshard.progress import is_time_up, shown_progress
from autoshard.report.record import Record


def plan_cheaper_order(graph: Graph, mesh: Mesh, opts: CompileOptions, known: KnownLayouts = NOTHING_KNOWN) -> Compiled:
    """``graph`` planned in sequence order, and in zigzag order if that balances ring attention."""
    if opts.plan is not None:
        return _in_order(graph, opts.plan.folded, mesh, opts, known)
    orders = Candidates[Compiled](order_seconds)
    orders.add(_in_order(graph, 0, mesh, opts, known))
    if ranks := zigzag_ranks(orders.cheapest().program.assignment):
        with orders.attempt("zigzag order"):  # it does not fit, or contradicts the options
            orders.add(_in_order(graph, ranks, mesh, opts, known))
    return orders.cheapest()


def plan_loss_chunks(
    graph: Graph,
    micro_batches: int,
    mesh: Mesh,
    opts: CompileOptions,
    known: KnownLayouts,
    planned: Callable[[Graph], Compiled],
) -> Compiled:
    """``graph`` as ``planned``, its cross entropy in the number of chunks that the options ask for.

    If the number is searched and memory binds, it climbs from 8, up or down, while steps get faster."""

    def chunked(count: int) -> Compiled:
        made = chunk_losses(graph, count)
        found = planned(made)
        return replace(found, plan=replace(found.plan, loss_chunks=count if made is not graph else 1))

    reason = why_unchunked(graph)
    if opts.loss_chunks != AUTO:
        why = reason or ("" if logits_bytes(graph) else "the model computes no cross entropy")
        if why and opts.loss_chunks > 1 and opts.plan is None and not known.later:
            raise PlanError(f"loss_chunks={opts.loss_chunks}: {why}. Leave loss_chunks out")
        return chunked(opts.loss_chunks)
    found = Candidates[Compiled](order_seconds)
    with found.attempt("the loss at once"):
        found.add(chunked(1))
    fast = found.best is not None and not is_limited(found.best.plan)
    small = logits_bytes(graph) / micro_batches / mesh.size < OUTER_LIMITS.small_share * opts.budget(mesh.hardware)
    if fast or small or opts.quick or known.boundaries is not None or is_time_up():
        return found.cheapest()
    if reason and found.best is not None:
        notes = (*found.best.plan.notes, f"memory binds, and {reason}")
        return replace(found.best, plan=replace(found.best.plan, notes=notes))
    for counts in ((8, 16, 32, 64), (4, 2)) if not reason else ():
        for count in counts:
            # a hint may name the logits
            with suppress(HintError), found.attempt(f"the loss in {count} chunks"):
                if not found.add(chunked(count)):
                    break
        if found.best is None or found.best.plan.loss_chunks != 8:
            break
    return found.cheapest(told=-1)


def is_limited(plan: Record) -> bool:
    """Whether the memory budget excludes faster plans, of any stage."""
    return any(part.memory.limited for part in (plan.staged.plans if plan.staged is not None else (plan,)))


def order_seconds(found: Compiled) -> float:
    """Predicted seconds of a step."""
    return found.plan.cost.total_s


def _in_order(graph: Graph, ranks: int, mesh: Mesh, opts: CompileOptions, known: KnownLayouts) -> Compiled:
    """``ranks``: those of the zigzag order; 0: sequence order."""
    graph = (to_zigzag_order(graph, ranks) if ranks else None) or graph
    program, plan = plan_graph(graph, mesh, opts, known)
    plan = replace(plan, folded=ranks)
    return Compiled(graph, program, plan, lambda: codegen(program, opts.title, plan.recomputed))


def plan_graph(
    graph: Graph,
    mesh: Mesh,
    opts: CompileOptions,
    known: KnownLayouts = NOTHING_KNOWN,
    settings: SearchSettings = ALONE,
) -> tuple[Program, Plan]:
    """Program and plan of ``graph`` as it is."""
    check_graph(graph)
    if opts.strict:
        check_rules(graph)
    with record_conditions() as decided:  # decisions on open lengths become conditions of the program
        if opts.plan is not None:
            check_plan_options(opts.plan, opts, known, graph, mesh)
            strategy = NamedStrategy(text=opts.plan.like)
            assignment = assignment_of(opts.plan, graph, mesh, _given_layouts(graph, known), opts.optimizer)
            program, memory = lower_and_simulate(assignment, opts.optimizer, settings.micro_batches_held)
        else:
            strategy, program, memory = _search(graph, mesh, opts, known, settings)
    program = with_length_conditions(program, decided)
    check_program(program)
    plan = describe_program(program, opts.title, opts.optimizer, memory)
    mixed, notes = str(opts.mixed_precision or ""), (*strategy.notes, *plan.notes)
    budget = opts.budget(mesh.hardware) if opts.plan is None else opts.plan.memory_budget
    return program, replace(plan, like=strategy.text, mixed_precision=mixed, notes=notes, memory_budget=budget)


def _search(
    graph: Graph, mesh: Mesh, opts: CompileOptions, known: KnownLayouts, settings: SearchSettings
) -> tuple[NamedStrategy, Program, Memory]:
    """The named strategy, and the cheapest program within it, hints, known layouts and memory."""
    strategy = resolve_like(opts.like, graph, mesh, known=known.later)
    with shown_progress("planning"):
        try:
            planner = make_planner(graph, mesh, opts, strategy, known, settings)
            baselines = baseline_strategies(graph, mesh, strategy)
            return strategy, *_search_memory(planner, opts, baselines)
        except InfeasibleStrategyError:
            if not known.later:
                raise
        strategy = given_up(strategy)
        planner = make_planner(graph, mesh, opts, strategy, known, settings)
        return strategy, *_search_memory(planner, opts)


def _search_memory(
    planner: Planner, opts: CompileOptions, baselines: Iterable[NamedStrategy] = ()
) -> tuple[Program, Memory]:
    """The search within memory; of blocks in host memory, too, where these options allow it."""
    search = search_with_offload if opts.offload in ("activations", "all") else search_within_memory
    return search(planner, opts.budget(planner.mesh.hardware), baselines, opts.quick)


def make_planner(
    graph: Graph,
    mesh: Mesh,
    opts: CompileOptions,
    strategy: NamedStrategy,
    known: KnownLayouts = NOTHING_KNOWN,
    settings: SearchSettings = ALONE,
    carried: frozenset[str] = frozenset(),
) -> Planner:
    """The planner of ``graph`` under these options. ``carried``: see :class:`Planner`."""
    hinted = resolve_hints(opts.hints, graph, mesh, known=known.later)
    hinted |= fixed_parameters(known.parameters or {}, graph)
    given = _given_layouts(graph, known)
    return Planner(graph, mesh, hinted, strategy, opts.optimizer, opts.recompute, settings, given, carried)


def _given_layouts(graph: Graph, known: KnownLayouts) -> dict[str, Layout]:
    inputs = given_input_layouts(known.inputs, graph)
    given_back = () if graph.training else graph.inputs
    taken = {i.fqn: inputs[i.name] for i in given_back if i.name in inputs}
    return {
        **inputs,
        **kept_buffer_layouts(known.parameters, graph),
        **wanted_output_layouts({**taken, **(known.states or {})}, graph),
    }
