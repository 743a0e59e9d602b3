"""What a pipeline on a number of devices would take, from the plan of a graph with its equal blocks left out.

One plan of the folded graph (:mod:`autoshard.passes.pipeline.fold`) says what every block takes on a mesh; from these
pieces the boundaries and the step of every schedule follow at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from autoshard.compiler import planned
from autoshard.errors import PlanError
from autoshard.hardware import Hardware
from autoshard.layout import Placement
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.microbatch import micro_batched
from autoshard.passes.pipeline import Pieces
from autoshard.passes.pipeline.choose import Cutting, Piece
from autoshard.passes.pipeline.fold import Folded, folded
from autoshard.passes.pipeline.timeline import held, in_flight, orders, refusal
from autoshard.passes.propagate.hints import in_time
from autoshard.passes.search.network import Effort
from autoshard.plans.plan import Plan
from autoshard.plans.stages import CHUNKS, budget_of
from autoshard.plans.wishes import Wishes
from autoshard.report.pipeline import meeting_seconds, stage_times
from autoshard.report.record import local_bytes

AXIS = "pp"
EFFORT = Effort(0.1, branches=False)
"""of the search for an estimate"""


@dataclass(frozen=True)
class Setup:
    """Ranks along the axis of stages, the rest of the mesh from outer to inner, and micro-batches of a step."""

    stages: int
    rest: tuple[int, ...]
    batches: int

    @property
    def ranks(self) -> int:
        return self.stages * math.prod(self.rest)

    def of_stage(self, hardware: Hardware) -> Mesh:
        """The mesh of one stage."""
        return Mesh({f"axis{i}": n for i, n in enumerate(self.rest)}, hardware)

    def mesh(self, rest: Mesh) -> Mesh:
        """The whole mesh, the axis of stages outermost; ``rest``: the mesh of a stage, with its names."""
        return Mesh({AXIS: self.stages, **dict(zip(rest.axes, rest.shape, strict=True))}, rest.hardware)

    def __str__(self) -> str:
        stages = f"{self.stages} stages × " if self.stages > 1 else ""
        return f"{stages}{' × '.join(map(str, self.rest))} with {self.batches} micro-batches"


@dataclass(frozen=True)
class Estimate:
    """The step of a setup with its best schedule, predicted from the plan of the folded graph."""

    setup: Setup
    schedule: str
    seconds: float
    bubble_s: float
    boundaries: tuple[int, ...]
    """positions among the operations of the whole graph of one micro-batch"""
    held: float
    """bytes of states and activations on the fullest rank"""
    plan: Plan
    """of the folded graph"""
    graph: Graph
    """the folded graph of one micro-batch"""


class Alone(NamedTuple):
    """A step on one device."""

    work: float
    """seconds"""
    launches: float
    """seconds"""
    forward: float
    """seconds of both in the forward"""
    state: float
    """bytes of parameters, gradients and the optimizer's state"""
    kept: float
    """bytes that the forward keeps for the backward"""


