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
from autoshard.passes.redistribute import cost_matrix


def conversion_seconds(
    type_: TensorType, mesh: Mesh, sources: Sequence[Placements], targets: Sequence[Placements], parameter: bool
) -> np.ndarray:
    """Seconds per step to bring a value from each source (row) to each target (column): forward and backward.

    A parameter that is gathered is not kept: it is gathered once more in the backward (FSDP).
    """
    a, b = ([Layout(mesh, p) for p in side] for side in (sources, targets))
    seconds = cost_matrix(a, b, type_.shape, type_.dtype, type_.grad, type_.unknown)
    if not (parameter and type_.grad):
        return seconds
    gathered = np.array([[_gathers(x, y) for y in b] for x in a]).reshape(seconds.shape)
    return seconds + np.where(gathered, forward_seconds(type_, a, b), 0.0)


def forward_seconds(type_: TensorType, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
    """Seconds of the conversions of the value alone, without its gradient's."""
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


def paid(table: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
    """``table`` with 0 in the columns where ``mask`` says that nothing is to be paid."""
    return table if mask is None else np.where(mask, table, 0.0)


@dataclass
class EdgeTables:
    """:func:`conversion_seconds` for many edges: one matrix per tensor type, cut per edge; equal edges share a table."""

    graph: Graph
    mesh: Mesh
    known: dict[TensorType, dict[Placements, int]] = field(default_factory=dict)
    matrices: dict[tuple[TensorType, bool], np.ndarray] = field(default_factory=dict)
    codes: dict[tuple[TensorType, int], tuple[np.ndarray, Sequence[Placements]]] = field(default_factory=dict)
    tables: dict[Any, np.ndarray] = field(default_factory=dict)

    def collect(self, value: str, placed: Sequence[Placements]) -> None:
        """Note that ``value`` may lie so, before the first :meth:`table` is asked for."""
        type_ = self.graph.types[value]
        if (type_, id(placed)) in self.codes:
            return
        known = self.known.setdefault(type_, {})
        codes = np.array([known.setdefault(p, len(known)) for p in placed], dtype=np.int64)
        self.codes[type_, id(placed)] = (codes, placed)

    def table(
        self, value: str, a: Sequence[Placements], b: Sequence[Placements], mask: np.ndarray | None
    ) -> np.ndarray:
        """Seconds from each of ``a`` (row) to each of ``b`` (column)."""
        type_, parameter = self.graph.types[value], value in self.graph.parameters
        key = (type_, id(a), id(b), parameter, None if mask is None else mask.tobytes())
        if key not in self.tables:
            if (type_, parameter) not in self.matrices:
                known = tuple(self.known[type_])
                self.matrices[type_, parameter] = conversion_seconds(type_, self.mesh, known, known, parameter)
            cut = np.ix_(self.codes[type_, id(a)][0], self.codes[type_, id(b)][0])
            self.tables[key] = paid(self.matrices[type_, parameter][cut], mask)
        return self.tables[key]
