"""Serving: one layout of the weights for all calls of a profile, found by one joint search.
:class:`JointSearch` puts the cost networks of several graphs side by side, such as a prompt
(prefill) and a token after it (decode). Seconds of each are multiplied by how often it runs.
Edges that allow equal layouts alone tie variables: a parameter in all graphs, a KV cache where it
is returned and where it is taken. So the solver proves the plan of all graphs."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from torch import nn

from autoshard.compiler import capture_graph
from autoshard.errors import PlanError
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph, Ref
from autoshard.passes.ir.memory import Memory
from autoshard.passes.ir.program import Program
from autoshard.passes.ir.text import show_bytes
from autoshard.passes.ir.verify import check_graph, check_program
from autoshard.passes.memory import lower_and_simulate, search_within_memory
from autoshard.passes.propagate.named_strategies import expand_tp_plan, resolve_like
from autoshard.passes.propagate.network import BuiltNetwork, LayoutNetwork, NetworkVariable
from autoshard.passes.propagate.planner import Planner, decode_assignment
from autoshard.passes.rules.families.embedding import LOOKUP_OPS
from autoshard.passes.rules.restrictions import check_random, check_rules
from autoshard.passes.search import CostNetwork, LinearRow, Prepared, Solution
from autoshard.passes.search.arrays import Matrix, map_entries
from autoshard.passes.search.candidates import Candidates
from autoshard.passes.search.network import FULL, Effort
from autoshard.plans.describe import describe_program
from autoshard.plans.options import NOTHING_KNOWN, CallArguments, CompileOptions, KnownLayouts
from autoshard.plans.plan import Plan
from autoshard.plans.planning import make_planner
from autoshard.plans.reuse import check_training, check_whole_plan
from autoshard.progress import shown_progress
from autoshard.report.record import Phase, Serving, local_bytes
from autoshard.runtime.transport.torch_state import without_autocast
from autoshard.serving.calls import ServedCall, capture_calls

OTHER_CHOICES = "beside"
"""key in a solution's stats: choices of the other networks"""

GraphVariable = tuple[int, str]
"""(graph number, 0 for the main one; variable of its network)"""


@dataclass(frozen=True, eq=False)
class JointNetwork(Prepared):
    """Networks of several graphs, the main graph's nodes and rows first. Choices, limits and prices
    are of the main graph; cost and bound of all."""

    starts: tuple[int, ...] = ()
    """the first node of each graph, and the number of all"""
    own: int = 0
    """rows of the main graph"""
    large: ClassVar[int] = 100_000
    """lower than for one graph: calls are tied in every layer, so elimination is slower"""

    def solve(
        self,
        limits: Sequence[float] | None = None,
        effort: Effort = FULL,
        prices: Sequence[float] | None = None,
    ) -> Solution:
        """See :meth:`Prepared.solve`."""
        if limits is not None:
            limits = (*limits, *(row.limit for row in self.rows[self.own :]))
        if prices is not None:
            prices = (*prices, *(0.0,) * (len(self.rows) - len(prices)))
        found = super().solve(limits, effort, prices)
        main, *beside = (found.choice[a:b] for a, b in pairwise(self.starts))
        return replace(
            found, choice=main, prices=found.prices[: self.own], stats={**found.stats, OTHER_CHOICES: beside}
        )


