"""A graph as segments between possible stage boundaries: their costs, and the boundaries chosen.
Costs are of one micro-batch on one rank of the rest of the mesh, spread evenly, without a stage
plan's collectives, which are alike in equal blocks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.errors import PlanError
from autoshard.hardware import Route
from autoshard.layout import Replicate
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import values_made_of
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.memory import optimizer_bytes
from autoshard.passes.ir.text import block_path
from autoshard.passes.pipeline.partition import Boundaries, BoundarySearch, GraphSegment
from autoshard.passes.pipeline.schedules import SPLIT_PRODUCTS
from autoshard.passes.propagate.activation_memory import SavedTensorTables
from autoshard.passes.propagate.op_space import OpSpaces
from autoshard.passes.propagate.prices.roofline import optimizer_seconds
from autoshard.passes.propagate.recompute import duplicable_nodes
from autoshard.passes.rules.facts import is_view
from autoshard.passes.search.candidates import Candidates
from autoshard.passes.search.limits import OUTER_LIMITS

FREE_MESSAGE_SECONDS = 1e-5
"""seconds that it takes at least to start a message and to wait for it"""


@dataclass(frozen=True)
class SegmentedGraph:
    """``graph`` of one micro-batch on ``mesh`` without the axis of stages, which ``route``
    links."""

    graph: Graph
    mesh: Mesh
    route: Route
    optimizer: str = "adamw"

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Positions in ``graph.nodes`` where it may be cut; no segment is empty."""
        found, fixed, prepared = list[int](), False, weight_preparation(self.graph)
        for position, node in enumerate(self.graph.nodes):
            if node.name not in self.duplicable:
                if fixed and position not in prepared:
                    found.append(position)
                fixed = True
        if len(found) <= OUTER_LIMITS.max_cuts:
            return tuple(found)
        done = np.cumsum([self.seconds[n.name][0] + self.seconds[n.name][1] for n in self.graph.nodes])
        best: dict[int, int] = {}
        for position in found:
            share = int(OUTER_LIMITS.max_cuts * done[position - 1] / done[-1]) if done[-1] else position
            if share not in best or self.crossing[0][position] < self.crossing[0][best[share]]:
                best[share] = position
        return tuple(sorted(best.values()))

    @cached_property
    def block_ends(self) -> tuple[int, ...]:
        """Those of :attr:`places` before and behind all numbered modules (layers), and between two
        the one with the smallest messages."""
        paths = [block_path(n.fqn) for n in self.graph.nodes]
        found, nodes = list[int](), self.graph.nodes
        last, since = None, 0
        for position, node in enumerate(nodes):
            if node.name in self.duplicable or not paths[position]:
                continue
            if last is not None and paths[position] != last:
                found.append(self._least(since + 1, position))
            last, since = paths[position], position
        if last is not None:
            found.append(self._least(since + 1, len(nodes) - 1))
        first = next((i for i, path in enumerate(paths) if path and nodes[i].name not in self.duplicable), 0)
        return tuple(p for p in sorted({first, *found}) if p in set(self.places))

    def _least(self, first: int, last: int) -> int:
        return min(range(first, max(first, last) + 1), key=lambda p: self.crossing[0][p])

    def between(self, places: Sequence[int]) -> list[GraphSegment]:
        sent, back = self.crossing
        ends = (0, *places, len(self.graph.nodes))
        return [self._piece(first, end, sent, back) for first, end in itertools.pairwise(ends)]

    def _piece(self, first: int, end: int, sent: np.ndarray, back: np.ndarray) -> GraphSegment:
        own = self.graph.nodes[first:end]
        seconds = np.array([self.seconds[n.name] for n in own]).sum(axis=0)
        names = [n.name for n in own]
        forward = float(seconds[0])
        updated, added = (math.fsum(x) for x in zip(*(self.updates.get(n, (0.0, 0.0)) for n in names), strict=True))
        return GraphSegment(
            forward,
            float(seconds[1]) + added,
            float(seconds[2]) + added,
            self._message(sent[end]),
            self._message(back[first]),
            state=sum(self.states.get(n, 0.0) for n in names),
            kept=sum(self.kept.get(n, 0.0) for n in names),
            most=max((self.touched(n) for n in own), default=0.0),
            least=min(float(sent[first]) / self.mesh.size, sum(self.kept.get(n, 0.0) for n in names)),
            recompute_s=forward,
            carry=self._carried(sent[end]),
            carry_back=self._carried(back[first]),
            once=updated,
        )

    def cutting(
        self,
        pieces: Sequence[GraphSegment],
        schedule: str,
        ranks: int,
        batches: int,
        chunks: int = 1,
        budget: float = math.inf,
    ) -> BoundarySearch:
        """The search for boundaries between ``pieces``. ``budget``: bytes per rank."""
        hardware, training = self.mesh.hardware, self.graph.training
        paces, host = hardware.paces(ranks, self.mesh.size), hardware.on_processor(hardware.actions)
        return BoundarySearch(pieces, schedule, ranks, batches, chunks, budget, training, paces, host)

    def _message(self, size: float) -> float:
        return self.route.seconds(float(size) / self.mesh.size, "permute") if size else 0.0

    def _carried(self, size: float) -> float:
        hardware = self.mesh.hardware
        return hardware.on_processor(hardware.carried * float(size) / self.mesh.size)

    @cached_property
    def duplicable(self) -> frozenset[str]:
        """Ops of inputs alone, which any stage can duplicate."""
        return duplicable_nodes(self.graph, math.inf)

    def is_cheaper_duplicated(self, node: Node, times: int, hops: int) -> bool:
        """Whether ``times`` runs of ``node`` beat ``hops`` sends of its results."""
        message = self._message(sum(self.graph.types[name].nbytes for name in node.outputs))
        return times * self._work_for(node) <= max(FREE_MESSAGE_SECONDS, hops * message)

    def _work_for(self, node: Node) -> float:
        """Seconds of a node and its producers; they start while others run."""
        needed, wanted = {node.name: node}, [node]
        while wanted:
            for name in wanted.pop().inputs:
                before = self.graph.producers.get(name)
                if before is not None and before.name not in needed:
                    needed[before.name] = before
                    wanted.append(before)
        spaces = (self.alone[n] for n in needed.values())
        forward = ((x.forward, x.launches[0]) for x in (s.compute() for s in spaces))
        return sum(seconds - launch for seconds, launch in forward) / self.mesh.size

    @cached_property
    def alone(self) -> OpSpaces:
        return OpSpaces(self.graph, Mesh({"alone": 1}, self.mesh.hardware))

    @cached_property
    def seconds(self) -> dict[str, tuple[float, float, float]]:
        """Node → seconds: forward, backward, and the latter's part for weight gradients."""
        found = {}
        for node in self.graph.nodes:
            compute, launches = self.alone[node].phases[:2, :, 0]
            work = (compute - launches) / self.mesh.size + launches
            found[node.name] = (float(work[0]), float(work[1]), float(work[1]) * self._weights(node))
        return found

    def _weights(self, node: Node) -> float:
        """Share of the backward that can run later: one product per operand with a gradient."""
        factors = [name for name in node.inputs[:2] if self.graph.types[name].grad] if node.op in SPLIT_PRODUCTS else []
        return sum(name in self.weights for name in factors) / max(1, len(factors))

    @cached_property
    def weights(self) -> frozenset[str]:
        return values_made_of(self.graph, self.graph.parameters)

    @cached_property
    def kept(self) -> dict[str, float]:
        """Node → bytes of activations it makes and autograd saves, and of other saved tensors."""
        if not self.graph.training:
            return {}
        tables, base, found = SavedTensorTables(self.graph, self.alone.mesh), dict[str, str](), dict[str, float]()
        needed = set[str]()
        for node in self.graph.nodes:
            if is_view(node.op) and node.inputs:
                base.update(dict.fromkeys(node.outputs, base.get(node.inputs[0], node.inputs[0])))
                continue
            keeps = tables.of(node, self.alone[node])
            found[node.name] = float(keeps.private[0]) / self.mesh.size
            needed.update(base.get(n, n) for n, k in zip(node.inputs, keeps.operands, strict=True) if k[0])
            needed.update(n for n, k in zip(node.outputs, keeps.results, strict=True) if k[0])
        for name in needed - self.weights:
            if (maker := self.graph.producers.get(name)) is not None:
                found[maker.name] = found.get(maker.name, 0.0) + self.graph.types[name].nbytes / self.mesh.size
        return found

    @cached_property
    def states(self) -> dict[str, float]:
        """First reader of a parameter → bytes of parameter, gradient and optimizer state."""
        found = dict[str, float]()
        for node, type_ in self._first_reads():
            size = float(type_.nbytes)
            if type_.grad and self.graph.training:
                size += type_.nbytes + optimizer_bytes(self.optimizer, type_.example.shape, type_.dtype)
            found[node.name] = found.get(node.name, 0.0) + size / self.mesh.size
        return found

    @cached_property
    def updates(self) -> dict[str, tuple[float, float]]:
        """First reader of a weight → seconds of its update, and per micro-batch of accumulation."""
        found, alone = dict[str, tuple[float, float]](), self.alone.mesh
        for node, type_ in self._first_reads():
            if type_.grad and self.graph.training:
                update = optimizer_seconds(self.optimizer, type_, (Replicate(),), alone)
                added = (1 - 1 / self.graph.passes) * self.mesh.hardware.traffic_seconds(3.0 * type_.nbytes)
                before = found.get(node.name, (0.0, 0.0))
                found[node.name] = before[0] + update / self.mesh.size, before[1] + added / self.mesh.size
        return found

    def _first_reads(self) -> Iterator[tuple[Node, TensorType]]:
        """(first reader, type) of every parameter."""
        seen = set[str]()
        for node in self.graph.nodes:
            for name in node.inputs:
                if name in self.graph.parameters and name not in seen:
                    seen.add(name)
                    yield node, self.graph.types[name]

    def touched(self, node: Node) -> float:
        """Bytes of a node's operands and results, without weights."""
        names = {*node.inputs, *node.outputs} - self.weights
        return sum(self.graph.types[n].nbytes for n in names) / self.mesh.size

    @cached_property
    def crossing(self) -> tuple[np.ndarray, np.ndarray]:
        """Per position: bytes that a cut there sends forward, and of gradients back."""
        graph, count = self.graph, len(self.graph.nodes)
        place = {n.name: i for i, n in enumerate(graph.nodes)}
        sent, back = np.zeros(count + 1), np.zeros(count + 1)
        for name, node in graph.producers.items():
            readers = [place[n.name] for n in graph.uses[name] if n.name not in self.duplicable]
            if node.name in self.duplicable or not readers:
                continue
            type_ = graph.types[name]
            for found, size in ((sent, type_.nbytes), (back, type_.nbytes if type_.grad else 0)):
                found[place[node.name] + 1] += size
                found[max(readers) + 1 :][:1] -= size
        return np.cumsum(sent), np.cumsum(back)


