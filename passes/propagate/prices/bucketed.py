"""Latency shares in gradient and gather buckets: what one tensor pays of a coalesced message.

:mod:`~autoshard.passes.lower.bucket` communicates a block's parameters in one message, so a price
per message and parameter would count latency too often. The search chooses which parameters move,
and prices must not depend on each other: a share is that in a bucket of all matrices, or all
vectors, of the block. If all move alike, shares sum to the true latency, else to less. Vectors
(biases) mostly join matrices: for gathers they pay as for a sum over replicas, one message over all
blocks. So a sharded vector pays less than a message, and never less than a replicated one.

Small looked-up operands of one operation, and queries, keys and values of attention, share a
message, too (:mod:`~autoshard.passes.lower.together`): each pays as if all went together. Look-up
results of one type are exempt (:mod:`.joined`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import groupby

import torch

from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.known import known_of_graph, signature
from autoshard.passes.ir.paths import block_path
from autoshard.passes.propagate.prices.cost import backward_factor, node_flops
from autoshard.passes.propagate.prices.joined import joins, looked_up
from autoshard.passes.propagate.prices.waiting import waiting
from autoshard.passes.redistribute.pricing import Shares
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.base import Rule
from autoshard.passes.rules.facts import is_view, saves_operand
from autoshard.passes.rules.families.ring import ATTENTION

BUCKET_BYTES = 25 * 2**20
"""bytes per rank of a bucket on links without latency (DistributedDataParallel's default); least
size of buckets that only sum, as gradients exist anyway"""
LEAST, MOST = 2**20, 256 * 2**20
"""bounds of bucket sizes derived from a link"""
LATENCY = 0.1
"""latency's share of a bucket's gather: smaller buckets overlap better, larger take memory"""


def bucket_bytes(mesh: Mesh, axes: str | Sequence[str]) -> float:
    """Bytes of a gathered bucket so that latency has its share of the gather along ``axes``."""
    route = mesh.link(axes)
    latency, per_byte = route.rate("all_gather")
    if not latency:
        return BUCKET_BYTES
    ring = latency / per_byte * (1 - LATENCY) / LATENCY
    return min(MOST, max(LEAST, ring * route.ranks / (route.ranks - 1)))


def goes_in_buckets(type_: TensorType) -> bool:
    """Whether a parameter goes into buckets: a sparse gradient has no flat buffer."""
    return bool(type_.grad) and not type_.sparse


class EachShares(dict[str, Shares]):
    """Shares by value; ``others``: of values not in it."""

    def __init__(self, found: Mapping[str, Shares], others: Shares) -> None:
        super().__init__(found)
        self.others = others

    def __missing__(self, value: str) -> Shares:
        return self.others


@known_of_graph
def latency_shares(graph: Graph, mesh: Mesh) -> EachShares:
    """Value → its shares (0 to 1) of message latency: parameters, and coalesced operands.

    Other values pay full latency and synchronization skew. Parameters are gathered before the block
    that reads them first. Gradient sums cross blocks
    (:mod:`autoshard.runtime.parameters.gradients`): the first bucket alone, to start early, then
    full buckets; matrices and vectors count apart, as their axes may differ.
    """
    full = min((bucket_bytes(mesh, axis) for axis in mesh.axes if mesh.size_of(axis) > 1), default=BUCKET_BYTES)
    blocks, beside, waits = _blocks(graph), _beside_block(graph, mesh), waiting(graph, mesh).message
    every: dict[Hashable, float] = defaultdict(float)
    for group in blocks:
        for name, size in group.items():
            every[_alike(name, graph)] += size
    told_apart = {n for node, _ in joins(graph, mesh) for n in node.inputs if n in looked_up(graph)}
    others = {n: x for n, x in _beside_others(graph, waits).items() if n not in told_apart}
    found = EachShares(others, Shares(waits=waits))
    for group in blocks:
        again = any(_saved(name, graph) for name in group)
        along = _along(group, full, graph)
        joint = math.fsum(size for name, size in group.items() if name in along or not _is_vector(name, graph))
        for name, size in group.items():
            sums = min(1.0, size / every[_alike(name, graph)] + size / max(full, BUCKET_BYTES))
            those = sum(group.values()) - joint if _is_vector(name, graph) else joint
            share = sums if name in along else min(1.0, size / min(full, those))
            found[name] = Shares(share, sums, again, beside=beside.get(name, math.inf))
    return found


def _beside_block(graph: Graph, mesh: Mesh) -> dict[str, float]:
    """Parameter → forward seconds of products in the block that reads it first, per rank.

    Gathers are prefetched (:func:`~autoshard.passes.lower.bucket.prefetched`) during the block
    before, assumed equal: what lasts longer is exposed.
    """
    found: dict[str, float] = {}
    products: dict[Hashable, float] = {}  # equal layers have equal ones
    for path, several in groupby(graph.nodes, key=lambda node: block_path(node.fqn)):
        nodes = [node for node in several if path and node.outputs]
        each = []
        for node in nodes:
            rule = rule_for(node.op)
            if rule is not None and rule.flops is not None:
                key = signature(node, graph.example.types)
                if key not in products:
                    products[key] = _products(node, graph, mesh, rule)
                each.append(products[key])
        seconds = math.fsum(each) / mesh.size
        for name in (n for node in nodes for n in node.inputs if n in graph.parameters):
            found.setdefault(name, seconds)
    return found


def _products(node: Node, graph: Graph, mesh: Mesh, rule: Rule) -> float:
    """Forward seconds of a node's products on one device."""
    forward = node_flops(node, graph, rule) / (1.0 + backward_factor(node, graph))
    return forward / (mesh.hardware.peak(graph.types[node.outputs[0]].dtype) * mesh.hardware.efficiency)


def _beside_others(graph: Graph, waits: float) -> dict[str, Shares]:
    """Shares of look-up results and attention operands, at their first reader."""
    found: dict[str, Shares] = {}
    tables = looked_up(graph)
    for node in graph.nodes:
        groups: dict[Hashable, list[str]] = {}
        joined = graph.producers if node.op in ATTENTION else tables
        for name in dict.fromkeys(n for n in node.inputs if n in joined):
            if name not in found:
                type_ = graph.types[name]
                groups.setdefault((type_.dtype, type_.grad), []).append(name)
        found |= {
            name: Shares(joined=1.0 / len(names), waits=waits / len(names))
            for names in groups.values()
            for name in names
        }
    return found


def _along(group: Mapping[str, float], full: float, graph: Graph) -> set[str]:
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


def _blocks(graph: Graph) -> list[dict[str, float]]:
    """Per block and dtype: bytes of bucketed parameters that it reads first."""
    parameters, seen = frozenset(graph.parameters), set[str]()
    found: dict[tuple[int, torch.dtype], dict[str, float]] = defaultdict(dict)
    for number, (_, nodes) in enumerate(groupby(graph.nodes, key=lambda node: block_path(node.fqn))):
        for name in (n for node in nodes for n in node.inputs if n in parameters and n not in seen):
            seen.add(name)
            type_ = graph.types[name]
            if goes_in_buckets(type_) and (numel := math.prod(map(int, type_.shape))):
                found[number, type_.dtype][name] = float(numel * type_.dtype.itemsize)
    return [*found.values()]


def _is_vector(name: str, graph: Graph) -> bool:
    return len(graph.types[name].shape) < 2


def _alike(name: str, graph: Graph) -> Hashable:
    """Equal for parameters whose gradients are summed together."""
    return graph.types[name].dtype, _is_vector(name, graph)


def _saved(name: str, graph: Graph) -> bool:
    """Whether autograd saves a value, or a view of it, for the backward."""
    for reader in graph.uses[name]:
        if is_view(reader.op):
            if any(_saved(out, graph) for out in reader.outputs):
                return True
        elif any(n == name and saves_operand(reader, graph.types, i) for i, n in enumerate(reader.inputs)):
            return True
    return False