@dataclass
class JointSearch:
    """A planner's ``prepare`` that adds the networks of ``others`` to its search."""

    others: Sequence[tuple[float, Planner]]
    """(runs per run of the main graph, planner)"""
    tied: Sequence[tuple[GraphVariable, GraphVariable]]
    """variables to tie; missing ones are skipped"""
    tables: dict[Any, np.ndarray] = field(default_factory=dict)
    """equality tables, interned"""

    @cached_property
    def built(self) -> list[tuple[LayoutNetwork, BuiltNetwork]]:
        """Networks of the other graphs; memory is not searched for them."""
        return [planner.network(limited=False) for _, planner in self.others]

    def __call__(
        self,
        network: LayoutNetwork,
        costs: CostNetwork,
        rows: tuple[LinearRow, ...],
        alike: Sequence[Hashable | None] | None,
    ) -> Prepared:
        """The joint network: the main ``network`` with its costs and rows, and the others."""
        nodes, edges, starts = list(costs.nodes), list(costs.edges), [0]
        labels: list[Hashable | None] = list(alike or [None] * len(nodes))
        more: list[LinearRow] = []
        for number, ((times, _), (_, built)) in enumerate(zip(self.others, self.built, strict=True), 1):
            scaled, start, first = _scaled_network(built.network, times), len(nodes), len(edges)
            nodes += scaled.nodes
            edges += [(start + i, start + j, table) for i, j, table in scaled.edges]
            more += [_shifted_row(row, start, first, times) for row in built.hiding]
            labels += [None if x is None else (number, x) for x in built.alike]
            starts.append(start)
        edges += self._joins([network, *(found for found, _ in self.built)], starts, nodes)
        joined = CostNetwork(tuple(nodes), tuple(edges))
        padded = tuple(_padded_row(row, len(nodes), len(edges)) for row in (*rows, *more))
        return JointNetwork(joined, padded, labels, starts=(*starts, len(nodes)), own=len(rows))

    def beside(self, found: Solution) -> list[Assignment]:
        """The assignments of the other graphs in a solution of this search."""
        sides = zip(self.built, found.stats[OTHER_CHOICES], strict=True)
        return [decode_assignment(network, replace(found, choice=own)) for (network, _), own in sides]

    def _joins(
        self, known: Sequence[LayoutNetwork], starts: Sequence[int], nodes: Sequence[np.ndarray]
    ) -> Iterator[tuple[int, int, np.ndarray]]:
        numbers = [{name: i for i, name in enumerate(found.variables)} for found in known]
        for (a, first), (b, second) in self.tied:
            if first not in numbers[a] or second not in numbers[b]:
                continue
            sides = starts[a] + numbers[a][first], starts[b] + numbers[b][second]
            states = known[a].variables[first], known[b].variables[second]
            key = tuple((x.choices, len(nodes[i])) for i, x in zip(sides, states, strict=True))
            if key not in self.tables:
                self.tables[key] = _equality_table(*states, *(len(nodes[i]) for i in sides))
            yield (*sides, self.tables[key])


