"""Embedding tables in the search: table-wise placement on owner ranks, and grouped look-ups.
The search decides that a table has an owner; :func:`assign_owners` then balances tables over
ranks. Look-ups in owned tables share one all-to-all (grouped look-ups): :class:`ExchangePricing`
prices its latency and the optimizer's update of the busiest rank. :class:`GroupedOpSpaces` adds
strategies for readers whose look-up results share one redistribution."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from autoshard.layout import Layout, Owned, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import cached_per_graph
from autoshard.passes.ir.assignment import Assignment, Placements, Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.propagate.hints import Constraint, DimLimit
from autoshard.passes.propagate.op_space import OpSpace, OpSpaces, internal_collectives
from autoshard.passes.propagate.prices.coalescing import (
    GroupedConversions,
    grouped_lookup_readers,
    grouped_source_layouts,
    shared_latencies,
)
from autoshard.passes.propagate.prices.collective_overheads import synchronization_skew, update_seconds
from autoshard.passes.propagate.prices.overlap import StepParts
from autoshard.passes.propagate.prices.roofline import owner_imbalance
from autoshard.passes.rules.families.embedding import TABLE_WISE_LABEL, grouped_lookups
from autoshard.passes.rules.families.experts import EXPERT_OWNERS

OwnerAxes = tuple[str, ...]


def assign_owners(assignment: Assignment, constraints: Mapping[str, Constraint | DimLimit]) -> Assignment:
    """``assignment`` with owned tables balanced over ranks, largest first and most bytes on rank 0,
    so that its memory is the peak; not if hints or an earlier compilation fix owners."""
    fixed = {name for name, c in constraints.items() if isinstance(c, Constraint)}
    layouts, types, mesh = assignment.layouts, assignment.graph.types, assignment.mesh
    found = _expert_owners(assignment)
    tables = [n for n in assignment.graph.parameters if layouts[n].owner and n not in found]
    for axes in dict.fromkeys(tuple(layouts[n].owner) for n in sorted(tables)):
        names = sorted(n for n in tables if tuple(layouts[n].owner) == axes)
        found |= _balanced_owners({n: types[n] for n in names}, axes, layouts, mesh, fixed)
    if not found:
        return assignment
    return replace(
        assignment,
        layouts={**layouts, **found},
        shared={**assignment.shared, **_owned_shared_layouts(assignment, found)},
    )


def _expert_owners(assignment: Assignment) -> dict[str, Layout]:
    """Matrices of experts → layouts: each on the rank with this chunk of all experts."""
    found: dict[str, Layout] = {}
    mesh, layouts = assignment.mesh, assignment.layouts
    for node in assignment.graph.nodes:
        axes = [a for a, s in zip(mesh.axes, assignment.choices[node.name], strict=True) if s.label == EXPERT_OWNERS]
        if not axes:
            continue
        whole, parts = Layout(mesh, dict.fromkeys(axes, Shard(0))), node.argument("parts")
        for rank in range(mesh.size):
            start, length = whole.chunk_of(0, len(node.inputs) // parts, rank)
            owner = {a: Owned(owner=mesh.index_along(rank, a)) for a in axes}
            mine = node.inputs[start * parts : (start + length) * parts]
            found.update((n, layouts[n].replace(owner)) for n in mine)
    return found


def _owned_shared_layouts(assignment: Assignment, found: Mapping[str, Layout]) -> dict[str, Layout]:
    """Shared layouts with the same owners."""
    pairs = ((n, assignment.shared[n], x) for n, x in found.items() if n in assignment.shared)
    return {n: shared.replace({a: x[a] for a in shared.owner}) for n, shared, x in pairs}


def _balanced_owners(
    tables: Mapping[str, TensorType], axes: OwnerAxes, layouts: Mapping[str, Layout], mesh: Mesh, fixed: Collection[str]
) -> dict[str, Layout]:
    loads = {n: table_load(t) for n, t in tables.items()}
    ranks = mesh.size_of(axes)
    held = {n: _owner_index(layouts[n], axes, mesh) for n in tables if n in fixed}
    place = balance_loads(loads, ranks, held)
    sizes = [sum(loads[n][0] for n, r in place.items() if r == rank) for rank in range(ranks)]
    order = range(ranks) if held else sorted(range(ranks), key=lambda r: -sizes[r])
    number = {rank: i for i, rank in enumerate(order)}
    return {n: layouts[n].replace(_owner_coordinates(number[rank], axes, mesh)) for n, rank in place.items()}


def table_load(table: TensorType) -> tuple[float, float]:
    """(bytes, looked-up elements) of a table on its owner."""
    return float(table.nbytes), float(table.looked_up * table.shape[1])


def balance_loads(
    loads: Mapping[str, tuple[float, ...]], ranks: int, fixed: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Name → rank, greedy (Graham's rule in several dimensions), keeping ``fixed`` ranks. Largest
    load first, to the rank whose worst kind of load stays smallest."""
    totals = [sum(kind) or 1.0 for kind in zip(*loads.values(), strict=True)]
    shares = {name: [x / total for x, total in zip(load, totals, strict=True)] for name, load in loads.items()}
    held = [[0.0] * len(totals) for _ in range(ranks)]
    place = dict(fixed or {})
    for name, rank in place.items():
        held[rank] = [a + b for a, b in zip(held[rank], shares[name], strict=True)]
    for name in sorted(shares.keys() - place.keys(), key=lambda n: (-max(shares[n]), n)):
        after = [[a + b for a, b in zip(h, shares[name], strict=True)] for h in held]
        rank = min(range(ranks), key=lambda r: (max(after[r]), sum(after[r])))
        place[name], held[rank] = rank, after[rank]
    return place


