"""Estimates of pipelines from one plan of the folded graph, which has equal blocks once.

The plan of the folded graph (:mod:`autoshard.passes.pipeline.fold`) gives time and memory of every
block on a mesh. Stage boundaries and the step of each schedule follow without another search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.compiler import planned
from autoshard.devices.bounds import AXIS, Bounds, Setup
from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.pipeline import Pieces
from autoshard.passes.pipeline.choose import Cutting
from autoshard.passes.pipeline.piece import Piece
from autoshard.passes.pipeline.timeline import held, in_flight, orders
from autoshard.passes.search.network import Effort
from autoshard.plans.plan import Plan
from autoshard.plans.stages import budget_of
from autoshard.report.pipeline import meeting_seconds, stage_times
from autoshard.report.record import local_bytes

EFFORT = Effort(0.1, branches=False)
"""search effort of an estimate"""
SHORT = 5
"""extra cost of an estimate that is repeated with less memory, in estimates"""


@dataclass(frozen=True)
class Estimate:
    """Predicted step of a setup with its best schedule, from the plan of the folded graph."""

    setup: Setup
    schedule: str
    seconds: float
    bubble_s: float
    boundaries: tuple[int, ...]
    """positions among the operations of the unfolded graph of one micro-batch"""
    held: float
    """bytes of parameters, gradients, optimizer state and activations on the fullest rank"""
    budget: float
    """memory limit per rank, in bytes"""
    plan: Plan
    """plan of the folded graph"""
    graph: Graph
    """the folded graph of one micro-batch"""

    @property
    def fits(self) -> bool:
        """Whether states and activations are within the budget."""
        return self.held <= self.budget


@dataclass
class Estimates(Bounds):
    """Estimates of one captured graph."""

    title: str = "model"
    spent: int = 0
    """effort so far, in estimates that needed no second try"""

    def of(self, setup: Setup) -> Estimate:
        """The estimate of ``setup`` with its best schedule; :class:`PlanError` without a plan.

        The folded graph is planned within its share of a stage's memory, and once more within less
        if the stages then exceed the budget.
        """
        self.spent += 1
        found, limit = self._within(setup, math.inf)
        if found.fits:
            return found
        self.spent += SHORT
        try:
            return self._within(setup, limit * found.budget / found.held)[0]
        except PlanError:
            return found  # the full plan may fit

    def _within(self, setup: Setup, most: float) -> tuple[Estimate, float]:
        """(estimate, memory limit used); the folded graph may take at most ``most`` bytes."""
        graph, own = self.of_one(setup.batches), setup.of_stage(self.hardware)
        rows, sequence = self.folded.sequence(graph)
        flying = in_flight(orders("1f1b", setup.stages, setup.batches)[0]) if graph.training else 0
        share = min(1.0, setup.stages * len(rows) / len(sequence))
        budget, pieces = budget_of(self.wishes, self.hardware), self._pieces(graph, setup, own)
        work = max(map(pieces.touched, graph.nodes), default=0.0)
        limit = min(most, share * budget + (1 - share) * min(2 * work, budget / 2))
        asked = replace(self.wishes, stages=None, flying=flying, stays=False, memory_budget=limit, effort=EFFORT)
        _, plan = planned(graph, own, asked, self.title)
        bare = pieces.between(list(itertools.accumulate(map(len, rows)))[:-1])
        parts = [self._piece(piece, nodes, plan, pieces, flying) for piece, nodes in zip(bare, rows, strict=True)]
        whole, meetings = [parts[i] for i in sequence], meeting_seconds(setup.mesh(own))
        places = list(itertools.accumulate(len(rows[i]) for i in sequence))
        found = []
        for schedule, chunks in self.schedules(setup):
            cutting = pieces.cutting(whole, schedule, setup.stages, setup.batches, chunks)
            cut = cutting.shortest()
            size = _held(cutting, cut.ends)
            cuts, seconds, bubble = (
                tuple(places[end - 1] for end in cut.ends[:-1]),
                cut.seconds + meetings,
                cutting.bubble(cut),
            )
            found.append(Estimate(setup, schedule, seconds, bubble, cuts, size, budget, plan, graph))
        if not found:
            raise PlanError("no schedule has so few parts and micro-batches")
        return min(found, key=lambda e: (not e.fits, e.seconds)), limit

    def _pieces(self, graph: Graph, setup: Setup, own: Mesh) -> Pieces:
        return Pieces(graph, own, setup.mesh(own).link(AXIS), self.wishes.optimizer)

    @staticmethod
    def _piece(bare: Piece, nodes: Sequence[Node], plan: Plan, pieces: Pieces, flying: int) -> Piece:
        """The piece of operations ``nodes`` with the times and memory of ``plan``."""
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
        states = memory.parameters + memory.gradients + memory.optimizer + memory.gathered
        each = (memory.activations - memory.gathered) / max(1, flying)
        return replace(
            bare,
            forward=times.batch.forward,
            backward=times.batch.backward,
            weights=times.batch.weights,
            state=part * states,
            kept=each * sum(pieces.kept.get(n, 0.0) for n in names) / kept,
            once=times.once_s,
        )


def _held(cutting: Cutting, ends: Sequence[int]) -> float:
    """Bytes of states and activations on the fullest rank."""
    spans = list(zip((0, *ends), ends, strict=False))
    kept = [sum(p.kept for p in cutting.pieces[a:b]) for a, b in spans]
    state = [sum(p.state for p in cutting.pieces[a:b]) for a, b in spans]
    order = orders(cutting.schedule, cutting.ranks, cutting.batches, cutting.chunks, cutting.training)
    return max(sum(state[r :: cutting.ranks]) + held(own, kept) for r, own in enumerate(order))
