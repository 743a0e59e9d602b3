"""What a parameter pays of the latency of a message that brings several of a block: its share by bytes.

:mod:`~autoshard.passes.lower.bucket` moves the parameters of a block together, so a price per message for each of them would
count latency as often as there are parameters. Which of them move is what the search finds out, and a price of one must not
depend on others: so the share is that in a bucket of all parameters of the block that are alike, matrices or vectors. Where
they all move the same way, that is what the buckets take, matrices and vectors counted apart; where only some do, less.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import groupby

from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph, TensorType
from autoshard.passes.ir.paths import block_path
from autoshard.passes.redistribute.pricing import ALONE, Shares

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


def latency_shares(graph: Graph, mesh: Mesh) -> dict[str, Shares]:
    """Parameter → what it pays of the latency of messages that move it, above 0 and at most 1; other values pay all.

    Parameters are gathered in front of the block that reads them first. Sums of gradients over replicas go together across
    blocks (:mod:`autoshard.runtime.parameters.gradients`): the first alone, so that sums begin early, then one for each full
    bucket.
    Matrices and vectors count apart: they need not go over the same axes.
    """
    full = min((bucket_bytes(mesh, axis) for axis in mesh.axes if mesh.size_of(axis) > 1), default=BUCKET_BYTES)
    parameters, seen = frozenset(graph.parameters), set[str]()
    groups: dict[tuple[int, tuple[object, bool]], dict[str, float]] = defaultdict(dict)
    every: dict[tuple[object, bool], float] = defaultdict(float)
    for number, (_, nodes) in enumerate(groupby(graph.nodes, key=lambda node: block_path(node.fqn))):
        for name in (n for node in nodes for n in node.inputs if n in parameters and n not in seen):
            seen.add(name)
            type_ = graph.types[name]
            if goes_in_buckets(type_):
                bytes_ = math.prod(map(int, type_.shape)) * type_.dtype.itemsize
                alike = type_.dtype, len(type_.shape) < 2
                groups[number, alike][name] = float(bytes_)
                every[alike] += bytes_
    return {
        name: Shares(
            min(1.0, size / min(full, sum(group.values()))),
            min(1.0, size / every[alike] + size / max(full, BUCKET_BYTES)),
        )
        for (_, alike), group in groups.items()
        for name, size in group.items()
        if size
    }


def share_of(value: str, shares: Mapping[str, Shares]) -> Shares:
    """What ``value`` pays of the latency of its messages."""
    return shares.get(value, ALONE)
