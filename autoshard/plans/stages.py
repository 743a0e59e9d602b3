"""Pipeline stages: split points of the graph, a plan per stage, and their combined plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar, cast

from autoshard.errors import AutoshardError, BudgetError, MeshError, PlanError
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.codegen import Source, codegen_stages
from autoshard.passes.ir.analyses import LazySequence
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.program import Program
from autoshard.passes.microbatch import MicroBatches
from autoshard.passes.pipeline import (
    SegmentedGraph,
    Stage,
    Stages,
    boundaries_from_homes,
    cut_into_stages,
    split_backward,
    stage_boundaries,
    stages_per_rank,
    with_trained_parameters,
)
from autoshard.passes.pipeline.schedules import SCHEDULES, peak_kept, rank_orders
from autoshard.passes.propagate.hints import resolve_hints, wanted_output_layouts
from autoshard.passes.propagate.named_strategies import resolve_like
from autoshard.passes.propagate.planner import SearchSettings
from autoshard.passes.search.candidates import Candidates
from autoshard.passes.search.limits import OUTER_LIMITS
from autoshard.passes.search.network import FULL, QUICK
from autoshard.plans.options import CompileOptions, KnownLayouts
from autoshard.plans.plan import Compiled, Plan
from autoshard.plans.planning import plan_graph
from autoshard.plans.reuse import check_mesh, graph_renaming, rename_plan
from autoshard.report.pipeline import pipeline_cost, pipeline_memory
from autoshard.report.record import Choice, Staged
from autoshard.report.summary import with_rates

Joinable = TypeVar("Joinable")

STAGE_LABEL = "–"
"""an operation's label along the axis of stages: it runs in one of them"""


def mesh_without_axis(mesh: Mesh, axis: str) -> Mesh:
    """The mesh of a stage: ``mesh`` without ``axis``; a mesh of one rank if nothing is left."""
    others = {a: n for a, n in mesh.sizes.items() if a != axis}
    return Mesh(others or {axis: 1}, mesh.hardware)


def combine_stage_plans(stages: Stages, plans: Sequence[Plan], mesh: Mesh, staged: Staged) -> Plan:
    """The combined plan on the full ``mesh``; shared values are listed as in the first stage."""
    first = plans[0]
    outputs: list[Layout | None] = [None] * len(stages.whole.outputs)
    for stage, plan in zip(stages.each, plans, strict=True):
        for position, layout in zip(stage.results, plan.outputs[len(stage.sent) :], strict=True):
            outputs[position] = layout
    backwards = [*reversed(plans)]
    plan = replace(
        first,
        mesh=mesh,
        layouts=_layouts_on_mesh(mesh, _merge_by_name(p.layouts for p in backwards)),
        collectives=(
            *(c for p in plans for c in p.collectives if c.phase == "forward"),
            *(c for p in backwards for c in p.collectives if c.phase == "backward"),
        ),
        cost=pipeline_cost(staged, mesh),
        choices={n: _with_stage_label(c, mesh, staged.axis) for p in backwards for n, c in p.choices.items()},
        shared=_layouts_on_mesh(mesh, _merge_by_name(p.shared for p in backwards)),
        outputs=tuple(None if x is None else _on_full_mesh(mesh, x) for x in outputs),
        given=tuple(sorted({name for p in plans for name in p.given} & {i.fqn for i in stages.whole.inputs})),
        shapes=_merge_by_name(p.shapes for p in backwards),
        kinds={**_merge_by_name(p.kinds for p in plans), **{n: "value" for s in stages.each for n in s.received}},
        notes=(_schedule_note(staged), *_stage_notes(plans)),
        ties=_merge_by_name(p.ties for p in plans),
        modules=_merge_by_name(p.modules for p in backwards),
        dtypes=_merge_by_name(p.dtypes for p in backwards),
        differentiable=tuple(dict.fromkeys(n for p in plans for n in p.differentiable)),
        memory=pipeline_memory(staged, mesh.size_of(staged.axis)),
        recomputed=tuple(r for p in plans for r in p.recomputed),
        zero=_merge_by_name(p.zero for p in plans),
        shared_again=tuple(sorted({n for p in plans for n in p.shared_again})),
        staged=staged,
    )
    return with_rates(plan)


def _stage_notes(plans: Sequence[Plan]) -> Iterator[str]:
    """Notes of the stages, without those whose first clause repeats."""
    begun: set[str] = set()
    for note in dict.fromkeys(note for p in plans for note in p.notes):
        begins = note.partition(",")[0]
        if begins not in begun:
            begun.add(begins)
            yield note


