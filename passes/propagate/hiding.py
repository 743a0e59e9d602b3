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
from autoshard.passes.search.network import Array


def stepping(
    sizes: Sequence[int],
    nodes: Sequence[Parts],
    edges: Sequence[tuple[int, int, Parts]],
    overlap: float,
    passes: int = 1,
) -> tuple[CostNetwork, tuple[Row, ...]]:
    """The network whose cost, plus what its rows exceed 0 by, is the time of the step.

    ``sizes``: states per node. Equal parts share arrays, in the network and in the rows.
    """
    made: dict[Any, Array] = {}
    counts: dict[Any, bool] = {}

    def once(p: Parts, what: str, value: Callable[[Parts], Array], *shape: int) -> Array:
        if (id(p), what, shape) not in made:
            made[id(p), what, shape] = np.broadcast_to(value(p), shape).copy()
        return made[id(p), what, shape]

    def cost(p: Parts) -> Array:
        return passes * (p.compute + p.other + p.blocking) + p.once + p.slowing(overlap, passes)

    network = CostNetwork(
        tuple(once(p, "cost", cost, n) for n, p in zip(sizes, nodes, strict=True)),
        tuple((i, j, once(p, "cost", cost, sizes[i], sizes[j])) for i, j, p in edges),
    )
    rows: list[Row] = []
    kinds = [(True, 1.0), *([(False, passes - 1.0)] if passes > 1 else [])]
    for last, times in kinds if overlap else ():
        for number in (0, 1):

            def excess(p: Parts, number: int = number, last: bool = last) -> Array:
                return p.excess(overlap, last)[number]

            def over(
                p: Parts, *shape: int, what: str = f"{number} {last}", of: Callable[[Parts], Array] = excess
            ) -> Array | None:
                if (id(p), what) not in counts:
                    counts[id(p), what] = bool(of(p).any())
                return once(p, what, of, *shape) if counts[id(p), what] else None

            row = Row(
                tuple(over(p, n) for n, p in zip(sizes, nodes, strict=True)),
                tuple(over(p, sizes[i], sizes[j]) for i, j, p in edges),
                limit=0.0,
                price=times,
            )
            if any(a is not None for a in row.edges):
                rows.append(row)
    return network, tuple(rows)
