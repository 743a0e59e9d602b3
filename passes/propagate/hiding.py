"""What hides behind compute, in the search: per link class a row, the excess of movable communication over the compute.

A cost network with these rows costs what the step takes: max(0, η·M − C) is what η·M − C exceeds 0 by. Of a step in several
passes there are rows for the last one and rows, at their number, for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autoshard.passes.propagate.step_time import Parts
from autoshard.passes.search import CostNetwork, Row
from autoshard.passes.search.folded import Classes, Folded, Matrix
from autoshard.passes.search.network import Array


def stepping(
    sizes: Sequence[int],
    nodes: Sequence[Parts],
    edges: Sequence[tuple[int, int, Parts]],
    overlap: float,
    passes: int = 1,
    folds: Sequence[tuple[Classes, Classes]] | None = None,
) -> tuple[CostNetwork, tuple[Row, ...]]:
    """The network whose cost, plus what its rows exceed 0 by, is the time of the step.

    ``sizes``: states per node; ``folds``: per edge which row and which column of its parts each state has (None: each its
    own). Equal parts share arrays, in the network and in the rows.
    """
    made: dict[Any, Array] = {}
    folded: dict[Any, Folded] = {}
    counts: dict[Any, bool] = {}

    def once(p: Parts, what: str, value: Callable[[Parts], Array], *shape: int) -> Array:
        if (id(p), what, shape) not in made:
            made[id(p), what, shape] = np.broadcast_to(value(p), shape).copy()
        return made[id(p), what, shape]

    def pairs(e: int, p: Parts, what: str, value: Callable[[Parts], Array]) -> Matrix:
        i, j, _ = edges[e]
        if folds is None:
            return once(p, what, value, sizes[i], sizes[j])
        rows, columns = folds[e]
        if (id(p), what) not in folded:
            stored = once(p, what, value, int(rows.max()) + 1, int(columns.max()) + 1)
            folded[id(p), what] = Folded(stored, rows, columns)
        return folded[id(p), what]

    def cost(p: Parts) -> Array:
        return passes * (p.compute + p.other + p.blocking) + p.once + p.slowing(overlap, passes)

    network = CostNetwork(
        tuple(once(p, "cost", cost, n) for n, p in zip(sizes, nodes, strict=True)),
        tuple((i, j, pairs(e, p, "cost", cost)) for e, (i, j, p) in enumerate(edges)),
    )
    rows: list[Row] = []
    kinds = [(True, 1.0), *([(False, passes - 1.0)] if passes > 1 else [])]
    for last, times in kinds if overlap else ():
        for number in (0, 1):

            def excess(p: Parts, number: int = number, last: bool = last) -> Array:
                return p.excess(overlap, last)[number]

            what = f"{number} {last}"

            def over(p: Parts, what: str = what, of: Callable[[Parts], Array] = excess) -> bool:
                if (id(p), what) not in counts:
                    counts[id(p), what] = bool(of(p).any())
                return counts[id(p), what]

            row = Row(
                tuple(once(p, what, excess, n) if over(p) else None for n, p in zip(sizes, nodes, strict=True)),
                tuple(pairs(e, p, what, excess) if over(p) else None for e, (_, _, p) in enumerate(edges)),
                limit=0.0,
                price=times,
            )
            if any(a is not None for a in row.edges):
                rows.append(row)
    return network, tuple(rows)
