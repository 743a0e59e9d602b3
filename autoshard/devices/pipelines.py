"""Pipeline search for a number of devices: stages, their mesh, micro-batches and schedule."""

from __future__ import annotations

import logging
import math
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
from autoshard.passes.ir.units import show_bytes, show_seconds
from autoshard.passes.propagate.experts.roles import named_by_role
from autoshard.plans.follow import assignment_of
from autoshard.plans.plan import Plan
from autoshard.plans.stages import budget_of
from autoshard.plans.wishes import Wishes
from autoshard.report.record import Candidate, Cost
from autoshard.runtime.autocast import without_autocast

log = logging.getLogger("autoshard.plan")

MOST = 40
"""most estimates; a count, not a time limit, so that every run gives the same plan"""
FULL = 2
"""most full plans, where the first takes longer than its estimate"""


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
    """The plan of the best pipeline found on ``devices``, with other estimates in ``candidates``.

    ``graph``: of the full batch; ``batches``: micro-batches, None: searched; ``least``: fewest
    stages. Setups (:class:`Setup`) are estimated in order of promise, unless their lower bound
    exceeds the best estimate. At most :data:`MOST` are; one short of memory counts as several. The
    best is planned in full, and others while estimates are below that plan, :data:`FULL` in all.

    Raises :class:`MeshError` for an invalid number of devices, :class:`PlanError` without any plan.
    """
    if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1:
        raise MeshError(f"devices={devices!r}: a number of devices is an int of at least 1")
    search = _Search(Estimates(graph, hardware, wishes, title), devices, batches, least)
    search.run()
    if not search.found:
        raise PlanError(f"no pipeline of these {hardware.name} has a plan: {search.why()}")
    return search.result()


