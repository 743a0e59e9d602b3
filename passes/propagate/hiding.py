"""What hides behind compute, in the search: per link class a row, the excess of movable communication over the compute.

A cost network with these rows costs what the step takes: max(0, η·M − C) is what η·M − C exceeds 0 by.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from autoshard.passes.propagate.step_time import Parts
from autoshard.passes.search import CostNetwork, Row
from autoshard.passes.search.network import Array


def stepping(
    sizes: Sequence[int], nodes: Sequence[Parts], edges: Sequence[tuple[int, int, Parts]], overlap: float
) -> tuple[CostNetwork, tuple[Row, ...]]:
    """The network whose cost, plus what its rows exceed 0 by, is the time of the step.

    ``sizes``: states per node. Equal parts share arrays, in the network and in the rows.
    """
    made: dict[Any, Array] = {}

    def once(p: Parts, what: str, value: Callable[[Parts], Array], *shape: int) -> Array:
        if (id(p), what, shape) not in made:
            made[id(p), what, shape] = np.broadcast_to(value(p), shape).copy()
        return made[id(p), what, shape]

    def cost(p: Parts) -> Array:
        return p.compute + p.optimizer + p.blocking + p.slowing(overlap)

    network = CostNetwork(
        tuple(once(p, "cost", cost, n) for n, p in zip(sizes, nodes, strict=True)),
        tuple((i, j, once(p, "cost", cost, sizes[i], sizes[j])) for i, j, p in edges),
    )
    rows: list[Row] = []
    for number, link in enumerate(("node", "network") if overlap else ()):

        def excess(p: Parts, number: int = number) -> Array:
            return p.excess(overlap)[number]

        def over(p: Parts, *shape: int, link: str = link, of: Callable[[Parts], Array] = excess) -> Array | None:
            return once(p, link, of, *shape) if p.compute.any() or getattr(p, link).any() else None

        row = Row(
            tuple(over(p, n) for n, p in zip(sizes, nodes, strict=True)),
            tuple(over(p, sizes[i], sizes[j]) for i, j, p in edges),
            limit=0.0,
            price=1.0,
        )
        if any(a is not None for a in row.edges):
            rows.append(row)
    return network, tuple(rows)
