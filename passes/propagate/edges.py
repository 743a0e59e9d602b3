"""Edges of the cost network: readers of a value, and seconds and bytes of its redistribution.
:data:`EDGE_TERMS` names what adds seconds to an edge. The search asks for all states of both ends, the
objective for one of each, and the alternatives for all of one operation."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from autoshard.layout import Invariant, Layout, Replicate
from autoshard.mesh import Mesh
from autoshard.passes.ir.analyses import cached_per_graph
from autoshard.passes.ir.assignment import Placements, cached_layout, is_fully_replicated
from autoshard.passes.ir.graph import GradientTransfer, Graph, Node, TensorType
from autoshard.passes.propagate.activation_memory import (
    RECONVERTED,
    ConversionCopies,
    EdgeMemory,
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
from autoshard.passes.propagate.prices.collective_overheads import copy_seconds, gathered_pairs, with_skew
from autoshard.passes.propagate.prices.overlap import NO_SECONDS, StepParts, movable_values, sum_of_terms
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
    return parts if mask is None else parts.map(lambda x: np.where(mask, x, 0.0))


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
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    stage: int | None,
    movable: bool,
    share: MessageShares = UNSHARED_MESSAGES,
    products: RingProducts = NO_RING_PRODUCTS,
    passes: int = 1,
) -> StepParts:
    """Seconds per pass to redistribute a value from each source (row) to each target (column).
    ``stage``: ZeRO stage of a parameter, None for other values: 0 (FSDP) gathers again in the
    backward; 1, 2 gather once per step and reduce gradients once per step (1) or in each of
    ``passes`` (2). Sums over replicas happen once per step. ``movable``, ``share``,
    ``products``: see :func:`~autoshard.passes.propagate.prices.overlap.movable_values`,
    :func:`~autoshard.passes.propagate.prices.coalescing.latency_shares`,
    :mod:`~autoshard.passes.propagate.prices.collective_matmul`."""
    ends, mesh = (type_, sources, targets), sources[0].mesh
    found = np.stack(link_matrices(sources, targets, *_moved(type_), share))
    ahead, back = copy_seconds(*ends, stage is not None, share)
    found[0] = (found[0] if movable else with_skew(found[0], mesh, share.waits)) + ahead + back
    gathered, gather = gathered_pairs(sources, targets), np.zeros_like(found)
    twice = stage == 0 and type_.grad and share.again
    waited = movable and np.isfinite(share.beside)
    if twice or waited or (stage and passes > 1):
        gather = np.stack(forward_matrices(*ends, share))
    again = gather + np.stack([ahead, *np.zeros_like(gather[1:])])
    if twice:
        found = found + np.where(gathered, again, 0.0)
    if waited:
        each_pass = np.full_like(gathered, stage == 0 or passes == 1) | ~gathered  # others are gathered once a step
        found = _with_exposed_gathers(found, gather, share.beside, mesh, [each_pass, gathered & twice])
    if passes == 1 or stage is None:
        return with_collective_matmul(as_parts(found, movable), type_, products, sources, targets)
    apart = _gradient_sum_matrices(*ends, share) if type_.grad else np.zeros_like(found)
    if stage:  # the rest of what is gathered, such as padding, moves in every pass
        apart = np.where(gathered, found if stage == 1 else apart + again, apart)
    apart = np.where(np.isfinite(found), np.minimum(found, apart), 0.0)
    once = as_parts(apart, movable)
    return replace(as_parts(found - apart, movable), once=once.blocking, node_once=once.node, network_once=once.network)


def _moved(type_: TensorType) -> tuple[tuple[int, ...], torch.dtype, GradientTransfer, tuple[int, ...]]:
    """The arguments of :func:`link_matrices` that say what is moved."""
    return type_.shape, type_.dtype, type_.moves, type_.unknown


def _with_exposed_gathers(
    found: np.ndarray, gather: np.ndarray, beside: float, mesh: Mesh, comes: Sequence[np.ndarray]
) -> np.ndarray:
    """``found`` with gathers that outlast ``beside`` seconds of compute as exposed. ``comes``:
    masks of gathers in every pass, and of those repeated in the backward (twice the compute)."""
    exposed, *links = found
    for i, (all_, ahead, speed) in enumerate(zip(links, gather[1:], mesh.overlap, strict=True)):
        finite = np.where(np.isfinite(all_) & np.isfinite(ahead), ahead, 0.0)
        each = (where * np.maximum(0.0, speed * finite - n * beside) for n, where in enumerate(comes, 1))
        late = sum(each, np.zeros_like(finite))
        late = np.minimum(late / (speed or 1.0), all_)  # without a gather the backward may take less
        links[i], exposed = all_ - late, exposed + late
    return np.stack([exposed, *links])


def is_collective_matmul(graph: Graph, value: str, products: RingProducts, src: Layout, dst: Layout) -> bool:
    """Whether this redistribution is priced as a collective matmul with ``products``."""
    shares = latency_shares(graph, src.mesh)
    terms = None, value in movable_values(graph), shares[value], products, graph.passes
    return bool(conversion_parts(graph.types[value], (src,), (dst,), *terms).hidden.any())


def _gradient_sum_matrices(
    type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout], share: MessageShares
) -> np.ndarray:
    """The share of :func:`link_matrices` that sums gradients over replicas (I → R)."""
    reads = [frozenset(a for a in x.axes_with(Replicate)) for x in targets]
    found = np.zeros((3, len(sources), len(targets)))
    for axes in set(reads):
        entered = [x.replace({a: Replicate() for a in axes.intersection(x.axes_with(Invariant))}) for x in sources]
        seconds = np.stack(link_matrices(sources, entered, *_moved(type_), share))
        seconds[0] += copy_seconds(type_, sources, entered, True, share)[1]
        found[:, :, [r == axes for r in reads]] = np.diagonal(seconds, axis1=1, axis2=2)[:, :, None]
    return found


def as_parts(links: Sequence[np.ndarray] | np.ndarray, movable: bool) -> StepParts:
    """Seconds (launches and copies, links in a node, between nodes) as blocking or movable."""
    launches, node, network = links
    total = launches + node + network
    if not movable:
        return StepParts(blocking=total)
    never = np.isinf(total)  # an impossible conversion is infinite whatever overlaps
    finite = (np.where(never, 0.0, x) for x in (node, network))
    return StepParts(np.zeros(()), np.zeros(()), np.where(never, np.inf, launches), *finite)


def forward_matrices(
    type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout], share: MessageShares = UNSHARED_MESSAGES
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(launches, links in a node, links between nodes): seconds of the forward alone."""
    a = [layout.without_gradient() for layout in sources]
    b = a if targets is sources else [layout.without_gradient() for layout in targets]
    return link_matrices(a, b, type_.shape, type_.dtype, False, type_.unknown, share)


