"""Grouped look-ups: what look-ups in owned tables pay for a shared all-to-all, and the update.

A look-up's price has its share of the latency as if all look-ups of its group went together. If
some tables are placed otherwise, fewer share. The optimizer's update takes as long as that of the
rank with the largest load. A variable per group corrects both: its choice is the way (mesh axes)
that most look-ups go, and the largest table among them. The correction is an upper bound where a
second subset also shares a message, or only some smaller tables have an owner.
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
"""per mesh axis, whether looked-up rows travel along it"""


class Exchange(NamedTuple):
    """One look-up's part in the message and the update of its group."""

    way: Way
    latency: float
    """seconds, with synchronization skew, forward and backward"""
    shared: float
    """the part in the look-up's price"""
    update: float
    """seconds of its table's update in the look-up's price"""


class Most(NamedTuple):
    """A choice of the group variable."""

    way: Way
    latency: float
    largest: int
    """look-up of the largest table that goes this way"""


class Group(NamedTuple):
    """The variable of a group of look-ups."""

    ways: tuple[Way, ...]
    """per choice; no axis: no table has an owner"""
    seconds: np.ndarray
    """per choice: latency of the message"""
    more: tuple[Parts, ...]
    """per look-up: seconds on top of its price, by group choice (row) and own choice (column)"""


@known_of_graph
def groups(graph: Graph, mesh: Mesh) -> tuple[tuple[Node, ...], ...]:
    """Groups of look-ups that can share an all-to-all if their tables have owners."""
    return () if mesh.size == 1 else tuple(tuple(nodes) for nodes in in_one_call(graph).values() if len(nodes) > 1)


def exchanges(graph: Graph, mesh: Mesh, optimizer: str) -> list[Exchanges]:
    return [Exchanges(graph, mesh, nodes, optimizer) for nodes in groups(graph, mesh)]


class Exchanges:
    """Pricing of one group of look-ups for an optimizer."""

    def __init__(self, graph: Graph, mesh: Mesh, nodes: Sequence[Node], optimizer: str) -> None:
        self.graph, self.mesh, self.nodes, self.optimizer = graph, mesh, nodes, optimizer
        self.tables = [graph.types[node.inputs[0]] for node in nodes]
        self.alone = [len(graph.uses[node.inputs[0]]) == 1 for node in nodes]
        """whether nothing else reads the table"""
        self._known: dict[tuple[Way, int], dict[int, float]] = {}

    def group(self, spaces: Sequence[OpSpace]) -> Group | None:
        """The group's variable; None if no choice sends a message. ``spaces``: of the look-ups."""
        found = [self.of_choices(node, space) for node, space in zip(self.nodes, spaces, strict=True)]
        ways = sorted({(x.way, x.latency) for each in found for x in each if x is not None})
        if not ways:
            return None
        choices = (None, *(Most(*way, i) for way in ways for i in range(len(self.nodes))))
        more = (self._table(choices, i, each) for i, each in enumerate(found))
        said = [((False,) * self.mesh.ndim, 0.0) if x is None else (x.way, x.latency) for x in choices]
        return Group(tuple(way for way, _ in said), np.array([seconds for _, seconds in said]), tuple(more))

    def of_choices(self, node: Node, space: OpSpace) -> list[Exchange | None]:
        """Per choice of a look-up; None: it sends no such message."""
        sides = zip(zip(*space.inputs, strict=True), zip(*space.outputs, strict=True), strict=True)
        return [
            self.exchange(node, choice, (*ins, *outs)) for choice, (ins, outs) in zip(space.choices, sides, strict=True)
        ]

    def exchange(self, node: Node, choice: tuple[Strategy, ...], placed: Sequence[Placements]) -> Exchange | None:
        """The exchange under ``choice``; ``placed``: of every operand, then every result."""
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
        """Exchanges of all look-ups in ``assignment``."""
        return [self.exchange(node, assignment.choices[node.name], assignment.placed(node)) for node in self.nodes]

    def on_top(self, found: Sequence[Exchange | None]) -> tuple[float, float]:
        """(seconds of latency, of the update) on top of the look-ups' prices, as in the search."""
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
        """(latency, update) seconds of a look-up on top of its price, given the group's choice."""
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
        return -self.tables[number].updates.nbytes, number

    def _counts(self, way: Way, largest: int) -> dict[int, float]:
        """Look-up → weight of its update's price, if ``largest`` is the largest owned table. Larger
        ones are left out. In sum: the busiest rank's update if all others are owned."""
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
