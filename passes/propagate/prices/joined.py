"""Message coalescing of look-up results: latency that several pay once at one reader.

Small features of a recommender are redistributed to their reader by one message for all of equal
source layout (:mod:`~autoshard.passes.lower.together`). The reader's strategy chooses the layout
whose values pay no latency (:class:`~autoshard.passes.propagate.ways.SpacesWithWays`); others pay
their own. Where a second group shares a message, too, the price is an upper bound.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.layout import I, Layout, P, Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Placements
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.known import known_of_graph
from autoshard.passes.propagate.prices.waiting import waiting, with_waits
from autoshard.passes.redistribute import link_matrices
from autoshard.passes.redistribute.pricing import ALONE
from autoshard.passes.redistribute.space import Floats
from autoshard.passes.rules.families.embedding import LOOK_UPS

AXES = 2
"""most mesh axes for which the search distinguishes source layouts: their number grows fast"""


class Ways(NamedTuple):
    """Of a reader: the source layout whose values share a message, under each choice."""

    values: tuple[str, ...]
    """operands that may share a message"""
    layouts: tuple[Placements, ...]
    """source layouts"""
    at: np.ndarray
    """per choice: 0: nothing is shared; n: values from ``layouts[n - 1]`` share a message"""


@known_of_graph
def joins(graph: Graph, mesh: Mesh) -> tuple[tuple[Node, tuple[str, ...]], ...]:
    """(reader, its largest group of look-up results of one type)."""
    found: list[tuple[Node, tuple[str, ...]]] = []
    made = looked_up(graph) if sum(n > 1 for n in mesh.shape) <= AXES else {}
    readers = {node.name: node for name in made for node in graph.uses[name]}
    for node in readers.values():
        groups: dict[TensorType, list[str]] = {}
        for name in dict.fromkeys(n for n in node.inputs if n in made):
            groups.setdefault(graph.types[name], []).append(name)
        largest = max(groups.values(), key=len)
        if len(largest) > 1:
            found.append((node, tuple(largest)))
    return tuple(found)


@known_of_graph
def looked_up(graph: Graph) -> Mapping[str, Node]:
    """Result of a look-up → the look-up."""
    return {name: node for node in graph.nodes if node.op in LOOK_UPS for name in node.outputs}


def ways(type_: TensorType, mesh: Mesh) -> Iterable[Placements]:
    """All layouts from which values of this type may share a message."""
    every: tuple[Placement, ...] = (R, I, P, *map(Shard, range(len(type_.shape))))
    return itertools.product(*(every if n > 1 else (R, I) for n in mesh.shape))


def latencies(
    type_: TensorType, mesh: Mesh, sources: Sequence[Placements], targets: Sequence[Placements], waits: float
) -> Floats:
    """Seconds per source (row) and target (column) that a group pays once.

    ``waits``: synchronization skew before each message.
    """
    a, b = ([Layout(mesh, p) for p in side] for side in (sources, targets))
    what = type_.shape, type_.dtype, type_.moves, type_.unknown
    alone, together = (link_matrices(a, b, *what, share) for share in (ALONE, ALONE._replace(joined=0.0)))
    finite = np.isfinite(sum(alone))
    launches, *links = (
        np.where(finite, x, 0.0) - np.where(finite, y, 0.0) for x, y in zip(alone, together, strict=True)
    )
    found: Floats = with_waits(launches, mesh, waits) + sum(links)
    return found


def saved(graph: Graph, mesh: Mesh, moves: Iterable[tuple[str, Placements, Placements]]) -> float:
    """Seconds saved by coalescing conversions (name, from, to) of one type at one reader. The
    source layout that saves most pays latency once."""
    going: dict[Placements, list[float]] = {}
    for name, src, dst in dict.fromkeys(moves):
        if not Layout(mesh, src).fixed:
            going.setdefault(src, []).append(_latency(graph, mesh, graph.types[name], src, dst))
    return max((sum(each) - max(each) for each in going.values()), default=0.0)


@known_of_graph
def _latency(graph: Graph, mesh: Mesh, type_: TensorType, src: Placements, dst: Placements) -> float:
    return float(latencies(type_, mesh, (src,), (dst,), waiting(graph, mesh).message)[0, 0])