def _equality_table(a: NetworkVariable, b: NetworkVariable, rows: int, columns: int) -> np.ndarray:
    """0 where choices are equal, else inf; state number = place of tag × choices + choice."""
    equal = np.array([[x == y for y in b.choices] for x in a.choices])
    return np.where(np.tile(equal, (rows // len(a.choices), columns // len(b.choices))), 0.0, np.inf)


def _scaled_network(network: CostNetwork, times: float) -> CostNetwork:
    """``network`` with costs times ``times``; shared tables stay shared."""
    made: dict[int, Matrix] = {}

    def scaled(table: Matrix) -> Matrix:
        if id(table) not in made:
            made[id(table)] = map_entries(lambda x: x * times, table)
        return made[id(table)]

    return CostNetwork(
        tuple(vector * times for vector in network.nodes), tuple((i, j, scaled(t)) for i, j, t in network.edges)
    )


def _shifted_row(row: LinearRow, nodes: int, edges: int, times: float) -> LinearRow:
    """``row`` padded in front by ``nodes`` and ``edges`` of earlier networks."""
    return LinearRow((None,) * nodes + row.nodes, (None,) * edges + row.edges, row.limit, times * row.price)


def _padded_row(row: LinearRow, nodes: int, edges: int) -> LinearRow:
    return replace(
        row,
        nodes=row.nodes + (None,) * (nodes - len(row.nodes)),
        edges=row.edges + (None,) * (edges - len(row.edges)),
    )


log = logging.getLogger("autoshard.plan")


@dataclass(frozen=True)
class JointPlan:
    """One joint choice for all calls."""

    calls: tuple[ServedCall, ...]
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
        return {i.fqn: layouts[i.name] for i in graph.of_kind("parameter")}

    def on(self, mesh: Mesh, opts: CompileOptions) -> JointPlan:
        """The same choices on ``mesh``, whose axes have other names."""
        tries = [lower_and_simulate(program.assignment.on(mesh), opts.optimizer) for program in self.programs]
        programs, memories = zip(*tries, strict=True)
        return replace(self, programs=programs, memories=memories)


def is_serving_asked(opts: CompileOptions) -> bool:
    """Whether weights are laid out for more than the first call."""
    return opts.objective != "step" or opts.profile is not None


def with_serving_layouts(
    model: nn.Module,
    mesh: Mesh,
    example: CallArguments,
    opts: CompileOptions,
    known: KnownLayouts,
    training: bool,
) -> tuple[CompileOptions, KnownLayouts]:
    """``opts``, and layouts for all calls of the profile, or those of a serving plan."""
    plan = opts.plan
    if plan is not None and plan.serving is not None:
        check_training(plan, training)
        check_whole_plan(plan, opts, mesh)
        layouts = {n: plan.layouts[n] for n, kind in plan.kinds.items() if kind == "parameter"}
        inputs = {n: plan.layouts[n] for n, kind in plan.kinds.items() if kind == "input"}
        return replace(opts, plan=None), replace(known, parameters=layouts, states=inputs)
    if not is_serving_asked(opts):
        return opts, known
    calls = profile_calls(model, *example, opts)
    found = search_jointly(calls, mesh, replace(opts, like=expand_tp_plan(model, opts.like)), known)
    log.info("%s: weights laid out for %s", opts.title, ", ".join(f"{c.times:g} × {c.name}" for c in calls))
    return opts, replace(known, parameters=found.weights, states=found.states)


def serving_plan(calls: Sequence[ServedCall], found: JointPlan, opts: CompileOptions) -> Plan:
    """The decode plan with ``serving``, from the result of :func:`search_jointly`."""
    mesh = found.programs[0].assignment.mesh
    plans: dict[str, Plan] = {}
    for call, program, memory in zip(found.calls, found.programs, found.memories, strict=True):
        check_program(program)
        plan = describe_program(program, opts.title, opts.optimizer, memory)
        plans[call.name] = replace(
            plan,
            like="" if opts.like is None else repr(opts.like),
            mixed_precision=str(opts.mixed_precision or ""),
            memory_budget=opts.budget(mesh.hardware),
        )
    phases = tuple(_phase(call, plans[call.name]) for call in calls)
    objective = opts.objective if opts.objective != "step" else "throughput"
    serving = Serving(objective, phases, mesh.size, found.lower_bound)
    plan = plans[serving.decode.name]
    room = _spare_requests(plan, serving.decode, opts)
    return replace(plan, serving=replace(serving, room=room), asked=tuple(opts.words()))


def profile_calls(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], opts: CompileOptions
) -> tuple[ServedCall, ...]:
    """The calls of the profile, captured on meta tensors."""

    def capture(skeleton: nn.Module, own: Sequence[Any], named: Mapping[str, Any]) -> Graph:
        return capture_graph(skeleton, own, named, training=False, precision=opts.mixed_precision)

    return capture_calls(model, args, kwargs, opts.objective, opts.profile, capture)


@without_autocast()  # its casts are in the graph
def search_jointly(
    calls: Sequence[ServedCall], mesh: Mesh, opts: CompileOptions, known: KnownLayouts = NOTHING_KNOWN
) -> JointPlan:
    """The cheapest joint choice for all calls with one layout of the weights. Memory is searched
    for the most frequent call; if others do not fit, for the next. Raises :class:`PlanError`."""
    found = Candidates[JointPlan](lambda one: one.lower_bound)
    for main in sorted(calls, key=lambda c: -c.times):
        order = (main, *(c for c in calls if c is not main))
        planners = [_call_planner(call, mesh, opts, known) for call in order]
        others = [(c.times / main.times, p) for c, p in zip(order[1:], planners[1:], strict=True)]
        search = planners[0].prepare = JointSearch(others, _tied_variables(order))
        with found.attempt(f"memory searched for {main.name}"), shown_progress("planning"):
            program, memory = search_within_memory(planners[0], opts.budget(mesh.hardware))
            solution = program.assignment.solution
            rest = [_require_budget(lower_and_simulate(a, opts.optimizer), mesh, opts) for a in search.beside(solution)]
            programs, memories = zip((program, memory), *rest, strict=True)
            return JointPlan(order, programs, memories, max(0.0, main.times * solution.lower_bound))
    return found.cheapest()


def _call_planner(call: ServedCall, mesh: Mesh, opts: CompileOptions, known: KnownLayouts) -> Planner:
    check_graph(call.graph)
    check_random(call.graph)
    if opts.strict:
        check_rules(call.graph)
    expert = resolve_like(opts.like, call.graph, mesh)
    return make_planner(call.graph, mesh, opts, expert, known, carried=frozenset(n for n, _ in call.carried))


def _require_budget(found: tuple[Program, Memory], mesh: Mesh, opts: CompileOptions) -> tuple[Program, Memory]:
    """``found``; raises :class:`PlanError` if it exceeds the memory budget."""
    peak, budget = found[1].peak, opts.budget(mesh.hardware)
    if peak > budget:
        raise PlanError(
            f"no plan within {show_bytes(budget, 4)} per rank was found on {mesh} for all calls "
            f"of the profile. One of them takes {show_bytes(peak, 4)}, at {found[1].moment} "
            f"({found[1].dominant()}). What helps: fewer requests, shorter prompts, or more ranks."
        )
    return found


def _tied_variables(calls: Sequence[ServedCall]) -> list[tuple[GraphVariable, GraphVariable]]:
    """Pairs of variables to tie: weights and buffers of all calls, KV caches given and taken."""
    found: list[tuple[GraphVariable, GraphVariable]] = []
    first: dict[str, GraphVariable] = {}
    for number, call in enumerate(calls):
        for value in call.graph.inputs:
            if value.kind in ("parameter", "buffer"):
                place = number, value.name
                if first.setdefault(value.fqn, place) != place:
                    found.append((first[value.fqn], place))
        for name, out in call.carried:
            for other, prompt in enumerate(calls):
                if _returns_cache(prompt.graph, out, call.graph, name):
                    found.append(((number, name), (other, f"out:{out}")))
    return found


def _returns_cache(graph: Graph, out: int, taker: Graph, name: str) -> bool:
    """Whether output ``out`` is the tensor that ``taker`` takes as ``name``: equal number of
    dims."""
    if out >= len(graph.outputs) or not isinstance(graph.outputs[out], Ref):
        return False
    return len(graph.types[graph.outputs[out].name].shape) == len(taker.types[name].shape)


def _phase(call: ServedCall, plan: Plan) -> Phase:
    """Seconds, bytes and lower bound of a call by its plan."""
    graph, hardware = call.graph, plan.mesh.hardware
    tables = {n for n in graph.parameters if all(u.op in LOOKUP_OPS for u in graph.uses[n]) and graph.uses[n]}
    rows = {node.inputs[0]: node.outputs[0] for node in graph.nodes if node.op in LOOKUP_OPS}
    public = graph.fqns
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


def _spare_requests(plan: Plan, decode: Phase, opts: CompileOptions) -> float:
    """More requests whose KV caches would fit."""
    if not decode.caches:
        return math.nan
    budget = opts.budget(plan.mesh.hardware)
    return float(math.floor(max(0.0, budget - decode.peak) / (decode.caches / decode.requests)))
