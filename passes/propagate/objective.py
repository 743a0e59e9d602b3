"""The objective: predicted seconds of a step for an assignment, and the cost of other strategies.
Both are the terms of the search's cost network at a choice. :class:`ChosenNetwork` is the network of
one assignment, with one state per variable, and :func:`objective` the sum of its terms.
:func:`alternatives` lets one operation have all its strategies, and lists runner-up strategies with
the seconds that they add (sensitivity), for reports and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from autoshard.hardware import Overlap
from autoshard.layout import I, Owned, R, Shard
from autoshard.passes.ir.analyses import LazySequence
from autoshard.passes.ir.assignment import Assignment, Placements, is_dividing_label
from autoshard.passes.ir.graph import Node
from autoshard.passes.propagate.activation_memory import NEEDED, RECONVERTED, EdgeSide, SavedTensorTables
from autoshard.passes.propagate.edges import EdgeTable, EdgeTables, ValueEdge, operand_reads
from autoshard.passes.propagate.embedding_tables import ExchangePricing, GroupedOpSpaces, exchange_pricings
from autoshard.passes.propagate.network import LayoutNetwork
from autoshard.passes.propagate.op_space import OpSpace, OpSpaces
from autoshard.passes.propagate.prices.collective_overheads import update_seconds
from autoshard.passes.propagate.prices.overlap import (
    NO_SECONDS,
    StepParts,
    sum_of_terms,
    tables_of_step,
    total_parts,
)


@dataclass
class ChosenNetwork(LayoutNetwork):
    """The cost network with the states of one assignment. Variables that no assignment knows, such as
    which conversions share a message, have several: the cheapest counts."""

    assignment: Assignment = field(kw_only=True)

    @classmethod
    def of(cls, assignment: Assignment, optimizer: str) -> ChosenNetwork:
        graph, mesh = assignment.graph, assignment.mesh
        spaces = GroupedOpSpaces(graph, mesh, chosen=assignment.choices)
        stages = {name: (assignment.zero.get(name, 0),) for name in graph.parameters}
        terms = SavedTensorTables(graph, mesh), None, optimizer, assignment.layouts, stages
        found = cls(graph, mesh, {}, spaces, *terms, assignment=assignment)
        found.collect()
        return found

    # --- its states ---

    @property
    def remembers(self) -> bool:
        return bool(self.assignment.again or self.assignment.shared_again)

    def _one(self, placed: Placements) -> tuple[Placements, ...]:
        return self._interned(("one", placed), (placed,))

    def _needed(self) -> frozenset[str]:
        return frozenset()

    def _tags(self, node: Node, needed: frozenset[str]) -> tuple[int, ...]:
        again = self.assignment.again.get(node.name, 0)
        return ((RECONVERTED if again else NEEDED) if self.remembers and node.name in self.views else again,)

    def _shared(self, value: str, *others: object) -> tuple[tuple[Placements, ...], tuple[int, ...]] | None:
        layout = self.assignment.shared.get(value)
        tag = RECONVERTED if value in self.assignment.shared_again else NEEDED
        return None if layout is None else (self._one(layout.placements), (tag if self.remembers else 0,))

    def _input_states(self, name: str, kind: str) -> tuple[Placements, ...]:
        return self._one(self.assignment.layouts[name].placements)

    def _output_states(self, number: int, name: str) -> tuple[Placements, ...]:
        layout = self.assignment.outputs[number]
        assert layout is not None
        return self._one(layout.placements)

    # --- its terms ---

    @cached_property
    def tables(self) -> EdgeTables:
        return EdgeTables(self.graph, self.mesh)

    @cached_property
    def links_of(self) -> Mapping[str, list[ValueEdge]]:
        found: dict[str, list[ValueEdge]] = {name: [] for name in self.variables}
        for link in self.links:
            found[link.source].append(link)
            found[link.reader].append(link)
        return found

    def table(self, link: ValueEdge) -> EdgeTable:
        key = "table", self.tables.key(link)
        if key not in self.known:
            self.known[key] = self.tables.of(link, self.remembers)
        return self.known[key]

    @cached_property
    def states(self) -> Mapping[str, int]:
        found = dict.fromkeys(self.variables, 0)
        for name, variable in self.variables.items():
            if variable.size > 1:
                cost = self.cost(self.around(name, found), variable.size)
                found[name] = int(np.argmin(cost))
        return found

    def cost(self, parts: StepParts, *shape: int) -> np.ndarray:
        """The network's cost of ``parts``, without its rows."""
        return tables_of_step(parts, shape, self.mesh.overlap, self.graph.passes).cost  # type: ignore[return-value]

    def around(self, name: str, states: Mapping[str, int], without: str = "") -> StepParts:
        """Seconds of a variable and its edges but that to ``without``, per state."""
        parts = self.variables[name].parts
        for link in self.links_of[name]:
            table = self.table(link)
            if without in (link.source, link.reader):
                continue
            if link.source == name:
                parts += table.parts[table.rows, table.columns[states[link.reader]]]
            else:
                parts += table.parts[table.rows[states[link.source]], table.columns]
        for way, look_up, terms in self.calls:
            if way == name and look_up != without:
                parts += sum_of_terms(terms)[:, states[look_up]]
        return parts

    def terms(self) -> Iterator[tuple[str, str, StepParts]]:
        """(term, operation or value, seconds) of all variables and edges."""
        states, known = self.states, dict[tuple[int, int, int], list[tuple[str, StepParts]]]()
        for name, variable in self.variables.items():
            for term, parts in variable.terms.items():
                yield term, name.rpartition(":")[2], parts[states[name]]
        for link in self.links:
            table, a, b = self.table(link), states[link.source], states[link.reader]
            if (id(table), a, b) not in known:
                at = table.rows[a], table.columns[b]
                known[id(table), a, b] = [(term, parts[at]) for term, parts in table.terms.items()]
            yield from ((term, link.value, parts) for term, parts in known[id(table), a, b])
        for way, look_up, terms in self.calls:
            for term, parts in terms.items():
                yield term, look_up.rpartition(":")[2], parts[states[way], states[look_up]]