def weight_preparation(graph: Graph) -> frozenset[int]:
    """Positions between an op on weights alone (a cast) and its first reader in the module: a cut
    there would separate weights that calls in another state read together."""
    weights, place, found = (
        values_made_of(graph, graph.parameters),
        {n.name: i for i, n in enumerate(graph.nodes)},
        set[int](),
    )
    for position, node in enumerate(graph.nodes):
        if node.inputs and weights.issuperset(node.inputs):
            readers = [reader for name in node.outputs for reader in graph.uses[name] if reader.fqn == node.fqn]
            found.update(range(position + 1, min((place[r.name] for r in readers), default=position) + 1))
    return frozenset(found)


def stage_boundaries(
    pieces: SegmentedGraph, schedule: str, ranks: int, batches: int, chunks: int = 1, budget: float = math.inf
) -> tuple[int, ...]:
    """Positions in the graph's nodes before which stages begin, for the shortest step. ``budget``:
    bytes per rank. Raises :class:`PlanError` for too few ops."""
    graph, count = pieces.graph, ranks * chunks
    if count == 1:
        return ()
    if len(pieces.places) + 1 < count:
        own = sum(n.name not in pieces.duplicable for n in graph.nodes)
        raise PlanError(f"{count} stages: the model has only {own} operations to split between. Ask for fewer stages.")

    def shortest(places: Sequence[int], limit: float) -> tuple[Boundaries, list[int]]:
        found = pieces.cutting(pieces.between(places), schedule, ranks, batches, chunks, limit).shortest()
        return found, [places[end - 1] for end in found.ends[:-1]]

    for limit in (budget, math.inf):  # stages may fit where estimates do not
        try:
            found, cuts = shortest(pieces.places, limit)
            break
        except PlanError:
            if limit == math.inf:
                raise
    blocks = pieces.block_ends
    if len(blocks) + 1 >= count:
        try:
            whole, between = shortest(blocks, limit)
        except PlanError:  # a block does not fit
            return tuple(cuts)
        if whole.seconds <= found.seconds * (1 + OUTER_LIMITS.block_tolerance):
            return tuple(between)
    return tuple(cuts)


