"""What a parameter pays of the latency of a message that brings several of a block: its share by bytes.

:mod:`~autoshard.passes.lower.bucket` moves the parameters of a block together, so a price per message for each of them would
count latency as often as there are parameters. Which of them move is what the search finds out, and a price of one must not
depend on others: so the share is that in a bucket of all parameters of the block that are alike, matrices or vectors. Where
they all move the same way, that is what the buckets take; where only some do, less. Vectors, such as biases, mostly go with
the matrices of their block: of gathers these pay what they would of a sum over replicas, one message for those of all blocks.
So a vector that is cut pays less than a message, and yet never less than one that is whole.

Results of look-ups that one operation reads, as the features of a recommender, and queries, keys and values of an attention
are brought to it together (:mod:`~autoshard.passes.lower.together`) where they are small: each pays as if all of them went the
same way; but results of look-ups of one type, whose ways are told apart (:mod:`.joined`).
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
"""a bucket is closed when it holds this many bytes per rank, on links without latency (DistributedDataParallel's default),
and never before where nothing is gathered: its gradients are there anyway"""
LEAST, MOST = 2**20, 256 * 2**20
"""bounds of what follows from a link"""
LATENCY = 0.1
"""of the time of a bucket's gather: smaller buckets overlap better, larger ones take more memory"""


def bucket_bytes(mesh: Mesh, axes: str | Sequence[str]) -> float:
    """Bytes of a gathered bucket in whose gather along ``axes`` latency takes its share."""
    route = mesh.link(axes)
    latency, per_byte = route.rate("all_gather")
    if not latency:
        return BUCKET_BYTES
    ring = latency / per_byte * (1 - LATENCY) / LATENCY
    return min(MOST, max(LEAST, ring * route.ranks / (route.ranks - 1)))


def goes_in_buckets(type_: TensorType) -> bool:
    """Whether a parameter of this type moves together with others: a sparse gradient is no part of a flat buffer."""
    return bool(type_.grad) and not type_.sparse


class EachShares(dict[str, Shares]):
    """By value; ``others``: of those that are not in it."""

    def __init__(self, found: Mapping[str, Shares], others: Shares) -> None:
        super().__init__(found)
        self.others = others

    def __missing__(self, value: str) -> Shares:
        return self.others


@known_of_graph
def latency_shares(graph: Graph, mesh: Mesh) -> EachShares:
    """Value → what it pays of the latency of messages that move it, above 0 and at most 1: parameters, and what is looked up
    beside others; other values pay all, and what ranks wait for one another.

    Parameters are gathered in front of the block that reads them first. Sums of gradients over replicas go together across
    blocks (:mod:`autoshard.runtime.parameters.gradients`): the first alone, so that sums begin early, then one for each full
    bucket; those of matrices and of vectors need not go over the same axes, and count apart.
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
    """Parameter → seconds of the products of the numbered module that reads it first, in the forward, shared out to all ranks.

    Parameters are gathered while the module before runs (:func:`~autoshard.passes.lower.bucket.prefetched`), which is taken to
    be like it: what lasts longer is waited for, however much there is to compute elsewhere.
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
    """Seconds of a node's products in the forward, on one device."""
    forward = node_flops(node, graph, rule) / (1.0 + backward_factor(node, graph))
    return forward / (mesh.hardware.peak(graph.types[node.outputs[0]].dtype) * mesh.hardware.efficiency)


def _beside_others(graph: Graph, waits: float) -> dict[str, Shares]:
    """Results of look-ups, and operands of attention, that are converted before one operation, where their first reader stands:
    their shares."""
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
    """The vectors of a block that go in a bucket with a matrix, where all parameters move the same way."""
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
    """Of every block and dtype the bytes of the parameters that it reads first and that go in buckets."""
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
    """Whether autograd keeps a value, or a view of it, for the backward."""
    for reader in graph.uses[name]:
        if is_view(reader.op):
            if any(_saved(out, graph) for out in reader.outputs):
                return True
        elif any(n == name and saves_operand(reader, graph.types, i) for i, n in enumerate(reader.inputs)):
            return True
    return False
