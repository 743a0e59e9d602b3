"""Edges of the cost network: readers of a value, and seconds and bytes of its redistribution.

The search, the alternatives and the report price a redistribution by the same function,
:func:`conversion_parts`."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from autoshard.layout import Invariant, Layout, Replicate, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import cached_per_graph
from autoshard.passes.ir.assignment import Placements, is_fully_replicated
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.propagate.activation_memory import (
    RECONVERTED,
    ConversionCopies,
    EdgeSide,
    memory_of_edge,
    zero_stage_table,
)
from autoshard.passes.propagate.op_space import OpSpace
from autoshard.passes.propagate.prices import roofline as costs
from autoshard.passes.propagate.prices.coalescing import GroupedConversions, latency_shares, shared_latencies
from autoshard.passes.propagate.prices.collective_matmul import (
    NO_RING_PRODUCTS,
    RingProducts,
    overlapping_products,
    with_collective_matmul,
)
from autoshard.passes.propagate.prices.collective_overheads import copy_seconds, with_skew
from autoshard.passes.propagate.prices.overlap import StepParts, movable_values
from autoshard.passes.redistribute import link_matrices
from autoshard.passes.redistribute.pricing import UNSHARED_MESSAGES, MessageShares
from autoshard.passes.search.arrays import CompactMatrix, joint_classes


class OperandRead(NamedTuple):
    """One operand of an operation."""

    position: int
    name: str
    placed: Sequence[Placements]
    """layout per choice"""
    mask: np.ndarray | None
    """choices under which it is paid; None: all"""
    spared: np.ndarray | None
    """seconds per choice of collectives that a replicated operand makes unnecessary"""
    ways: GroupedConversions | None = None
    """groups of conversions that share a message"""


def operand_reads(node: Node, space: OpSpace) -> Iterator[OperandRead]:
    """Operands of ``node``; a value that is read several times pays once per layout."""
    earlier: dict[str, list[Sequence[Placements]]] = {}
    for position, (name, placed) in enumerate(zip(node.inputs, space.inputs, strict=True)):
        before = earlier.setdefault(name, [])
        new = np.array([all(p != other[i] for other in before) for i, p in enumerate(placed)]) if before else None
        if new is None or new.any():
            mask = None if new is None or new.all() else new
            ways = space.ways if space.ways is not None and name in space.ways.values else None
            yield OperandRead(position, name, placed, mask, space.spared.get(position), ways)
        before.append(placed)


def masked_parts(parts: StepParts, mask: np.ndarray | None) -> StepParts:
    """``parts`` with 0 in the columns that ``mask`` excludes."""
    return parts if mask is None else StepParts(*(np.where(mask, x, 0.0) if x.ndim else x for x in parts))


def unless_replicated(spared: np.ndarray, sources: Sequence[Placements]) -> np.ndarray:
    """Seconds per source (row) and choice (column); 0 if the source is replicated."""
    return np.where([[is_fully_replicated(p)] for p in sources], 0.0, spared)


class ValueEdge(NamedTuple):
    """An edge: from the definition of a value, or its shared layout, to a reader."""

    source: str
    """variable"""
    given: EdgeSide
    reader: str
    """variable"""
    asked: EdgeSide
    value: str
    mask: np.ndarray | None = None
    """the reader's choices under which it is paid; None: all"""
    spared: np.ndarray | None = None
    """see :class:`OperandRead`"""
    ways: GroupedConversions | None = None