@dataclass
class Estimates:
    """Estimates of one captured graph."""

    graph: Graph
    hardware: Hardware
    wishes: Wishes
    title: str
    micro: dict[int, Graph] = field(default_factory=dict)

    @cached_property
    def folded(self) -> Folded:
        named = self.wishes.hints or isinstance(self.wishes.like, Mapping)  # names of modules, which may be left out
        return Folded(self.graph, ()) if named else folded(self.graph)

    @cached_property
    def cuts(self) -> Mapping[str, Placement]:
        """What hints say of the inputs of a micro-batch."""
        return in_time(self.wishes.hints, self.folded.graph)

    def of_one(self, batches: int) -> Graph:
        """The folded graph of one micro-batch. Raises :class:`PlanError` where the batch does not divide."""
        if batches not in self.micro:
            whole = self.folded.graph
            several = batches > 1 and whole.training
            self.micro[batches] = replace(micro_batched(whole, batches, self.cuts)[0], passes=1) if several else whole
        return self.micro[batches]

    @cached_property
    def batch(self) -> int:
        """The length of the batch; 1 where it cannot be divided."""
        if not self.folded.graph.training:
            return 1
        try:
            _, micro = micro_batched(self.folded.graph, 2, self.cuts)
        except PlanError:
            return 1
        types, cut = self.folded.graph.types, micro.inputs.values()
        return min((int(types[name].shape[dim]) for name, dim in cut if dim is not None), default=1)

    @cached_property
    def alone(self) -> Alone:
        """The whole step on one device."""
        graph = self.folded.graph
        pieces = Pieces(graph, Mesh({"alone": 1}, self.hardware), self.hardware.route(1, 1), self.wishes.optimizer)
        rows, sequence = self.folded.sequence(graph)
        nodes = [node for number in sequence for node in rows[number]]
        launches = math.fsum(float(pieces.alone[n].launches[:, 0].sum()) for n in nodes)
        seconds = math.fsum(sum(pieces.seconds[n.name][:2]) for n in nodes)
        again = math.fsum(pieces.seconds[n.name][0] for n in nodes)
        state, kept = (math.fsum(of.get(n.name, 0.0) for n in nodes) for of in (pieces.states, pieces.kept))
        return Alone(seconds - launches, launches, again, state, kept)

    def floor(self, setup: Setup) -> float:
        """Seconds that no plan of ``setup`` can be below: its work, its launches, and the least bubble."""
        alone = self.alone
        each = alone.work / setup.ranks + setup.batches * alone.launches / setup.stages
        return each * (1 + (setup.stages - 1) / (setup.batches * max(CHUNKS.values())))

    def guess(self, setup: Setup) -> float:
        """:meth:`floor`, and what has to be made again where all is spread over all ranks: the order of estimates."""
        alone, budget = self.alone, budget_of(self.wishes, self.hardware)
        kept = min(setup.stages, setup.batches) * alone.kept / (setup.batches * setup.ranks)
        over = kept + alone.state / setup.ranks - budget
        return self.floor(setup) + (min(1.0, over / kept) * alone.forward / setup.ranks if over > 0 else 0.0)

    def fits(self, setup: Setup) -> bool:
        """Whether at least the states fit where they are spread over all ranks."""
        return self.alone.state / setup.ranks <= budget_of(self.wishes, self.hardware)

    def of(self, setup: Setup, schedules: Sequence[str]) -> Estimate:
        """The estimate of ``setup`` with the best of ``schedules``. Raises :class:`PlanError` where there is no plan.

        The folded graph is planned within its share of what a stage may hold.
        """
        graph, own = self.of_one(setup.batches), setup.of_stage(self.hardware)
        rows, sequence = self.folded.sequence(graph)
        flying = in_flight(orders("1f1b", setup.stages, setup.batches)[0]) if graph.training else 0
        share = min(1.0, setup.stages * len(rows) / len(sequence))
        budget, pieces = budget_of(self.wishes, self.hardware), self._pieces(graph, setup, own)
        work = max(map(pieces.touched, graph.nodes), default=0.0)
        limit = share * budget + (1 - share) * min(2 * work, budget / 2)
        asked = replace(self.wishes, stages=None, flying=flying, memory_budget=limit, effort=EFFORT)
        _, plan = planned(graph, own, asked, self.title)
        bare = pieces.between(list(itertools.accumulate(map(len, rows)))[:-1])
        parts = [self._piece(piece, nodes, plan, pieces, flying) for piece, nodes in zip(bare, rows, strict=True)]
        whole, once = [parts[i][0] for i in sequence], sum(parts[i][1] for i in sequence) / setup.stages
        once += meeting_seconds(setup.mesh(own))
        places = list(itertools.accumulate(len(rows[i]) for i in sequence))
        found = []
        for schedule in schedules:
            chunks = CHUNKS[schedule] if setup.stages > 1 else 1
            if refusal(schedule, setup.stages, setup.batches, chunks) or setup.stages * chunks > len(whole):
                continue
            paces = self.hardware.paces(setup.stages, own.size)
            host = self.hardware.on_processor(self.hardware.actions)
            cutting = Cutting(
                whole, schedule, setup.stages, setup.batches, chunks, math.inf, graph.training, paces, host
            )
            cut, step = cutting.shortest()
            size = _held(cutting, cut.ends)
            cuts = tuple(places[end - 1] for end in cut.ends[:-1])
            found.append(Estimate(setup, schedule, step.step_s + once, step.bubble_s, cuts, size, plan, graph))
        if not found:
            raise PlanError("no schedule has so few parts and micro-batches")
        return min(found, key=lambda e: (e.held > budget, e.seconds))

    def _pieces(self, graph: Graph, setup: Setup, own: Mesh) -> Pieces:
        return Pieces(graph, own, setup.mesh(own).link(AXIS), self.wishes.optimizer)

    @staticmethod
    def _piece(bare: Piece, nodes: Sequence[Node], plan: Plan, pieces: Pieces, flying: int) -> tuple[Piece, float]:
        """A row of operations as ``plan`` runs them; and the seconds that it takes once a step."""
        names = {n.name for n in nodes}
        inputs = {i.name: i.fqn for i in pieces.graph.inputs if i.kind == "parameter"}
        weights = {inputs[x] for n in nodes if n.name in pieces.states for x in n.inputs if x in inputs}
        sizes = {fqn: local_bytes(plan, fqn) for fqn in inputs.values()}
        own = sum(sizes[w] for w in weights)
        part = own / (sum(sizes.values()) or 1)
        choices = {n: c for n, c in plan.choices.items() if n in names}
        sent = tuple(c for c in plan.collectives if c.op in names)
        update = plan.cost.optimizer_s * part
        compute = math.fsum(c.seconds for c in choices.values())
        local = plan.cost.local_s * compute / ((plan.cost.compute_s - plan.cost.optimizer_s) or 1.0)
        cost = replace(plan.cost, compute_s=compute + update, local_s=local, optimizer_s=update)
        times = stage_times(replace(plan, choices=choices, collectives=sent, cost=cost))
        kept = sum(pieces.kept.values()) or 1.0
        memory = plan.memory
        states = memory.parameters + memory.gradients + memory.optimizer
        return (
            replace(
                bare,
                forward=times.batch.forward,
                backward=times.batch.backward,
                weights=times.batch.weights,
                state=part * states,
                kept=memory.activations / max(1, flying) * sum(pieces.kept.get(n, 0.0) for n in names) / kept,
            ),
            times.once_s,
        )


def _held(cutting: Cutting, ends: Sequence[int]) -> float:
    """The most bytes of states and activations that a rank holds."""
    spans = list(zip((0, *ends), ends, strict=False))
    kept = [sum(p.kept for p in cutting.pieces[a:b]) for a, b in spans]
    state = [sum(p.state for p in cutting.pieces[a:b]) for a, b in spans]
    order = orders(cutting.schedule, cutting.ranks, cutting.batches, cutting.chunks, cutting.training)
    return max(sum(state[r :: cutting.ranks]) + held(own, kept) for r, own in enumerate(order))
