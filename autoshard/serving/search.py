"""Serving search: one layout of the weights for all calls of a profile, and phases of a plan."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autoshard.compiler import captured, planner_of
from autoshard.errors import PlanError
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph, Ref
from autoshard.passes.ir.memory import Memory
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.units import show_bytes
from autoshard.passes.ir.verify import check_graph, check_program
from autoshard.passes.memory import fitting, tried
from autoshard.passes.memory.fit import SHARE
from autoshard.passes.propagate.experts import asked_by, like_of
from autoshard.passes.propagate.planner import Planner
from autoshard.passes.propagate.together import Place, Together
from autoshard.passes.rules.checks import check_random, check_rules
from autoshard.passes.rules.families.embedding import LOOK_UPS
from autoshard.plans.describe import describe
from autoshard.plans.plan import Plan
from autoshard.plans.wishes import Wishes
from autoshard.progress import stage
from autoshard.report.record import local_bytes
from autoshard.report.serving import Phase, Serving
from autoshard.runtime.autocast import without_autocast
from autoshard.serving.calls import Call, calls_of

log = logging.getLogger("autoshard.plan")


@dataclass(frozen=True)
class Found:
    """One joint choice for all calls."""

    calls: tuple[Call, ...]
    """memory was searched for the first"""
    programs: tuple[Program, ...]
    """per call, with equal layouts of the weights"""
    memories: tuple[Memory, ...]
    lower_bound: float
    """lower bound in seconds of all calls, weighted by how often they come"""

    @property
    def states(self) -> dict[str, Layout]:
        """KV caches: argument name → layout."""
        found: dict[str, Layout] = {}
        for call, program in zip(self.calls, self.programs, strict=True):
            taken, layouts = {name for name, _ in call.carried}, program.assignment.layouts
            found |= {i.fqn: layouts[i.name] for i in program.graph.inputs if i.name in taken}
        return found

    @property
    def weights(self) -> dict[str, Layout]:
        """Parameter name → layout."""
        graph, layouts = self.programs[0].graph, self.programs[0].assignment.layouts
        return {i.fqn: layouts[i.name] for i in graph.inputs if i.kind == "parameter"}

    def on(self, mesh: Mesh, wishes: Wishes) -> Found:
        """The same choices on ``mesh``, whose axes have other names."""
        tries = [tried(program.assignment.on(mesh), wishes.optimizer) for program in self.programs]
        programs, memories = zip(*tries, strict=True)
        return replace(self, programs=programs, memories=memories)


def is_asked(wishes: Wishes) -> bool:
    """Whether weights are laid out for more than the first call."""
    return wishes.objective != "step" or wishes.profile is not None


def laid_out(
    model: nn.Module, mesh: Mesh, args: Sequence[Any], kwargs: Mapping[str, Any], wishes: Wishes, title: str
) -> Wishes:
    """``wishes`` with weights laid out for all calls of the profile, or as in a serving plan."""
    plan = wishes.plan
    if plan is not None and plan.serving is not None:
        layouts = {n: plan.layouts[n] for n, kind in plan.kinds.items() if kind == "parameter"}
        inputs = {n: plan.layouts[n] for n, kind in plan.kinds.items() if kind == "input"}
        return replace(wishes, plan=None, parameters=layouts, states=inputs)
    if not is_asked(wishes):
        return wishes
    calls = calls_for(model, args, kwargs, wishes)
    found = together(calls, mesh, replace(wishes, like=like_of(model, wishes.like)))
    log.info("%s: weights laid out for %s", title, ", ".join(f"{c.times:g} × {c.name}" for c in calls))
    return replace(wishes, parameters=found.weights, states=found.states)


def served(calls: Sequence[Call], found: Found, wishes: Wishes, title: str) -> Plan:
    """The decode plan with ``serving``, from the result of :func:`together`."""
    mesh = found.programs[0].assignment.mesh
    plans: dict[str, Plan] = {}
    for call, program, memory in zip(found.calls, found.programs, found.memories, strict=True):
        check_program(program)
        plan = describe(program, title, wishes.optimizer, memory)
        plans[call.name] = replace(plan, like=_text(wishes), mixed_precision=str(wishes.mixed_precision or ""))
    phases = tuple(_phase(call, plans[call.name]) for call in calls)
    objective = wishes.objective if wishes.objective != "step" else "throughput"
    serving = Serving(objective, phases, mesh.size, found.lower_bound)
    plan = plans[serving.decode.name]
    return replace(plan, serving=replace(serving, room=_room(plan, serving.decode, wishes)))


def _text(wishes: Wishes) -> str:
    return "" if wishes.like is None else str(wishes.like)


def calls_for(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], wishes: Wishes) -> tuple[Call, ...]:
    """The calls of the profile, captured on meta tensors."""

    def capture(skeleton: nn.Module, own: Sequence[Any], named: Mapping[str, Any]) -> Graph:
        return captured(skeleton, own, named, training=False, precision=wishes.mixed_precision)

    return calls_of(model, args, kwargs, wishes.objective, wishes.profile, capture)


@without_autocast()  # its casts are in the graph
def together(calls: Sequence[Call], mesh: Mesh, wishes: Wishes) -> Found:
    """The cheapest joint choice for all calls with one layout of the weights.

    Memory is searched for the most frequent call; if others do not fit, for the next. Raises
    :class:`PlanError`.
    """
    errors: list[PlanError] = []
    for main in sorted(calls, key=lambda c: -c.times):
        order = (main, *(c for c in calls if c is not main))
        planners = [_planner(call, mesh, wishes) for call in order]
        others = [(c.times / main.times, p) for c, p in zip(order[1:], planners[1:], strict=True)]
        search = planners[0].prepare = Together(others, _same(order))
        try:
            with stage("planning"):
                program, memory = fitting(planners[0], wishes.memory_budget)
            solution = program.assignment.solution
            rest = [_within(tried(a, wishes.optimizer), mesh, wishes) for a in search.beside(solution)]
        except PlanError as error:
            errors.append(error)
            continue
        programs, memories = zip((program, memory), *rest, strict=True)
        return Found(order, programs, memories, main.times * solution.lower_bound)
    raise errors[0]


def _planner(call: Call, mesh: Mesh, wishes: Wishes) -> Planner:
    check_graph(call.graph)
    check_random(call.graph)
    if wishes.strict:
        check_rules(call.graph)
    expert = asked_by(wishes.like, call.graph, mesh)
    return planner_of(call.graph, mesh, wishes, expert, carried=frozenset(n for n, _ in call.carried))


def _within(found: tuple[Program, Memory], mesh: Mesh, wishes: Wishes) -> tuple[Program, Memory]:
    """``found``; raises :class:`PlanError` if it exceeds the memory budget."""
    peak, budget = found[1].peak, _budget(mesh, wishes)
    if peak > budget:
        raise PlanError(
            f"no plan within {show_bytes(budget, 4)} per rank was found on {mesh} for all calls of the profile: one of them "
            f"takes {show_bytes(peak, 4)}, at {found[1].moment} ({found[1].dominant()}). What helps: fewer requests, shorter "
            "prompts, or more ranks."
        )
    return found


def _budget(mesh: Mesh, wishes: Wishes) -> float:
    return wishes.memory_budget or SHARE * mesh.hardware.memory_bytes


def _same(calls: Sequence[Call]) -> list[tuple[Place, Place]]:
    """Pairs of variables to tie: weights and buffers of all calls, KV caches given and taken."""
    found: list[tuple[Place, Place]] = []
    first: dict[str, Place] = {}
    for number, call in enumerate(calls):
        for value in call.graph.inputs:
            if value.kind in ("parameter", "buffer"):
                place = number, value.name
                if first.setdefault(value.fqn, place) != place:
                    found.append((first[value.fqn], place))
        for name, out in call.carried:
            for other, prompt in enumerate(calls):
                if _gives(prompt.graph, out, call.graph, name):
                    found.append(((number, name), (other, f"out:{out}")))
    return found


def _gives(graph: Graph, out: int, taker: Graph, name: str) -> bool:
    """Whether output ``out`` is the tensor that ``taker`` takes as ``name``: equal number of
    dims."""
    if out >= len(graph.outputs) or not isinstance(graph.outputs[out], Ref):
        return False
    return len(graph.types[graph.outputs[out].name].shape) == len(taker.types[name].shape)


def _phase(call: Call, plan: Plan) -> Phase:
    """Seconds, bytes and lower bound of a call by its plan."""
    graph, hardware = call.graph, plan.mesh.hardware
    tables = {n for n in graph.parameters if all(u.op in LOOK_UPS for u in graph.uses[n]) and graph.uses[n]}
    rows = {node.inputs[0]: node.outputs[0] for node in graph.nodes if node.op in LOOK_UPS}
    public = {i.name: i.fqn for i in graph.inputs}
    caches = {n for n, _ in call.carried} | set(graph.states.values())
    weights = graph.parameters - tables

    def whole(names: set[str] | frozenset[str]) -> float:
        return float(sum(graph.types[n].nbytes for n in names))

    def here(names: set[str] | frozenset[str]) -> float:
        return float(sum(local_bytes(plan, public[n]) for n in names))

    looked = sum(graph.types[rows[n]].nbytes for n in tables if n in rows)
    read = (whole(weights) + whole(caches) + looked) / plan.mesh.size
    dtype = next((graph.types[n].dtype for n in weights), None)
    peak = hardware.peak(dtype) if dtype is not None else math.inf
    least = max(plan.cost.flops / plan.mesh.size / peak, read / hardware.memory_bandwidth)
    sent = sum(c.bytes for c in plan.collectives)
    sizes = here(weights) + looked, here(caches)
    seconds, tokens = plan.cost.total_s, (call.requests, call.tokens)
    return Phase(call.name, call.times, *tokens, seconds, sent, *sizes, least, plan.memory.peak)


def _room(plan: Plan, decode: Phase, wishes: Wishes) -> float:
    """More requests whose KV caches would fit."""
    if not decode.caches:
        return math.nan
    budget = _budget(plan.mesh, wishes)
    return float(math.floor(max(0.0, budget - decode.peak) / (decode.caches / decode.requests)))