def conversion_parts(
    type_: TensorType,
    mesh: Mesh,
    sources: Sequence[Placements],
    targets: Sequence[Placements],
    stage: int | None,
    movable: bool,
    share: MessageShares = UNSHARED_MESSAGES,
    products: RingProducts = NO_RING_PRODUCTS,
    passes: int = 1,
) -> StepParts:
    """Seconds per pass to redistribute a value from each source (row) to each target (column).

    ``stage``: ZeRO stage of a parameter, None for other values. 0 (FSDP): gathered again in the
    backward. 1, 2: gathered once per step; gradients are reduced once per step (1) or in each of
    ``passes`` (2). Sums over replicas happen once per step. ``movable``: see
    :func:`~autoshard.passes.propagate.prices.overlap.movable_values`. ``share``: of message
    latency (:func:`~autoshard.passes.propagate.prices.coalescing.latency_shares`). ``products``: for
    collective matmul (:mod:`~autoshard.passes.propagate.prices.collective_matmul`).
    """
    a = [Layout(mesh, p) for p in sources]
    b = a if targets is sources else [Layout(mesh, p) for p in targets]
    exposed_part, *links = link_matrices(a, b, type_.shape, type_.dtype, type_.moves, type_.unknown, share)
    exposed_part = exposed_part if movable else with_skew(exposed_part, mesh, share.waits)
    ahead, back = copy_seconds(type_, a, b, stage is not None, share)
    found: Sequence[np.ndarray] = [exposed_part + ahead + back, *links]
    twice = stage == 0 and type_.grad and share.again
    waited = movable and np.isfinite(share.beside)
    gathered = _gathered_mask(a, b)
    if twice or waited:
        value = forward_matrices(type_, a, b, share)
    if twice:
        found = [x + np.where(gathered, y, 0.0) for x, y in zip(found, (value[0] + ahead, *value[1:]), strict=True)]
    if waited:
        each_pass = np.full_like(gathered, stage == 0 or passes == 1) | ~gathered  # others are gathered once a step
        found = _with_exposed_gathers(found, value, share.beside, mesh, [each_pass, gathered & twice])
    if passes == 1 or stage is None:
        return with_collective_matmul(as_parts(found, movable), type_, products, a, b)
    apart = _gradient_sum_matrices(type_, a, b, share) if type_.grad else [np.zeros_like(x) for x in found]
    if stage:  # the rest of what is gathered, such as padding, moves in every pass
        gather, *links = forward_matrices(type_, a, b, share)
        kept = found if stage == 1 else [x + y for x, y in zip(apart, (gather + ahead, *links), strict=True)]
        apart = [np.where(gathered, x, y) for x, y in zip(kept, apart, strict=True)]
    apart = [np.where(np.isfinite(x), np.minimum(x, y), 0.0) for x, y in zip(found, apart, strict=True)]
    each = as_parts([x - y for x, y in zip(found, apart, strict=True)], movable)
    once = as_parts(apart, movable)
    return replace(each, once=once.blocking, node_once=once.node, network_once=once.network)


def _with_exposed_gathers(
    found: Sequence[np.ndarray], gather: Sequence[np.ndarray], beside: float, mesh: Mesh, comes: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """``found`` with gathers that outlast ``overlapping_products`` seconds of compute as exposed. ``comes``:
    masks of gathers in every pass, and of those repeated in the backward (twice the compute)."""
    exposed_part, *links = found
    for i, (all_, ahead, speed) in enumerate(
        zip(links, gather[1:], (mesh.overlap.node, mesh.overlap.network), strict=True)
    ):
        finite = np.where(np.isfinite(all_) & np.isfinite(ahead), ahead, 0.0)
        each = (where * np.maximum(0.0, speed * finite - n * beside) for n, where in enumerate(comes, 1))
        late = sum(each, np.zeros_like(finite))
        late = np.minimum(late / (speed or 1.0), all_)  # without a gather the backward may take less
        links[i], exposed_part = all_ - late, exposed_part + late
    return [exposed_part, *links]


def is_collective_matmul(graph: Graph, value: str, products: RingProducts, src: Layout, dst: Layout) -> bool:
    """Whether this redistribution is priced as a collective matmul with ``products``."""
    shares = latency_shares(graph, src.mesh)
    terms = None, value in movable_values(graph), shares[value], products, graph.passes
    found = conversion_parts(graph.types[value], src.mesh, (src.placements,), (dst.placements,), *terms)
    return bool(found.hidden.any())


def _gradient_sum_matrices(
    type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout], share: MessageShares
) -> list[np.ndarray]:
    """The share of :func:`link_matrices` that sums gradients over replicas (I → R)."""
    reads = [frozenset(a for a in x.axes_with(Replicate)) for x in targets]
    found = [np.zeros((len(sources), len(targets))) for _ in range(3)]
    for axes in set(reads):
        entered = [x.replace({a: Replicate() for a in axes.intersection(x.axes_with(Invariant))}) for x in sources]
        columns = np.array([r == axes for r in reads])
        what = type_.shape, type_.dtype, type_.moves, type_.unknown
        exposed_part, *links = link_matrices(sources, entered, *what, share)
        copied = copy_seconds(type_, sources, entered, True, share)[1]
        for out, seconds in zip(found, (exposed_part + copied, *links), strict=True):
            out[:, columns] = np.diag(seconds)[:, None]
    return found


