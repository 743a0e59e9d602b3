"""Pipeline stages: split points of the graph, and a plan per stage on the rest of the mesh."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import Any, cast

from autoshard.errors import AutoshardError, MeshError, PlanError
from autoshard.hardware import Hardware
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.codegen import Source, codegen_stages
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.program import Program
from autoshard.passes.memory.fit import SHARE
from autoshard.passes.microbatch import MicroBatches
from autoshard.passes.pipeline import (
    Pieces,
    Stage,
    Stages,
    boundaries,
    cut,
    following,
    in_two_parts,
    stages_per_rank,
    with_parameters,
)
from autoshard.passes.pipeline.timeline import SCHEDULES, held, orders
from autoshard.passes.propagate.experts import asked_by
from autoshard.passes.propagate.hints import goes_out, resolve
from autoshard.plans.alike import renamed, renaming
from autoshard.plans.compiled import Compiled
from autoshard.plans.follow import check_mesh
from autoshard.plans.plan import Plan
from autoshard.plans.stages_together import rest, together
from autoshard.plans.wishes import Wishes
from autoshard.report.record import Staged

IN_ROUNDS = ("interleaved", "zero_bubble")
"""schedules with several stages per rank"""
LEAST = {"interleaved": 2}
"""fewest stages per rank"""

Planned = tuple[Program, Plan]


def check_stages(mesh: Mesh, wishes: Wishes) -> None:
    """Raise :class:`MeshError` for an unknown axis, :class:`PlanError` for an unknown schedule."""
    check_schedule(wishes, wishes.stages is not None)
    if wishes.plan is not None and wishes.plan.staged is not None:
        check_mesh(wishes.plan, mesh)
    if wishes.stages is not None and wishes.stages not in mesh.axes:
        raise MeshError(f"stages={wishes.stages!r}: the mesh has the axes {', '.join(mesh.axes)}")


def check_schedule(wishes: Wishes, searched: bool) -> None:
    """Raise :class:`PlanError` for an unknown schedule, or one without stages. ``searched``:
    whether there are or will be stages."""
    if wishes.schedule not in SCHEDULES:
        raise PlanError(f"schedule={wishes.schedule!r}: there are {', '.join(map(repr, SCHEDULES))}")
    for name in ("schedule", "stages_per_rank"):
        if not searched and getattr(wishes, name) != getattr(Wishes, name):
            raise PlanError(
                f"{name}={getattr(wishes, name)!r} is one of stages, and there are none: name the mesh axis along which the "
                'graph is cut, stages="pp"'
            )
    each = wishes.stages_per_rank
    if each is None:
        return
    if isinstance(each, bool) or not isinstance(each, int) or each < 1:
        raise PlanError(f"stages_per_rank={each!r} is a number of stages, such as 2")
    if (each > 1) != (wishes.schedule == "interleaved") and wishes.schedule != "zero_bubble":
        raise PlanError(
            f"stages_per_rank={each}: {wishes.schedule!r} runs {'several' if each == 1 else 'one'}. "
            "Choose 'interleaved' or 'zero_bubble' for several, 'zero_bubble', '1f1b' or 'gpipe' for one"
        )


def staged(graph: Graph, mesh: Mesh, wishes: Wishes, micro: MicroBatches | None) -> Stages:
    """The ``graph`` of one micro-batch, split into axis size × stages per rank pipeline stages.

    Raises :class:`PlanError` if that is impossible.
    """
    check_stages(mesh, wishes)
    assert wishes.stages is not None
    loss = micro.loss if micro is not None else None
    ranks = mesh.size_of(wishes.stages)
    if micro is not None and wishes.schedule in IN_ROUNDS and micro.count % max(1, micro.count // ranks):
        raise PlanError(
            f"schedule={wishes.schedule!r} runs micro-batches in {micro.count // ranks} equal rounds, since {wishes.stages} "
            f"has {ranks} ranks, and {micro.count} do not fall into such: choose a multiple of {ranks}"
        )
    pieces = Pieces(graph, rest(mesh, wishes.stages), mesh.link(wishes.stages), wishes.optimizer)
    if wishes.plan is not None:
        if wishes.plan.staged is None:
            raise PlanError(f"stages={wishes.stages!r}: the plan that is given has no stages. Plan again with them.")
        return cut(pieces, wishes.plan.staged.boundaries, loss, idle=True)
    if wishes.boundaries is not None:
        return cut(pieces, wishes.boundaries, loss)
    if wishes.homes is not None:
        last = max((stage for stages in wishes.homes.values() for stage in stages), default=0)
        each = max(last // ranks + 1, wishes.stages_per_rank or LEAST.get(wishes.schedule, 1))
        return cut(pieces, following(pieces, wishes.homes, ranks * each), loss, idle=True)
    budget = budget_of(wishes, mesh.hardware)
    asked = wishes.schedule, ranks, wishes.micro_batches
    chunks = wishes.stages_per_rank or (
        stages_per_rank(pieces, *asked, budget) if wishes.schedule == "interleaved" else 1
    )
    cuts = boundaries(pieces, *asked, chunks, budget)
    return cut(pieces, with_parameters(graph, cuts), loss)


def in_stages(
    graph: Graph,
    mesh: Mesh,
    wishes: Wishes,
    title: str,
    micro: MicroBatches | None,
    plan: Callable[[Graph, Mesh, Wishes, str], Planned],
) -> Compiled:
    """The steps after capture for a graph with pipeline stages. ``plan``: plans one graph."""
    count = micro.count if micro is not None else 1
    wishes = replace(wishes, micro_batches=count)
    assert wishes.stages is not None
    pipeline = staged(graph, mesh, wishes, micro)
    found, whole = planned_stages(pipeline, mesh, wishes, title, plan)
    if wishes.schedule == "zero_bubble" and graph.training:
        found = [(in_two_parts(program), one) for program, one in found]
    programs, recomputed = [program for program, _ in found], [one.recomputed for _, one in found]
    sources = cache(partial(codegen_stages, programs, title, mesh, wishes.stages, recomputed))
    parts = tuple(
        Compiled(stage.graph, program, one, lambda number=number: sources()[number])  # type: ignore[misc]
        for number, (stage, (program, one)) in enumerate(zip(pipeline.each, found, strict=True))
    )
    inputs = tuple(i.name for i in graph.inputs if i.kind == "input")

    def source() -> Source:
        return replace(sources()[0], inputs=inputs, mutated=tuple(graph.mutations))

    return Compiled(graph, programs[0], whole, source, micro, pipeline, parts)


def planned_stages(
    stages: Stages, mesh: Mesh, wishes: Wishes, title: str, plan: Callable[[Graph, Mesh, Wishes, str], Planned]
) -> tuple[list[Planned], Plan]:
    """Program and plan of every stage, and the combined plan. ``plan``: plans one graph.

    A stage takes a value in the layout in which the previous stage gives it, so nothing is gathered
    to be sharded again. A parameter of several stages has the layout of the first, or of the last
    if the step is then shorter. Stages of one rank share its memory by :func:`_shared_out`, or
    equally if that does not fit.
    """
    assert wishes.stages is not None
    ranks, budget = mesh.size_of(wishes.stages), budget_of(wishes, mesh.hardware)
    chunks = len(stages) // ranks
    flying = _in_flight(stages, wishes, ranks, chunks)
    own = rest(mesh, wishes.stages)

    def one(stage: Stage, asked: Wishes) -> Planned:
        return plan(stage.graph, own, asked, title)

    planned = partial(_planned_within, wishes, one, partial(_one_after_another, stages, mesh, flying, one))
    if chunks > 1 and stages.whole.training:
        with suppress(PlanError):
            found = planned(_shared_out(budget, chunks, flying, stages, mesh, wishes))
            if found[1].memory.peak <= budget:
                return found
    return planned([budget / chunks] * len(stages))


def _shared_out(
    budget: float, chunks: int, flying: Sequence[int], stages: Stages, mesh: Mesh, wishes: Wishes
) -> list[float]:
    """Bytes that each stage's plan may need, if a rank has several stages (``chunks``).

    States are shared equally, the rest in proportion to micro-batches in flight. Only the running
    stage needs the working memory of its operations.
    """
    assert wishes.stages is not None
    ranks = len(stages) // chunks
    pieces = Pieces(stages.whole, rest(mesh, wishes.stages), mesh.link(wishes.stages), wishes.optimizer)
    state = sum(pieces.states.values()) / len(stages)
    work = max(map(pieces.touched, stages.whole.nodes), default=0.0)
    free = max(0.0, budget - chunks * state)
    shares = (n / sum(flying[i % ranks :: ranks]) for i, n in enumerate(flying))
    return [state + free * share + (1 - 1 / chunks) * work for share in shares]


RIVALS = ("ddp", "zero1", "zero2", "fsdp")
"""named strategies that are tried if memory is tight"""
TIGHT = 0.5
"""share of a stage's budget below which memory did not influence its plan"""

