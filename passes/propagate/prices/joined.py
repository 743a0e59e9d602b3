"""What results of look-ups pay of the latency of messages that bring several of them to one operation.

Features of a recommender, where small, are brought to the operation that puts them side by side by one message of all that go
the same way (:mod:`~autoshard.passes.lower.together`). Which way that is, is a choice of that operation: who goes it pays no
latency, others pay their own (:class:`~autoshard.passes.propagate.ways.SpacesWithWays`), as do those of another type. Where
several go a second way together as well, that is more than they will take.
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
"""axes of a mesh, at most, on which ways are told apart: there are as many as layouts"""


class Ways(NamedTuple):
    """Of an operation, the way that most of what it reads together goes under each choice."""

    values: tuple[str, ...]
    """what may go together"""
    layouts: tuple[Placements, ...]
    """from which they go"""
    at: np.ndarray
    """per choice: 0 where each goes by itself, n where those that go from ``layouts[n - 1]`` go together"""


@known_of_graph
def joins(graph: Graph, mesh: Mesh) -> tuple[tuple[Node, tuple[str, ...]], ...]:
    """Operations that read several results of look-ups of one type, each with the largest such group."""
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
    """The results of look-ups → which these are."""
    return {name: node for node in graph.nodes if node.op in LOOK_UPS for name in node.outputs}


def ways(type_: TensorType, mesh: Mesh) -> Iterable[Placements]:
    """All layouts from which values of this type may go together."""
    every: tuple[Placement, ...] = (R, I, P, *map(Shard, range(len(type_.shape))))
    return itertools.product(*(every if n > 1 else (R, I) for n in mesh.shape))


def latencies(
    type_: TensorType, mesh: Mesh, sources: Sequence[Placements], targets: Sequence[Placements], waits: float
) -> Floats:
    """Seconds of the conversion from each source (row) to each target (column) that those which go together pay once.

    ``waits``: what ranks wait for one another before each message.
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
    """Seconds that values of one type save which are converted before one operation, each as (name, from, to): those that go
    the way on which most is saved pay latency once."""
    going: dict[Placements, list[float]] = {}
    for name, src, dst in dict.fromkeys(moves):
        if not Layout(mesh, src).fixed:
            going.setdefault(src, []).append(_latency(graph, mesh, graph.types[name], src, dst))
    return max((sum(each) - max(each) for each in going.values()), default=0.0)


@known_of_graph
def _latency(graph: Graph, mesh: Mesh, type_: TensorType, src: Placements, dst: Placements) -> float:
    return float(latencies(type_, mesh, (src,), (dst,), waiting(graph, mesh).message)[0, 0])