def reconversion_parts(
    type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout], movable: bool, others: MessageShares
) -> StepParts:
    """Seconds of redistributions repeated in the backward; ``others``: blocking values' shares."""
    launches, *links = forward_matrices(type_, sources, targets)
    return as_parts([launches if movable else with_skew(launches, sources[0].mesh, others.waits), *links], movable)


def conversion_copies(
    type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout], stage: int | None, passes: int
) -> ConversionCopies:
    """Memory of redistributions; ``stage``, ``passes``: see :func:`conversion_parts`."""
    own, made = (
        costs.bytes_per_layout(type_, [x.placements for x in side], side[0].mesh) for side in (sources, targets)
    )
    plain = [[x.without_gradient().placements for x in side] for side in (sources, targets)]
    codes = {p: i for i, p in enumerate(dict.fromkeys((*plain[0], *plain[1])))}
    shares = np.equal.outer(*(np.array([codes[p] for p in side]) for side in plain))
    gathered = gathered_pairs(sources, targets)
    copies = ConversionCopies(np.where(shares, 0.0, made), shares, own)
    if stage == 0:  # not kept: conversion_parts counts a second gather
        copies = replace(copies, made=np.where(gathered, 0.0, copies.made))
    elif stage and passes > 1:  # held for all passes; at stage 1 so is the gradient sum
        whole = made + (np.maximum(made - own[:, None], 0.0) if stage == 1 else 0.0)
        copies = replace(copies, made=np.where(gathered, 0.0, copies.made), always_held=np.where(gathered, whole, 0.0))
    return copies


@cached_per_graph
def seconds_between(
    graph: Graph, find: Callable[..., Sequence[np.ndarray]], type_: TensorType, src: Layout, dst: Layout, *terms: Any
) -> tuple[float, ...]:
    """What ``find`` says of one pair of layouts, cached per graph for equal layers."""
    return tuple(float(x[0, 0]) for x in find(type_, (src,), (dst,), *terms))


# --- terms ---


@dataclass(frozen=True, eq=False)
class EdgeTable:
    """Seconds and bytes of a link, over distinct states of source (row) and reader (column)."""

    terms: Mapping[str, StepParts]
    """by name, see :data:`EDGE_TERMS`; a term that adds nothing is absent"""
    held: CompactMatrix | None
    """None if all are 0"""
    rows: np.ndarray
    """state of the source → row"""
    columns: np.ndarray
    """state of the reader → column"""

    @property
    def parts(self) -> StepParts:
        return sum_of_terms(self.terms)

    @property
    def shape(self) -> tuple[int, int]:
        return int(self.rows.max()) + 1, int(self.columns.max()) + 1