Done = list[tuple[Stage, Wishes, Planned]]
"""stages in order, their options, and their plans"""


PlanOne = Callable[[Stage, Wishes], Planned]
"""plans one stage"""


def _planned_within(
    wishes: Wishes,
    plan: PlanOne,
    planned: Callable[[Wishes, Sequence[float]], tuple[Done, Plan]],
    limits: Sequence[float],
) -> tuple[list[Planned], Plan]:
    """See :func:`planned_stages`. ``planned``: all stages in order; ``limits``: bytes per stage.

    A stage is planned without the later ones, and not optimally under a limit. So if memory may
    decide, plans that keep parameters gathered and named strategies compete.
    """
    found: list[tuple[Done, Plan]] = []
    refused: list[PlanError] = []

    def attempt(asked: Wishes) -> None:
        try:
            found.append(planned(asked, limits))
        except PlanError as error:
            refused.append(error)

    plain = replace(wishes, stays=False)
    attempt(plain)
    free = not (wishes.plan or wishes.like or wishes.hints)
    if found and free and (last := _as_in_the_last(found[0][0], plain, plan)):
        attempt(replace(plain, parameters={**(wishes.parameters or {}), **last}))
    if wishes.plan is None and (not found or _is_tight(found[0][0])):
        attempt(wishes)
        for like in RIVALS if free else ():
            attempt(replace(plain, like=like))
    if not found:
        raise refused[0]
    done, best = min(found, key=lambda one: one[1].cost.total_s)
    return [one for _, _, one in done], best


