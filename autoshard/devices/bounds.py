"""Lower bounds on the step time of pipelines, without a plan: compute split over stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from autoshard.errors import PlanError
from autoshard.hardware import Hardware
from autoshard.layout import Placement
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph
from autoshard.passes.microbatch import micro_batched
from autoshard.passes.pipeline import Pieces
from autoshard.passes.pipeline.fold import Folded, folded
from autoshard.passes.pipeline.steps import least_seconds
from autoshard.passes.pipeline.timeline import orders, refusal
from autoshard.passes.propagate.hints import in_time
from autoshard.plans.stages import budget_of
from autoshard.plans.wishes import Wishes

AXIS = "pp"
SCHEDULES = ("1f1b", "interleaved")
"""schedules searched by default; GPipe has the bubble of 1F1B and needs more memory"""
SEVERAL = (2, 4)
"""stages per rank that are searched for interleaved schedules"""


@dataclass(frozen=True)
class Setup:
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
        """The mesh of one stage."""
        return Mesh({f"axis{i}": n for i, n in enumerate(self.rest)}, hardware)

    def mesh(self, rest: Mesh) -> Mesh:
        """The full mesh, stage axis outermost; ``rest``: the mesh of a stage, with axis names."""
        return Mesh({AXIS: self.stages, **dict(zip(rest.axes, rest.shape, strict=True))}, rest.hardware)

    def __str__(self) -> str:
        stages = f"{self.stages} stages × " if self.stages > 1 else ""
        return f"{stages}{' × '.join(map(str, self.rest))} with {self.batches} micro-batch{'es' * (self.batches != 1)}"


class Alone(NamedTuple):
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


@dataclass
class Bounds:
    """Lower bounds for setups of a captured graph, from micro-batches with folded equal blocks."""

    graph: Graph
    hardware: Hardware
    wishes: Wishes
    micro: dict[int, Graph] = field(default_factory=dict, init=False)
    known: dict[int, Alone] = field(default_factory=dict, init=False)
    floors: dict[tuple[int, int, int], float] = field(default_factory=dict, init=False)

    @cached_property
    def folded(self) -> Folded:
        named = self.wishes.hints or isinstance(self.wishes.like, Mapping)  # of folded modules, too
        return Folded(self.graph, ()) if named else folded(self.graph)

    @cached_property
    def cuts(self) -> Mapping[str, Placement]:
        """Micro-batch dims of inputs, from hints."""
        return in_time(self.wishes.hints, self.folded.graph)

    def of_one(self, batches: int) -> Graph:
        """The folded graph of one micro-batch, planned as a step of its own (``passes=1``).

        Otherwise the head would hide the gathers of the few folded blocks, which it cannot for all.
        Raises :class:`PlanError` if the batch is not divisible."""
        if batches not in self.micro:
            whole = self.folded.graph
            several = batches > 1 and whole.training
            self.micro[batches] = replace(micro_batched(whole, batches, self.cuts)[0], passes=1) if several else whole
        return self.micro[batches]

    @cached_property
    def batch(self) -> int:
        """The batch size; 1 where the batch cannot be divided."""
        if not self.folded.graph.training:
            return 1
        try:
            _, micro = micro_batched(self.folded.graph, 2, self.cuts)
        except PlanError:
            return 1
        types, cut = self.folded.graph.types, micro.inputs.values()
        return min((int(types[name].shape[dim]) for name, dim in cut if dim is not None), default=1)

    def schedules(self, setup: Setup) -> Sequence[tuple[str, int]]:
        """(schedule, stages per rank) that ``setup`` and the number of blocks allow."""
        asked, each = self.wishes.schedule, self.wishes.stages_per_rank
        names = SCHEDULES if asked == Wishes.schedule else (asked,)
        if setup.stages == 1:
            return [(names[0], 1)]
        several = {"interleaved": SEVERAL if each is None else (each,), "zero_bubble": (each or 1,)}
        found = [(name, chunks) for name in names for chunks in several.get(name, (1,))]
        parts = len(self.folded.sequence(self.folded.graph)[1])
        return [
            (name, chunks)
            for name, chunks in found
            if setup.stages * chunks <= parts and not refusal(name, setup.stages, setup.batches, chunks)
        ]

    def alone(self, batches: int) -> Alone:
        """Work of one of ``batches`` micro-batches. Raises :class:`PlanError` if not divisible."""
        if batches not in self.known:
            graph = self.of_one(batches)
            pieces = Pieces(graph, Mesh({"alone": 1}, self.hardware), self.hardware.route(1, 1), self.wishes.optimizer)
            rows, sequence = self.folded.sequence(graph)
            names = [node.name for number in sequence for node in rows[number]]
            launches = {n.name: pieces.alone[n].launches[:, 0] for n in graph.nodes}

            def summed(way: int, share: int | None = None) -> tuple[float, float]:
                """(compute, launches) forward (0) or backward (1), or of part ``share``."""
                parts = [pieces.seconds[n] for n in names]
                part = [1.0 if share is None else s[share] / s[way] if s[way] else 0.0 for s in parts]
                started = [float(launches[n][way]) for n in names]
                work = (p * (s[way] - x) for p, s, x in zip(part, parts, started, strict=True))
                return math.fsum(work), math.fsum(p * x for p, x in zip(part, started, strict=True))

            state, kept = (math.fsum(of.get(n, 0.0) for n in names) for of in (pieces.states, pieces.kept))
            self.known[batches] = Alone(summed(0), summed(1), summed(1, 2), state, kept)
        return self.known[batches]

    def floor(self, setup: Setup) -> float:
        """Lower bound on the step (seconds) of any plan of ``setup`` with any stages and schedule.

        Infinite where no schedule applies. Raises :class:`PlanError` if the batch is not divisible.
        """
        key = setup.stages, setup.each, setup.batches
        if key not in self.floors:
            self.floors[key] = min((self._floor(setup, *run) for run in self.schedules(setup)), default=math.inf)
        return self.floors[key]

    def _floor(self, setup: Setup, schedule: str, chunks: int) -> float:
        forward, backward, weights = (work / setup.each + launches for work, launches in self.alone(setup.batches)[:3])
        if setup.stages == 1:
            return setup.batches * (forward + backward)
        order = orders(schedule, setup.stages, setup.batches, chunks, self.graph.training)
        work = {"F": forward, "B": backward, "I": backward - weights, "W": weights}
        return least_seconds(order, setup.stages * chunks, work)

    def guess(self, setup: Setup) -> float:
        """Guessed step (seconds), to order the search: even work, bubble, recomputation."""
        alone, budget = self.alone(setup.batches), budget_of(self.wishes, self.hardware)
        forward, both = (sum(work / setup.each + launches for work, launches in of) for of in (alone[:1], alone[:2]))
        chunks = max((chunks for _, chunks in self.schedules(setup)), default=0)
        if not chunks:
            return math.inf
        work = setup.batches * both / setup.stages
        kept = min(setup.stages, setup.batches) * alone.kept / setup.ranks
        over = kept + alone.state / setup.ranks - budget
        again = min(1.0, over / kept) * setup.batches * forward / setup.stages if over > 0 and kept else 0.0
        return work * (1 + (setup.stages - 1) / (setup.batches * chunks)) + again

    def fits(self, setup: Setup) -> bool:
        """Whether parameters, gradients and optimizer state fit if sharded over all ranks."""
        return self.alone(setup.batches).state / setup.ranks <= budget_of(self.wishes, self.hardware)