def _owner_index(layout: Layout, axes: OwnerAxes, mesh: Mesh) -> int:
    """The owner's index in the group of the flattened ``axes``."""
    number = 0
    for axis in axes:
        number = number * mesh.size_of(axis) + layout.owner[axis]
    return number


def _owner_coordinates(rank: int, axes: OwnerAxes, mesh: Mesh) -> dict[str, Shard]:
    """Coordinates of index ``rank`` of the flattened ``axes``."""
    found: dict[str, Shard] = {}
    for axis in reversed(axes):
        rank, coordinate = divmod(rank, mesh.size_of(axis))
        found[axis] = Owned(owner=coordinate)
    return found


ExchangeAxes = tuple[bool, ...]
"""per mesh axis, whether looked-up rows travel along it"""


class LookupExchange(NamedTuple):
    """One look-up's part in the message and the update of its group."""

    way: ExchangeAxes
    latency: float
    """seconds, with synchronization skew, forward and backward"""
    shared: float
    """the part in the look-up's price"""
    update: float
    """seconds of its table's update in the look-up's price"""


class MajorityExchange(NamedTuple):
    """A choice of the group variable."""

    way: ExchangeAxes
    latency: float
    largest: int
    """look-up of the largest table that goes this way"""


class ExchangeGroup(NamedTuple):
    """The variable of a group of look-ups."""

    ways: tuple[ExchangeAxes, ...]
    """per choice; no axis: no table has an owner"""
    terms: Mapping[str, StepParts]
    """per choice: latency of the message"""
    more: tuple[Mapping[str, StepParts], ...]
    """per look-up: seconds on top of its price, by group choice (row) and own choice (column)"""


@cached_per_graph
def groupable_lookups(graph: Graph, mesh: Mesh) -> tuple[tuple[Node, ...], ...]:
    """Groups of look-ups that can share an all-to-all if their tables have owners."""
    return () if mesh.size == 1 else tuple(tuple(nodes) for nodes in grouped_lookups(graph).values() if len(nodes) > 1)


def exchange_pricings(graph: Graph, mesh: Mesh, optimizer: str) -> list[ExchangePricing]:
    return [ExchangePricing(graph, mesh, nodes, optimizer) for nodes in groupable_lookups(graph, mesh)]


