"""Step of a pipeline from the plans of its stages: time per micro-batch, timeline, cost and memory.
A stage's plan is of all micro-batches: what is done once per step (optimizer, all-reduces of
accumulated gradients, ZeRO's) is separated, the rest divided. Collectives are coalesced (without
``merged_s``)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.mesh import Mesh
from autoshard.passes.ir.memory import Memory
from autoshard.passes.ir.text import block_path
from autoshard.passes.pipeline.schedules import SPLIT_PRODUCTS, StageSeconds, Timeline, rank_orders, simulate_timeline
from autoshard.passes.propagate.prices.overlap import StepParts
from autoshard.report.record import Collective, Cost, Record, Staged, local_bytes

_SPLIT_BACKWARD_OPS = frozenset(map(str, SPLIT_PRODUCTS))

MessageSeconds = tuple[float, float, float, float]
"""(forward, backward, host forward, host backward) seconds of messages: :func:`stage_times`"""

SYNCHRONISATIONS = 4
"""small collectives per step: trained parameters of other stages, call number, failures, loss"""


@dataclass(frozen=True)
class StageTimes:
    """Times of a stage: ``batch`` per micro-batch, of which ``compute_s`` is compute."""

    batch: StageSeconds
    compute_s: float
    update_s: float
    """seconds of the optimizer per step"""

    @property
    def once_s(self) -> float:
        """Seconds once per step: optimizer, and exposed collectives that micro-batches share."""
        return self.batch.once


def stage_times(plan: Record, sent: MessageSeconds = (0.0, 0.0, 0.0, 0.0)) -> StageTimes:
    """Times of the stage of ``plan``; later micro-batches accumulate gradients. ``sent``: seconds
    of its messages, then of their host work."""
    cost, mesh, count = plan.cost, plan.mesh, plan.micro_batches
    once = [c for c in plan.collectives if _is_once_per_step(c, plan)]
    each = [
        replace(c, seconds=c.seconds / count, hidden_s=c.hidden_s / count)
        for c in plan.collectives
        if not _is_once_per_step(c, plan)
    ]
    added = (1 - 1 / count) * _accumulation_seconds(plan) if plan.training else 0.0
    compute = (cost.compute_s - cost.optimizer_s) / count + added
    ahead = min(compute, math.fsum(c.seconds - c.backward_s for c in plan.choices.values()) / count)
    copied = math.fsum(c.copied_s for c in once)
    waits, moves = ([c for c in each if c.movable == movable] for movable in (False, True))
    blocking = _collective_seconds(waits) + (cost.local_s - copied) / count
    first = blocking * _fraction(
        _collective_seconds(c for c in waits if c.phase == "forward"), _collective_seconds(waits)
    )
    shown = _exposed_seconds(moves, mesh, compute)
    begun = shown * _fraction(_collective_seconds(c for c in moves if c.phase == "forward"), _collective_seconds(moves))
    forward, backward = ahead + first + begun, compute - ahead + blocking - first + shown - begun
    weights = added + (backward - added) * _fraction(
        _weight_gradient_seconds(plan), math.fsum(c.backward_s for c in plan.choices.values())
    )
    gathers, sums = ([c for c in once if c.movable and c.phase == phase] for phase in ("forward", "backward"))
    shared = _exposed_seconds(gathers, mesh, ahead) + _exposed_seconds(sums, mesh, compute - ahead)
    shared += _collective_seconds(c for c in once if not c.movable) + copied
    host = mesh.hardware.on_processor(mesh.hardware.actions)
    batch = StageSeconds(forward, backward, weights, *sent, host=host, once=shared + cost.optimizer_s)
    return StageTimes(batch, compute, cost.optimizer_s)


def _accumulation_seconds(plan: Record) -> float:
    """Seconds to accumulate gradients once: two reads, one write; unsharded under ZeRO-1."""
    trained = [name for name in plan.differentiable if plan.kinds.get(name) == "parameter"]
    along: dict[str, set[str]] = {name: set() for name in trained}
    for c in plan.collectives:
        if c.kind == "all_gather" and c.phase == "forward" and plan.zero.get(c.value) == 1:
            along[c.value].update(c.axes)
    sizes = (local_bytes(plan, name) * math.prod(map(plan.mesh.size_of, along[name])) for name in trained)
    return math.fsum(plan.mesh.hardware.traffic_seconds(3.0 * size) for size in sizes)


def _is_once_per_step(c: Collective, plan: Record) -> bool:
    """Whether ``c`` runs once per step: an all-reduce of accumulated gradients, or a collective
    of a parameter that ZeRO keeps gathered (:mod:`autoshard.passes.propagate.recompute`)."""
    if plan.kinds.get(c.value) != "parameter":
        return False
    if c.phase == "forward":
        return c.value in plan.zero
    return c.kind == "all_reduce" or plan.zero.get(c.value) == 1


def _collective_seconds(collectives: Iterable[Collective]) -> float:
    """Seconds that operations beside them (rings, collective matmuls) do not hide."""
    return math.fsum(c.seconds - c.hidden_s for c in collectives)


def _fraction(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _exposed_seconds(moves: Sequence[Collective], mesh: Mesh, compute: float) -> float:
    """Exposed seconds of movable collectives behind ``compute``."""
    moved = (_collective_seconds(c for c in moves if mesh.crosses(c.axes) == crossing) for crossing in (False, True))
    node, network = map(np.array, moved)
    return float(StepParts(np.array(compute), node=node, network=network).exposed(mesh.overlap))


def _weight_gradient_seconds(plan: Record) -> float:
    """Seconds of weight gradients, which zero-bubble schedules can delay."""
    wanting = frozenset(plan.differentiable)
    weights = {name for name, kind in plan.kinds.items() if kind == "parameter"}
    found = 0.0
    for choice in plan.choices.values():
        if choice.inputs and weights.issuperset(choice.inputs):
            weights.update(choice.outputs)
        factors = [name for name in choice.inputs[:2] if name in wanting] if choice.op in _SPLIT_BACKWARD_OPS else []
        found += choice.backward_s * sum(name in weights for name in factors) / max(1, len(factors))
    return found


def staged_times(staged: Staged, mesh: Mesh) -> tuple[StageTimes, ...]:
    """Times of every stage, with its messages over the links along the stage axis."""
    link, hardware = mesh.link(staged.axis), mesh.hardware

    def sent(number: int) -> MessageSeconds:
        sizes = [staged.sent[n][b] if 0 <= n < len(staged.sent) else 0.0 for n, b in ((number, 0), (number - 1, 1))]
        ahead, back = (link.seconds(size, "permute") if size else 0.0 for size in sizes)
        carry, carry_back = (hardware.on_processor(hardware.carried * size) for size in sizes)
        return ahead, back, carry, carry_back

    return tuple(stage_times(p, sent(i)) for i, p in enumerate(staged.plans))


def pipeline_timeline(plan: Record) -> Timeline:
    """Timeline of a pipelined step: actions of every rank and messages, no work once per step."""
    staged = plan.staged
    if staged is None:
        raise ValueError("the plan has no stages")
    return _simulated_timeline(staged, plan.mesh, staged_times(staged, plan.mesh))


def _simulated_timeline(staged: Staged, mesh: Mesh, times: Sequence[StageTimes]) -> Timeline:
    ranks, training = mesh.size_of(staged.axis), staged.plans[0].training
    order = rank_orders(staged.schedule, ranks, staged.micro_batches, len(staged.plans) // ranks, training)
    return simulate_timeline(order, [t.batch for t in times], mesh.hardware.paces(ranks, mesh.size // ranks))


def synchronisation_seconds(mesh: Mesh) -> float:
    """Seconds of a step's small collectives among all ranks, before and after the schedule."""
    return SYNCHRONISATIONS * mesh.link(mesh.axes).seconds(0.0)