@dataclass(frozen=True)
class Objective:
    """Predicted seconds of one step on the busiest rank."""

    terms: tuple[tuple[str, str, StepParts], ...]
    """(term, operation or value, seconds)"""
    spaces: OpSpaces
    """of the chosen strategies"""
    overlap: Overlap
    """speed of compute beside movable communication"""
    passes: int = 1
    """micro-batches per step"""

    @cached_property
    def parts(self) -> StepParts:
        """Everything but the optimizer."""
        return total_parts(parts for term, _, parts in self.terms if term != "update")

    @cached_property
    def optimizer(self) -> float:
        return math.fsum(float(parts.once) for term, _, parts in self.terms if term == "update")

    @cached_property
    def again(self) -> Mapping[str, StepParts]:
        """Repeated in the backward: per recomputed operation, and value converted again."""
        found: dict[str, StepParts] = {}
        for term, name, parts in self.terms:
            if term == "again":
                found[name] = found[name] + parts if name in found else parts
        return found

    @property
    def compute_s(self) -> float:
        return self.passes * float(self.parts.compute + self.parts.other) + self.optimizer

    @property
    def comm_s(self) -> float:
        return float(self.parts.communication(self.passes))

    @property
    def exposed_s(self) -> float:
        """Exposed communication: what compute does not hide."""
        return float(self.parts.exposed(self.overlap, self.passes))

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s


def objective(assignment: Assignment, optimizer: str = "adamw") -> Objective:
    """The objective of ``assignment``, whether searched or given."""
    network = ChosenNetwork.of(assignment, optimizer)
    return Objective(tuple(network.terms()), network.spaces, network.mesh.overlap, network.graph.passes)


Alternative = tuple[tuple[str, ...], float]
"""(a label per mesh axis, seconds more per step)"""


def alternatives(
    assignment: Assignment, limit: int = 3, optimizer: str = "adamw"
) -> dict[str, LazySequence[Alternative]]:
    """Node → ``limit`` cheapest other strategies, and the cheapest that shards each idle axis.
    Seconds: change of the objective if this operation and redistributions around it change, all
    else fixed (an owned table follows its reader). An upper bound, as a search could adapt
    neighbours. Never negative in an optimal plan."""
    one = _Alternatives(assignment, limit, optimizer)
    return {node.name: LazySequence(partial(one.of, node)) for node in assignment.graph.nodes}


_OWN = "operation"
"""variable of the operation whose alternatives are priced"""


