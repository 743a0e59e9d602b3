"""What look-ups in tables of one owner each pay of the latency of the message that brings what all of them find.

Inside its local form each pays a share, as if all that may go in one call did. Where only some of the tables lie so, or not all
along the same axes, fewer share: what they pay on top is found of each group of look-ups. The search has a variable for each
group, the way that most of it go; where several go a second way together as well, that is more than they will take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment, Placements, Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.known import known_of_graph
from autoshard.passes.propagate.op_space import OpSpace, internal_collectives
from autoshard.passes.propagate.prices.waiting import waiting
from autoshard.passes.rules.families.embedding import TABLE, in_one_call


class Exchange(NamedTuple):
    """The messages of one look-up."""

    way: tuple[bool, ...]
    """per mesh axis, whether it goes along it"""
    latency: float
    """seconds, with what ranks wait for one another before it, forward and backward"""
    shared: float
    """the part of it that its price has"""


class Group(NamedTuple):
    """The ways in which look-ups go in one call, as a variable of the search."""

    ways: tuple[tuple[bool, ...], ...]
    seconds: np.ndarray
    """per way: of the message"""
    more: tuple[np.ndarray, ...]
    """per look-up, by way (row) and by its choice (column): what it pays on top of its price"""


@known_of_graph
def groups(graph: Graph, mesh: Mesh) -> tuple[tuple[Node, ...], ...]:
    """The look-ups that go in one call, where all of their tables have one owner each."""
    return () if mesh.size == 1 else tuple(tuple(nodes) for nodes in in_one_call(graph).values() if len(nodes) > 1)


def exchange(
    node: Node, graph: Graph, mesh: Mesh, choice: tuple[Strategy, ...], placed: Sequence[Placements]
) -> Exchange | None:
    """Of ``node`` under ``choice``; ``placed``: of every operand, then every result. None: it goes in no such message."""
    way = tuple(s.label == TABLE and n > 1 for s, n in zip(choice, mesh.shape, strict=True))
    if not any(way):
        return None
    latency = shared = 0.0
    for c in internal_collectives(node, graph, mesh, choice, placed):
        each = mesh.link(c.axes).rate(c.kind)[0] + waiting(graph, mesh).message
        latency, shared = latency + each, shared + c.share * each
    return Exchange(way, latency, shared)


def group(graph: Graph, mesh: Mesh, nodes: Sequence[Node], spaces: Sequence[OpSpace]) -> Group | None:
    """Of look-ups that go in one call; None where none of their choices does."""
    found = [of_choices(node, graph, mesh, space) for node, space in zip(nodes, spaces, strict=True)]
    ways = sorted({(x.way, x.latency) for each in found for x in each if x is not None})
    if not ways:
        return None
    each = [((False,) * mesh.ndim, 0.0), *ways]
    more = (np.array([[_on_top(x, *way) for x in of] for way in each]) for of in found)
    return Group(tuple(way for way, _ in each), np.array([seconds for _, seconds in each]), tuple(more))


def of_choices(node: Node, graph: Graph, mesh: Mesh, space: OpSpace) -> list[Exchange | None]:
    """Of every choice."""
    sides = zip(zip(*space.inputs, strict=True), zip(*space.outputs, strict=True), strict=True)
    return [
        exchange(node, graph, mesh, choice, (*ins, *outs))
        for choice, (ins, outs) in zip(space.choices, sides, strict=True)
    ]


def _on_top(found: Exchange | None, way: tuple[bool, ...], seconds: float) -> float:
    """What a look-up pays where most go this way, and pay so much once."""
    if found is None:
        return 0.0
    return max(0.0, found.latency - seconds) - found.shared if found.way == way else found.latency - found.shared


def chosen(assignment: Assignment, node: Node) -> Exchange | None:
    """That of a look-up as it was chosen."""
    graph, mesh = assignment.graph, assignment.mesh
    placed = (
        *(assignment.use(node, i) for i in range(len(node.inputs))),
        *(assignment.made(node, i) for i in range(len(node.outputs))),
    )
    return exchange(node, graph, mesh, assignment.choices[node.name], placed)


def on_top(found: Iterable[Exchange | None]) -> float:
    """Seconds that the look-ups of a group pay on top of their prices: as the search's variable has it."""
    together = [x for x in found if x is not None]
    ways: dict[tuple[bool, ...], list[float]] = {}
    for x in together:
        ways.setdefault(x.way, []).append(x.latency)
    saved = max((math.fsum(each) - max(each) for each in ways.values()), default=0.0)
    return math.fsum(x.latency - x.shared for x in together) - saved
