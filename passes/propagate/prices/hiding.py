"""Overlap rows: per link class the excess of movable communication over compute.

A cost network with these rows costs the step's time: a row is priced by its excess η·M − C over 0.
With several passes there are rows for the last pass and rows, weighted, for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.hardware import Overlap
from autoshard.passes.propagate.prices.step_time import Parts
from autoshard.passes.search import CostNetwork, Row
from autoshard.passes.search.folded import Classes, Folded, Matrix
from autoshard.passes.search.network import Array


@dataclass(frozen=True, eq=False)
class Stepped:
    """What one table adds to the step's time: to the cost, and to every row (None: nothing)."""

    cost: Matrix
    over: tuple[Matrix | None, ...]


def stepped(
    parts: Parts, shape: tuple[int, ...], overlap: Overlap, passes: int = 1, fold: tuple[Classes, Classes] | None = None
) -> Stepped:
    """``parts`` of this shape as tables of the network. ``fold``: of an edge, its row and column
    per state (None: one each)."""

    def table(values: Array) -> Matrix:
        full = values if values.shape == shape else np.broadcast_to(values, shape).copy()
        return full if fold is None else Folded(full, *fold)

    cost = passes * (parts.compute + parts.other + parts.blocking) + parts.once + parts.slowing(overlap, passes)
    over = [x for last, _ in _kinds(overlap, passes) for x in parts.excess(overlap, last)]
    return Stepped(table(cost), tuple(table(x) if x.any() else None for x in over))


def stepping(
    nodes: Sequence[Stepped], edges: Sequence[tuple[int, int, Stepped]], overlap: Overlap, passes: int = 1
) -> tuple[CostNetwork, tuple[Row, ...]]:
    """(network, rows): cost plus excess of rows is the step's time. Equal tables: one object."""
    vectors = [node.cost for node in nodes]
    network = CostNetwork(tuple(vectors), tuple((i, j, edge.cost) for i, j, edge in edges))  # type: ignore[arg-type]
    prices = [times for _, times in _kinds(overlap, passes) for _ in ("node", "network")]
    rows = (
        Row(tuple(n.over[k] for n in nodes), tuple(e.over[k] for *_, e in edges), limit=0.0, price=price)  # type: ignore[misc]
        for k, price in enumerate(prices)
    )
    return network, tuple(row for row in rows if any(amounts is not None for amounts in row.edges))


def _kinds(overlap: Overlap, passes: int) -> list[tuple[bool, float]]:
    """Per pair of rows: (whether for the pass with gradient sums, number of passes)."""
    return [(True, 1.0), *([(False, passes - 1.0)] if passes > 1 else [])] if overlap.node else []