@dataclass(frozen=True, eq=False)
class PricedEdge:
    """A link reduced to choices that differ in price, as terms see it."""

    tables: EdgeTables
    link: ValueEdge
    layouts: tuple[tuple[Layout, ...], tuple[Layout, ...]]
    """distinct layouts of source and reader"""
    cut: tuple[np.ndarray, ...]
    """number of each choice's layout, as an index of tables over :attr:`layouts`"""
    memory: EdgeMemory | None = None
    """None: memory does not count"""

    @property
    def tags(self) -> tuple[int, int]:
        return len(self.link.given.tags), len(self.link.asked.tags)

    def tiled(self, parts: StepParts) -> StepParts:
        """Parts over :attr:`layouts` for all states."""
        return parts.map(lambda x: np.tile(x[self.cut], self.tags))

    def between(self, find: Callable[..., Any], *terms: Hashable) -> Any:
        """``find(type, source layouts, reader layouts, *terms)``, cached."""
        type_, known = self.tables.graph.types[self.link.value], self.tables.known
        key = find, type_, *map(id, self.layouts), *terms
        if key not in known:
            known[key] = find(type_, *self.layouts, *terms)
        return known[key]


def _conversion_term(edge: PricedEdge) -> StepParts:
    """The redistribution; of a parameter by its ZeRO stage."""
    tables, at = edge.tables, zero_stage_table(edge.link.given, edge.link.asked)
    terms = *tables.terms_of(edge.link.value), tables.ring_products_of(edge.link), tables.graph.passes
    found = {stage: edge.between(conversion_parts, stage, *terms) for stage in {s for row in at for s in row}}
    if len(found) == 1:
        return edge.tiled(next(iter(found.values())))
    shape = edge.cut[0].size, edge.cut[1].size
    columns = {stage: [np.broadcast_to(x, shape) for x in parts[edge.cut]] for stage, parts in found.items()}
    needed = [any(x.ndim for x in each) for each in zip(*found.values(), strict=True)]
    return StepParts(
        *(
            np.block([[columns[stage][i] for stage in row] for row in at]) if n else np.zeros(())
            for i, n in enumerate(needed)
        )
    )


def _inside_term(edge: PricedEdge) -> StepParts | None:
    """Collectives inside the reader that a replicated operand spares."""
    if (spared := edge.link.spared) is None:
        return None
    source = [[is_fully_replicated(p)] for p in edge.link.given.placed]
    return StepParts(blocking=np.tile(np.where(source, 0.0, spared), edge.tags))


def _coalesced_term(edge: PricedEdge) -> StepParts | None:
    """Latency that conversions of one group share (negative)."""
    if (ways := edge.link.ways) is None:
        return None
    tables, given, asked = edge.tables, edge.link.given.placed, edge.link.asked.placed
    goes = np.array([[n > 0 and ways.layouts[n - 1] == source for n in ways.at] for source in given])
    type_ = tables.graph.types[edge.link.value]
    saved = np.where(goes, shared_latencies(type_, tables.mesh, given, asked, tables.shares.others.waits), 0.0)
    return StepParts(blocking=np.tile(-saved, edge.tags))


def _again_term(edge: PricedEdge) -> StepParts | None:
    """The backward's repeated redistribution; it blocks for recomputed operations alone."""
    if edge.memory is None or not edge.memory.again.any():
        return None
    asked, found, shares = edge.link.asked, NO_SECONDS, edge.tables.shares
    waits = np.array([not asked.passive and tag == RECONVERTED for tag in asked.tags])
    for waiting in set(waits.tolist()):
        where = edge.memory.again & np.repeat(waits == waiting, edge.cut[1].size)
        movable = edge.link.value in edge.tables.movable or not waiting
        found += masked_parts(edge.tiled(edge.between(reconversion_parts, movable, shares.others)), where)
    return found


def _forbidden_term(edge: PricedEdge) -> StepParts | None:
    """Infinite where the backward needs a value that it does not have."""
    if edge.memory is None or not edge.memory.forbidden.any():
        return None
    return StepParts(blocking=np.where(edge.memory.forbidden, np.inf, 0.0))


EDGE_TERMS: Mapping[str, Callable[[PricedEdge], StepParts | None]] = {
    "conversion": _conversion_term,
    "inside": _inside_term,
    "coalesced": _coalesced_term,
    "again": _again_term,
    "forbidden": _forbidden_term,
}
"""what adds seconds to an edge of the network, in the order of the sum"""


