"""What a collective costs beyond its message: packing copies, and waiting for slower ranks.

Copies run on the compute stream, so nothing hides them. Shards of parameters are packed into flat
buffers, gathered values are unpacked, gradients are packed into the buffer that is reduced
(:mod:`autoshard.runtime.parameters.bucket`). Reduced gradients are views of that buffer. A
row-sharded matrix that fills a bucket by itself in its own dtype is not copied. Other values are
copied before a sum, which overwrites them.

Ranks differ in speed, so they wait for the slowest (synchronization skew, stragglers) before each
blocking message and at the end of a step. Calibration measures how much
(:attr:`~autoshard.hardware.Hardware.waiting`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.layout import Invariant, Layout, Partial, R, Replicate, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import cached_per_graph, node_signature
from autoshard.passes.ir.assignment import Placements
from autoshard.passes.ir.graph import Graph, TensorType
from autoshard.passes.propagate.prices.roofline import (
    is_ideal_network,
    local_numel,
    node_flops,
    node_seconds,
    optimizer_seconds,
)
from autoshard.passes.redistribute.pricing import UNSHARED_MESSAGES, BoolArray, MessageShares, gradient_itemsize
from autoshard.passes.rules.base import unsharded_strategies
from autoshard.passes.search.network import Array


def copy_seconds(
    type_: TensorType,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    parameter: bool,
    share: MessageShares = UNSHARED_MESSAGES,
) -> tuple[Array, Array]:
    """(forward, backward) seconds of copies from each source (row) to each target (column); 0 on an
    ideal network. ``parameter``: in buckets, at ``share`` of latency. Sparse gradients are not
    packed."""
    if not sources or not targets or type_.sparse or is_ideal_network(sources[0].mesh):
        none = np.zeros((len(sources), len(targets)))
        return none, none
    mesh = sources[0].mesh
    taken = mesh.hardware.traffic_seconds
    kept, moved = type_.kept.dtype.itemsize, type_.dtype.itemsize
    back = gradient_itemsize(type_.dtype, type_.moves)
    own, whole = ([local_numel(type_, x.placements, mesh) for x in side] for side in (sources, targets))
    sums = placements_on_axis(sources, Partial, targets, Invariant | Replicate)
    sums_back = placements_on_axis(sources, Invariant | Partial, targets, Replicate) if back else np.zeros_like(sums)
    if not parameter:
        return (
            sums * np.array([taken(2 * moved * n) for n in whole]),
            sums_back * np.array([taken(2 * back * n) for n in whole]),
        )
    gathers = gathered_pairs(sources, targets)
    scatters = placements_on_axis(sources, Shard, targets, Replicate) if back else np.zeros_like(gathers)
    into = np.array([taken((kept + moved) * n) for n in own])[:, None]
    out_of, reduced = (np.array([taken(each * n) for n in whole]) for each in (2 * moved, moved + back))
    alone = share.gathers >= 1 and kept == moved
    rows = np.array([[alone and all(p.dim == 0 for p in x.placements if isinstance(p, Shard))] for x in sources])
    as_it_is = rows & (back in (0, moved))
    return gathers * ~rows * (into + out_of), (scatters & ~as_it_is | sums_back & ~scatters) * reduced


def placements_on_axis(sources: Sequence[Layout], given: object, targets: Sequence[Layout], asked: object) -> BoolArray:
    """Whether on some axis the source (row) is ``given`` and the target (column) ``asked``."""
    has, wants = (
        np.array([[isinstance(p, kind) for p in x.placements] for x in side])  # type: ignore[arg-type]
        for side, kind in ((sources, given), (targets, asked))
    )
    return has @ wants.T


def gathered_pairs(sources: Sequence[Layout], targets: Sequence[Layout]) -> BoolArray:
    """Whether some axis shards the source (row) and not the target (column)."""
    return placements_on_axis(sources, Shard, targets, Invariant | Replicate)


PRODUCTS_PER_MESSAGE = 2.0
"""products (with gradients) between two messages"""


class SkewSeconds(NamedTuple):
    """Linear model of synchronization skew."""

    message: float = 0.0
    """seconds before each blocking message, beyond latency"""
    share: float = 0.0
    """seconds per second of compute"""


NO_SKEW = SkewSeconds()


@cached_per_graph
def synchronization_skew(graph: Graph, mesh: Mesh) -> SkewSeconds:
    """The line for ``graph``: as measured, else the slowest device's share, else 0."""
    if not mesh.hardware.waiting:
        return SkewSeconds(share=mesh.hardware.slowest_excess(mesh.size))
    graph, seconds = graph.example, dict[object, float]()  # a price for example lengths does not specialize the program
    total, products = 0.0, 0
    for node in graph.nodes:
        products += node_flops(node, graph) > 0
        key = node_signature(node, graph.types)
        if key not in seconds:
            names = node.values
            choice = (unsharded_strategies(len(node.inputs), len(node.outputs))[0],) * mesh.ndim
            placed = [(R,) * mesh.ndim] * len(names)
            seconds[key] = node_seconds(node, graph, mesh, choice, placed).step
        total += seconds[key]
    if not products:
        return NO_SKEW
    between, all_ = PRODUCTS_PER_MESSAGE * total / mesh.size / products, total / mesh.size
    short, long = mesh.hardware.waits(between), mesh.hardware.waits(all_)
    share = (long - short) / (all_ - between) if all_ > between else 0.0
    return SkewSeconds(max(0.0, short - share * between), share)


def update_seconds(optimizer: str, type_: TensorType, placements: Placements, graph: Graph, mesh: Mesh) -> float:
    """:func:`~autoshard.passes.propagate.prices.roofline.optimizer_seconds` with skew after it."""
    return (1.0 + synchronization_skew(graph, mesh).share) * optimizer_seconds(optimizer, type_, placements, mesh)


def with_skew(launches: np.ndarray, mesh: Mesh, waits: float) -> np.ndarray:
    """Seconds of launches plus ``waits`` seconds of skew per launched collective."""
    return launches * (1.0 + waits / mesh.hardware.kernel_latency) if waits else launches
