"""What look-ups in tables of one owner each pay together: latency of the message that brings what all find, and the update.

Inside its local form each pays a share of the latency, as if all that may go in one call did. Where only some of the tables lie
so, or not all along the same axes, fewer share. Of the optimizer's update a step takes what the rank with most to update does:
that of the largest table, or more where all are dealt out. What look-ups pay on top of their prices, or less, is found of each
group of them. The search has a variable for each group: the way that most of it go, and the largest table among these. Where
several go a second way together as well, that is more than they will take; where only some of the smaller tables have an owner,
each pays what it does beside all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from autoshard.layout import Owned, R
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Assignment, Placements, Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.known import known_of_graph
from autoshard.passes.propagate.op_space import OpSpace, internal_collectives
from autoshard.passes.propagate.owners import balanced, load
from autoshard.passes.propagate.prices.cost import skew
from autoshard.passes.propagate.prices.step_time import Parts
from autoshard.passes.propagate.prices.waiting import update_seconds, waiting
from autoshard.passes.rules.families.embedding import TABLE, in_one_call

Way = tuple[bool, ...]
"""per mesh axis, whether what is looked up goes along it"""


class Exchange(NamedTuple):
    """What one look-up has in the messages and the update of its group."""

    way: Way
    latency: float
    """seconds, with what ranks wait for one another before the message, forward and backward"""
    shared: float
    """the part of it that its price has"""
    update: float
    """seconds of the update of its table as its price has them"""


class Most(NamedTuple):
    """What most of a group do."""

    way: Way
    latency: float
    largest: int
    """of the tables that go this way, by its look-up's number"""


class Group(NamedTuple):
    """What most look-ups of a group do, as a variable of the search."""

    ways: tuple[Way, ...]
    """per choice; along no axis: no table has one owner"""
    seconds: np.ndarray
    """per choice: of the message"""
    more: tuple[Parts, ...]
    """per look-up, by choice (row) and by its own (column): what it pays on top of its price"""


@known_of_graph
def groups(graph: Graph, mesh: Mesh) -> tuple[tuple[Node, ...], ...]:
    """The look-ups that go in one call, where all of their tables have one owner each."""
    return () if mesh.size == 1 else tuple(tuple(nodes) for nodes in in_one_call(graph).values() if len(nodes) > 1)


def exchanges(graph: Graph, mesh: Mesh, optimizer: str) -> list[Exchanges]:
    """Of all groups."""
    return [Exchanges(graph, mesh, nodes, optimizer) for nodes in groups(graph, mesh)]


