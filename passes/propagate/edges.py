"""What a conversion costs: the one price that the search, the alternatives and the report ask for, as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.layout import Invariant, Layout, Replicate, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Placements
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.propagate.op_space import OpSpace
from autoshard.passes.propagate.step_time import Parts, movable_values
from autoshard.passes.redistribute import cost_matrix, link_matrices


def conversion_parts(
    type_: TensorType,
    mesh: Mesh,
    sources: Sequence[Placements],
    targets: Sequence[Placements],
    parameter: bool,
    movable: bool,
) -> Parts:
    """What it takes per step to bring a value from each source (row) to each target (column): forward and backward.

    A ``parameter`` that is gathered is not kept: it is gathered once more in the backward (FSDP). ``movable``: see
    :func:`~autoshard.passes.propagate.step_time.movable_values`.
    """
    a, b = ([Layout(mesh, p) for p in side] for side in (sources, targets))
    node, network = link_matrices(a, b, type_.shape, type_.dtype, type_.grad, type_.unknown)
    if parameter and type_.grad:
        gathered = np.array([[_gathers(x, y) for y in b] for x in a]).reshape(node.shape)
        again = forward_matrices(type_, a, b)
        node, network = (x + np.where(gathered, y, 0.0) for x, y in zip((node, network), again, strict=True))
    if not movable:
        return Parts(blocking=node + network)
    never = np.isinf(node + network)  # what is impossible costs all, however much compute could hide
    return Parts(
        np.zeros(()), np.zeros(()), np.where(never, np.inf, 0.0), *(np.where(never, 0.0, x) for x in (node, network))
    )


def forward_matrices(
    type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds, inside a node and between nodes, of the conversions of the value alone, without its gradient's."""
    a, b = ([layout.without_gradient() for layout in side] for side in (sources, targets))
    return link_matrices(a, b, type_.shape, type_.dtype, False, type_.unknown)


def forward_seconds(type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
    """:func:`forward_matrices` added up."""
    a, b = ([layout.without_gradient() for layout in side] for side in (sources, targets))
    return cost_matrix(a, b, type_.shape, type_.dtype, False, type_.unknown)


def _gathers(source: Layout, target: Layout) -> bool:
    """Whether an axis that cuts the source leaves the target whole."""
    pairs = zip(source.placements, target.placements, strict=True)
    return any(isinstance(a, Shard) and isinstance(b, Replicate | Invariant) for a, b in pairs)


Reading = tuple[str, Sequence[Placements], np.ndarray | None]
"""a value, how it is read under each choice, and where that is to be paid (None: everywhere)"""


def readings(node: Node, space: OpSpace) -> Iterator[Reading]:
    """Every operand of ``node``; a value read several times pays once per layout."""
    earlier: dict[str, list[Sequence[Placements]]] = {}
    for name, placed in zip(node.inputs, space.inputs, strict=True):
        before = earlier.setdefault(name, [])
        new = np.array([all(p != other[i] for other in before) for i, p in enumerate(placed)])
        if new.any():
            yield name, placed, None if new.all() else new
        before.append(placed)


def paid(parts: Parts, mask: np.ndarray | None) -> Parts:
    """``parts`` with 0 in the columns where ``mask`` says that nothing is to be paid."""
    return parts if mask is None else Parts(*(np.where(mask, x, 0.0) if x.ndim else x for x in parts))


@dataclass
class EdgeTables:
    """:func:`conversion_parts` for many edges: matrices per tensor type, cut per edge; equal edges share tables."""

    graph: Graph
    mesh: Mesh
    known: dict[TensorType, dict[Placements, int]] = field(default_factory=dict)
    matrices: dict[tuple[TensorType, bool, bool], Parts] = field(default_factory=dict)
    codes: dict[tuple[TensorType, int], tuple[np.ndarray, Sequence[Placements]]] = field(default_factory=dict)
    tables: dict[Any, Parts] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.movable = movable_values(self.graph)

    def collect(self, value: str, placed: Sequence[Placements]) -> None:
        """Note that ``value`` may lie so, before the first :meth:`table` is asked for."""
        type_ = self.graph.types[value]
        if (type_, id(placed)) in self.codes:
            return
        known = self.known.setdefault(type_, {})
        codes = np.array([known.setdefault(p, len(known)) for p in placed], dtype=np.int64)
        self.codes[type_, id(placed)] = (codes, placed)

    def table(self, value: str, a: Sequence[Placements], b: Sequence[Placements], mask: np.ndarray | None) -> Parts:
        """What it takes from each of ``a`` (row) to each of ``b`` (column)."""
        case = (self.graph.types[value], value in self.graph.parameters, value in self.movable)
        key = (*case, id(a), id(b), None if mask is None else mask.tobytes())
        if key not in self.tables:
            type_ = case[0]
            if case not in self.matrices:
                known = tuple(self.known[type_])
                self.matrices[case] = conversion_parts(type_, self.mesh, known, known, *case[1:])
            cut = np.ix_(self.codes[type_, id(a)][0], self.codes[type_, id(b)][0])
            self.tables[key] = paid(self.matrices[case][cut], mask)
        return self.tables[key]
