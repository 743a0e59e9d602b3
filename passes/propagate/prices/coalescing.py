"""Message coalescing: what one tensor pays of the latency of messages that it shares with others.

:mod:`~autoshard.passes.lower.bucket` communicates a block's parameters in one message, so a price
per message and parameter would count latency too often. The search chooses which parameters move,
and prices must not depend on each other: a share is that in a bucket of all matrices, or all
vectors, of the block. If all move alike, shares sum to the true latency, else to less. Vectors
(biases) mostly join matrices: for gathers they pay as for a sum over replicas, one message over
all blocks. So a sharded vector pays less than a message, and never less than a replicated one.

Small looked-up operands of one operation, and queries, keys and values of attention, share a
message, too (:mod:`~autoshard.passes.lower.coalescing`): each pays as if all went together. Look-up
results of one type are priced apart: the strategy of their reader chooses the source layout whose
values pay no latency; others pay their own. Where a second group shares a message, the price is
an upper bound."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch

from autoshard.layout import I, Layout, P, Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import cached_per_graph, node_signature
from autoshard.passes.ir.assignment import Placements
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.text import block_path
from autoshard.passes.propagate.prices.collective_overheads import synchronization_skew, with_skew
from autoshard.passes.propagate.prices.roofline import backward_factor, node_flops
from autoshard.passes.redistribute import link_matrices
from autoshard.passes.redistribute.layout_graph import Floats
from autoshard.passes.redistribute.pricing import UNSHARED_MESSAGES, MessageShares
from autoshard.passes.rules.facts import is_view, saves_operand
from autoshard.passes.rules.families.context_parallel import ATTENTION_OPS
from autoshard.passes.rules.families.embedding import LOOKUP_OPS

MAX_GROUPED_AXES = 2
"""most mesh axes for which the search distinguishes source layouts: their number grows fast"""


class GroupedConversions(NamedTuple):
    """Of a reader: the source layout whose values share a message, under each choice."""

    values: tuple[str, ...]
    """operands that may share a message"""
    layouts: tuple[Placements, ...]
    """source layouts"""
    at: np.ndarray
    """per choice: 0: nothing is shared; n: values from ``layouts[n - 1]`` share a message"""


@cached_per_graph
def grouped_lookup_readers(graph: Graph, mesh: Mesh) -> tuple[tuple[Node, tuple[str, ...]], ...]:
    """(reader, its largest group of look-up results of one type)."""
    found: list[tuple[Node, tuple[str, ...]]] = []
    made = lookup_results(graph) if sum(n > 1 for n in mesh.shape) <= MAX_GROUPED_AXES else {}
    readers = {node.name: node for name in made for node in graph.uses[name]}
    for node in readers.values():
        groups: dict[TensorType, list[str]] = {}
        for name in dict.fromkeys(n for n in node.inputs if n in made):
            groups.setdefault(graph.types[name], []).append(name)
        largest = max(groups.values(), key=len)
        if len(largest) > 1:
            found.append((node, tuple(largest)))
    return tuple(found)


@cached_per_graph
def lookup_results(graph: Graph) -> Mapping[str, Node]:
    """Result of a look-up → the look-up."""
    return {name: node for node in graph.nodes if node.op in LOOKUP_OPS for name in node.outputs}


def grouped_source_layouts(type_: TensorType, mesh: Mesh) -> Iterable[Placements]:
    """All layouts from which values of this type may share a message."""
    every: tuple[Placement, ...] = (R, I, P, *map(Shard, range(len(type_.shape))))
    return itertools.product(*(every if n > 1 else (R, I) for n in mesh.shape))


def shared_latencies(
    type_: TensorType, mesh: Mesh, sources: Sequence[Placements], targets: Sequence[Placements], waits: float
) -> Floats:
    """Seconds per source and target that a group pays once. ``waits``: skew per message."""
    a, b = ([Layout(mesh, p) for p in side] for side in (sources, targets))
    what = type_.shape, type_.dtype, type_.moves, type_.unknown
    alone, together = (
        link_matrices(a, b, *what, share) for share in (UNSHARED_MESSAGES, UNSHARED_MESSAGES._replace(joined=0.0))
    )
    finite = np.isfinite(sum(alone))
    launches, *links = (
        np.where(finite, x, 0.0) - np.where(finite, y, 0.0) for x, y in zip(alone, together, strict=True)
    )
    return with_skew(launches, mesh, waits) + sum(links)


BUCKET_BYTES = 25 * 2**20
"""bytes per rank of a bucket on links without latency (DistributedDataParallel's default); least
size of buckets that only sum, as gradients exist anyway"""
BUCKET_BYTES_MIN, BUCKET_BYTES_MAX = 2**20, 256 * 2**20
"""bounds of bucket sizes derived from a link"""
BUCKET_LATENCY_SHARE = 0.1
"""latency's share of a bucket's gather: smaller buckets overlap better, larger take memory"""


def bucket_bytes(mesh: Mesh, axes: str | Sequence[str]) -> float:
    """Bytes of a gathered bucket so that latency has its share of the gather along ``axes``."""
    route = mesh.link(axes)
    latency, per_byte = route.rate("all_gather")
    if not latency:
        return BUCKET_BYTES
    ring = latency / per_byte * (1 - BUCKET_LATENCY_SHARE) / BUCKET_LATENCY_SHARE
    return min(BUCKET_BYTES_MAX, max(BUCKET_BYTES_MIN, ring * route.ranks / (route.ranks - 1)))


def is_bucketed(type_: TensorType) -> bool:
    """Whether a parameter goes into buckets: a sparse gradient has no flat buffer."""
    return bool(type_.grad) and not type_.sparse


class SharesByValue(dict[str, MessageShares]):
    """Shares by value; ``others``: of values not in it."""

    def __init__(self, found: Mapping[str, MessageShares], others: MessageShares) -> None:
        super().__init__(found)
        self.others = others

    def __missing__(self, value: str) -> MessageShares:
        return self.others


@cached_per_graph
def latency_shares(graph: Graph, mesh: Mesh) -> SharesByValue:
    """Value → shares (0 to 1) of message latency of parameters and coalesced operands; others pay
    it in full. Parameters are gathered before the block that reads them first. Gradient sums
    cross blocks (:mod:`autoshard.runtime.parameters.gradients`): the first bucket alone, to
    start early, then full ones. Matrices and vectors count apart."""
    full = min((bucket_bytes(mesh, axis) for axis in mesh.axes if mesh.size_of(axis) > 1), default=BUCKET_BYTES)
    blocks, beside, waits = (
        _block_parameter_bytes(graph),
        _prefetch_windows(graph, mesh),
        synchronization_skew(graph, mesh).message,
    )
    every: dict[Hashable, float] = defaultdict(float)
    for group in blocks:
        for name, size in group.items():
            every[_reduction_group(name, graph)] += size
    separately_priced = {
        n for node, _ in grouped_lookup_readers(graph, mesh) for n in node.inputs if n in lookup_results(graph)
    }
    others = {n: x for n, x in _coalesced_shares(graph, waits).items() if n not in separately_priced}
    found = SharesByValue(others, MessageShares(waits=waits))
    for group in blocks:
        again = any(_is_saved_value(name, graph) for name in group)
        along = _vectors_with_matrices(group, full, graph)
        joint = math.fsum(size for name, size in group.items() if name in along or not _is_vector(name, graph))
        for name, size in group.items():
            sums = min(1.0, size / every[_reduction_group(name, graph)] + size / max(full, BUCKET_BYTES))
            those = sum(group.values()) - joint if _is_vector(name, graph) else joint
            share = sums if name in along else min(1.0, size / min(full, those))
            found[name] = MessageShares(share, sums, again, beside=beside.get(name, math.inf))
    return found


def _prefetch_windows(graph: Graph, mesh: Mesh) -> dict[str, float]:
    """Parameter → forward seconds of products in the block that reads it first, per rank: gathers,
    prefetched during the block before (assumed equal), are exposed beyond that."""
    found: dict[str, float] = {}
    products: dict[Hashable, float] = {}  # equal layers have equal ones
    for path, several in groupby(graph.nodes, key=lambda node: block_path(node.fqn)):
        nodes = [node for node in several if path and node.outputs]
        keys = [node_signature(node, graph.example.types) for node in nodes]
        for key, node in zip(keys, nodes, strict=True):
            if key not in products:
                products[key] = _forward_product_time(node, graph, mesh)
        seconds = math.fsum(products[key] for key in keys) / mesh.size
        for name in (n for node in nodes for n in node.inputs if n in graph.parameters):
            found.setdefault(name, seconds)
    return found


def _forward_product_time(node: Node, graph: Graph, mesh: Mesh) -> float:
    """Forward seconds of a node's products on one device."""
    if not (flops := node_flops(node, graph)):
        return 0.0
    forward = flops / (1.0 + backward_factor(node, graph))
    return forward / (mesh.hardware.peak(graph.types[node.outputs[0]].dtype) * mesh.hardware.efficiency)


def _coalesced_shares(graph: Graph, waits: float) -> dict[str, MessageShares]:
    """Shares of look-up results and attention operands, at their first reader."""
    found: dict[str, MessageShares] = {}
    tables = lookup_results(graph)
    for node in graph.nodes:
        groups: dict[Hashable, list[str]] = {}
        joined = graph.producers if node.op in ATTENTION_OPS else tables
        for name in dict.fromkeys(n for n in node.inputs if n in joined):
            if name not in found:
                type_ = graph.types[name]
                groups.setdefault((type_.dtype, type_.grad), []).append(name)
        found |= {
            name: MessageShares(joined=1.0 / len(names), waits=waits / len(names))
            for names in groups.values()
            for name in names
        }
    return found


def _vectors_with_matrices(group: Mapping[str, float], full: float, graph: Graph) -> set[str]:
    """Vectors of a block that share a bucket with a matrix, if all move alike."""
    buckets: list[list[str]] = []
    filled = full
    for name, size in group.items():
        if filled >= full:
            buckets.append([])
            filled = 0.0
        buckets[-1].append(name)
        filled += size
    mixed = (bucket for bucket in buckets if not all(_is_vector(name, graph) for name in bucket))
    return {name for bucket in mixed for name in bucket if _is_vector(name, graph)}


def _block_parameter_bytes(graph: Graph) -> list[dict[str, float]]:
    """Per block and dtype: bytes of bucketed parameters that it reads first."""
    parameters, seen = frozenset(graph.parameters), set[str]()
    found: dict[tuple[int, torch.dtype], dict[str, float]] = defaultdict(dict)
    for number, (_, nodes) in enumerate(groupby(graph.nodes, key=lambda node: block_path(node.fqn))):
        for name in (n for node in nodes for n in node.inputs if n in parameters and n not in seen):
            seen.add(name)
            type_ = graph.types[name]
            if is_bucketed(type_) and (numel := math.prod(map(int, type_.shape))):
                found[number, type_.dtype][name] = float(numel * type_.dtype.itemsize)
    return [*found.values()]


def _is_vector(name: str, graph: Graph) -> bool:
    return len(graph.types[name].shape) < 2


def _reduction_group(name: str, graph: Graph) -> Hashable:
    """Equal for parameters whose gradients are summed together."""
    return graph.types[name].dtype, _is_vector(name, graph)


def _is_saved_value(name: str, graph: Graph) -> bool:
    """Whether autograd saves a value, or a view of it, for the backward."""
    for reader in graph.uses[name]:
        if is_view(reader.op):
            if any(_is_saved_value(out, graph) for out in reader.outputs):
                return True
        elif any(n == name and saves_operand(reader, graph.types, i) for i, n in enumerate(reader.inputs)):
            return True
    return False