def as_parts(links: Sequence[np.ndarray], movable: bool) -> StepParts:
    """Seconds (launches and copies, links in a node, links between nodes) as blocking or movable.

    Launches and copies never overlap with compute.
    """
    launches, node, network = links
    total = launches + node + network
    if not movable:
        return StepParts(blocking=total)
    never = np.isinf(total)  # an impossible conversion is infinite whatever overlaps
    finite = (np.where(never, 0.0, x) for x in (node, network))
    return StepParts(np.zeros(()), np.zeros(()), np.where(never, np.inf, launches), *finite)


def reconversion_parts(
    type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout], movable: bool, others: MessageShares
) -> StepParts:
    """Seconds of redistributions repeated in the backward; ``others``: blocking values' shares."""
    launches, *links = forward_matrices(type_, sources, targets)
    return as_parts([launches if movable else with_skew(launches, sources[0].mesh, others.waits), *links], movable)


def forward_matrices(
    type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout], share: MessageShares = UNSHARED_MESSAGES
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(launches, links in a node, links between nodes): seconds of the forward alone."""
    a = [layout.without_gradient() for layout in sources]
    b = a if targets is sources else [layout.without_gradient() for layout in targets]
    return link_matrices(a, b, type_.shape, type_.dtype, False, type_.unknown, share)


def forward_seconds(type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
    """The sum of :func:`forward_matrices`."""
    found: np.ndarray = np.add.reduce(forward_matrices(type_, sources, targets))
    return found


@cached_per_graph
def forward_seconds_between(graph: Graph, type_: TensorType, src: Layout, dst: Layout) -> float:
    """:func:`forward_seconds` of one pair, cached per graph for equal layers."""
    return float(forward_seconds(type_, (src,), (dst,))[0, 0])


def _gathered_mask(sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
    """Mask: some axis shards the source (row) and not the target (column)."""
    cut = np.array([[isinstance(p, Shard) for p in x.placements] for x in sources])
    whole = np.array([[isinstance(p, Replicate | Invariant) for p in x.placements] for x in targets])
    found: np.ndarray = cut @ whole.T
    return found


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """Seconds and bytes of a link, over distinct states of source (row) and reader (column)."""

    parts: StepParts
    held: CompactMatrix | None
    """None if all are 0"""
    rows: np.ndarray
    """state of the source → row"""
    columns: np.ndarray
    """state of the reader → column"""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the parts."""
        return int(self.rows.max()) + 1, int(self.columns.max()) + 1


