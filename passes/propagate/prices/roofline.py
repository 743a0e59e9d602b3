"""Seconds of an operation on local shapes: roofline, kernel launches and kernel fusion.
With kernel fusion (torch.compile) an elementwise operation, norm, softmax, reduction or loss runs
in the kernel of its neighbours of the kind. A value inside such a chain is neither written nor
read; only an operation that writes launches a kernel. Redistributions do not end a chain. Time of
redistributions: :mod:`autoshard.passes.redistribute`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from autoshard.aten import aten
from autoshard.hardware import SMALL_ALL_REDUCE, Hardware
from autoshard.layout import Owned, Placement, Shard, chunk
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import cached_per_node
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Input, Node, Ref, TensorType
from autoshard.passes.ir.memory import ON_HOST, orthogonalization_flops, state_bytes
from autoshard.passes.ir.program import InternalCollective
from autoshard.passes.ir.rewrite import NodeBuilder
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.facts import facts_of, is_view, saved_for_backward
from autoshard.passes.rules.families import context_parallel
from autoshard.passes.rules.families.embedding import LOOKUP_OPS, TABLE_SUMS, TABLE_WISE_LABEL, lookup_kernels
from autoshard.passes.rules.families.loss import CLASSES_LAST, OF_LINEAR, gathered_label, gathered_rows
from autoshard.passes.rules.families.windows import CONVOLUTION_RULES as CONVOLUTIONS
from autoshard.runtime.transport.move import sums_directly
from autoshard.torch_private.ops import OpOverload


@dataclass(frozen=True, slots=True)
class Traffic:
    """Which operands are read from memory, and which results are written."""

    reads: tuple[bool, ...]
    writes: tuple[bool, ...]

    @property
    def launches(self) -> bool:
        """Whether it is a kernel of its own, or the end of a chain."""
        return any(self.writes)


def is_fusible(node: Node) -> bool:
    """Whether ``node`` fuses with neighbours of the kind."""
    return _op_fuses(node.op)


@cache
def _op_fuses(op: OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags or torch.Tag.reduction in op.tags or facts_of(op).chains


def fused_traffic(graph: Graph) -> Mapping[str, Traffic]:
    """Node name → its traffic. Views are neither read nor written."""
    kernel, base = _fused_kernels(graph), _view_bases(graph)
    made_in = {name: kernel[of] for name, of in base.items()}
    views = {node.name for node in graph.nodes if is_view(node.op)}
    written = set(graph.returned)
    for node in graph.nodes:
        if node.name not in views:
            own, kept = (
                kernel[node.name],
                saved_for_backward(node, graph.types).operands if facts_of(node.op).chains else (),
            )
            written.update([n for i, n in enumerate(node.inputs) if made_in[n] != own or i in kept])
    written = {base[name] for name in written}
    found = {}
    for node in graph.nodes:
        if node.name in views:
            found[node.name] = Traffic((False,) * len(node.inputs), (False,) * len(node.outputs))
        else:
            own = kernel[node.name]
            reads = tuple([made_in[n] != own for n in node.inputs])
            writes = tuple([own[1] != "" or o in written or not graph.uses[o] for o in node.outputs])
            found[node.name] = Traffic(reads, writes)
    return found


def _fused_kernels(graph: Graph) -> dict[str, tuple[int, str]]:
    """Node or input → its kernel: (unfusible operations before it, own name if unfusible). A value
    that is read again after such an operation has gone to memory."""
    found = {i.name: (0, i.name) for i in graph.inputs}
    for node in graph.nodes:
        ends = not is_fusible(node) and not is_view(node.op)
        deepest = max([found[name][0] for name in node.inputs], default=0) + ends
        kernel = found[node.name] = deepest, node.name if ends else ""
        for name in node.outputs:
            found[name] = kernel
    return found


def _view_bases(graph: Graph) -> dict[str, str]:
    """Value → the base of the view, or itself."""
    base = {name: name for name in graph.types}
    for node in graph.nodes:
        if is_view(node.op) and node.inputs:
            base.update(dict.fromkeys(node.outputs, base[node.inputs[0]]))
    return base


CONVOLUTION_OPS = frozenset(rule.op for rule in CONVOLUTIONS)
MEMORY_LINE_BYTES = 64
"""least bytes per memory access"""


@lru_cache(maxsize=1 << 16)
def local_shape(shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: Mesh) -> tuple[int, ...]:
    """The largest local shape (rank 0's) of a tensor with ``placements``."""
    local = [int(n) for n in shape]
    for placement, ranks in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = chunk(local[placement.dim], ranks, 0)[1]
    return tuple(local)


def local_numel(type_: TensorType, placements: tuple[Placement, ...], mesh: Mesh) -> int:
    """Elements on the fullest rank."""
    return math.prod(local_shape(type_.shape, placements, mesh))


def bytes_per_layout(type_: TensorType, states: Sequence[tuple[Placement, ...]], mesh: Mesh) -> np.ndarray:
    """Bytes on the fullest rank per layout: float64 [layouts]."""
    return np.array([local_numel(type_, p, mesh) for p in states], dtype=float) * type_.dtype.itemsize


def work_share(choice: Sequence[Strategy], mesh: Mesh) -> float:
    """Share of an operation's work on the fullest rank (one strategy per mesh axis)."""
    lengths: dict[str, tuple[int, int]] = {}
    share = 1.0
    for strategy, ranks in zip(choice, mesh.shape, strict=True):
        if not strategy.divides:
            continue
        if strategy.size is None:
            share /= ranks
            continue
        factor, size = strategy.work or (strategy.label, strategy.size)
        full, left = lengths.get(factor, (int(size),) * 2)
        lengths[factor] = (full, chunk(left, ranks, 0)[1])
    for full, left in lengths.values():
        share *= left / full if full else 1.0
    return share


def backward_factor(node: Node, graph: Graph) -> float:
    """Backward FLOPs per forward FLOP: one product per operand with a gradient."""
    if not graph.is_differentiable(node):
        return 0.0
    stated = facts_of(node.op).backward
    return float(len(_gradient_operands(node, graph))) if stated is None else stated


def _gradient_operands(node: Node, graph: Graph) -> list[int]:
    """Positions of operands whose gradient takes a product; at most two, without the addend."""
    added = _addend_of(node)
    wanting = (i for i, n in enumerate(node.inputs) if graph.types[n].grad and Ref(n) != added)
    return [*itertools.islice(wanting, 2)]


def _addend_of(node: Node) -> object:
    """The argument that is added to a product, if any."""
    return node.argument(name) if (name := facts_of(node.op).addend) else None


def _bias_gradient_bytes(node: Node, graph: Graph, shapes: Sequence[tuple[int, ...]]) -> float:
    """Bytes that a bias gradient sums in a kernel of its own; 0: none."""
    added, result, dtype = _addend_of(node), math.prod(shapes[-1]), graph.types[node.outputs[-1]].dtype
    operands = zip(node.inputs, shapes, strict=False)
    of_bias = (graph.types[n].grad and Ref(n) == added and math.prod(x) < result for n, x in operands)
    return float(result * dtype.itemsize) if facts_of(node.op).kernels == 1 and any(of_bias) else 0.0


def internal_cost(collective: InternalCollective, mesh: Mesh, waits: float = 0.0) -> tuple[float, float]:
    """(ring bytes per rank, seconds) of a collective in a local form, at its latency share.
    ``waits``: synchronization skew before it."""
    ranks, link = mesh.size_of(collective.axes), mesh.link(collective.axes)
    if collective.kind == "permute":  # every rank sends one message
        return collective.bytes, link.seconds(collective.bytes, "permute") + waits
    passes = 2 if collective.kind == "all_reduce" else 1
    kind = SMALL_ALL_REDUCE if passes == 2 and sums_directly(collective.bytes, ranks) else collective.kind
    moved = passes * (ranks - 1) / ranks * collective.bytes
    return moved, link.seconds(moved, kind) - (1.0 - collective.share) * link.rate(kind)[0] + collective.share * waits


def node_flops(node: Node, graph: Graph) -> float:
    """Forward plus backward FLOPs of ``node`` on one device (matmul-like; others count 0)."""
    rule = rule_for(node.op)
    if rule is None or rule.flops is None:
        return 0.0
    return float(rule.flops(node, graph.example)) * (1.0 + backward_factor(node, graph))


class PhaseSeconds(NamedTuple):
    """Seconds of one operation, forward and backward."""

    forward: float
    backward: float = 0.0
    launches: tuple[float, float] = (0.0, 0.0)
    """launch seconds in each phase"""

    @property
    def step(self) -> float:
        return self.forward + self.backward

    def slowed_by(self, share: float) -> PhaseSeconds:
        if not share:
            return self
        ahead, back = self.launches
        more = 1.0 + share
        return PhaseSeconds(more * self.forward, more * self.backward, (more * ahead, more * back))


def node_seconds(
    node: Node,
    graph: Graph,
    mesh: Mesh,
    choice: Sequence[Strategy],
    placements: Sequence[tuple[Placement, ...]],
    traffic: Traffic | None = None,
) -> PhaseSeconds:
    """Seconds of ``node``: the larger of FLOPs and memory traffic (twice in the backward), plus
    launches. ``placements``: of operands, then results; ``traffic``: which are read and written
    (None: all)."""
    pairs = zip(node.values, placements, strict=True)
    shapes = tuple(local_shape(graph.types[n].shape, p, mesh) for n, p in pairs)
    return node_timer(node, graph, mesh, traffic)(choice, shapes)


def node_timer(
    node: Node, graph: Graph, mesh: Mesh, traffic: Traffic | None = None
) -> Callable[[Sequence[Strategy], tuple[tuple[int, ...], ...]], PhaseSeconds]:
    """:func:`node_seconds` as a function of (choice, local shapes of operands, then results)."""
    names = node.values
    if is_view(node.op) or not names:
        return lambda choice, shapes: PhaseSeconds(0.0)
    flops = node_flops(node, graph)

    def anew(choice: Sequence[Strategy], shapes: tuple[tuple[int, ...], ...]) -> PhaseSeconds:
        return _roofline_seconds(node, graph, mesh, choice, flops, shapes, traffic)

    if node.op in context_parallel.ATTENTION_OPS or (node.op in LOOKUP_OPS and graph.types[names[0]].tables):
        return anew
    if node.op is OF_LINEAR:
        return lambda choice, shapes: _chunked_loss_seconds(node, graph, mesh, choice, shapes)
    _, known = _known_node_seconds(node, graph.types).setdefault((id(mesh.hardware), traffic), (mesh.hardware, {}))

    def once(choice: Sequence[Strategy], shapes: tuple[tuple[int, ...], ...]) -> PhaseSeconds:
        if (key := (flops, work_share(choice, mesh), *shapes)) not in known:
            known[key] = anew(choice, shapes)
        return known[key]

    return once


@cached_per_node
def _known_node_seconds(
    node: Node, types: Mapping[str, TensorType]
) -> dict[tuple[int, Traffic | None], tuple[Hardware, dict[Any, PhaseSeconds]]]:
    """Cache by hardware (kept alive for its id) and traffic: (FLOPs, share, shapes) → seconds."""
    return {}


def _roofline_seconds(
    node: Node,
    graph: Graph,
    mesh: Mesh,
    choice: Sequence[Strategy],
    flops: float,
    shapes: Sequence[tuple[int, ...]],
    traffic: Traffic | None,
) -> PhaseSeconds:
    names, device = node.values, mesh.hardware
    sizes: list[float] = [math.prod(x) * graph.types[n].dtype.itemsize for n, x in zip(names, shapes, strict=True)]
    touched = (True,) * len(sizes) if traffic is None else (*traffic.reads, *traffic.writes)
    if graph.types[names[0]].tables and node.op in LOOKUP_OPS:
        sizes = _lookup_sizes(node, graph, mesh, choice, shapes, sizes)
    if facts_of(node.op).joins:
        sizes = [sizes[-1] / len(node.inputs)] * len(node.inputs) + sizes[-1:]
    moved = sum(itertools.compress(sizes, touched))
    if facts_of(node.op).looks_up:
        moved -= max(0, sizes[0] - sizes[len(node.inputs)])
    kernels = facts_of(node.op).kernels
    launch = kernels * device.kernel_latency * (traffic is None or traffic.launches)
    if node.op in LOOKUP_OPS and traffic is None:  # else it is fused with others
        table = graph.types[names[0]]
        launch *= lookup_kernels(node, choice, mesh.shape, table.together if device.cpu and not table.sparse else 1)
    wanting = [shapes[i] for i in _gradient_operands(node, graph)]
    trained = graph.is_differentiable(node)
    between = 0.0
    if kernels > 1:  # each kernel reads what the one before wrote
        between = device.traffic_seconds(2 * _intermediate_bytes(node, graph, shapes))
    elif trained and facts_of(node.op).function:
        moved += _intermediate_bytes(node, graph, shapes)
    work = flops * work_share(choice, mesh)
    forward = work / (1.0 + backward_factor(node, graph))
    dtype = graph.types[names[-1]].dtype
    if node.op in context_parallel.ATTENTION_OPS:
        tiling = context_parallel.attention_tiling(node, graph, mesh, choice)
        ahead = device.attention_seconds(tiling.pairs * forward, tiling.keys, dtype, backward=False)
        back = device.attention_seconds(2.5 * tiling.pairs * forward, tiling.keys, dtype, backward=True)
        ahead, back = (
            context_parallel.tile_padding_ratio(node, graph, device.attention_tile) * x for x in (ahead, back)
        )
        moved += tiling.passes * math.prod(shapes[0][:-1]) * tiling.matrix * dtype.itemsize
        between = device.traffic_seconds(2 * context_parallel.reordered_elements(node, choice, shapes) * dtype.itemsize)
        launch *= tiling.pieces
        if tiling.tiles > 1:  # each tile has a result of its own, to be merged
            launch *= tiling.tiles + context_parallel.MERGE_KERNELS * (tiling.tiles - 1)
            moved += 3 * (tiling.tiles - 1) * math.prod(shapes[-1]) * max(4, dtype.itemsize)
    else:
        ahead = back = 0.0
        if flops:
            taken = _product_timer(node, graph, device, forward, shapes)
            ahead = taken(forward, shapes[-1])
            each = (work - forward) / max(1, len(wanting))
            back = math.fsum(taken(each, x) for x in wanting)
        if device.functions and facts_of(node.op).function:
            elements = max(map(math.prod, shapes))
            ahead, back = (device.function_seconds(elements, backward) for backward in (False, True))
    seconds = launch + max(ahead, device.traffic_seconds(moved)) + between
    if not trained:
        return PhaseSeconds(seconds, 0.0, (launch, 0.0))
    summed = _bias_gradient_bytes(node, graph, shapes)
    launches = launch * ((max(1, len(wanting)) if flops and kernels == 1 else 1) + bool(summed))
    filled = _zero_fill_bytes(node, graph, shapes[0]) if touched[0] and not is_ideal_network(mesh) else 0.0
    moving = device.traffic_seconds(2 * moved) + device.traffic_seconds(filled)
    back = max(back, moving) + 2 * between + device.traffic_seconds(summed)
    return PhaseSeconds(seconds, launches + back, (launch, launches))


def _chunked_loss_seconds(
    node: Node, graph: Graph, mesh: Mesh, choice: Sequence[Strategy], shapes: Sequence[tuple[int, ...]]
) -> PhaseSeconds:
    """Seconds of a linear layer and its loss in chunks, with logits computed twice."""
    values = dict(zip(node.inputs, shapes, strict=False))
    local = {n: replace(graph.types[n].example, shape=x) for n, x in values.items()}
    rows, target, matrix = (node.argument(name).name for name in ("self", "target", "matrix"))
    *lead, features = values[rows]
    dim, chunks = gathered_rows(choice, len(values[rows])), max(1, min(node.argument("chunks"), math.prod(lead)))
    label = None if dim is None else gathered_label(dim)
    ranks = math.prod(n for s, n in zip(choice, mesh.shape, strict=True) if s.label == label)
    count = ranks * math.ceil(math.prod(lead) / chunks)
    local |= {rows: replace(local[rows], shape=(count, features)), target: replace(local[target], shape=(count,))}
    inputs = tuple(Input(name, "input", name) for name in local)
    build = NodeBuilder(replace(graph, inputs=inputs, types=local, nodes=(), outputs=()))
    build.place = node
    logits = build(aten.linear.default, Ref(rows), Ref(matrix), node.argument("bias"))
    if local[rows].dtype != (dtype := node.argument("dtype")):
        logits = build(aten._to_copy.default, logits, dtype=dtype)
    build(CLASSES_LAST, logits, Ref(target), label_smoothing=node.argument("label_smoothing"))
    part = replace(build.graph, nodes=tuple(build.nodes), types=build.types)
    unsharded = (Strategy("I", (), ()),) * mesh.ndim
    traffic = fused_traffic(part) if mesh.hardware.fuses else {}
    each = [node_timer(n, part, mesh, traffic.get(n.name))(unsharded, part.shapes(n.values)) for n in part.nodes]
    ahead, launch = (chunks * math.fsum(x) for x in zip(*((x.forward, x.launches[0]) for x in each), strict=True))
    if not graph.is_differentiable(node):
        return PhaseSeconds(ahead, 0.0, (launch, 0.0))
    again = math.fsum(x.forward for x in each[:-1])
    summed = 2 * math.prod(values[matrix]) * max(4, local[matrix].dtype.itemsize) * local[matrix].grad
    back = again + math.fsum(x.backward for x in each) + mesh.hardware.traffic_seconds(summed)
    return PhaseSeconds(ahead, chunks * back, (launch, launch + chunks * math.fsum(x.launches[1] for x in each)))


def _product_timer(
    node: Node, graph: Graph, device: Hardware, forward: float, shapes: Sequence[tuple[int, ...]]
) -> Callable[[float, tuple[int, ...]], float]:
    """(FLOPs, local result shape) → seconds, for the products of ``node`` and of its gradients."""
    dtype = graph.types[node.outputs[-1]].dtype
    if node.op not in CONVOLUTION_OPS:
        aligned = device.is_aligned(forward, shapes[-1], dtype)
        return lambda flops, result: device.product_seconds(flops, result, dtype, aligned)
    weight = shapes[node.positions["weight"]]
    channels = weight[:2] if node.argument("groups") == 1 else ()  # groups fill blocks together
    return lambda flops, result: device.convolution_seconds(flops, dtype, channels)


def _intermediate_bytes(node: Node, graph: Graph, shapes: Sequence[tuple[int, ...]]) -> float:
    """Bytes saved for the backward that are neither operands nor results (cross entropy)."""
    facts = facts_of(node.op)
    if facts.intermediates is None:
        return 0.0
    pairs = zip(node.values, shapes, strict=True)
    local = {n: TensorType(x, graph.types[n].dtype, graph.types[n].grad) for n, x in pairs}
    return float(sum(t.nbytes for t in facts.intermediates(node, local)))


def _zero_fill_bytes(node: Node, graph: Graph, table: tuple[int, ...]) -> float:
    """Bytes of zeros that the backward of a look-up writes: the dense gradient of the table."""
    type_ = graph.types[node.inputs[0]]
    if not type_.grad or type_.sparse or not (facts_of(node.op).looks_up or node.op in LOOKUP_OPS):
        return 0.0
    return float(math.prod(table) * type_.dtype.itemsize)


def _lookup_sizes(
    node: Node,
    graph: Graph,
    mesh: Mesh,
    choice: Sequence[Strategy],
    shapes: Sequence[tuple[int, ...]],
    sizes: Sequence[float],
) -> list[float]:
    """``sizes`` with the rows that a look-up reads from its table, at least a memory line each.
    With owned tables a rank reads its own tables only."""
    place = node.positions["indices"]
    share = math.prod(n for s, n in zip(choice, mesh.shape, strict=True) if s.label in (TABLE_WISE_LABEL, TABLE_SUMS))
    row = max(MEMORY_LINE_BYTES, shapes[0][1] * graph.types[node.inputs[0]].dtype.itemsize)
    read = [float(n) for n in sizes]
    read[0] = math.prod(shapes[place]) * row / share
    for name in ("indices", "offsets", "per_sample_weights"):
        if name in node.positions:
            read[node.positions[name]] /= share
    return read


class InternalSeconds(NamedTuple):
    """Exposed seconds of collectives inside one operation, forward and backward."""

    forward: float
    backward: float = 0.0
    hidden: tuple[float, float] = (0.0, 0.0)
    """seconds hidden by the operation's own compute"""
    again: float = 0.0
    """of the forward, repeated if the operation is recomputed"""

    @property
    def step(self) -> float:
        return self.forward + self.backward


def inside_seconds(
    found: Sequence[InternalCollective], mesh: Mesh, compute: PhaseSeconds, waits: float = 0.0
) -> InternalSeconds:
    """Seconds of collectives in a local form with ``compute``; ``waits``: skew before each."""
    if not found:
        return InternalSeconds(0.0)
    spent, hidden = {"forward": 0.0, "backward": 0.0}, {"forward": 0.0, "backward": 0.0}
    again = 0.0
    for c in found:
        hides = hidden_seconds(c, mesh, compute)
        exposed_part = internal_cost(c, mesh, 0.0 if c.beside else waits)[1] - hides
        spent[c.phase] += exposed_part
        hidden[c.phase] += hides
        again += exposed_part if c.phase == "forward" and not c.kept else 0.0
    return InternalSeconds(spent["forward"], spent["backward"], (hidden["forward"], hidden["backward"]), again)


def hidden_seconds(c: InternalCollective, mesh: Mesh, compute: PhaseSeconds) -> float:
    """Seconds of a collective that overlap with the operation's compute; see ``step_time``."""
    if not c.beside or not mesh.hardware.overlap:
        return 0.0
    wire = mesh.link(c.axes).rate(c.kind)[1] * c.bytes
    ahead, launches = (
        (compute.forward, compute.launches[0]) if c.phase == "forward" else (compute.backward, compute.launches[1])
    )
    return min(mesh.beside(c.axes, c.kind) * wire, c.beside * max(0.0, ahead - launches))


def sparse_gradient_bytes(type_: TensorType, states: Sequence[tuple[Placement, ...]], mesh: Mesh) -> np.ndarray:
    """Bytes of a sparse gradient (rows and their numbers) per layout of its table."""
    shapes = [local_shape(type_.updates.shape, placed, mesh) for placed in states]
    return np.array([rows * (math.prod(rest) * type_.kept.dtype.itemsize + 8.0) for rows, *rest in shapes])


def optimizer_seconds(optimizer: str, type_: TensorType, placements: tuple[Placement, ...], mesh: Mesh) -> float:
    """Seconds of the optimizer's update of a parameter, bound by traffic of value (twice),
    gradient, state (twice). A fused kernel updates many, so one pays no launch. States on the host
    come and go beside the updates of other parameters."""
    if not type_.grad or optimizer.removesuffix(ON_HOST) == "none" or is_ideal_network(mesh):
        return 0.0
    shape, dtype = local_shape(type_.updates.shape, placements, mesh), type_.kept.dtype
    state = state_bytes(optimizer, shape, dtype)
    seconds: float = mesh.hardware.update_seconds(3 * math.prod(shape) * dtype.itemsize + 2 * state)
    if optimizer.endswith(ON_HOST) and state:
        seconds = max(seconds, mesh.hardware.host_seconds(state))
    if optimizer.removesuffix(ON_HOST) == "muon":
        seconds += _orthogonalization_seconds(type_.updates.shape, shape, dtype, mesh)
    busiest = owner_imbalance(type_, placements, mesh)
    return busiest * mesh.hardware.relative_duration(mesh.size / busiest, mesh.size) * seconds


def _orthogonalization_seconds(whole: tuple[int, ...], held: tuple[int, ...], dtype: torch.dtype, mesh: Mesh) -> float:
    """A rank's share of Muon's update (bfloat16) of a matrix of shards ``held``; see
    :func:`autoshard.dealt`. Messages of all matrices go together, so one pays no latency."""
    if not (flops := orthogonalization_flops(whole)):
        return 0.0
    seconds = mesh.hardware.product_seconds(flops, whole, torch.bfloat16) / mesh.size
    if mesh.size == 1:
        return seconds
    others, share = 1.0 - 1.0 / mesh.size, math.prod(held) / math.prod(whole)
    received = (2.0 * (1.0 - share) / mesh.size + share * others) * math.prod(whole) * dtype.itemsize
    return seconds + received * mesh.link(mesh.axes).rate("all_to_all")[1]


def is_ideal_network(mesh: Mesh) -> bool:
    """Whether the network is ideal: latency 0, so that operations and bytes count alone."""
    return not mesh.hardware.node.latency


def owner_imbalance(type_: TensorType, placements: tuple[Placement, ...], mesh: Mesh) -> float:
    """Tables on the busiest rank over the mean: of 6 on 4 ranks some have 2, not 1.5."""
    owners = math.prod(n for p, n in zip(placements, mesh.shape, strict=True) if isinstance(p, Owned))
    return owners * math.ceil(type_.tables / owners) / type_.tables if owners > 1 and type_.tables else 1.0