class Exchanges:
    """Of the look-ups of one group, with an optimizer."""

    def __init__(self, graph: Graph, mesh: Mesh, nodes: Sequence[Node], optimizer: str) -> None:
        self.graph, self.mesh, self.nodes, self.optimizer = graph, mesh, nodes, optimizer
        self.tables = [graph.types[node.inputs[0]] for node in nodes]
        self.alone = [len(graph.uses[node.inputs[0]]) == 1 for node in nodes]
        """whether nothing else reads the table"""
        self._known: dict[tuple[Way, int], dict[int, float]] = {}

    def group(self, spaces: Sequence[OpSpace]) -> Group | None:
        """As a variable; None where none of the choices has a message. ``spaces``: of the look-ups."""
        found = [self.of_choices(node, space) for node, space in zip(self.nodes, spaces, strict=True)]
        ways = sorted({(x.way, x.latency) for each in found for x in each if x is not None})
        if not ways:
            return None
        choices = (None, *(Most(*way, i) for way in ways for i in range(len(self.nodes))))
        more = (self._table(choices, i, each) for i, each in enumerate(found))
        said = [((False,) * self.mesh.ndim, 0.0) if x is None else (x.way, x.latency) for x in choices]
        return Group(tuple(way for way, _ in said), np.array([seconds for _, seconds in said]), tuple(more))

    def of_choices(self, node: Node, space: OpSpace) -> list[Exchange | None]:
        """Of every choice of a look-up; None: it goes in no such message."""
        sides = zip(zip(*space.inputs, strict=True), zip(*space.outputs, strict=True), strict=True)
        return [
            self.exchange(node, choice, (*ins, *outs)) for choice, (ins, outs) in zip(space.choices, sides, strict=True)
        ]

    def exchange(self, node: Node, choice: tuple[Strategy, ...], placed: Sequence[Placements]) -> Exchange | None:
        """Of ``node`` under ``choice``; ``placed``: of every operand, then every result."""
        way = tuple(s.label == TABLE and n > 1 for s, n in zip(choice, self.mesh.shape, strict=True))
        if not any(way):
            return None
        waits, latency, shared = waiting(self.graph, self.mesh).message, 0.0, 0.0
        for c in internal_collectives(node, self.graph, self.mesh, choice, placed):
            each = self.mesh.link(c.axes).rate(c.kind)[0] + waits
            latency, shared = latency + each, shared + c.share * each
        update, type_ = 0.0, self.graph.types[node.inputs[0]]
        if self.graph.training:
            update = update_seconds(self.optimizer, type_, placed[0], self.graph, self.mesh)
        return Exchange(way, latency, shared, update)

    def chosen(self, assignment: Assignment) -> list[Exchange | None]:
        """Of all look-ups as they were chosen."""
        return [self.exchange(node, assignment.choices[node.name], assignment.placed(node)) for node in self.nodes]

    def on_top(self, found: Sequence[Exchange | None]) -> tuple[float, float]:
        """Seconds that the look-ups pay on top of their prices: of latency, and of the update. As the search has it."""
        return min((self._by(most, found) for most in self._most(found)), key=sum, default=(0.0, 0.0))

    def _most(self, found: Sequence[Exchange | None]) -> Iterator[Most]:
        for way in dict.fromkeys(x.way for x in found if x is not None):
            members = [i for i, x in enumerate(found) if x is not None and x.way == way]
            latency = max(x.latency for x in found if x is not None and x.way == way)
            yield Most(way, latency, min(members, key=self._order))

    def _by(self, most: Most, found: Sequence[Exchange | None]) -> tuple[float, float]:
        each = [self._more(most, i, x) for i, x in enumerate(found)]
        return most.latency + math.fsum(a for a, _ in each), math.fsum(b for _, b in each)

    def _table(self, choices: Sequence[Most | None], number: int, found: Sequence[Exchange | None]) -> Parts:
        each = np.array([[self._more(most, number, x) for x in found] for most in choices])
        return Parts(blocking=each[:, :, 0], once=each[:, :, 1])

    def _more(self, most: Most | None, number: int, found: Exchange | None) -> tuple[float, float]:
        """What a look-up pays on top of its share of latency, and of its update, where most do so."""
        if most is None:
            return (0.0 if found is None else math.inf), 0.0
        goes = found is not None and found.way == most.way
        if number == most.largest and not goes:
            return math.inf, 0.0
        if found is None or not goes:
            return (0.0 if found is None else found.latency - found.shared), 0.0
        if number not in (counts := self._counts(most.way, most.largest)):  # it is larger
            return math.inf, 0.0
        return max(0.0, found.latency - most.latency) - found.shared, (counts[number] - 1.0) * found.update

    def _order(self, number: int) -> tuple[int, int]:
        """The largest table first."""
        return -self.tables[number].updates.nbytes, number

    def _counts(self, way: Way, largest: int) -> dict[int, float]:
        """Look-up → what the update of its table counts, as a part of its price, where that of ``largest`` is the largest with
        one owner; larger ones are left out. All together: what the busiest rank takes if they all have one."""
        if (way, largest) not in self._known:
            self._known[way, largest] = dict(self._counted(way, largest))
        return self._known[way, largest]

    def _counted(self, way: Way, largest: int) -> Iterator[tuple[int, float]]:
        order = sorted(range(len(self.nodes)), key=self._order)
        smaller, size = order[order.index(largest) :], self.mesh.size
        ranks = math.prod(n for goes, n in zip(way, self.mesh.shape, strict=True) if goes)
        held, first = [0.0] * ranks, float(self.tables[largest].updates.nbytes)
        for number, rank in balanced({str(i): load(self.tables[i]) for i in smaller}, ranks).items():
            held[rank] += self.tables[int(number)].updates.nbytes
        if not first:
            yield from ((i, 1.0) for i in smaller)
            return

        def lasts(most: float, all_: float) -> float:
            return most * self.mesh.hardware.lasting(size * all_ / (ranks * most), size)

        all_, alone = lasts(max(held), sum(held)), lasts(first, first)
        rest = max(0.0, all_ - alone) / ((sum(held) - first) or 1.0)
        for i in smaller:
            placed = tuple(Owned() if goes else R for goes in way)
            busiest = skew(self.tables[i], placed, self.mesh)
            priced = busiest / ranks * self.mesh.hardware.lasting(size / busiest, size)  # of a byte of it
            counts = alone / first if i == largest else rest
            yield i, counts / priced if self.alone[i] else 1.0
