"""The objective: predicted seconds of a step for an assignment, and the cost of other strategies.

:func:`objective` evaluates the sum that the search minimizes. :func:`alternatives` lists
runner-up strategies of each operation with the seconds that they add (sensitivity), for reports
and pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, overload

import numpy as np

from autoshard.hardware import Overlap
from autoshard.layout import I, Layout, Owned, R, Shard
from autoshard.passes.ir.analyses import node_signature
from autoshard.passes.ir.assignment import Assignment, Placements, is_fully_replicated
from autoshard.passes.ir.graph import Node
from autoshard.passes.propagate.activation_memory import SavedTensorTables, is_memory_view
from autoshard.passes.propagate.edges import (
    conversion_parts,
    masked_parts,
    operand_reads,
    reconversion_parts,
    unless_replicated,
)
from autoshard.passes.propagate.embedding_tables import ExchangePricing, exchange_pricings
from autoshard.passes.propagate.op_space import OpSpace, OpSpaces, internal_collectives, memory_traffic
from autoshard.passes.propagate.prices import roofline as costs
from autoshard.passes.propagate.prices.coalescing import (
    SharesByValue,
    coalescing_saved_seconds,
    grouped_lookup_readers,
    latency_shares,
)
from autoshard.passes.propagate.prices.collective_matmul import NO_RING_PRODUCTS, RingProducts, overlapping_products
from autoshard.passes.propagate.prices.collective_overheads import synchronization_skew, update_seconds
from autoshard.passes.propagate.prices.overlap import StepParts, movable_values, total_parts
from autoshard.passes.propagate.recompute import zero_stages_of
from autoshard.passes.redistribute.pricing import MessageShares
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.facts import can_redraw


@dataclass(frozen=True)
class Objective:
    """Predicted seconds of one step on the busiest rank."""

    operations: Mapping[str, OpSeconds]
    """per node"""
    conversions: StepParts
    """redistributions between definitions and uses"""
    optimizer: float
    overlap: Overlap
    """speed of compute beside movable communication"""
    passes: int = 1
    """micro-batches per step"""
    again: Mapping[str, StepParts] = field(default_factory=dict)
    """repeated in the backward: per recomputed node, and per value that is converted again"""

    @cached_property
    def parts(self) -> StepParts:
        """Everything but the optimizer."""
        found = [op.parts for op in self.operations.values()]
        return total_parts((*found, self.conversions, *self.again.values()))

    @property
    def compute_s(self) -> float:
        return self.passes * float(self.parts.compute + self.parts.other) + self.optimizer

    @property
    def comm_s(self) -> float:
        """All communication."""
        return float(self.parts.communication(self.passes))

    @property
    def exposed_s(self) -> float:
        """Exposed communication: what compute does not hide."""
        return float(self.parts.exposed(self.overlap, self.passes))

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s


@dataclass(frozen=True)
class OpSeconds:
    """Seconds of one operation: compute, and collectives inside its local form."""

    compute: costs.PhaseSeconds
    inside: costs.InternalSeconds

    @property
    def again(self) -> StepParts:
        """Seconds to recompute it in the backward."""
        launch = self.compute.launches[0]
        hides, waits, hidden = self.compute.forward - launch, self.inside.again, self.inside.hidden[0]
        return StepParts(np.array(hides), np.array(launch), np.array(waits), hidden=np.array(hidden))

    @cached_property
    def parts(self) -> StepParts:
        launches = sum(self.compute.launches)
        hides, waits = self.compute.step - launches, self.inside.step
        return StepParts(np.array(hides), np.array(launches), np.array(waits), hidden=np.array(sum(self.inside.hidden)))


def objective(assignment: Assignment, optimizer: str = "adamw") -> Objective:
    """The objective of ``assignment``, whether searched or given."""
    graph, mesh = assignment.graph, assignment.mesh
    known: dict[object, OpSeconds] = {}
    touched, waits = memory_traffic(graph, mesh), synchronization_skew(graph, mesh)
    operations: dict[str, OpSeconds] = {}
    for node in graph.nodes:
        choice = assignment.choices[node.name]
        traffic = touched.get(node.name)
        spares = {i for i, name in enumerate(node.inputs) if is_fully_replicated(assignment.source(name).placements)}
        key = (node_signature(node, graph.types), choice, traffic, *spares)
        if key not in known:
            placed = assignment.placed(node)
            flops = costs.node_flops(node, graph, rule_for(node.op))
            inside = [c for c in internal_collectives(node, graph, mesh, choice, placed) if c.spared not in spares]
            compute = costs.node_seconds(node, graph, mesh, choice, flops, placed, traffic).slowed_by(waits.share)
            known[key] = OpSeconds(compute, costs.inside_seconds(inside, mesh, compute, waits.message))
        operations[node.name] = known[key]
    prices: dict[object, StepParts] = {}
    conversions: list[StepParts] = []
    movable, stages, shares = movable_values(graph), zero_stages_of(graph, assignment.zero), latency_shares(graph, mesh)
    products = overlapping_products(graph, mesh)
    for value, src, dst, first in _value_conversions(assignment):
        if src == dst:
            continue
        near = products.get(value, NO_RING_PRODUCTS) if first else NO_RING_PRODUCTS
        case = (graph.types[value], src, dst, stages.get(value), value in movable, shares[value], near)
        if case not in prices:
            prices[case] = conversion_parts(case[0], mesh, (src,), (dst,), *case[3:], graph.passes)[0, 0]
        conversions.append(prices[case])
    conversions += [StepParts(blocking=np.array(-x)) for x in _coalescing_savings(assignment)]
    stored = [(graph.types[name], assignment.layouts[name].placements) for name in graph.parameters]
    update = math.fsum(update_seconds(optimizer, type_, placed, graph, mesh) for type_, placed in stored)
    for together in exchange_pricings(graph, mesh, optimizer):
        latency, more = together.extra_seconds(together.chosen(assignment))
        conversions.append(StepParts(blocking=np.array(latency)))
        update += more
    again = _recompute_parts(assignment, operations, movable)
    return Objective(operations, total_parts(conversions), update, mesh.overlap, graph.passes, again)


def _coalescing_savings(assignment: Assignment) -> Iterator[float]:
    """Seconds saved by looked-up operands that share one message, per reading operation."""
    for node, values in grouped_lookup_readers(assignment.graph, assignment.mesh):
        read = [(i, name) for i, name in enumerate(node.inputs) if name in values]
        moves = ((n, assignment.source(n).placements, assignment.use(node, i)) for i, n in read)
        yield coalescing_saved_seconds(assignment.graph, assignment.mesh, moves)


def _recompute_parts(
    assignment: Assignment, operations: Mapping[str, OpSeconds], movable: frozenset[str]
) -> dict[str, StepParts]:
    """Seconds of recomputed operations and of redistributions repeated in the backward."""
    graph, mesh = assignment.graph, assignment.mesh
    found: dict[str, StepParts] = {}
    prices: dict[object, StepParts] = {}
    if not assignment.again and not assignment.shared_again:
        return found

    def convert(value: str, src: Placements, dst: Placements, waits: bool = False) -> None:
        case = graph.types[value], src, dst, value in movable or not waits
        if case not in prices:
            sides = [Layout(mesh, src)], [Layout(mesh, dst)]
            prices[case] = reconversion_parts(case[0], *sides, case[-1], latency_shares(graph, mesh).others)[0, 0]
        parts = prices[case]
        found[value] = found[value] + parts if value in found else parts

    for value in assignment.shared_again:
        convert(value, assignment.layouts[value].placements, assignment.shared[value].placements)
    keeps = SavedTensorTables(graph, mesh)
    for node in graph.nodes:
        state = assignment.again.get(node.name, 0)
        if state == 2 or (state == 1 and can_redraw(node)):
            op = operations[node.name]
            found[node.name] = op.again
        if state:
            passive = is_memory_view(node)
            placed = [assignment.use(node, i) for i in range(len(node.inputs))]
            saves = frozenset() if passive or state == 2 else keeps.chosen(node, assignment)
            needed = (
                n for i, n in enumerate(zip(node.inputs, placed, strict=True)) if state == 2 or passive or i in saves
            )
            for name, uses in dict.fromkeys(needed):
                if name not in graph.parameters:
                    convert(name, assignment.source(name).placements, uses, state == 2)
    return found


def _value_conversions(assignment: Assignment) -> Iterator[tuple[str, Placements, Placements, bool]]:
    """(value, from, to, is first): definition → shared layout → each reader."""
    for value, found in layouts_per_reader(assignment).items():
        if value in assignment.shared:
            yield value, assignment.layouts[value].placements, assignment.shared[value].placements, True
        for placed in found:
            yield value, assignment.source(value).placements, placed, value not in assignment.shared


def layouts_per_reader(assignment: Assignment) -> dict[str, list[Placements]]:
    """Value → layouts read: one per reading operation and layout, output, and write-back."""
    graph = assignment.graph
    found: dict[str, list[Placements]] = {name: [] for name in graph.types}
    for node in graph.nodes:
        for name, placed in dict.fromkeys((n, assignment.use(node, i)) for i, n in enumerate(node.inputs)):
            found[name].append(placed)
    for out, layout in zip(graph.outputs, assignment.outputs, strict=True):
        if layout is not None:
            found[out.name].append(layout.placements)
    for fqn, name in graph.mutations.items():
        found[name].append(assignment.written(fqn).placements)
    return found


Alternative = tuple[tuple[str, ...], float]
"""(a label per mesh axis, seconds more per step)"""


class LazyAlternatives(Sequence[Alternative]):
    """Lazy alternatives: finding them takes as long as the search, and most are never read."""

    def __init__(self, find: Callable[[], Sequence[Alternative]]) -> None:
        self._find = find

    @cached_property
    def found(self) -> tuple[Alternative, ...]:
        return tuple(self._find())

    @overload
    def __getitem__(self, index: int) -> Alternative: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Alternative, ...]: ...
    def __getitem__(self, index: int | slice) -> Alternative | tuple[Alternative, ...]:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def __eq__(self, other: object) -> bool:
        return self.found == (other.found if isinstance(other, LazyAlternatives) else other)

    def __hash__(self) -> int:
        return hash(self.found)

    def __repr__(self) -> str:
        return repr(self.found)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.found,)


def alternatives(assignment: Assignment, limit: int = 3, optimizer: str = "adamw") -> dict[str, LazyAlternatives]:
    """Node → ``limit`` cheapest other strategies, and the cheapest that shards each idle axis.

    Seconds: change of the objective if this operation and redistributions around it change, all
    else fixed (an owned table follows its reader). An upper bound, as a search could adapt
    neighbours. Never negative in an optimal plan.
    """
    one = _Alternatives(assignment, limit, optimizer)
    return {node.name: LazyAlternatives(partial(one.of, node)) for node in assignment.graph.nodes}


class _Alternatives:
    def __init__(self, assignment: Assignment, limit: int, optimizer: str) -> None:
        self.assignment, self.limit, self.optimizer = assignment, limit, optimizer
        self.graph, self.mesh = assignment.graph, assignment.mesh
        self.known: dict[Any, tuple[Alternative, ...]] = {}

    @cached_property
    def spaces(self) -> OpSpaces:
        return OpSpaces(self.graph, self.mesh)

    @cached_property
    def total(self) -> StepParts:
        return objective(self.assignment, self.optimizer).parts

    @cached_property
    def targets(self) -> Mapping[str, Sequence[Placements]]:
        return layouts_per_reader(self.assignment) | {n: [x.placements] for n, x in self.assignment.shared.items()}

    @cached_property
    def movable(self) -> frozenset[str]:
        return movable_values(self.graph)

    @cached_property
    def shares(self) -> SharesByValue:
        return latency_shares(self.graph, self.mesh)

    @cached_property
    def products(self) -> Mapping[str, RingProducts]:
        return overlapping_products(self.graph, self.mesh)

    @cached_property
    def joined(self) -> Mapping[str, list[tuple[Node, tuple[str, ...]]]]:
        """Readers and producers of coalesced look-up results → (reader, values)."""
        found: dict[str, list[tuple[Node, tuple[str, ...]]]] = {}
        for reader, values in grouped_lookup_readers(self.graph, self.mesh):
            for name in dict.fromkeys((reader.name, *(self.graph.producers[n].name for n in values))):
                found.setdefault(name, []).append((reader, values))
        return found

    @cached_property
    def calls(self) -> Mapping[str, ExchangePricing]:
        """Look-up → pricing of the group that shares its all-to-all."""
        found = exchange_pricings(self.graph, self.mesh, self.optimizer)
        return {node.name: together for together in found for node in together.nodes}

    @cached_property
    def stages(self) -> Mapping[str, int]:
        return zero_stages_of(self.graph, self.assignment.zero)

    def of(self, node: Node) -> tuple[Alternative, ...]:
        space, labels = self.spaces[node], _strategy_labels(self.assignment.choices[node.name])
        current = next((i for i, choice in enumerate(space.choices) if _strategy_labels(choice) == labels), None)
        if current is None or len(space.choices) < 2:
            return ()
        sources = {name: self.assignment.source(name).placements for name in node.inputs}
        targets = tuple(tuple(self.targets[name]) for name in node.outputs)
        owned = tuple(self._terms(name) for name in (*node.inputs, *node.outputs))
        key = (id(space), current, *((sources[n], self._is_stored_as_read(n)) for n in node.inputs), targets, owned)
        alone = node.name not in self.joined and node.name not in self.calls
        key = key if alone else (*key, node.name)
        if key not in self.known:
            parts = space.parts
            for _, name, placed, mask, spared, _ in operand_reads(node, space):
                parts += masked_parts(self._read(name, placed), mask)
                if spared is not None:
                    parts += StepParts(blocking=unless_replicated(spared, [sources[name]])[0])
            for name, asked, placed in zip(node.outputs, targets, space.outputs, strict=True):
                for target in asked:
                    parts += self._parts(name, placed, [target])[:, 0]
            if node.name in self.joined:
                parts += StepParts(blocking=-self._coalescing_seconds(node, space))
            if node.name in self.calls:
                parts += self._extra_parts(node, space)
            others = self.total + (parts - parts[current])
            self.known[key] = self._best(space, self._step(others) - self._step(self.total), current)
        return self.known[key]

    def _coalescing_seconds(self, node: Node, space: OpSpace) -> np.ndarray:
        """Seconds saved by coalesced look-up results, per choice of a producer or reader."""
        found = np.zeros(len(space.choices))
        for reader, values in self.joined.get(node.name, ()):
            places = [(i, name) for i, name in enumerate(reader.inputs) if name in values]
            for choice in range(len(found)):
                lies = {n: self.assignment.source(n).placements for _, n in places}
                if reader is not node:
                    made = zip(node.outputs, space.outputs, strict=True)
                    lies |= {n: x[choice] for n, x in made if n in lies and n not in self.assignment.shared}
                    read = [self.assignment.use(reader, i) for i, _ in places]
                else:
                    read = [space.inputs[i][choice] for i, _ in places]
                moves = ((n, lies[n], placed) for (_, n), placed in zip(places, read, strict=True))
                found[choice] += coalescing_saved_seconds(self.graph, self.mesh, moves)
        return found

    def _extra_parts(self, node: Node, space: OpSpace) -> StepParts:
        """Seconds on top of look-up prices in the group of ``node``, per choice of ``node``."""
        found = self.calls[node.name]
        each, at = found.chosen(self.assignment), found.nodes.index(node)
        own = (found.extra_seconds([*each[:at], x, *each[at + 1 :]]) for x in found.per_choice(node, space))
        latency, update = np.array(list(own)).T
        return StepParts(blocking=latency, once=update)

    def _step(self, parts: StepParts) -> Any:
        return parts.step(self.mesh.overlap, self.graph.passes)

    def _parts(
        self, name: str, sources: Sequence[Placements], targets: Sequence[Placements], first: bool = True
    ) -> StepParts:
        """``first``: whether sources are layouts of the definition, not of the shared layout."""
        stage, movable, share, products = self._terms(name)
        terms = stage, movable, share, products if first else NO_RING_PRODUCTS, self.graph.passes
        return conversion_parts(self.graph.types[name], self.mesh, sources, targets, *terms)

    def _read(self, name: str, placed: Sequence[Placements]) -> StepParts:
        """Seconds to convert an operand to each layout; an owned table is stored as read."""
        if not self._is_stored_as_read(name):
            source = self.assignment.source(name).placements
            return self._parts(name, [source], placed, name not in self.assignment.shared)[0]
        type_ = self.graph.types[name]
        whole = I if type_.grad else R
        stored = [tuple(p if isinstance(p, Shard | Owned) else whole for p in x) for x in placed]
        read = self._parts(name, stored, placed)
        update = [update_seconds(self.optimizer, type_, x, self.graph, self.mesh) for x in stored]
        return StepParts(*(x.diagonal() if x.ndim else x for x in read)) + StepParts(once=np.array(update))

    def _is_stored_as_read(self, name: str) -> bool:
        """Whether it is stored as read: an owned table with one reader has no conversions."""
        owned = any(isinstance(p, Owned) for p in self.assignment.source(name).placements)
        return owned and name not in self.assignment.shared

    def _terms(self, name: str) -> tuple[int | None, bool, MessageShares, RingProducts]:
        """(ZeRO stage, whether movable, latency shares, products of a collective matmul)."""
        products = self.products.get(name, NO_RING_PRODUCTS)
        return self.stages.get(name), name in self.movable, self.shares[name], products

    def _best(self, space: OpSpace, extra: np.ndarray, current: int) -> tuple[Alternative, ...]:
        order = [int(i) for i in np.argsort(extra, kind="stable") if i != current and math.isfinite(extra[i])]
        kept = order[: self.limit]
        for axis, size in enumerate(self.mesh.shape):
            if size > 1 and not space.choices[current][axis].divides:
                kept += [i for i in order if space.choices[i][axis].divides][:1]
        return tuple((_strategy_labels(space.choices[i]), float(extra[i])) for i in sorted(set(kept), key=order.index))


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


def is_dividing_label(label: str) -> bool:
    """Whether a strategy with this label shards a factor: it is not I, R or P(…)."""
    return label not in ("I", "R") and not label.startswith("P(")