def pipeline_cost(staged: Staged, mesh: Mesh) -> Cost:
    """Cost of a pipelined step: work of the busiest rank, and its bubble."""
    times, ranks, count = staged_times(staged, mesh), mesh.size_of(staged.axis), staged.micro_batches
    found = _simulated_timeline(staged, mesh, times)
    of_ranks = [[times[i] for i in own] for own in _stages_by_rank(staged, ranks)]
    busiest = max(range(ranks), key=lambda r: sum(t.batch.work for t in of_ranks[r]))
    own, plans = of_ranks[busiest], [staged.plans[i] for i in range(busiest, len(times), ranks)]
    meetings = synchronisation_seconds(mesh)
    end = found.end_s + meetings
    update = sum(t.update_s for t in own)
    work = count * sum(t.batch.work for t in own)
    work += sum(times[span.action.stage].batch.host for span in found.ranks[busiest])
    pace = work / found.busy_s[busiest] if mesh.hardware.sharing and work else 1.0
    compute = count * sum(t.compute_s for t in own) / pace + update
    exposed = max(0.0, work / pace + sum(t.once_s for t in own) - compute) + meetings
    return Cost(
        compute_s=compute,
        comm_s=sum(p.cost.comm_s - p.cost.merged_s for p in plans) + meetings,
        exposed_s=exposed,
        bubble_s=end - compute - exposed,
        total_s=end,
        memory_bytes=pipeline_memory(staged, ranks).peak,
        flops=sum(p.cost.flops for p in staged.plans),
        flops_per_rank=max(sum(staged.plans[i].cost.flops_per_rank for i in x) for x in _stages_by_rank(staged, ranks)),
        local_s=sum(p.cost.local_s for p in plans),
        optimizer_s=update,
        schedule_s=end,
    )


