"""What a choice costs: roofline compute of one op on local shapes, and memory per rank. Communication: redistribute."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from autoshard.layout import Placement, Shard, chunk
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import Internal
from autoshard.passes.rules.base import Rule
from autoshard.passes.rules.facts import facts_of, is_view


@lru_cache(maxsize=1 << 16)
def local_shape(shape: tuple[int, ...], placements: tuple[Placement, ...], mesh: Mesh) -> tuple[int, ...]:
    """The largest local shape (rank 0's) of a tensor with ``placements``."""
    local = [int(n) for n in shape]
    for placement, ranks in zip(placements, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] = chunk(local[placement.dim], ranks, 0)[1]
    return tuple(local)


def local_numel(type_: TensorType, placements: tuple[Placement, ...], mesh: Mesh) -> int:
    """Elements the fullest rank holds."""
    return math.prod(local_shape(type_.shape, placements, mesh))


def divided(choice: Sequence[Strategy], mesh: Mesh) -> float:
    """The share of an op's work that the fullest rank does under ``choice`` (one strategy per mesh axis)."""
    lengths: dict[str, tuple[int, int]] = {}
    share = 1.0
    for strategy, ranks in zip(choice, mesh.shape, strict=True):
        if not strategy.divides:
            continue
        if strategy.size is None:
            share /= ranks
            continue
        full, left = lengths.get(strategy.label, (int(strategy.size),) * 2)
        lengths[strategy.label] = (full, chunk(left, ranks, 0)[1])
    for full, left in lengths.values():
        share *= left / full if full else 1.0
    return share


def backward_factor(node: Node, graph: Graph) -> float:
    """Backward FLOPs per forward FLOP of a matmul-like op: one more product per operand that wants a gradient."""
    if not any(graph.types[o].grad for o in node.outputs):
        return 0.0
    wanting = sum(graph.types[name].grad for name in node.inputs)
    stated = facts_of(node.op).backward
    return float(min(wanting, 2)) if stated is None else stated


def internal_cost(collective: Internal, mesh: Mesh) -> tuple[float, float]:
    """(ring bytes per rank, seconds) of a collective inside an op's local form."""
    ranks = mesh.size_of(collective.axes)
    if collective.kind == "halo":  # neighbours send each other one message
        return collective.bytes, mesh.link(collective.axes).seconds(collective.bytes, 2)
    passes = 2 if collective.kind == "all_reduce" else 1
    moved = passes * (ranks - 1) / ranks * collective.bytes
    return moved, mesh.link(collective.axes).seconds(moved, ranks)


def node_flops(node: Node, graph: Graph, rule: Rule | None) -> float:
    """Forward plus backward FLOPs of ``node`` on one device (matmul-like ops; others count 0)."""
    if rule is None or rule.flops is None:
        return 0.0
    return float(rule.flops(node, graph.example)) * (1.0 + backward_factor(node, graph))


class Seconds(NamedTuple):
    """Seconds of one operation, forward and backward."""

    forward: float
    backward: float = 0.0

    @property
    def step(self) -> float:
        """Both."""
        return self.forward + self.backward


def node_seconds(
    node: Node,
    graph: Graph,
    mesh: Mesh,
    choice: Sequence[Strategy],
    flops: float,
    placements: Sequence[tuple[Placement, ...]],
) -> Seconds:
    """Time of ``node`` under ``choice``; ``placements``: of every operand, then every result."""
    names = (*node.inputs, *node.outputs)
    if is_view(node.op) or not names:
        return Seconds(0.0)
    moved = 0.0
    for name, placed in zip(names, placements, strict=True):
        type_ = graph.types[name]
        moved += local_numel(type_, placed, mesh) * type_.dtype.itemsize
    dtype = graph.types[names[-1]].dtype
    share = divided(choice, mesh)
    hardware = mesh.hardware
    forward = flops / (1.0 + backward_factor(node, graph))
    seconds = hardware.compute_seconds(forward * share, moved, dtype)
    if not any(graph.types[o].grad for o in node.outputs):
        return Seconds(seconds)
    return Seconds(seconds, hardware.compute_seconds((flops - forward) * share, 2 * moved, dtype))


def inside_seconds(found: Sequence[Internal], mesh: Mesh) -> Seconds:
    """Time of the collectives inside an op's local form."""
    spent = {"forward": 0.0, "backward": 0.0}
    for c in found:
        spent[c.phase] += internal_cost(c, mesh)[1]
    return Seconds(**spent)


def optimizer_seconds(type_: TensorType, placements: tuple[Placement, ...], mesh: Mesh) -> float:
    """Time of Adam's update of a parameter stored with ``placements``: it is bound by memory traffic.

    Read: the value, its gradient and two float32 moments; written: the value and both moments. One fused kernel updates
    many parameters, so a single one pays no launch.
    """
    if not type_.grad:
        return 0.0
    size = type_.dtype.itemsize
    moved = local_numel(type_, placements, mesh) * (3 * size + 4 * max(4, size))
    return moved / (mesh.hardware.memory_bandwidth * mesh.hardware.efficiency)