def _schedule_note(staged: Staged) -> str:
    return f"{len(staged.plans)} stages along {staged.axis}, schedule {staged.schedule}, {staged.micro_batches} micro-batches"


def _merge_by_name(parts: Iterator[Mapping[str, Joinable]]) -> dict[str, Joinable]:
    return {name: x for part in parts for name, x in part.items()}


def _layouts_on_mesh(mesh: Mesh, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    return {name: _on_full_mesh(mesh, layout) for name, layout in layouts.items()}


def _on_full_mesh(mesh: Mesh, layout: Layout) -> Layout:
    """A stage's layout on the full mesh: replicated along the axis of stages."""
    return Layout(mesh, {a: layout[a] for a in layout.mesh.axes})


def _with_stage_label(choice: Choice, mesh: Mesh, axis: str) -> Choice:
    """A stage's choice with a label along the axis of stages."""

    def with_axis(labels: Sequence[str]) -> tuple[str, ...]:
        if mesh.ndim == 1:
            return (STAGE_LABEL,)
        at = mesh.index(axis)
        return (*labels[:at], STAGE_LABEL, *labels[at:])

    others = LazySequence(lambda: [(with_axis(labels), seconds) for labels, seconds in choice.alternatives])
    return replace(choice, labels=with_axis(choice.labels), alternatives=others)


MULTI_STAGE_SCHEDULES = ("interleaved", "zero_bubble")
"""schedules with several stages per rank"""
MIN_STAGES_PER_RANK = {"interleaved": 2}
"""fewest stages per rank"""


def check_stages(mesh: Mesh, opts: CompileOptions) -> None:
    """Raise :class:`MeshError` for an unknown axis, :class:`PlanError` for an unknown schedule."""
    check_schedule(opts, opts.stages is not None)
    if opts.plan is not None and opts.plan.staged is not None:
        check_mesh(opts.plan, mesh)
    if opts.stages is not None and opts.stages not in mesh.axes:
        raise MeshError(f"stages={opts.stages!r} is not an axis of the mesh. Its axes: {', '.join(mesh.axes)}")


def check_schedule(opts: CompileOptions, searched: bool) -> None:
    """Raise :class:`PlanError` for an unknown schedule, or one without stages. ``searched``:
    whether there are or will be stages."""
    if opts.schedule not in SCHEDULES:
        raise PlanError(f"schedule={opts.schedule!r} is not known. Known: {', '.join(map(repr, SCHEDULES))}")
    for name in ("schedule", "stages_per_rank"):
        if not searched and getattr(opts, name) != getattr(CompileOptions, name):
            raise PlanError(f'{name}={getattr(opts, name)!r} needs stages. Name their mesh axis, stages="pp"')
    each = opts.stages_per_rank
    if each is None:
        return
    if isinstance(each, bool) or not isinstance(each, int) or each < 1:
        raise PlanError(f"stages_per_rank={each!r} is not a number of stages, such as 2")
    if (each > 1) != (opts.schedule == "interleaved") and opts.schedule != "zero_bubble":
        raise PlanError(
            f"stages_per_rank={each}, but {opts.schedule!r} runs {'several' if each == 1 else 'one'}. "
            "Use 'interleaved' or 'zero_bubble' for several, 'zero_bubble', '1f1b' or 'gpipe' for one"
        )


def split_into_stages(
    graph: Graph, mesh: Mesh, opts: CompileOptions, known: KnownLayouts, micro: MicroBatches | None
) -> Stages:
    """The ``graph`` of one micro-batch, split into axis size × stages per rank pipeline stages.
    Raises :class:`PlanError` if that is impossible."""
    check_stages(mesh, opts)
    assert opts.stages is not None
    loss = micro.loss if micro is not None else None
    ranks = mesh.size_of(opts.stages)
    if micro is not None and opts.schedule in MULTI_STAGE_SCHEDULES and micro.count % max(1, micro.count // ranks):
        raise PlanError(
            f"schedule={opts.schedule!r} runs micro-batches in {micro.count // ranks} equal rounds of {ranks} "
            f"ranks along {opts.stages}, but {micro.count} do not divide into them. Use a multiple of {ranks}"
        )
    pieces = SegmentedGraph(graph, mesh_without_axis(mesh, opts.stages), mesh.link(opts.stages), opts.optimizer)
    if opts.plan is not None:
        if opts.plan.staged is None:
            raise PlanError(f"stages={opts.stages!r}: the given plan has no stages. Plan again with them.")
        return cut_into_stages(pieces, opts.plan.staged.boundaries, loss, idle=True)
    if known.boundaries is not None:
        return cut_into_stages(pieces, known.boundaries, loss)
    if known.homes is not None:
        last = max((stage for stages in known.homes.values() for stage in stages), default=0)
        each = max(last // ranks + 1, opts.stages_per_rank or MIN_STAGES_PER_RANK.get(opts.schedule, 1))
        return cut_into_stages(pieces, boundaries_from_homes(pieces, known.homes, ranks * each), loss, idle=True)
    budget = opts.budget(mesh.hardware)
    asked = opts.schedule, ranks, opts.micro_batches
    chunks = opts.stages_per_rank or (stages_per_rank(pieces, *asked, budget) if opts.schedule == "interleaved" else 1)
    cuts = stage_boundaries(pieces, *asked, chunks, budget)
    return cut_into_stages(pieces, with_trained_parameters(graph, cuts), loss)


def compile_stages(
    graph: Graph, mesh: Mesh, opts: CompileOptions, known: KnownLayouts, micro: MicroBatches | None
) -> Compiled:
    """The steps after capture for a graph with pipeline stages."""
    opts = replace(opts, micro_batches=micro.count if micro is not None else 1)
    assert opts.stages is not None
    pipeline = split_into_stages(graph, mesh, opts, known, micro)
    done, whole = StagePlanner(pipeline, mesh, opts, known).cheapest()
    split = opts.schedule == "zero_bubble" and graph.training
    programs = [split_backward(one.program) if split else one.program for one in done]
    recomputed = [one.plan.recomputed for one in done]
    sources = cache(partial(codegen_stages, programs, opts.title, mesh, opts.stages, recomputed))
    parts = tuple(
        Compiled(stage.graph, program, one.plan, lambda number=number: sources()[number])  # type: ignore[misc]
        for number, (stage, program, one) in enumerate(zip(pipeline.each, programs, done, strict=True))
    )
    inputs = tuple(i.name for i in graph.of_kind("input"))

    def source() -> Source:
        return replace(sources()[0], inputs=inputs, mutated=tuple(graph.mutations))

    return Compiled(graph, programs[0], whole, source, micro, pipeline, parts)


TIGHT_STRATEGIES = ("ddp", "zero1", "zero2", "fsdp")
"""named strategies that are tried if memory is tight"""


class PlannedStage(NamedTuple):
    """A stage, what it was planned with, and its plan."""

    stage: Stage
    opts: CompileOptions
    known: KnownLayouts
    settings: SearchSettings
    program: Program
    plan: Plan


PlannedPipeline = tuple[tuple[PlannedStage, ...], Plan]
"""all stages in order, and their combined plan"""


def _seconds_of_all(planned: PlannedPipeline) -> float:
    return planned[1].cost.total_s


class StagePlanner:
    """Plans of the stages of one graph. A stage takes a value in the layout in which the previous
    one gives it. A parameter of several stages has the layout of the first, or of the last if
    the step is then shorter."""

    def __init__(self, stages: Stages, mesh: Mesh, opts: CompileOptions, known: KnownLayouts) -> None:
        assert opts.stages is not None
        self.stages, self.mesh, self.opts, self.known, self.axis = stages, mesh, opts, known, opts.stages
        self.own_mesh, ranks = mesh_without_axis(mesh, self.axis), mesh.size_of(self.axis)
        self.chunks, each = len(stages) // ranks, range(len(stages))
        order = rank_orders(opts.schedule, ranks, opts.micro_batches, self.chunks) if stages.whole.training else ()
        held = (int(peak_kept(order[i % ranks], [float(i == k) for k in each])) if order else 0 for i in each)
        self.in_flight = tuple(held)
        """micro-batches in flight per stage; 0 without a backward"""
        self.many = len(stages) > OUTER_LIMITS.most_stage_plans
        """whether equal stages share plans, by quick searches of layouts without named strategies"""

    def cheapest(self) -> PlannedPipeline:
        """The cheapest plans of all stages.

        Stages of one rank share its memory equally: recomputation saves most where most micro-batches are in
        flight. Where memory is tight, :meth:`_stage_budgets` compete; of many stages only if nothing else fits.
        """
        budget, found = self.opts.budget(self.mesh.hardware), Candidates[PlannedPipeline](_seconds_of_all)
        with found.attempt("equal shares of memory"):
            found.add(self._within([budget / self.chunks] * len(self.stages)))
        best, several = found.best, self.chunks > 1 and self.stages.whole.training
        if several and (best is None or (_is_memory_tight(best[0]) and not self.many)):
            with found.attempt("memory by micro-batches in flight"):
                other = self._within(self._stage_budgets(budget))
                if (peak := other[1].memory.peak) > budget:
                    raise BudgetError(f"the stages of a rank need {peak:.4g} B together", peak)
                found.add(other)
        return found.cheapest()

    def _stage_budgets(self, budget: float) -> list[float]:
        """Bytes that each stage's plan may need, if a rank has several: equal shares of states, the
        rest by micro-batches in flight. Only the running stage needs working memory."""
        ranks, whole = len(self.stages) // self.chunks, self.stages.whole
        pieces = SegmentedGraph(whole, self.own_mesh, self.mesh.link(self.axis), self.opts.optimizer)
        state = sum(pieces.states.values()) / len(self.stages)
        work = max(map(pieces.touched, whole.nodes), default=0.0)
        free = max(0.0, budget - self.chunks * state)
        shares = (n / sum(self.in_flight[i % ranks :: ranks]) for i, n in enumerate(self.in_flight))
        return [state + free * share + (1 - 1 / self.chunks) * work for share in shares]

    def _within(self, limits: Sequence[float]) -> PlannedPipeline:
        """The cheapest plans within ``limits``, bytes per stage.

        A stage is planned without the later ones, and not optimally under a limit. So if memory may
        decide, plans that keep parameters gathered and named strategies compete. Many stages
        are planned once where that fits.
        """
        found = Candidates[PlannedPipeline](_seconds_of_all)
        opts, known = self.opts, self.known
        with found.attempt("stages one after another"):
            found.add(self._in_order(opts, known, limits, keep_gathered=self.many))
        first, free = found.best, not (opts.plan or opts.like or opts.hints)
        if first is not None and free and (last := self._last_stage_layouts(first[0])):
            with found.attempt("layouts of last stages"):
                layouts = {**(known.parameters or {}), **last}
                found.add(self._in_order(opts, replace(known, parameters=layouts), limits, keep_gathered=self.many))
        if opts.plan is None and (first is None or (_is_memory_tight(first[0]) and not self.many)):
            with found.attempt("parameters kept gathered, or not"):
                found.add(self._in_order(opts, known, limits, keep_gathered=not self.many))
            for like in TIGHT_STRATEGIES if free and (not self.many or found.best is None) else ():
                with found.attempt(like):
                    found.add(self._in_order(replace(opts, like=like), known, limits))
        return found.cheapest()

    def _last_stage_layouts(self, done: Sequence[PlannedStage]) -> dict[str, Layout]:
        """Shared parameters for which the last stage alone prefers another layout."""
        found: dict[str, Layout] = {}
        fixed = set(self.known.parameters or ())
        for one in reversed(done):
            taken = one.known.parameters or {}
            shared = {i.fqn for i in one.stage.graph.of_kind("parameter") if i.fqn in taken} - fixed
            fixed |= shared
            if shared:
                free = replace(one.known, parameters={n: x for n, x in taken.items() if n not in shared})
                alone = plan_graph(one.stage.graph, self.own_mesh, one.opts, free, one.settings)[1].layouts
                found |= {fqn: alone[fqn] for fqn in shared if alone[fqn] != taken[fqn]}
        return found

    def _block(self, stage: Stage) -> tuple[int, int]:
        """(stage of its rank, group of neighbours): a block's equal stages are planned alike."""
        ranks = len(self.stages) // self.chunks
        return stage.number // ranks, stage.number % ranks * OUTER_LIMITS.most_stage_plans // len(self.stages)

    def _in_order(
        self, opts: CompileOptions, known: KnownLayouts, limits: Sequence[float], keep_gathered: bool = False
    ) -> PlannedPipeline:
        """Plans of the stages one after another, each with what those before it settle."""
        stages, done = self.stages, list[PlannedStage]()
        # raises for patterns that match nothing in any stage
        resolve_hints(opts.hints, stages.whole, self.own_mesh, known=known.later)
        inputs = dict(zip(stages.whole.flat_inputs, known.inputs, strict=False))
        taken = {i.fqn: layout for i in stages.whole.inputs if (layout := inputs.get(i.name)) is not None}
        states = {} if stages.whole.training else {**taken, **(known.states or {})}
        given_back = wanted_output_layouts(states, stages.whole)
        received: dict[str, Layout | None] = {}
        parameters = dict(known.parameters or {})
        given = opts.plan.staged.plans if opts.plan is not None and opts.plan.staged is not None else ()
        for stage in stages.each:
            asked = replace(
                opts,
                stages=None,
                hints=_matching_entries(opts.hints, partial(resolve_hints, graph=stage.graph, mesh=self.own_mesh)),
                like=_stage_strategy(opts.like, stage, self.own_mesh),
                plan=cast(Plan, given[stage.number]) if given else None,
                memory_budget=limits[stage.number],
                quick=opts.quick or self.many,
            )
            layouts = KnownLayouts(
                parameters=dict(parameters),
                states=_stage_output_layouts(stage, given_back),
                inputs=tuple(received.get(n) or inputs.get(n) for n in stage.graph.flat_inputs if n is not None),
            )
            settings = SearchSettings(self.in_flight[stage.number], keep_gathered, QUICK if self.many else FULL)
            if not (asked.hints or asked.plan or isinstance(asked.like, Mapping)):
                near = {one.stage.number for one in done if self._block(one.stage) == self._block(stage)}
                asked = replace(asked, plan=_reused_plan(stage, layouts, settings, done, near, asked.memory_budget))
            program, plan = plan_graph(stage.graph, self.own_mesh, asked, layouts, settings)
            done.append(PlannedStage(stage, asked, layouts, settings, program, plan))
            parameters |= {i.fqn: plan.layouts[i.fqn] for i in stage.graph.of_kind("parameter")}
            received = dict(zip(stage.sent, plan.outputs, strict=False))
        plans = [one.plan for one in done]
        messages = tuple(float(s.message_bytes) for s in stages.each[:-1])
        sent = tuple(_sent_bytes_per_rank(stage, one) for stage, one in zip(stages.each[:-1], plans, strict=False))
        record = Staged(
            self.axis,
            opts.schedule,
            opts.micro_batches,
            stages.boundaries,
            tuple(plans),
            messages,
            sent,
            self.in_flight,
        )
        return tuple(done), combine_stage_plans(stages, plans, self.mesh, record)


def _is_memory_tight(done: Sequence[PlannedStage]) -> bool:
    """Whether memory may have influenced the plans of stages with a backward."""
    return any(
        one.stage.graph.training
        and (one.plan.recomputed or one.plan.memory.peak > OUTER_LIMITS.tight_share * (one.opts.memory_budget or 0.0))
        for one in done
    )


def _reused_plan(
    stage: Stage,
    known: KnownLayouts,
    settings: SearchSettings,
    done: Sequence[PlannedStage],
    near: Collection[int],
    limit: float | None,
) -> Plan | None:
    """The plan of an earlier stage, equal except for names, if it is the best here, too: of the
    same memory ``limit`` and as many micro-batches in flight, or fewer where memory did not
    matter. Or if its number is ``near``: as many or more in flight, in proportion to the limits,
    and no bound here."""
    if any(fqn in (known.parameters or {}) for fqn in stage.held):
        return None
    held = settings.micro_batches_held
    for other in reversed(done):
        theirs = other.settings.micro_batches_held
        best = limit == other.opts.memory_budget and (held == theirs or not _is_memory_tight((other,)))
        fits = held <= theirs and (best or other.stage.number in near)
        same = (known.inputs, known.states) == (other.known.inputs, other.known.states)
        if fits and same and not any(fqn in (other.known.parameters or {}) for fqn in other.stage.held):
            names = graph_renaming(other.stage.graph, stage.graph)
            if names is not None:
                plan = rename_plan(other.plan, names)
                return plan if best else replace(plan, cost=replace(plan.cost, lower_bound=0.0))
    return None


def _stage_output_layouts(stage: Stage, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """``layouts`` of the full graph's outputs, under a stage's own keys "out:i"."""
    places = enumerate(stage.results, len(stage.sent))
    return {f"out:{at}": layouts[f"out:{i}"] for at, i in places if f"out:{i}" in layouts}


def _sent_bytes_per_rank(stage: Stage, plan: Plan) -> tuple[float, float]:
    """Bytes that a rank sends after the forward, and receives after the backward."""
    ahead = back = 0.0
    for name, layout in zip(stage.sent, plan.outputs, strict=False):
        type_ = stage.graph.types[name]
        assert layout is not None
        size = math.prod(layout.max_local_shape(type_.example.shape)) * type_.dtype.itemsize
        ahead, back = ahead + size, back + (size if type_.grad else 0.0)
    return ahead, back


def _stage_strategy(like: Any, stage: Stage, mesh: Mesh) -> Any:
    """The named strategy restricted to a stage: without styles for modules elsewhere."""
    if not isinstance(like, Mapping) or any(axis in mesh.axes for axis in like):
        return like
    return _matching_entries(like, lambda one: resolve_like(one, stage.graph, mesh)) or None


def _matching_entries(asked: Mapping[str, Any] | None, attempt: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
    """The entries that ``attempt`` accepts: patterns that match something."""
    found = {}
    for pattern, what in (asked or {}).items():
        try:
            attempt({pattern: what})
        except AutoshardError:
            continue
        found[pattern] = what
    return found