def stages_per_rank(pieces: SegmentedGraph, schedule: str, ranks: int, batches: int, budget: float = math.inf) -> int:
    """The number of stages per rank (2 to ``OUTER_LIMITS.max_chunks``) with the shortest
    interleaved step; ties go to fewer. 2 if none fits ``budget``."""
    parts, steps = (
        pieces.between(pieces.block_ends),
        Candidates[tuple[int, float]](lambda found: found[1], OUTER_LIMITS.least_step_gain),
    )
    for chunks in range(2, min(OUTER_LIMITS.max_chunks, len(parts) // ranks) + 1):
        with steps.attempt(f"{chunks} stages per rank"):
            search = pieces.cutting(parts, schedule, ranks, batches, chunks, budget)
            steps.add((chunks, search.shortest().seconds))
    return 2 if steps.best is None else steps.best[0]


def boundaries_from_homes(pieces: SegmentedGraph, homes: Mapping[str, tuple[int, ...]], count: int) -> tuple[int, ...]:
    """Boundaries of another graph of the model that keep parameters in their stages ``homes``.
    Raises :class:`PlanError` if ops read these in another order, or write one of several
    stages."""
    graph, duplicable = pieces.graph, pieces.duplicable
    for fqn in graph.mutations:
        if len(held := homes.get(fqn, ())) > 1:
            raise PlanError(
                f"stages: this call writes {fqn!r}, but the call that the stages were made for "
                f"left copies in stages {', '.join(map(str, held))}. Compile with an example of "
                "the call that writes it, or ask for fewer stages."
            )
    kept = (i for i in graph.of_kind("parameter", "buffer"))
    stages = {i.name: frozenset(homes[i.fqn]) for i in kept if i.fqn in homes}
    found, stage, everywhere = list[int](), 0, frozenset(range(count))
    for place, node in enumerate(graph.nodes):
        known = everywhere.intersection(*(stages.get(n, everywhere) for n in node.inputs))
        if node.name in duplicable:  # computed where it is read, such as a parameter's cast
            stages |= dict.fromkeys(node.outputs, known)
            continue
        least = min((k for k in known if k >= stage), default=None)
        if least is None:
            read = sorted({k for n in node.inputs for k in stages.get(n, ())})
            raise PlanError(
                f"stages: {node.op} in {node.fqn or '(root)'} at {node.source} reads a parameter of stage {read[0]} "
                f"after one of stage {max(stage, read[-1])}, unlike the call that the stages were made for"
            )
        found += [place] * (least - stage)
        stage = least
    return (
        *found,
        *[len(graph.nodes)] * (count - 1 - len(found)),
    )  # last stages may be empty, as when only an encoder runs


def with_trained_parameters(graph: Graph, cuts: Sequence[int]) -> tuple[int, ...]:
    """``cuts`` moved forward where a stage would train nothing (optimizers refuse to be empty) or,
    without a backward, has no parameter of its own, by which later calls find their stages."""
    parameters = [i.name for i in graph.of_kind("parameter")]
    trained = {n for n in parameters if (graph.types[n].grad if graph.training else len(graph.uses[n]) == 1)}
    reads = [place for place, node in enumerate(graph.nodes) if any(name in trained for name in node.inputs)]
    found, end, prepared = list(cuts), len(graph.nodes), weight_preparation(graph)
    for k in reversed(range(len(found))):
        if not any(found[k] <= place < end for place in reads):
            before = [place for place in reads if place < min(found[k], end)]
            if not before or (k and before[-1] <= found[k - 1] and len(before) < k + 1):
                return tuple(cuts)
            found[k] = next((place for place in range(before[-1], 0, -1) if place not in prepared), 0)
        end = found[k]
    return tuple(found) if all(a < b for a, b in zip([0, *found], found, strict=False)) else tuple(cuts)