class EdgeTables:
    """Tables of links of networks. Links between equal layouts share matrices."""

    def __init__(self, graph: Graph, mesh: Mesh) -> None:
        self.graph, self.mesh = graph, mesh
        self.movable, self.shares = movable_values(graph), latency_shares(graph, mesh)
        self.products = overlapping_products(graph, mesh)
        self._kinds: dict[Hashable, int] = {}
        self._distinct: dict[int, tuple[Sequence[Placements], tuple[Layout, ...], np.ndarray]] = {}
        """id of layouts per choice → (these, to keep their id; the distinct ones; number of each)"""
        self._interned: dict[tuple[Placements, ...], tuple[Layout, ...]] = {}
        self.known: dict[Hashable, Any] = {}
        """see :meth:`PricedEdge.between`"""

    def key(self, link: ValueEdge) -> Hashable:
        """Equal keys have equal tables."""
        at = None if link.ways is None else link.ways.at
        marks = (None if mark is None else mark.tobytes() for mark in (link.mask, link.spared, at))
        return self._kind(link.value), self.ring_products_of(link), link.given.key, link.asked.key, *marks

    def _kind(self, value: str) -> int:
        """Equal for values whose redistributions cost the same."""
        if value not in self._kinds:
            terms = self.graph.types[value], *self.terms_of(value)
            self._kinds[value] = self._kinds.setdefault(terms, len(self._kinds))
        return self._kinds[value]

    def terms_of(self, value: str) -> tuple[bool, MessageShares]:
        """(whether its redistributions are movable, latency shares)."""
        return value in self.movable, self.shares[value]

    def ring_products_of(self, link: ValueEdge) -> RingProducts:
        """Products for a collective matmul: only of a value's first conversion, not of copies."""
        shared = link.source.startswith("shared:")
        return NO_RING_PRODUCTS if shared else self.products.get(link.value, NO_RING_PRODUCTS)

    def of(self, link: ValueEdge, held: bool, micro_batches_held: int = 1) -> EdgeTable:
        """The table of a link, with bytes if ``held``, for ``micro_batches_held`` in flight."""
        edge, rows, columns = self._priced(link, held)
        mask = None if edge.link.mask is None else np.tile(edge.link.mask, edge.tags[1])
        found = ((name, term(edge)) for name, term in EDGE_TERMS.items())
        terms = {name: masked_parts(parts, mask) for name, parts in found if parts is not None}
        if edge.memory is None:
            return EdgeTable(terms, None, rows, columns)
        amounts = edge.memory.held * (1 if link.value in self.graph.parameters else micro_batches_held)
        amounts = amounts if mask is None else np.where(mask, amounts, 0.0)
        return EdgeTable(terms, CompactMatrix(amounts, rows, columns) if amounts.any() else None, rows, columns)

    def _priced(self, link: ValueEdge, held: bool) -> tuple[PricedEdge, np.ndarray, np.ndarray]:
        """``link`` reduced to choices that differ in price; state → reduced state of both ends."""
        at = None if link.ways is None else link.ways.at
        given, above, _, rows = self._reduced(link.given, (link.given.holds,))
        asked, beside, first, columns = self._reduced(link.asked, (link.asked.saves, link.mask, at))
        mask, spared = (None if mark is None else mark[first] for mark in (link.mask, link.spared))
        ways = None if link.ways is None else link.ways._replace(at=link.ways.at[first])
        reduced = link._replace(given=given, asked=asked, mask=mask, spared=spared, ways=ways)
        layouts = self._layouts(link.given.placed)[0], self._layouts(link.asked.placed)[0]
        edge = PricedEdge(self, reduced, layouts, np.ix_(above, beside))
        if held:
            stages = {stage for row in zero_stage_table(given, asked) for stage in row}
            copies = {x: edge.between(conversion_copies, x, self.graph.passes)[edge.cut] for x in stages}
            edge = replace(edge, memory=memory_of_edge(given, asked, copies))
        return edge, rows, columns

    def _reduced(
        self, side: EdgeSide, marks: Sequence[np.ndarray | None]
    ) -> tuple[EdgeSide, np.ndarray, np.ndarray, np.ndarray]:
        """(side of choices that differ, number of layouts, these choices, state → reduced)."""
        numbers = self._layouts(side.placed)[1]
        first, where = joint_classes([numbers, *(mark.astype(np.int64) for mark in marks if mark is not None)])
        saves, holds = (None if mark is None else mark[first] for mark in (side.saves, side.holds))
        placed = tuple(side.placed[i] for i in first)
        states = np.concatenate([t * len(first) + where for t in range(len(side.tags))])
        return replace(side, placed=placed, saves=saves, holds=holds), numbers[first], first, states

    def _layouts(self, placed: Sequence[Placements]) -> tuple[tuple[Layout, ...], np.ndarray]:
        """(distinct layouts, number per choice)."""
        if id(placed) not in self._distinct:
            known: dict[Placements, int] = {}
            numbers = np.array([known.setdefault(p, len(known)) for p in placed], dtype=np.int64)
            layouts = tuple(cached_layout(self.mesh, p) for p in known)
            self._distinct[id(placed)] = placed, self._interned.setdefault(tuple(known), layouts), numbers
        return self._distinct[id(placed)][1:]