class EdgeTables:
    """Tables of links of networks: one matrix per tensor type, sliced per link."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.graph, self.mesh = graph, mesh
        self.movable, self.shares = movable_values(graph), latency_shares(graph, mesh)
        self.products = overlapping_products(graph, mesh)
        self.kinds: dict[str, int] = {}
        self._terms: dict[Hashable, int] = {}
        self.codes: dict[tuple[TensorType, int], np.ndarray] = {}
        self.collected: set[tuple[int, int]] = set()
        """ids of types and placements, which live as long as the graph and :attr:`alive`"""
        self.known: dict[TensorType, dict[Placements, int]] = {}
        self.alive: list[Sequence[Placements]] = []
        self.matrices: dict[Any, StepParts] = {}
        self.copies: dict[Any, ConversionCopies] = {}

    def collect(self, links: Sequence[ValueEdge]) -> None:
        """Register all links of a network; call it before :meth:`of`."""
        for link in links:
            self._collect(link.value, link.given.placed)
            self._collect(link.value, link.asked.placed)

    def _collect(self, value: str, placed: Sequence[Placements]) -> None:
        type_ = self.graph.types[value]
        if (id(type_), id(placed)) in self.collected:
            return
        self.collected.add((id(type_), id(placed)))
        if (type_, id(placed)) in self.codes:
            return
        known = self.known.setdefault(type_, {})
        self.codes[type_, id(placed)] = np.array([known.setdefault(p, len(known)) for p in placed], dtype=np.int64)
        self.alive.append(placed)

    def key(self, link: ValueEdge) -> Hashable:
        """Equal keys have equal tables."""
        at = None if link.ways is None else link.ways.at
        marks = (None if mark is None else mark.tobytes() for mark in (link.mask, link.spared, at))
        return self._kind(link.value), self._ring_products_of(link), link.given.key, link.asked.key, *marks

    def _kind(self, value: str) -> int:
        """Equal for values whose redistributions cost the same."""
        if value not in self.kinds:
            terms = self.graph.types[value], value in self.movable, self.shares[value]
            self.kinds[value] = self._terms.setdefault(terms, len(self._terms))
        return self.kinds[value]

    def of(self, link: ValueEdge, held: bool, micro_batches_held: int = 1) -> EdgeTable:
        """The table of a link, with bytes if ``held``. ``micro_batches_held``: micro-batches in flight, which
        multiply bytes of activations."""
        (given, _, above, rows), (asked, first, beside, columns) = self._sides(link)
        mask, spared = (None if mark is None else mark[first] for mark in (link.mask, link.spared))
        link = link._replace(given=given, asked=asked, mask=mask, spared=spared)
        cut = np.ix_(above, beside)
        parts = self._seconds(link, cut)
        if spared is not None:
            each = np.tile(spared, len(asked.tags))
            parts += StepParts(blocking=np.tile(unless_replicated(each, given.placed), (len(given.tags), 1)))
        if link.ways is not None:
            together = self._coalescing_seconds(link, link.ways._replace(at=link.ways.at[first]))
            parts += StepParts(blocking=np.tile(-together, (len(given.tags), len(asked.tags))))
        parts, amounts = self._with_memory(link, parts, cut) if held else (masked_parts(parts, link.mask), None)
        count = 1 if link.value in self.graph.parameters else micro_batches_held
        return EdgeTable(
            parts, None if amounts is None else CompactMatrix(amounts * count, rows, columns), rows, columns
        )

    def _sides(self, link: ValueEdge) -> Iterator[tuple[EdgeSide, np.ndarray, np.ndarray, np.ndarray]]:
        """Per side: the side reduced to distinguishable choices, their first index, layout codes,
        and state → choice."""
        at = None if link.ways is None else link.ways.at
        for side, marks in ((link.given, (link.given.holds,)), (link.asked, (link.asked.saves, link.mask, at))):
            codes = self.codes[self.graph.types[link.value], id(side.placed)]
            first, where = joint_classes([codes, *(mark.astype(np.int64) for mark in marks if mark is not None)])
            saves, holds = (None if mark is None else mark[first] for mark in (side.saves, side.holds))
            placed = tuple(side.placed[i] for i in first)
            states = np.concatenate([t * len(first) + where for t in range(len(side.tags))])
            yield replace(side, placed=placed, saves=saves, holds=holds), first, codes[first], states

    def _seconds(self, link: ValueEdge, cut: tuple[np.ndarray, ...]) -> StepParts:
        """Seconds of the redistributions, for all tags of both sides."""
        at = zero_stage_table(link.given, link.asked)
        products = self._ring_products_of(link)
        found = {stage: self._conversions(link.value, stage, products)[cut] for stage in {s for row in at for s in row}}
        if len(found) == 1:
            tags = len(at), len(at[0])
            return StepParts(*(np.tile(x, tags) if x.ndim else x for x in next(iter(found.values()))))
        shape = cut[0].size, cut[1].size
        columns = {stage: [np.broadcast_to(x, shape) for x in parts] for stage, parts in found.items()}
        needed = [any(x.ndim for x in each) for each in zip(*found.values(), strict=True)]
        blocks = (
            np.block([[columns[stage][i] for stage in row] for row in at]) if n else np.zeros(())
            for i, n in enumerate(needed)
        )
        return StepParts(*blocks)

    def _coalescing_seconds(self, link: ValueEdge, ways: GroupedConversions) -> np.ndarray:
        """Seconds saved by coalescing, from each source (row) for each choice of the reader."""
        type_, given, asked = self.graph.types[link.value], link.given.placed, link.asked.placed
        goes = np.array([[n > 0 and ways.layouts[n - 1] == source for n in ways.at] for source in given])
        return np.where(goes, shared_latencies(type_, self.mesh, given, asked, self.shares.others.waits), 0.0)

    def _ring_products_of(self, link: ValueEdge) -> RingProducts:
        """Products for a collective matmul: only of a value's first conversion, not of copies."""
        return (
            NO_RING_PRODUCTS if link.source.startswith("shared:") else self.products.get(link.value, NO_RING_PRODUCTS)
        )

    def _conversions(self, value: str, stage: int | None, products: RingProducts) -> StepParts:
        """Matrix between all known layouts of a value's type."""
        type_, terms = self.graph.types[value], (stage, value in self.movable, self.shares[value], products)
        known = tuple(self.known[type_])
        if (key := (type_, len(known), *terms)) not in self.matrices:
            self.matrices[key] = conversion_parts(type_, self.mesh, known, known, *terms, self.graph.passes)
        return self.matrices[key]

    def _with_memory(
        self, link: ValueEdge, parts: StepParts, cut: tuple[np.ndarray, ...]
    ) -> tuple[StepParts, np.ndarray | None]:
        of_stage = {
            stage: self._copies(link.value, stage) for row in zero_stage_table(link.given, link.asked) for stage in row
        }
        found = memory_of_edge(link.given, link.asked, {stage: copies[cut] for stage, copies in of_stage.items()})
        tags = (len(link.given.tags), len(link.asked.tags))
        mask = None if link.mask is None else np.tile(link.mask, tags[1])
        if found.again.any():
            waits = [not link.asked.passive and tag == RECONVERTED for tag in link.asked.tags]
            for waiting in set(waits):
                where = found.again & np.repeat(np.array(waits) == waiting, cut[1].size)
                again = self._reconversions(link.value, waiting)[cut]
                parts += StepParts(*(np.where(where, np.tile(x, tags), 0.0) if x.ndim else x for x in again))
        if found.forbidden.any():
            parts = parts + StepParts(blocking=np.where(found.forbidden, np.inf, 0.0))
        held = found.held if mask is None else np.where(mask, found.held, 0.0)
        return masked_parts(parts, mask), held if held.any() else None

    def _reconversions(self, value: str, waits: bool) -> StepParts:
        """Seconds of forward redistributions repeated in the backward. ``waits``: for a recomputed
        operation, which blocks; else the source is ready early."""
        type_, movable = self.graph.types[value], value in self.movable or not waits
        known = self.known[type_]
        if (key := ("again", type_, len(known), movable)) not in self.matrices:
            layouts = [Layout(self.mesh, p) for p in known]
            self.matrices[key] = reconversion_parts(type_, layouts, layouts, movable, self.shares.others)
        return self.matrices[key]

    def _copies(self, value: str, stage: int | None) -> ConversionCopies:
        type_ = self.graph.types[value]
        known = tuple(self.known[type_])
        if (key := (type_, len(known), stage)) not in self.copies:
            layouts = [Layout(self.mesh, p) for p in known]
            own = np.array([costs.local_numel(type_, p, self.mesh) for p in known], dtype=float) * type_.dtype.itemsize
            codes: dict[Placements, int] = {}
            plain = np.array([codes.setdefault(x.without_gradient().placements, len(codes)) for x in layouts])
            shares = plain[:, None] == plain[None, :]
            gathered = _gathered_mask(layouts, layouts)
            copies = ConversionCopies(np.where(shares, 0.0, own[None, :]), shares, own)
            if stage == 0:  # not kept: conversion_parts counts a second gather
                copies = replace(copies, made=np.where(gathered, 0.0, copies.made))
            elif stage and self.graph.passes > 1:  # held for all passes; at stage 1 so is the gradient sum
                whole = own[None, :] + (np.maximum(own[None, :] - own[:, None], 0.0) if stage == 1 else 0.0)
                always_held = np.where(gathered, whole, 0.0)
                copies = replace(copies, made=np.where(gathered, 0.0, copies.made), always_held=always_held)
            self.copies[key] = copies
        return self.copies[key]