class ExchangePricing:
    """Pricing of one group of look-ups for an optimizer."""

    def __init__(self, graph: Graph, mesh: Mesh, nodes: Sequence[Node], optimizer: str) -> None:
        self.graph, self.mesh, self.nodes, self.optimizer = graph, mesh, nodes, optimizer
        self.tables = [graph.types[node.inputs[0]] for node in nodes]
        self.alone = [len(graph.uses[node.inputs[0]]) == 1 for node in nodes]
        """whether nothing else reads the table"""
        self._known: dict[tuple[ExchangeAxes, int], dict[int, float]] = {}

    def group(self, spaces: Sequence[OpSpace]) -> ExchangeGroup | None:
        """The group's variable; None if no choice sends a message. ``spaces``: of the look-ups."""
        found = [self.per_choice(node, space) for node, space in zip(self.nodes, spaces, strict=True)]
        ways = sorted({(x.way, x.latency) for each in found for x in each if x is not None})
        if not ways:
            return None
        choices = (None, *(MajorityExchange(*way, i) for way in ways for i in range(len(self.nodes))))
        more = (self._table(choices, i, each) for i, each in enumerate(found))
        said = [((False,) * self.mesh.ndim, 0.0) if x is None else (x.way, x.latency) for x in choices]
        latency = StepParts(blocking=np.array([seconds for _, seconds in said]))
        return ExchangeGroup(tuple(way for way, _ in said), {"exchange": latency}, tuple(more))

    def per_choice(self, node: Node, space: OpSpace) -> list[LookupExchange | None]:
        """Per choice of a look-up; None: it sends no such message."""
        sides = zip(zip(*space.inputs, strict=True), zip(*space.outputs, strict=True), strict=True)
        return [
            self.exchange(node, choice, (*ins, *outs)) for choice, (ins, outs) in zip(space.choices, sides, strict=True)
        ]

    def exchange(self, node: Node, choice: tuple[Strategy, ...], placed: Sequence[Placements]) -> LookupExchange | None:
        """The exchange under ``choice``; ``placed``: of every operand, then every result."""
        way = tuple(s.label == TABLE_WISE_LABEL and n > 1 for s, n in zip(choice, self.mesh.shape, strict=True))
        if not any(way):
            return None
        waits, latency, shared = synchronization_skew(self.graph, self.mesh).message, 0.0, 0.0
        for c in internal_collectives(node, self.graph, self.mesh, choice, placed):
            each = self.mesh.link(c.axes).rate(c.kind)[0] + waits
            latency, shared = latency + each, shared + c.share * each
        update, type_ = 0.0, self.graph.types[node.inputs[0]]
        if self.graph.training:
            update = update_seconds(self.optimizer, type_, placed[0], self.graph, self.mesh)
        return LookupExchange(way, latency, shared, update)

    def _table(
        self, choices: Sequence[MajorityExchange | None], number: int, found: Sequence[LookupExchange | None]
    ) -> dict[str, StepParts]:
        each = np.array([[self._correction(most, number, x) for x in found] for most in choices])
        return {"exchange": StepParts(blocking=each[:, :, 0]), "update": StepParts(once=each[:, :, 1])}

    def _correction(
        self, most: MajorityExchange | None, number: int, found: LookupExchange | None
    ) -> tuple[float, float]:
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

    def _counts(self, way: ExchangeAxes, largest: int) -> dict[int, float]:
        """Look-up → weight of its update's price, if ``largest`` is the largest owned table. Larger
        ones are left out. In sum: the busiest rank's update if all others are owned."""
        if (way, largest) not in self._known:
            self._known[way, largest] = dict(self._counted(way, largest))
        return self._known[way, largest]

    def _counted(self, way: ExchangeAxes, largest: int) -> Iterator[tuple[int, float]]:
        order = sorted(range(len(self.nodes)), key=self._order)
        smaller, size = order[order.index(largest) :], self.mesh.size
        ranks = math.prod(n for goes, n in zip(way, self.mesh.shape, strict=True) if goes)
        held, first = [0.0] * ranks, float(self.tables[largest].updates.nbytes)
        for number, rank in balance_loads({str(i): table_load(self.tables[i]) for i in smaller}, ranks).items():
            held[rank] += self.tables[int(number)].updates.nbytes
        if not first:
            yield from ((i, 1.0) for i in smaller)
            return

        def lasts(most: float, all_: float) -> float:
            return most * self.mesh.hardware.relative_duration(size * all_ / (ranks * most), size)

        all_, alone = lasts(max(held), sum(held)), lasts(first, first)
        rest = max(0.0, all_ - alone) / ((sum(held) - first) or 1.0)
        for i in smaller:
            placed = tuple(Owned() if goes else R for goes in way)
            busiest = owner_imbalance(self.tables[i], placed, self.mesh)
            priced = busiest / ranks * self.mesh.hardware.relative_duration(size / busiest, size)  # of a byte of it
            counts = alone / first if i == largest else rest
            yield i, counts / priced if self.alone[i] else 1.0


class GroupedOpSpaces(OpSpaces):
    """Adds a copy of a strategy per layout from which looked-up operands can share a message."""

    def __getitem__(self, node: Node) -> OpSpace:
        space = super().__getitem__(node)
        if space.ways is None and node.name in self._values:
            space = self._of[node.name] = self._with_ways(node, space, self._values[node.name])
        return space

    @cached_property
    def _values(self) -> Mapping[str, tuple[str, ...]]:
        return {node.name: values for node, values in grouped_lookup_readers(self.graph, self.mesh)}

    def _with_ways(self, node: Node, space: OpSpace, values: tuple[str, ...]) -> OpSpace:
        type_, mesh = self.graph.types[values[0]], self.mesh
        sources = tuple(grouped_source_layouts(type_, mesh))
        uses = [space.inputs[i] for i, name in enumerate(node.inputs) if name in values]
        pays = np.max([shared_latencies(type_, mesh, sources, placed, self.waits.message) for placed in uses], axis=0)
        at = [(i, 0) for i in range(len(space.choices))]
        at += [(int(i), s + 1) for s, row in enumerate(pays) for i in np.flatnonzero(row)]
        ways = GroupedConversions(values, sources, np.array([s for _, s in at]))
        return space.repeated([i for i, _ in at], ways, [pays[s - 1, i] if s else 0.0 for i, s in at])
