"""What hides behind compute, in the search: per link class a row, the excess of movable communication over the compute.

A cost network with these rows costs what the step takes: max(0, η·M − C) is what η·M − C exceeds 0 by.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.passes.search import CostNetwork, Row
from autoshard.passes.search.network import Array


def stepping(
    nodes: Sequence[Array], edges: Sequence[tuple[int, int, Array]], overlap: float
) -> tuple[CostNetwork, tuple[Row, ...]]:
    """The network whose cost, plus what its rows exceed 0 by, is the time of the step.

    ``nodes``: per variable seconds [compute, all else] × states; ``edges``: [what blocks] × states × states, or [what
    blocks, movable inside a node, movable between nodes]. Arrays that are shared there are shared in the result.
    """
    costs = {id(a): a.sum(axis=0) for a in nodes}
    costs |= {id(a): a[0] + (1 - overlap) * a[1:].sum(axis=0) for _, _, a in edges}
    network = CostNetwork(tuple(costs[id(a)] for a in nodes), tuple((i, j, costs[id(a)]) for i, j, a in edges))
    hides = {id(a): -a[0] for a in nodes if a[0].any()}
    rows = []
    for link in (1, 2):
        moves = {id(a): overlap * a[link] for _, _, a in edges if len(a) > 1 and overlap and a[link].any()}
        if moves:
            over = tuple(moves.get(id(a)) for _, _, a in edges)
            rows.append(Row(tuple(hides.get(id(a)) for a in nodes), over, limit=0.0, price=1.0))
    return network, tuple(rows)
