"""What a conversion costs: the one price that the search, the alternatives and the report ask for, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from autoshard.layout import Invariant, Layout, Replicate, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Placements
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.propagate import cost as costs
from autoshard.passes.propagate.keep import Conversions, Side, edge_tables
from autoshard.passes.propagate.op_space import OpSpace
from autoshard.passes.propagate.step_time import movable_values
from autoshard.passes.redistribute import link_matrices


def conversion_seconds(
    type_: TensorType,
    mesh: Mesh,
    sources: Sequence[Placements],
    targets: Sequence[Placements],
    parameter: bool,
    movable: bool,
) -> np.ndarray:
    """Seconds per step to bring a value from each source (row) to each target (column), forward and backward.

    float64 [1 or 3, sources, targets]: what the reader waits for, and where ``movable`` what can hide, inside a node and
    between nodes (:mod:`~autoshard.passes.propagate.step_time`). A ``parameter`` that is gathered is not kept: it is
    gathered once more in the backward (FSDP).
    """
    a, b = ([Layout(mesh, p) for p in side] for side in (sources, targets))
    found = np.stack(link_matrices(a, b, type_.shape, type_.dtype, type_.grad, type_.unknown))
    if parameter and type_.grad:
        found = found + np.where(_gathers(a, b), _ahead(type_, a, b), 0.0)
    return _by_kind(found, movable)


def forward_seconds(
    type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout], movable: bool
) -> np.ndarray:
    """:func:`conversion_seconds` of the value alone, without its gradient's."""
    return _by_kind(_ahead(type_, sources, targets), movable)


def _ahead(type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
    a, b = ([layout.without_gradient() for layout in side] for side in (sources, targets))
    return np.stack(link_matrices(a, b, type_.shape, type_.dtype, False, type_.unknown))


def _by_kind(links: np.ndarray, movable: bool) -> np.ndarray:
    """[inside a node, between nodes] as what blocks, and what can move: what is impossible blocks."""
    blocking: np.ndarray = links.sum(axis=0)[None]
    if not movable:
        return blocking
    never = np.isinf(blocking)
    return np.concatenate([np.where(never, np.inf, 0.0), np.where(never, 0.0, links)])


def _gathers(sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
    """Whether an axis that cuts the source (row) leaves the target (column) whole."""
    cut = np.array([[isinstance(p, Shard) for p in x.placements] for x in sources])
    whole = np.array([[isinstance(p, Replicate | Invariant) for p in x.placements] for x in targets])
    found: np.ndarray = (cut[:, None, :] & whole[None, :, :]).any(axis=2)
    return found


Reading = tuple[int, str, Sequence[Placements], np.ndarray | None]
"""the operand's place, the value, how it is read under each choice, and where that is to be paid (None: everywhere)"""


def readings(node: Node, space: OpSpace) -> Iterator[Reading]:
    """Every operand of ``node``; a value read several times pays once per layout."""
    earlier: dict[str, list[Sequence[Placements]]] = {}
    for position, (name, placed) in enumerate(zip(node.inputs, space.inputs, strict=True)):
        before = earlier.setdefault(name, [])
        new = np.array([all(p != other[i] for other in before) for i, p in enumerate(placed)])
        if new.any():
            yield position, name, placed, None if new.all() else new
        before.append(placed)


def paid(table: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """``table`` with 0 in the columns where ``mask`` says that nothing is to be paid."""
    return table if mask is None else np.where(mask, table, 0.0)


class Link(NamedTuple):
    """An edge of the network: from the definition of a value, or its shared layout, to a reader."""

    source: str
    """variable"""
    given: Side
    reader: str
    """variable"""
    asked: Side
    value: str
    mask: np.ndarray | None = None
    """the reader's choices under which it is to be paid; None: all"""


class EdgeTables:
    """The tables of many links: one matrix per tensor type, cut per link; equal links share a table.

    ``held``: whether bytes are asked for beside seconds.
    """

    def __init__(self, graph: Graph, mesh: Mesh, links: Sequence[Link], held: bool) -> None:
        self.graph, self.mesh, self.held = graph, mesh, held
        self.codes: dict[tuple[TensorType, int], np.ndarray] = {}
        self.known: dict[TensorType, dict[Placements, int]] = {}
        self.alive: list[Sequence[Placements]] = []
        self.matrices: dict[tuple[TensorType, bool, bool], Conversions] = {}
        self.movable = movable_values(graph)
        self.tables: dict[Any, tuple[np.ndarray, np.ndarray | None]] = {}
        for link in links:
            self._collect(link.value, link.given.placed)
            self._collect(link.value, link.asked.placed)

    def _collect(self, value: str, placed: Sequence[Placements]) -> None:
        type_ = self.graph.types[value]
        if (type_, id(placed)) in self.codes:
            return
        known = self.known.setdefault(type_, {})
        self.codes[type_, id(placed)] = np.array([known.setdefault(p, len(known)) for p in placed], dtype=np.int64)
        self.alive.append(placed)

    def of(self, link: Link) -> tuple[np.ndarray, np.ndarray | None]:
        """(seconds, bytes) of a link [states of the source, states of the reader]; bytes are None where all are 0.

        Seconds have the axis of :func:`conversion_seconds` in front.
        """
        type_ = self.graph.types[link.value]
        case = type_, link.value in self.graph.parameters, link.value in self.movable
        mask = None if link.mask is None else link.mask.tobytes()
        key = (*case, link.given.key, link.asked.key, mask)
        if key not in self.tables:
            whole = self._matrix(*case)
            rows, columns = (self.codes[type_, id(side.placed)] for side in (link.given, link.asked))
            cut = (..., rows[:, None], columns)
            if not self.held:
                self.tables[key] = paid(whole.seconds[cut], link.mask), None
            else:
                found = Conversions(
                    whole.seconds[cut], whole.forward[cut], whole.copies[cut], whole.shares[cut], whole.own[rows]
                )
                mask_ = None if link.mask is None else np.tile(link.mask, len(link.asked.tags))
                seconds, held = (paid(table, mask_) for table in edge_tables(link.given, link.asked, found))
                self.tables[key] = seconds, held if held.any() else None
        return self.tables[key]

    def _matrix(self, type_: TensorType, parameter: bool, movable: bool) -> Conversions:
        case = type_, parameter, movable
        if case not in self.matrices:
            known = tuple(self.known[type_])
            seconds = conversion_seconds(type_, self.mesh, known, known, parameter, movable)
            if not self.held:
                empty = np.zeros((0, 0))
                self.matrices[case] = Conversions(seconds, empty, empty, empty, empty)
                return self.matrices[case]
            layouts = [Layout(self.mesh, p) for p in known]
            own = np.array([costs.local_numel(type_, p, self.mesh) * type_.dtype.itemsize for p in known], dtype=float)
            codes: dict[Placements, int] = {}
            plain = np.array([codes.setdefault(x.without_gradient().placements, len(codes)) for x in layouts])
            shares = plain[:, None] == plain[None, :]
            copies = np.where(shares, 0.0, own[None, :])
            forward = forward_seconds(type_, layouts, layouts, movable)
            if parameter:  # gathered again in the backward, which conversion_seconds counts
                copies = np.where(_gathers(layouts, layouts), 0.0, copies)
            self.matrices[case] = Conversions(seconds, forward, copies, shares, own)
        return self.matrices[case]