@dataclass(frozen=True)
class StageRow:
    """A stage in reports: seconds per micro-batch, bytes per rank."""

    number: int
    rank: int
    """along the stage axis"""
    modules: tuple[str, ...]
    """module paths of its operations"""
    times: StageTimes
    flying: int
    sent: float
    """bytes of one micro-batch sent to the next stage"""
    memory: Memory


def stage_rows(plan: Record) -> tuple[StageRow, ...]:
    """The stages of a plan in order; empty without stages."""
    staged = plan.staged
    if staged is None:
        return ()
    ranks, found = plan.mesh.size_of(staged.axis), list[StageRow]()
    for i, (times, one) in enumerate(zip(staged_times(staged, plan.mesh), staged.plans, strict=True)):
        modules = dict.fromkeys(
            (block_path(c.fqn) or c.fqn.partition(".")[0] or "(root)") for c in one.choices.values()
        )
        flying = staged.flying[i] if staged.flying else 0
        sent = staged.sent[i][0] if i < len(staged.sent) else 0.0
        found.append(StageRow(i, i % ranks, tuple(modules), times, flying, sent, one.memory))
    return tuple(found)


def _stages_by_rank(staged: Staged, ranks: int) -> Iterator[range]:
    return (range(rank, len(staged.plans), ranks) for rank in range(ranks))


def pipeline_memory(staged: Staged, ranks: int) -> Memory:
    """Memory of the fullest rank: states of its stages add up, temporaries are of one at a time."""
    found = ([staged.plans[i].memory for i in own] for own in _stages_by_rank(staged, ranks))
    return max((_memory_of_rank(own) for own in found), key=lambda m: m.peak)


def _memory_of_rank(stages: Sequence[Memory]) -> Memory:
    if len(stages) == 1:
        return stages[0]
    stay = ("parameters", "gradients", "optimizer", "buffers", "activations")
    works = max(stages, key=lambda m: m.peak - sum(m.at_peak.get(part, 0.0) for part in stay))
    at_peak = {part: sum(m.at_peak.get(part, 0.0) for m in stages) for part in stay}
    at_peak["temporaries"] = works.at_peak.get("temporaries", 0.0)
    return replace(
        works,
        **{part: sum(getattr(m, part) for m in stages) for part in stay},
        gathered=sum(m.gathered for m in stages),
        temporaries=max(m.temporaries for m in stages),
        peak=sum(at_peak.values()),
        at_peak=at_peak,
        spared={name: n for m in stages for name, n in m.spared.items()},
    )