def _is_tight(done: Done) -> bool:
    """Whether memory may have influenced the plans of stages with a backward."""
    return any(
        stage.graph.training and (one.recomputed or one.memory.peak > TIGHT * (asked.memory_budget or 0.0))
        for stage, asked, (_, one) in done
    )


def _as_in_the_last(done: Done, wishes: Wishes, plan: PlanOne) -> dict[str, Layout]:
    """Shared parameters whose last stage, planned alone, prefers another layout than the first."""
    found: dict[str, Layout] = {}
    fixed = set(wishes.parameters or ())
    for stage, asked, _ in reversed(done):
        taken = asked.parameters or {}
        shared = {i.fqn for i in stage.graph.inputs if i.kind == "parameter" and i.fqn in taken} - fixed
        fixed |= shared
        if shared:
            free = replace(asked, parameters={n: x for n, x in taken.items() if n not in shared})
            alone = plan(stage, free)[1].layouts
            found |= {fqn: alone[fqn] for fqn in shared if alone[fqn] != taken[fqn]}
    return found


def _one_after_another(
    stages: Stages, mesh: Mesh, flying: tuple[int, ...], plan: PlanOne, wishes: Wishes, limits: Sequence[float]
) -> tuple[Done, Plan]:
    """Plan the stages in order. ``flying``: see :func:`_in_flight`."""
    axis = wishes.stages
    assert axis is not None
    own, done = rest(mesh, axis), Done()
    resolve(wishes.hints, stages.whole, own, known=wishes.known)  # raises for patterns that match nothing in any stage
    inputs = dict(zip(stages.whole.flat_inputs, wishes.inputs, strict=False))
    taken = {i.fqn: layout for i in stages.whole.inputs if (layout := inputs.get(i.name)) is not None}
    given_back = goes_out({} if stages.whole.training else {**taken, **(wishes.states or {})}, stages.whole)
    received: dict[str, Layout | None] = {}
    parameters = dict(wishes.parameters or {})
    given = wishes.plan.staged.plans if wishes.plan is not None and wishes.plan.staged is not None else ()
    for stage in stages.each:
        asked = replace(
            wishes,
            stages=None,
            hints=_that_fit(wishes.hints, partial(resolve, graph=stage.graph, mesh=own)),
            like=_styles(wishes.like, stage, own),
            plan=cast(Plan, given[stage.number]) if given else None,
            parameters=dict(parameters),
            flying=flying[stage.number],
            memory_budget=limits[stage.number],
            inputs=tuple(received.get(n) or inputs.get(n) for n in stage.graph.flat_inputs if n is not None),
            states=_given_back(stage, given_back),
        )
        if not (asked.hints or asked.plan or isinstance(asked.like, Mapping)):
            asked = replace(asked, plan=_as_before(stage, asked, done))
        done.append((stage, asked, plan(stage, asked)))
        one = done[-1][2][1]
        parameters |= {i.fqn: one.layouts[i.fqn] for i in stage.graph.inputs if i.kind == "parameter"}
        received = dict(zip(stage.sent, one.outputs, strict=False))
    plans = [one for _, _, (_, one) in done]
    messages = tuple(float(s.message_bytes) for s in stages.each[:-1])
    sent = tuple(_sent(stage, one) for stage, one in zip(stages.each[:-1], plans, strict=False))
    record = Staged(
        axis, wishes.schedule, wishes.micro_batches, stages.boundaries, tuple(plans), messages, sent, flying
    )
    return done, together(stages, plans, mesh, record)


