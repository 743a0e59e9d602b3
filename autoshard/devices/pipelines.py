"""Search over pipelines of a number of devices: stages, their mesh, micro-batches, schedule. Lower
bounds prune setups, estimates from one plan of the folded graph rank them, the best are planned
in full."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from autoshard.compiler import compile_graph
from autoshard.devices.meshes import check_devices, mesh_shapes
from autoshard.errors import AutoshardError, PlanError
from autoshard.hardware import Hardware
from autoshard.layout import Placement
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.text import show_bytes, show_seconds
from autoshard.passes.microbatch import micro_batched
from autoshard.passes.pipeline import SegmentedGraph
from autoshard.passes.pipeline.partition import BoundarySearch, GraphSegment
from autoshard.passes.pipeline.repeated_blocks import DeduplicatedBlocks, without_repeated_blocks
from autoshard.passes.pipeline.schedules import max_in_flight, peak_kept, rank_orders, schedule_refusal
from autoshard.passes.pipeline.step_times import step_lower_bound
from autoshard.passes.propagate.hints import micro_batch_placements
from autoshard.passes.propagate.named_strategies.strategies import axes_by_role
from autoshard.passes.propagate.planner import SearchSettings
from autoshard.passes.search.candidates import Candidates
from autoshard.passes.search.limits import OUTER_LIMITS
from autoshard.passes.search.network import QUICK
from autoshard.plans.options import CompileOptions, KnownLayouts
from autoshard.plans.plan import Plan
from autoshard.plans.planning import plan_graph
from autoshard.plans.reuse import assignment_of
from autoshard.progress import is_time_up, shown_progress
from autoshard.report.pipeline import stage_times, synchronisation_seconds
from autoshard.report.record import Candidate, Cost, local_bytes
from autoshard.runtime.transport.torch_state import without_autocast

STAGE_AXIS = "pp"
SEARCHED_SCHEDULES = ("1f1b", "interleaved")
"""schedules searched by default; GPipe has the bubble of 1F1B and needs more memory"""
LARGEST_RING = 256
"""most ranks of an outer axis of a stage that are tried beyond the batch: as many may share sequences"""
INTERLEAVED_STAGES = (2, 4)
"""stages per rank that are searched for interleaved schedules"""


@dataclass(frozen=True)
class PipelineSetup:
    """A point of the search: stage ranks, mesh shape of a stage (outer to inner), micro-batches."""

    stages: int
    rest: tuple[int, ...]
    batches: int

    @property
    def ranks(self) -> int:
        return self.stages * self.each

    @property
    def each(self) -> int:
        """Ranks of a stage."""
        return math.prod(self.rest)

    def of_stage(self, hardware: Hardware) -> Mesh:
        return Mesh({f"axis{i}": n for i, n in enumerate(self.rest)}, hardware)

    def mesh(self, rest: Mesh) -> Mesh:
        """The full mesh, stage axis outermost; ``rest``: the mesh of a stage, with axis names."""
        return Mesh({STAGE_AXIS: self.stages, **dict(zip(rest.axes, rest.shape, strict=True))}, rest.hardware)

    def __str__(self) -> str:
        stages = f"{self.stages} stages × " if self.stages > 1 else ""
        return f"{stages}{' × '.join(map(str, self.rest))} with {self.batches} micro-batch{'es' * (self.batches != 1)}"


class OneDeviceWork(NamedTuple):
    """Work of one micro-batch of the full model on one device."""

    forward: tuple[float, float]
    """seconds of compute, and of kernel launches"""
    backward: tuple[float, float]
    weights: tuple[float, float]
    """the part of the backward that computes weight gradients"""
    state: float
    """bytes of parameters, gradients and optimizer state"""
    kept: float
    """activation memory: bytes saved for the backward"""


@dataclass(frozen=True)
class PipelineEstimate:
    """Predicted step of a setup with its best schedule, from the plan of the folded graph."""

    setup: PipelineSetup
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

    @property
    def promise(self) -> float:
        """Seconds, longer by the share of memory that is missing: the full plan may recompute more."""
        return self.seconds * max(1.0, self.held / self.budget)


@dataclass
class PipelineEstimates:
    """Lower bounds and estimates for setups of a graph, from micro-batches with folded blocks."""

    graph: Graph
    hardware: Hardware
    opts: CompileOptions
    micro: dict[int, Graph] = field(default_factory=dict, init=False)
    one_device_work: dict[int, OneDeviceWork] = field(default_factory=dict, init=False)
    floors: dict[tuple[int, int, int], float] = field(default_factory=dict, init=False)
    spent: int = 0
    """effort so far, in estimates that needed no second try"""

    @cached_property
    def folded(self) -> DeduplicatedBlocks:
        named = self.opts.hints or isinstance(self.opts.like, Mapping)  # of folded modules, too
        return DeduplicatedBlocks(self.graph, ()) if named else without_repeated_blocks(self.graph)

    @cached_property
    def micro_batch_dims(self) -> Mapping[str, Placement]:
        """Micro-batch dims of inputs, from hints."""
        return micro_batch_placements(self.opts.hints, self.folded.graph)

    def micro_batch_graph(self, batches: int) -> Graph:
        """The folded graph of one micro-batch, planned as a step of its own (``passes=1``): else
        the head would hide the few folded blocks' gathers. Raises :class:`PlanError` if the
        batch is not divisible."""
        if batches not in self.micro:
            whole = self.folded.graph
            several = batches > 1 and whole.training
            self.micro[batches] = (
                replace(micro_batched(whole, batches, self.micro_batch_dims)[0], passes=1) if several else whole
            )
        return self.micro[batches]

    @cached_property
    def batch(self) -> int:
        """The batch size; 1 where the batch cannot be divided."""
        if not self.folded.graph.training:
            return 1
        try:
            _, micro = micro_batched(self.folded.graph, 2, self.micro_batch_dims)
        except PlanError:
            return 1
        types, cut = self.folded.graph.types, micro.inputs.values()
        return min((int(types[name].shape[dim]) for name, dim in cut if dim is not None), default=1)

    def schedules(self, setup: PipelineSetup) -> Sequence[tuple[str, int]]:
        """(schedule, stages per rank) that ``setup`` and the number of blocks allow."""
        asked, each = self.opts.schedule, self.opts.stages_per_rank
        names = SEARCHED_SCHEDULES if asked == CompileOptions.schedule else (asked,)
        if setup.stages == 1:
            return [(names[0], 1)]
        several = {"interleaved": INTERLEAVED_STAGES if each is None else (each,), "zero_bubble": (each or 1,)}
        found = [(name, chunks) for name in names for chunks in several.get(name, (1,))]
        parts = len(self.folded.sequence(self.folded.graph)[1])
        return [
            (name, chunks)
            for name, chunks in found
            if setup.stages * chunks <= parts and not schedule_refusal(name, setup.stages, setup.batches, chunks)
        ]

    def alone(self, batches: int) -> OneDeviceWork:
        """Work of one of ``batches`` micro-batches. Raises :class:`PlanError` if not divisible."""
        if batches not in self.one_device_work:
            graph = self.micro_batch_graph(batches)
            pieces = SegmentedGraph(
                graph, Mesh({"alone": 1}, self.hardware), self.hardware.route(1, 1), self.opts.optimizer
            )
            rows, sequence = self.folded.sequence(graph)
            names = [node.name for number in sequence for node in rows[number]]
            launches = {n.name: pieces.alone[n].phases[1, :, 0] for n in graph.nodes}

            def summed(way: int, share: int | None = None) -> tuple[float, float]:
                """(compute, launches) forward (0) or backward (1), or of part ``share``."""
                parts = [pieces.seconds[n] for n in names]
                part = [1.0 if share is None else s[share] / s[way] if s[way] else 0.0 for s in parts]
                started = [float(launches[n][way]) for n in names]
                work = (p * (s[way] - x) for p, s, x in zip(part, parts, started, strict=True))
                return math.fsum(work), math.fsum(p * x for p, x in zip(part, started, strict=True))

            state, kept = (math.fsum(of.get(n, 0.0) for n in names) for of in (pieces.states, pieces.kept))
            self.one_device_work[batches] = OneDeviceWork(summed(0), summed(1), summed(1, 2), state, kept)
        return self.one_device_work[batches]

    def floor(self, setup: PipelineSetup) -> float:
        """Lower bound on the step (seconds) of any plan of ``setup`` with any stages and schedule;
        infinite where none applies. Raises :class:`PlanError` if the batch is not divisible."""
        key = setup.stages, setup.each, setup.batches
        if key not in self.floors:
            self.floors[key] = min((self._floor(setup, *run) for run in self.schedules(setup)), default=math.inf)
        return self.floors[key]

    def _floor(self, setup: PipelineSetup, schedule: str, chunks: int) -> float:
        forward, backward, weights = (work / setup.each + launches for work, launches in self.alone(setup.batches)[:3])
        if setup.stages == 1:
            return setup.batches * (forward + backward)
        order = rank_orders(schedule, setup.stages, setup.batches, chunks, self.graph.training)
        work = {"F": forward, "B": backward, "I": backward - weights, "W": weights}
        return step_lower_bound(order, setup.stages * chunks, work)

    def guess(self, setup: PipelineSetup) -> float:
        """Guessed step (seconds), to order the search: even work, bubble, recomputation."""
        alone, budget = self.alone(setup.batches), self.opts.budget(self.hardware)
        forward, both = (sum(work / setup.each + launches for work, launches in of) for of in (alone[:1], alone[:2]))
        chunks = max((chunks for _, chunks in self.schedules(setup)), default=0)
        if not chunks:
            return math.inf
        work = setup.batches * both / setup.stages
        kept = min(setup.stages, setup.batches) * alone.kept / setup.ranks
        over = kept + alone.state / setup.ranks - budget
        again = min(1.0, over / kept) * setup.batches * forward / setup.stages if over > 0 and kept else 0.0
        return work * (1 + (setup.stages - 1) / (setup.batches * chunks)) + again

    def fits(self, setup: PipelineSetup) -> bool:
        """Whether parameters, gradients and optimizer state fit if sharded over all ranks."""
        return self.alone(setup.batches).state / setup.ranks <= self.opts.budget(self.hardware)

    def of(self, setup: PipelineSetup) -> PipelineEstimate:
        """The estimate of ``setup`` with its best schedule; :class:`PlanError` without one. The
        folded graph is planned within its share of memory, and once more within less if the
        stages then exceed the budget."""
        self.spent += 1
        found, limit = self._within(setup, math.inf)
        if found.fits:
            return found
        self.spent += OUTER_LIMITS.retry_cost
        try:
            return self._within(setup, limit * found.budget / found.held)[0]
        except PlanError:
            return found  # the full plan may fit

    def _within(self, setup: PipelineSetup, most: float) -> tuple[PipelineEstimate, float]:
        """(estimate, memory limit used); the folded graph may take at most ``most`` bytes."""
        graph, own = self.micro_batch_graph(setup.batches), setup.of_stage(self.hardware)
        rows, sequence = self.folded.sequence(graph)
        micro_batches_held = max_in_flight(rank_orders("1f1b", setup.stages, setup.batches)[0]) if graph.training else 0
        share = min(1.0, setup.stages * len(rows) / len(sequence))
        budget, pieces = self.opts.budget(self.hardware), self._pieces(graph, setup, own)
        work = max(map(pieces.touched, graph.nodes), default=0.0)
        limit = min(most, share * budget + (1 - share) * min(2 * work, budget / 2))
        asked = replace(self.opts, stages=None, memory_budget=limit, quick=True)
        settings = SearchSettings(micro_batches_held, keep_gathered=False, effort=QUICK)
        _, plan = plan_graph(graph, own, asked, settings=settings)
        bare = pieces.between(list(itertools.accumulate(map(len, rows)))[:-1])
        parts = [
            self._piece(piece, nodes, plan, pieces, micro_batches_held) for piece, nodes in zip(bare, rows, strict=True)
        ]
        whole, meetings = [parts[i] for i in sequence], synchronisation_seconds(setup.mesh(own))
        places = list(itertools.accumulate(len(rows[i]) for i in sequence))
        found = []
        for schedule, chunks in self.schedules(setup):
            cutting = pieces.cutting(whole, schedule, setup.stages, setup.batches, chunks)
            cut = cutting.shortest()
            size = _fullest_rank_bytes(cutting, cut.ends)
            cuts, seconds, bubble = (
                tuple(places[end - 1] for end in cut.ends[:-1]),
                cut.seconds + meetings,
                cutting.bubble(cut),
            )
            found.append(PipelineEstimate(setup, schedule, seconds, bubble, cuts, size, budget, plan, graph))
        if not found:
            raise PlanError("no schedule exists for this few stages and micro-batches")
        return min(found, key=lambda e: (not e.fits, e.seconds)), limit

    def _pieces(self, graph: Graph, setup: PipelineSetup, own: Mesh) -> SegmentedGraph:
        return SegmentedGraph(graph, own, setup.mesh(own).link(STAGE_AXIS), self.opts.optimizer)

    @staticmethod
    def _piece(
        bare: GraphSegment, nodes: Sequence[Node], plan: Plan, pieces: SegmentedGraph, micro_batches_held: int
    ) -> GraphSegment:
        """The piece of operations ``nodes`` with the times and memory of ``plan``."""
        names = {n.name for n in nodes}
        inputs = {i.name: i.fqn for i in pieces.graph.of_kind("parameter")}
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
        each = (memory.activations - memory.gathered) / max(1, micro_batches_held)
        return replace(
            bare,
            forward=times.batch.forward,
            backward=times.batch.backward,
            weights=times.batch.weights,
            state=part * states,
            kept=each * sum(pieces.kept.get(n, 0.0) for n in names) / kept,
            once=times.once_s,
        )


def _fullest_rank_bytes(cutting: BoundarySearch, ends: Sequence[int]) -> float:
    """Bytes of states and activations on the fullest rank."""
    spans = list(zip((0, *ends), ends, strict=False))
    kept = [sum(p.kept for p in cutting.pieces[a:b]) for a, b in spans]
    state = [sum(p.state for p in cutting.pieces[a:b]) for a, b in spans]
    order = rank_orders(cutting.schedule, cutting.ranks, cutting.batches, cutting.chunks, cutting.training)
    return max(sum(state[r :: cutting.ranks]) + peak_kept(own, kept) for r, own in enumerate(order))


log = logging.getLogger("autoshard.plan")


@without_autocast()  # its casts are in the graph
def pipelined_for(
    graph: Graph,
    devices: int,
    hardware: Hardware,
    opts: CompileOptions,
    batches: int | None = None,
    least: int = 1,
) -> Plan:
    """The plan of the best pipeline found on ``devices``, with other estimates in ``candidates``.
    ``graph``: of the full batch; ``batches``: micro-batches, None: searched; ``least``: fewest
    stages. Setups (:class:`PipelineSetup`), at most ``OUTER_LIMITS.most_estimates``, are
    estimated in order of promise unless their lower bound exceeds the best; one short of memory
    counts as several. The best, and up to ``OUTER_LIMITS.most_full_plans`` estimated below its
    plan, are planned in full. Raises :class:`MeshError`, or :class:`PlanError` without any
    plan."""
    check_devices(devices)
    search = _PipelineSearch(PipelineEstimates(graph, hardware, opts), devices, batches, least)
    with shown_progress(f"pipelines of {devices}"):
        search.run()
        if search.estimated.best is None:
            raise PlanError(f"no pipeline of these {hardware.name} has a plan: {search.why()}")
        return search.result()


@dataclass
class _PipelineSearch:
    estimates: PipelineEstimates
    devices: int
    batches: int | None
    least: int
    estimated: Candidates[PipelineEstimate] = field(
        default_factory=lambda: Candidates(lambda e: e.seconds if e.fits else math.inf)
    )
    notes: list[str] = field(default_factory=list)
    ratios: dict[PipelineSetup, float] = field(default_factory=dict)
    """estimated seconds over guessed seconds; infinite without a plan"""

    def run(self) -> None:
        """Estimate setups in order of promise, and prune by lower bounds."""
        of, every = self.estimates, self.in_order()
        left, longer, most = every, 0, len(every)
        while left:
            left = [setup for setup in left if not self.estimated.is_pruned(of.floor(setup))]
            longer = len(every) - len(self.ratios) - len(left)
            if (
                not left
                or of.spent >= OUTER_LIMITS.most_estimates
                or (self.estimated.best is not None and is_time_up())
            ):
                break
            setup = min(left, key=self.expected_seconds)
            left.remove(setup)
            self.ratios[setup] = math.inf
            with self.estimated.attempt(str(setup)), shown_progress(f"estimate of {setup}"):
                estimate = of.of(setup)
                log.info("%s, %s: %s", setup, estimate.schedule, show_seconds(estimate.seconds))
                self.ratios[setup] = estimate.seconds / of.guess(setup)
                self.estimated.add(estimate)
        if longer:
            self.notes.append(f"{longer} of {most} pipelines were not searched: their compute alone takes longer")
        if left:
            least, done = show_seconds(min(map(of.floor, left))), len(self.ratios)
            why = "the time limit was reached" if is_time_up() else f"{done} others were more promising"
            self.notes.append(
                f"{len(left)} of {most} pipelines were not searched: {why}, and the compute of these alone takes "
                f"at least {least}"
            )

    @property
    def blocks(self) -> int:
        """Most stages."""
        return max(1, len(self.estimates.folded.blocks) or len(self.estimates.graph.nodes))

    def in_order(self) -> list[PipelineSetup]:
        """Setups whose states may fit into memory, the best guess first."""
        return sorted(filter(self.estimates.fits, self.setups()), key=self.estimates.guess)

    def expected_seconds(self, setup: PipelineSetup) -> float:
        """Guess times the ratio of the most similar setup (half of it for another mesh)."""
        alike = [other for other in self.ratios if other.stages == setup.stages]
        if not alike:
            return self.estimates.guess(setup)
        near = min(alike, key=lambda other: (other.rest != setup.rest, abs(math.log(other.batches / setup.batches))))
        more = self.ratios[near] - 1
        return self.estimates.guess(setup) * (1 + (more if near.rest == setup.rest else more / 2))

    def setups(self) -> Iterator[PipelineSetup]:
        """Stages × stage meshes of up to two axes (inner one in a node) × micro-batch counts."""
        per_node, length = self.estimates.hardware.devices_per_node, self.estimates.batch
        for stages in (n for n in range(self.least, min(self.devices, self.blocks) + 1) if self.devices % n == 0):
            rest = self.devices // stages
            for shape in mesh_shapes(rest):
                if len(shape) == 2 and (shape[1] > per_node or shape[0] > max(length, LARGEST_RING)):
                    continue
                most = max(1, length // (shape[0] if len(shape) == 2 or rest > per_node else 1))
                counts = (2**k for k in range(most.bit_length())) if self.batches is None else (self.batches,)
                yield from (
                    PipelineSetup(stages, shape, n) for n in counts if length % n == 0 and (stages == 1 or n >= stages)
                )

    def why(self) -> str:
        """Why no setup was found, as text."""
        of = self.estimates
        if self.estimated.notes:
            return "; ".join(self.estimated.notes)
        if any(self.setups()):
            return (
                f"parameters, gradients and optimizer state take {show_bytes(of.alone(1).state / self.devices)} "
                f"if spread over all ranks, but a rank may hold {show_bytes(of.opts.budget(of.hardware))}"
            )
        if of.graph.symbols.read:
            return "a batch of open length (dynamic) is one micro-batch, but every stage needs one"
        if not any(self.devices % n == 0 for n in range(self.least, min(self.devices, self.blocks) + 1)):
            return f"{self.devices} devices cannot form {self.least} or more stages of a model of {self.blocks} blocks"
        asked = "at least as many micro-batches as stages" if self.batches is None else f"{self.batches} micro-batches"
        return f"a batch of {of.batch} does not divide into {asked}, and every stage needs one"

    def result(self) -> Plan:
        """The best full plan of the most promising estimates."""
        ranked = sorted(self.estimated.found, key=lambda e: e.promise)
        full = Candidates[tuple[Plan, PipelineEstimate]](lambda found: found[0].cost.total_s, refusals=AutoshardError)
        tries = 0
        for estimate in ranked:
            if full.is_pruned(estimate.seconds) or (full.best is not None and tries >= OUTER_LIMITS.most_full_plans):
                continue
            tries += 1
            with full.attempt(self._estimate_text(estimate)), shown_progress(f"plan of {estimate.setup}"):
                plan = self._in_full(estimate)
                log.info("%s planned in full: %s", self._estimate_text(estimate), show_seconds(plan.cost.total_s))
                full.add((plan, estimate))
        if full.best is None:
            why = "; ".join([*full.notes, *self.estimated.notes] or self.notes)
            raise PlanError(f"no pipeline of these {self.estimates.hardware.name} has a plan: {why}")
        plan, won = full.best
        lost = tuple(self._candidate(e, won, plan) for e in ranked if e is not won)
        return replace(plan, candidates=lost, notes=(*plan.notes, *full.notes, *self.notes))

    def _estimate_text(self, estimate: PipelineEstimate) -> str:
        return f"{estimate.setup}, {estimate.schedule}"

    def _mesh(self, estimate: PipelineEstimate) -> Mesh:
        """The full mesh, axes named by their use."""
        own = estimate.plan.mesh
        names = axes_by_role(estimate.graph, assignment_of(estimate.plan, estimate.graph, own, {}))
        return Mesh(({STAGE_AXIS: estimate.setup.stages} if estimate.setup.stages > 1 else {}) | names, own.hardware)

    def _in_full(self, estimate: PipelineEstimate) -> Plan:
        of, setup = self.estimates, estimate.setup
        mesh = self._mesh(estimate)
        stages = STAGE_AXIS if setup.stages > 1 else None
        opts = replace(of.opts, micro_batches=setup.batches, schedule=estimate.schedule, stages=stages)
        return compile_graph(of.graph, mesh, opts, KnownLayouts(boundaries=estimate.boundaries)).plan

    def _candidate(self, lost: PipelineEstimate, won: PipelineEstimate, plan: Plan) -> Candidate:
        more = lost.seconds - won.seconds
        slower = f"{show_seconds(more)} slower" if more >= 1e-9 * won.seconds else "as fast"
        why = f"{slower} by estimate: {self._estimate_text(lost)}"
        compute = lost.seconds - lost.bubble_s
        cost = Cost(compute, 0.0, lost.seconds, lost.held, plan.cost.flops, 0.0, exposed_s=0.0, bubble_s=lost.bubble_s)
        return Candidate(self._mesh(lost), cost, replace(lost.plan.memory, peak=lost.held), why)