@dataclass
class _Search:
    estimates: Estimates
    devices: int
    batches: int | None
    least: int
    found: list[Estimate] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    """reasons of setups without an estimate"""
    ratios: dict[Setup, float] = field(default_factory=dict)
    """estimated seconds over guessed seconds; infinite without a plan"""

    def run(self) -> None:
        """Estimate setups in order of promise, and prune by lower bounds."""
        of, best = self.estimates, math.inf
        every = self.in_order()
        left, longer, most = every, 0, len(every)
        while left:
            left = [setup for setup in left if of.floor(setup) < best]
            longer = len(every) - len(self.ratios) - len(left)
            if not left or of.spent >= MOST:
                break
            setup = min(left, key=self.promised)
            left.remove(setup)
            try:
                estimate = of.of(setup)
            except PlanError as error:
                log.info("%s: %s", setup, error)
                self.ratios[setup] = math.inf
                self.failed.append(f"{setup} has no plan: {error}")
                continue
            log.info("%s, %s: %s", setup, estimate.schedule, show_seconds(estimate.seconds))
            self.ratios[setup] = estimate.seconds / of.guess(setup)
            self.found.append(estimate)
            if estimate.fits:
                best = min(best, estimate.seconds)
        if longer:
            self.notes.append(f"{longer} of {most} pipelines were not searched: their work alone takes longer")
        if left:
            least, done = show_seconds(min(map(of.floor, left))), len(self.ratios)
            self.notes.append(
                f"{len(left)} of {most} pipelines were not searched: {done} others promised more, and the work of these alone "
                f"takes at least {least}"
            )

    @property
    def blocks(self) -> int:
        """Most stages."""
        return max(1, len(self.estimates.folded.blocks) or len(self.estimates.graph.nodes))

    def in_order(self) -> list[Setup]:
        """Setups whose states may fit into memory, the best guess first."""
        return sorted(filter(self.estimates.fits, self.setups()), key=self.estimates.guess)

    def promised(self, setup: Setup) -> float:
        """Guess times the ratio of the most similar setup (half of it for another mesh)."""
        alike = [other for other in self.ratios if other.stages == setup.stages]
        if not alike:
            return self.estimates.guess(setup)
        near = min(alike, key=lambda other: (other.rest != setup.rest, abs(math.log(other.batches / setup.batches))))
        more = self.ratios[near] - 1
        return self.estimates.guess(setup) * (1 + (more if near.rest == setup.rest else more / 2))

    def setups(self) -> Iterator[Setup]:
        """Stages × stage meshes of up to two axes (inner one in a node) × micro-batch counts."""
        per_node, length = self.estimates.hardware.devices_per_node, self.estimates.batch
        for stages in (n for n in range(self.least, min(self.devices, self.blocks) + 1) if self.devices % n == 0):
            rest = self.devices // stages
            for shape in shapes(rest):
                if len(shape) == 2 and shape[1] > per_node:
                    continue
                most = max(1, length // (shape[0] if len(shape) == 2 or rest > per_node else 1))
                counts = (2**k for k in range(most.bit_length())) if self.batches is None else (self.batches,)
                yield from (Setup(stages, shape, n) for n in counts if length % n == 0 and (stages == 1 or n >= stages))

    def why(self) -> str:
        """Why no setup was found, as text."""
        of = self.estimates
        if self.failed:
            return "; ".join(self.failed)
        if any(self.setups()):
            return (
                f"parameters, gradients and the optimizer's state take {show_bytes(of.alone(1).state / self.devices)} where "
                f"they are spread over all ranks, and a rank may hold {show_bytes(budget_of(of.wishes, of.hardware))}"
            )
        if of.graph.symbols.read:
            return "a batch of open length (dynamic) is one micro-batch, and every stage needs one"
        if not any(self.devices % n == 0 for n in range(self.least, min(self.devices, self.blocks) + 1)):
            return f"{self.devices} devices do not form {self.least} stages or more of a model of {self.blocks} blocks"
        asked = "at least as many micro-batches as stages" if self.batches is None else f"{self.batches} micro-batches"
        return f"a batch of {of.batch} does not divide into {asked}, of which every stage needs one"

    def result(self) -> Plan:
        """The best full plan of the shortest estimates, those that fit into memory first."""
        ranked, failed = sorted(self.found, key=lambda e: (not e.fits, e.seconds)), list[str]()
        best: tuple[Plan, Estimate] | None = None
        tries = 0
        for estimate in ranked:
            if best is not None and (estimate.seconds >= best[0].cost.total_s or tries >= FULL):
                continue
            tries += 1
            try:
                plan = self._in_full(estimate)
            except AutoshardError as error:
                failed.append(f"{self._said(estimate)} has no plan: {error}")
                continue
            log.info("%s in full: %s", self._said(estimate), show_seconds(plan.cost.total_s))
            if best is None or plan.cost.total_s < best[0].cost.total_s:
                best = plan, estimate
        if best is None:
            why = "; ".join([*failed, *self.failed] or self.notes)
            raise PlanError(f"no pipeline of these {self.estimates.hardware.name} has a plan: {why}")
        plan, won = best
        lost = tuple(self._candidate(e, won, plan) for e in ranked if e is not won)
        return replace(plan, candidates=lost, notes=(*plan.notes, *failed, *self.notes))

    def _said(self, estimate: Estimate) -> str:
        return f"{estimate.setup}, {estimate.schedule}"

    def _mesh(self, estimate: Estimate) -> Mesh:
        """The full mesh, axes named by their use."""
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
        slower = f"{show_seconds(more)} slower" if more >= 1e-9 * won.seconds else "as fast"
        why = f"{slower} by estimate: {self._said(lost)}"
        compute = lost.seconds - lost.bubble_s
        cost = Cost(compute, 0.0, lost.seconds, lost.held, plan.cost.flops, 0.0, exposed_s=0.0, bubble_s=lost.bubble_s)
        return Candidate(self._mesh(lost), cost, replace(lost.plan.memory, peak=lost.held), why)
