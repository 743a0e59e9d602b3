"""What an edge of the cost network costs: redistribution seconds between two layouts of a value, as tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.layout import Invariant, Layout, Replicate, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Placements
from autoshard.passes.ir.graph import Graph, TensorType
from autoshard.passes.redistribute import cost_matrix


@dataclass
class EdgeTables:
    """Redistribution seconds between layouts, one matrix per tensor type, cut per edge."""

    graph: Graph
    mesh: Mesh
    known: dict[TensorType, dict[Placements, int]] = field(default_factory=dict)
    matrices: dict[tuple[TensorType, bool], np.ndarray] = field(default_factory=dict)
    codes: dict[tuple[TensorType, int], tuple[np.ndarray, Sequence[Placements]]] = field(default_factory=dict)
    tables: dict[Any, np.ndarray] = field(default_factory=dict)

    def collect(self, value: str, placed: Sequence[Placements]) -> None:
        type_ = self.graph.types[value]
        if (type_, id(placed)) in self.codes:
            return
        known = self.known.setdefault(type_, {})
        codes = np.array([known.setdefault(p, len(known)) for p in placed], dtype=np.int64)
        self.codes[type_, id(placed)] = (codes, placed)

    def table(
        self,
        value: str,
        a: Sequence[Placements],
        b: Sequence[Placements],
        mask: np.ndarray | None,
        parameter: bool,
    ) -> np.ndarray:
        type_ = self.graph.types[value]
        key = (type_, id(a), id(b), parameter, None if mask is None else mask.tobytes())
        if key not in self.tables:
            table = self._matrix(type_, parameter)[np.ix_(self.codes[type_, id(a)][0], self.codes[type_, id(b)][0])]
            self.tables[key] = table if mask is None else table * mask[None, :]
        return self.tables[key]

    def _matrix(self, type_: TensorType, parameter: bool) -> np.ndarray:
        if (type_, parameter) not in self.matrices:
            layouts = [Layout(self.mesh, p) for p in self.known[type_]]
            matrix = cost_matrix(layouts, layouts, type_.shape, type_.dtype, type_.grad, type_.unknown)
            if parameter and type_.grad:
                # A gathered parameter is not kept: it is gathered once more in the backward (FSDP).
                plain = [layout.without_gradient() for layout in layouts]
                gathered = np.array([[_gathers(a, b) for b in layouts] for a in layouts])
                matrix = matrix + gathered * cost_matrix(plain, plain, type_.shape, type_.dtype, False)
            self.matrices[type_, parameter] = matrix
        return self.matrices[type_, parameter]


def _gathers(source: Layout, target: Layout) -> bool:
    """Whether an axis that cuts the source leaves the target whole."""
    pairs = zip(source.placements, target.placements, strict=True)
    return any(isinstance(a, Shard) and isinstance(b, Replicate | Invariant) for a, b in pairs)