class _Alternatives:
    def __init__(self, assignment: Assignment, limit: int, optimizer: str) -> None:
        self.assignment, self.limit, self.optimizer = assignment, limit, optimizer
        self.graph, self.mesh = assignment.graph, assignment.mesh
        self.spaces = GroupedOpSpaces(self.graph, self.mesh)
        self.known: dict[Any, tuple[Alternative, ...]] = {}

    @cached_property
    def network(self) -> ChosenNetwork:
        return ChosenNetwork.of(self.assignment, self.optimizer)

    @cached_property
    def total(self) -> StepParts:
        return total_parts(parts for term, _, parts in self.network.terms() if term != "update")

    @cached_property
    def exchanges(self) -> Mapping[str, ExchangePricing]:
        """Look-up → pricing of the group that shares its all-to-all."""
        found = exchange_pricings(self.graph, self.mesh, self.optimizer)
        return {node.name: together for together in found for node in together.nodes}

    def of(self, node: Node) -> tuple[Alternative, ...]:
        space, now = self.spaces[node], _strategy_labels(self.assignment.choices[node.name])
        labels = [_strategy_labels(choice) for choice in space.choices]
        if now not in labels or len(set(labels)) < 2:
            return ()
        links, variables = list(self._links(node, space)), self.network.variables
        key: Any = id(space), now, *((self.network.tables.key(x), self._is_stored_as_read(x)) for x in links)
        if node.name in self.exchanges or any(
            variables[x.source if x.reader == _OWN else x.reader].size > 1 for x in links
        ):
            key = node.name
        if key not in self.known:
            parts = space.parts
            for link in links:
                parts += self._edge(node, link, len(labels))
            if node.name in self.exchanges:
                parts += self._exchange(node, space)
            self.known[key] = self._best(space, labels, parts, now)
        return self.known[key]

    def _links(self, node: Node, space: OpSpace) -> Iterator[ValueEdge]:
        """Edges of ``node`` with all its strategies; their end there is :data:`_OWN`."""
        for read in operand_reads(node, space):
            source = self.network.sources[read.name]
            yield ValueEdge(*source, _OWN, EdgeSide(read.placed), read.name, read.mask, read.spared, read.ways)
        made = dict(zip(node.outputs, space.outputs, strict=True))
        variable = f"node:{node.name}"
        for link in self.network.links_of[variable]:
            if link.source == variable:
                yield link._replace(source=_OWN, given=EdgeSide(made[link.value]))

    def _edge(self, node: Node, link: ValueEdge, choices: int) -> StepParts:
        """Seconds of an edge per strategy of ``node``; variables at the other end adapt."""
        if self._is_stored_as_read(link):
            return self._stored_as_read(link)
        network, table, reads = self.network, self.network.tables.of(link, held=False), link.reader == _OWN
        other = link.source if reads else link.reader
        parts = table.parts[np.ix_(table.rows, table.columns)]
        parts = parts if reads else parts.map(np.transpose)
        if (states := network.variables[other].size) == 1:
            return parts[0]
        return self._cheapest(network.around(other, network.states, f"node:{node.name}"), parts, (states, choices))

    def _exchange(self, node: Node, space: OpSpace) -> StepParts:
        """Seconds of the message that look-ups share, per strategy of ``node``."""
        of = self.exchanges[node.name]
        found = of.group([space if n is node else self.network.spaces[n] for n in of.nodes])
        if found is None:
            return NO_SECONDS
        own, rest = NO_SECONDS, sum_of_terms(found.terms)
        for other, terms in zip(of.nodes, found.more, strict=True):
            if other is node:
                own = sum_of_terms(terms)
            else:
                rest += sum_of_terms(terms)[:, 0]
        return self._cheapest(rest, own, (len(found.ways), len(space.choices)))

    def _cheapest(self, rest: StepParts, parts: StepParts, shape: tuple[int, int]) -> StepParts:
        """For each choice (column of ``parts``) the cheapest state (row), with ``rest`` seconds per state."""
        every = rest[:, None] + parts
        best = self.network.cost(every, *shape).argmin(axis=0)
        return every.map(lambda x: np.broadcast_to(x, shape)[best, np.arange(shape[1])])

    def _is_stored_as_read(self, link: ValueEdge) -> bool:
        """Whether it is an owned table that ``node`` alone reads: it has no conversions."""
        placed = link.given.placed[0] if link.source == link.value else ()
        return link.reader == _OWN and any(isinstance(p, Owned) for p in placed)

    def _stored_as_read(self, link: ValueEdge) -> StepParts:
        """Seconds of a table that is stored in the layout in which each strategy reads it."""
        type_ = self.graph.types[link.value]
        whole = I if type_.grad else R
        stored = tuple(tuple(p if isinstance(p, Shard | Owned) else whole for p in x) for x in link.asked.placed)
        table = self.network.tables.of(link._replace(given=replace(link.given, placed=stored)), held=False)
        update = [update_seconds(self.optimizer, type_, x, self.graph, self.mesh) for x in stored]
        return table.parts[table.rows, table.columns] + StepParts(once=np.array(update))

    def _best(
        self, space: OpSpace, labels: Sequence[tuple[str, ...]], parts: StepParts, now: tuple[str, ...]
    ) -> tuple[Alternative, ...]:
        mine = np.array([x == now for x in labels])
        current = int(np.argmin(np.where(mine, self.network.cost(parts, len(labels)), np.inf)))
        passes, overlap = self.graph.passes, self.mesh.overlap
        others = self.total + (parts - parts[current])
        extra = others.step(overlap, passes) - self.total.step(overlap, passes)
        cheapest: dict[tuple[str, ...], int] = {}
        for i in np.argsort(extra, kind="stable").tolist():
            if not mine[i] and math.isfinite(extra[i]):
                cheapest.setdefault(labels[i], i)
        order = list(cheapest.values())
        kept = order[: self.limit]
        for axis, size in enumerate(self.mesh.shape):
            if size > 1 and not space.choices[current][axis].divides:
                kept += [i for i in order if space.choices[i][axis].divides][:1]
        return tuple((labels[i], float(extra[i])) for i in sorted(set(kept), key=order.index))


def _strategy_labels(choice: Sequence[Any]) -> tuple[str, ...]:
    return tuple(s.label for s in choice)


def cheapest_use(found: Mapping[str, Sequence[Alternative]], axis: int) -> tuple[str, float] | None:
    """(node that mesh axis ``axis`` could shard at the least extra cost, extra seconds)."""
    candidates = (
        (seconds, name)
        for name, others in found.items()
        for labels, seconds in others
        if is_dividing_label(labels[axis])
    )
    best = min(candidates, default=None)
    return None if best is None else (best[1], best[0])
