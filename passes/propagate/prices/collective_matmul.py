"""Collective matmul (asynchronous tensor parallelism): ring transfers hidden by products.

An activation that only products read may be gathered (S → R) shard by shard around a ring, each
multiplied while the next arrives; partial sums of a product may be reduced and scattered (P → S)
likewise. The gradient goes the reverse way. Runtime: :mod:`autoshard.runtime.operations.collective_matmul`.
A hop costs max(M, C + (1 - η) M) - C, with message M and products C of one shard; launches hide
nothing. Slower products of shards and the added partial sums count, too.

C of a gather is a lower bound: columns are sharded by all axes that replicate the operand. So the
price depends on the two layouts of the conversion alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from autoshard.aten import aten
from autoshard.layout import Layout, Partial, Replicate, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import cached_per_graph, values_made_of
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.text import block_path
from autoshard.passes.propagate.prices.collective_overheads import placements_on_axis
from autoshard.passes.propagate.prices.overlap import StepParts
from autoshard.passes.propagate.prices.roofline import is_ideal_network, local_shape
from autoshard.passes.redistribute.pricing import gradient_itemsize

LINEAR_OPS = frozenset({aten.linear.default})
"""products of a value [..., k] and a weight [n, k]"""


class RingProducts(NamedTuple):
    """Products that can hide the first conversion of a value."""

    read: tuple[int, ...] = ()
    """columns of each product that reads it, if only products do"""
    summed: int = 0
    """length that its producer sums over; 0: its producer is no product"""


NO_RING_PRODUCTS = RingProducts()


class RingTransfer(NamedTuple):
    """One phase of a ring transfer."""

    seconds: float
    """with the extra time of products on shards"""
    hidden: float
    """of :attr:`seconds`"""
    free: float
    """seconds of products beside which nothing is hidden"""


@cached_per_graph
def overlapping_products(graph: Graph, mesh: Mesh) -> Mapping[str, RingProducts]:
    """Value → products that can hide its conversion, if the hardware overlaps."""
    if not mesh.hardware.overlap or not mesh.hardware.part_by_part or is_ideal_network(mesh):
        return {}
    found, stored = {}, values_made_of(graph, graph.parameters)  # which exist before a block's products
    for name, type_ in graph.types.items():
        if name in graph.producers and not type_.unknown and not type_.sparse:
            maker, readers = graph.producers[name], graph.uses[name]
            alone = name not in graph.returned and len({block_path(node.fqn) for node in readers}) == 1
            alone = alone and all(node.inputs[0] == name and _is_weight_product(node, stored) for node in readers)
            read = tuple(int(graph.types[node.inputs[1]].shape[0]) for node in readers) if alone else ()
            summed = int(graph.types[maker.inputs[1]].shape[1]) if _is_weight_product(maker, stored) else 0
            if read or summed:
                found[name] = RingProducts(read, summed)
    return found


def _is_weight_product(node: Node, stored: frozenset[str]) -> bool:
    """Whether it is the product of a value and parameters, or values made from them."""
    return node.op in LINEAR_OPS and stored.issuperset(node.inputs[1:]) and node.inputs[0] not in stored


def ring_axis(src: Layout, dst: Layout) -> str | None:
    """The one axis of a gather (S → R) or reduce-scatter (P → S); None: another conversion."""
    mesh = src.mesh
    changed = [a for a, p, q in zip(mesh.axes, src.placements, dst.placements, strict=True) if p != q]
    if len(changed) != 1 or mesh.size_of(changed[0]) == 1 or src.order != dst.order:
        return None
    (axis,) = changed
    pair = src[axis], dst[axis]
    cut = src if isinstance(pair[1], Replicate) else dst
    if not isinstance(pair[1], Replicate) and not (isinstance(pair[0], Partial) and pair[0].op == "sum"):
        return None
    if type(cut[axis]) is not Shard:
        return None
    return axis if cut.axes_of(cut[axis].dim)[-1] == axis else None  # type: ignore[union-attr]


def ring_transfers(
    type_: TensorType, products: RingProducts, src: Layout, dst: Layout
) -> tuple[RingTransfer, RingTransfer | None] | None:
    """(forward, backward or None) of the conversion as a ring transfer; None: impossible."""
    axis = ring_axis(src, dst)
    gathers = axis is not None and isinstance(dst[axis], Replicate)
    if axis is None or not (products.read if gathers else products.summed):
        return None
    cut, whole = (src, dst) if gathers else (dst, src)
    part, full = (local_shape(type_.shape, x.placements, x.mesh) for x in (cut, whole))
    if cut[axis].dim == len(part) - 1:  # type: ignore[union-attr]
        return None
    columns = [(n, full[-1]) for n in products.read] if gathers else [(products.summed, full[-1])]
    kind = Replicate if gathers else Partial
    ranks = math.prod(n for p, n in zip(whole.placements, src.mesh.shape, strict=True) if isinstance(p, kind))
    features = [(-(-n // ranks), own) for n, own in columns]
    moved = math.prod(part)
    ahead = _ring_transfer(src.mesh, axis, type_.dtype, moved * type_.dtype.itemsize, part, full, features, gathers)
    back = gradient_itemsize(type_.dtype, type_.moves)
    if not back:
        return ahead, None
    return ahead, _ring_transfer(src.mesh, axis, type_.dtype, moved * back, part, full, features, not gathers)


def _ring_transfer(
    mesh: Mesh,
    axis: str,
    dtype: torch.dtype,
    size: float,
    part: tuple[int, ...],
    full: tuple[int, ...],
    features: Sequence[tuple[int, int]],
    gathers: bool,
) -> RingTransfer:
    """A ring of messages of ``size`` bytes beside products on ``part``, one shard of ``full``.
    ``features``: (other, own) columns. ``gathers``: shards travel, not partial sums."""
    device, hops = mesh.hardware, mesh.size_of(axis) - 1

    def products(shape: tuple[int, ...]) -> float:
        rows, taken = math.prod(shape[:-1]), 0.0
        for other, own in features:
            flops, result = 2.0 * rows * other * own, (*shape[:-1], other if gathers else own)
            aligned = device.is_aligned(flops, result, dtype)
            taken += device.product_seconds(flops, result, dtype, aligned=aligned)
        return taken

    each, link = products(part), mesh.link((axis,))
    longer = max(0.0, (hops + 1) * each - products(full)) + hops * len(features) * device.kernel_latency
    if not gathers:
        longer += device.kernel_latency + device.traffic_seconds((hops + 2) * size)
    message = link.seconds(size, "permute")
    hides = min(mesh.beside((axis,), "permute") * (message - device.kernel_latency), each)
    return RingTransfer(hops * message + longer, hops * hides, hops * (each - hides))


def _ring_exposed_seconds(found: tuple[RingTransfer, RingTransfer | None]) -> float:
    return math.fsum(j.seconds - j.hidden for j in found if j is not None)


def with_collective_matmul(
    parts: StepParts,
    type_: TensorType,
    products: RingProducts,
    sources: Sequence[Layout],
    targets: Sequence[Layout],
) -> StepParts:
    """``parts`` of conversions (row to column) with collective matmul where that is faster."""
    if products == NO_RING_PRODUCTS:
        return parts
    blocking, hidden = parts.blocking.copy(), np.zeros_like(parts.blocking)
    gathers, scatters = (Shard, targets, Replicate), (Partial, targets, Shard)
    moves = placements_on_axis(sources, *gathers) | placements_on_axis(sources, *scatters)
    codes = {p: i for i, p in enumerate({p for x in (*sources, *targets) for p in x.placements})}
    own, asked = (np.array([[codes[p] for p in x.placements] for x in side]) for side in (sources, targets))
    for i, j in np.argwhere(moves & ((own[:, None] != asked).sum(axis=2) == 1)):  # one axis changes
        found = ring_transfers(type_, products, sources[i], targets[j])
        if found is not None and (waits := _ring_exposed_seconds(found)) < blocking[i, j]:
            blocking[i, j], hidden[i, j] = waits, math.fsum(x.hidden for x in found if x is not None)
    return StepParts(parts.compute, parts.other, blocking, hidden=hidden)
