"""Stages, the mesh of a stage, micro-batches and schedule for a number of devices: the best that estimates find."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from autoshard.compiler import build
from autoshard.devices.bounds import AXIS, Setup
from autoshard.devices.estimate import Estimate, Estimates
from autoshard.devices.meshes import shapes
from autoshard.errors import AutoshardError, MeshError, PlanError
from autoshard.hardware import Hardware
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.experts.roles import named_by_role
from autoshard.plans.follow import assignment_of
from autoshard.plans.plan import Plan
from autoshard.plans.wishes import Wishes
from autoshard.report.record import Candidate, Cost
from autoshard.report.units import show_seconds
from autoshard.runtime.autocast import without_autocast

log = logging.getLogger("autoshard.plan")

MOST = 8
"""estimates, at most: as many in every run, so that it gives the same plan"""


@without_autocast()  # its casts are in the graph
def pipelined_for(
    graph: Graph,
    devices: int,
    hardware: Hardware,
    wishes: Wishes,
    title: str,
    batches: int | None = None,
    least: int = 1,
) -> Plan:
    """The plan of the best pipeline found on ``devices``, with what else was estimated in ``candidates``.

    ``graph``: of the whole batch; ``batches``: micro-batches, None: searched, too; ``least``: stages, at least.
    Of every number of stages the setup (:class:`Setup`) is estimated that would take least without communication, then the
    second of each, and so on; none of which that is more than the best takes, and :data:`MOST` in all. The best ones are
    then planned in full, until one has a plan.

    Raises :class:`MeshError` for a number of devices that is none, :class:`PlanError` where nothing has a plan.
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise MeshError(f"devices={devices!r}: a number of devices is an int of at least 1")
    search = _Search(Estimates(graph, hardware, wishes, title), devices, batches, least)
    search.run()
    return search.result()


@dataclass
class _Search:
    estimates: Estimates
    devices: int
    batches: int | None
    least: int
    found: list[Estimate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Estimate setups, the most promising first."""
        of, left = self.estimates, MOST
        best, longer, late = float("inf"), 0, 0
        for setup in self.in_order():
            if of.floor(setup) >= best:
                longer += 1
                continue
            if left <= 0:
                late += 1
                continue
            left -= 1
            try:
                estimate = of.of(setup)
            except PlanError as error:
                log.info("%s: %s", setup, error)
                continue
            log.info("%s, %s: %s", setup, estimate.schedule, show_seconds(estimate.seconds))
            self.found.append(estimate)
            best = min(best, estimate.seconds)
        if longer:
            self.notes.append(f"{longer} pipelines were not searched: their work alone takes longer")
        if late:
            self.notes.append(f"{late} pipelines were not searched: {MOST} others promised more")

    def in_order(self) -> list[Setup]:
        """The setups that may fit: the best guess of every number of stages, then the second of each, and so on."""
        of, places = self.estimates, Counter[int]()
        ranked = []
        for setup in sorted(filter(of.fits, self.setups()), key=of.guess):
            ranked.append((places[setup.stages], setup))
            places[setup.stages] += 1
        return [setup for _, setup in sorted(ranked, key=lambda one: (one[0], of.guess(one[1])))]

    def setups(self) -> Iterator[Setup]:
        """Stages × meshes of up to two axes, the inner one within a node, × micro-batches of at least a row per rank."""
        per_node, length = self.estimates.hardware.devices_per_node, self.estimates.batch
        blocks = max(1, len(self.estimates.folded.blocks) or len(self.estimates.graph.nodes))
        for stages in (n for n in range(self.least, min(self.devices, blocks) + 1) if self.devices % n == 0):
            rest = self.devices // stages
            for shape in shapes(rest, per_node):
                if len(shape) == 2 and shape[1] > per_node:
                    continue
                most = max(1, length // (shape[0] if len(shape) == 2 or rest > per_node else 1))
                counts = (2**k for k in range(most.bit_length())) if self.batches is None else (self.batches,)
                yield from (Setup(stages, shape, n) for n in counts if length % n == 0 and (stages == 1 or n >= stages))

    def result(self) -> Plan:
        """The first of the estimates, the shortest first, that has a plan in full."""
        ranked, errors = sorted(self.found, key=lambda e: e.seconds), list[str]()
        for number, estimate in enumerate(ranked):
            try:
                plan = self._in_full(estimate)
            except AutoshardError as error:
                errors.append(f"{estimate.setup}: {error}")
                continue
            others = (e for e in ranked if e is not estimate)
            lost = tuple(self._candidate(e, estimate, plan) for e in others)
            failed = [f"{self._said(e)} has no plan: {why}" for e, why in zip(ranked[:number], errors, strict=True)]
            return replace(plan, candidates=lost, notes=(*plan.notes, *failed, *self.notes))
        raise PlanError(
            f"no pipeline of these {self.estimates.hardware.name} has a plan: {'; '.join(errors or self.notes)}"
        )

    def _said(self, estimate: Estimate) -> str:
        return f"{estimate.setup}, {estimate.schedule}"

    def _mesh(self, estimate: Estimate) -> Mesh:
        """The whole mesh, named by what the axes are used for."""
        own = estimate.plan.mesh
        names = named_by_role(estimate.graph, assignment_of(estimate.plan, estimate.graph, own, {}))
        return Mesh(({AXIS: estimate.setup.stages} if estimate.setup.stages > 1 else {}) | names, own.hardware)

    def _in_full(self, estimate: Estimate) -> Plan:
        of, setup = self.estimates, estimate.setup
        mesh = self._mesh(estimate)
        wishes = replace(of.wishes, micro_batches=setup.batches, schedule=estimate.schedule)
        if setup.stages > 1:
            wishes = replace(wishes, stages=AXIS, boundaries=estimate.boundaries)
        return build(of.graph, mesh, wishes, title=of.title).plan

    def _candidate(self, lost: Estimate, won: Estimate, plan: Plan) -> Candidate:
        more = lost.seconds - won.seconds
        why = (
            f"{show_seconds(more)} slower by estimate: {self._said(lost)}"
            if more > 0
            else f"as fast: {self._said(lost)}"
        )
        compute = lost.seconds - lost.bubble_s
        cost = Cost(compute, 0.0, lost.seconds, lost.held, plan.cost.flops, 0.0, exposed_s=0.0, bubble_s=lost.bubble_s)
        return Candidate(self._mesh(lost), cost, replace(lost.plan.memory, peak=lost.held), why)