def _as_before(stage: Stage, asked: Wishes, done: Done) -> Plan | None:
    """The plan of an earlier stage that is equal except for names, if it is the best here, too.

    That needs as many micro-batches in flight, or fewer and no recomputation.
    """
    if any(fqn in (asked.parameters or {}) for fqn in stage.held):
        return None
    for other, wishes, (_, plan) in reversed(done):
        fits = asked.flying == wishes.flying or (asked.flying < wishes.flying and not plan.recomputed)
        same = asked.inputs == wishes.inputs and asked.states == wishes.states
        if fits and same and not any(fqn in (wishes.parameters or {}) for fqn in other.held):
            names = renaming(other.graph, stage.graph)
            if names is not None:
                return renamed(plan, names)
    return None


def _given_back(stage: Stage, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """``layouts`` of the full graph's outputs, under a stage's own keys "out:i"."""
    places = enumerate(stage.results, len(stage.sent))
    return {f"out:{at}": layouts[f"out:{i}"] for at, i in places if f"out:{i}" in layouts}


def _sent(stage: Stage, plan: Plan) -> tuple[float, float]:
    """Bytes that a rank sends after the forward, and receives after the backward."""
    ahead = back = 0.0
    for name, layout in zip(stage.sent, plan.outputs, strict=False):
        type_ = stage.graph.types[name]
        assert layout is not None
        size = math.prod(layout.max_local_shape(type_.example.shape)) * type_.dtype.itemsize
        ahead, back = ahead + size, back + (size if type_.grad else 0.0)
    return ahead, back


def _in_flight(stages: Stages, wishes: Wishes, ranks: int, chunks: int) -> tuple[int, ...]:
    """Micro-batches in flight per stage, with ``chunks`` stages per rank; 0 without a backward."""
    if not stages.whole.training:
        return (0,) * len(stages)
    order = orders(wishes.schedule, ranks, wishes.micro_batches, chunks)
    each = range(len(stages))
    return tuple(int(held(order[i % ranks], [float(i == k) for k in each])) for i in each)


def budget_of(wishes: Wishes, hardware: Hardware) -> float:
    """Memory budget of a rank in bytes."""
    return SHARE * hardware.memory_bytes if wishes.memory_budget is None else wishes.memory_budget


def _styles(like: Any, stage: Stage, mesh: Mesh) -> Any:
    """The named strategy restricted to a stage: without styles for modules elsewhere."""
    if not isinstance(like, Mapping) or any(axis in mesh.axes for axis in like):
        return like
    return _that_fit(like, lambda one: asked_by(one, stage.graph, mesh)) or None


def _that_fit(asked: Mapping[str, Any] | None, attempt: Callable[[Mapping[str, Any]], Any]) -> dict[str, Any]:
    """The entries that ``attempt`` accepts: patterns that match something."""
    found = {}
    for pattern, what in (asked or {}).items():
        try:
            attempt({pattern: what})
        except AutoshardError:
            continue
        found[pattern] = what
    return found
