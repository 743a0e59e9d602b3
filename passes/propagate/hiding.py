"""What hides behind compute, in the search: per link class the excess of movable communication over what can be hidden.

max(0, η·M − C) is the maximum of μ·(η·M − C) over μ in [0, 1]: for every price μ the network that pays it is an ordinary
cost network, its optimum bounds the step from below, and its solution is a candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.passes.propagate.step_time import Parts
from autoshard.passes.search import CostNetwork, Memory, Solution, solve
from autoshard.passes.search.network import Array

ROUNDS = 12
CLOSE = 1e-12


@dataclass(frozen=True)
class Row:
    """A sum over the choices; what it exceeds 0 by costs as much."""

    nodes: tuple[Array | None, ...]
    edges: tuple[Array | None, ...]

    def value(self, network: CostNetwork, choice: Sequence[int]) -> float:
        total = sum(float(a[s]) for a, s in zip(self.nodes, choice, strict=True) if a is not None)
        pairs = zip(self.edges, network.edges, strict=True)
        return total + sum(float(a[choice[i], choice[j]]) for a, (i, j, _) in pairs if a is not None)


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
        )
        if any(a is not None for a in row.edges):
            rows.append(row)
    return network, tuple(rows)


def solve_step(network: CostNetwork, rows: Sequence[Row], memory: Memory | None) -> Solution:
    """The choice of the least cost with the rows' excess, as far as prices tell it from others."""
    if not rows:
        return solve(network, memory=memory)
    best: Solution | None = None
    bound, lines = -np.inf, list[tuple[float, float]]()
    price = 1.0
    for _ in range(ROUNDS):
        found = solve(_priced(network, rows, price), memory=memory)
        excess = [row.value(network, found.choice) for row in rows]
        paid = network.cost(found.choice)
        cost = paid + sum(max(0.0, e) for e in excess)
        bound = max(bound, found.lower_bound)
        if best is None or cost < best.cost:
            best = replace(found, cost=cost, exact=False)
        if best.cost - bound <= CLOSE * abs(best.cost):
            return replace(best, lower_bound=min(bound, best.cost), exact=True)
        lines.append((paid, sum(excess)))
        if len(lines) == 1:
            price = 0.0
            continue
        price, expected = _dearest(lines)
        if expected - bound <= CLOSE * abs(expected):
            break
    assert best is not None
    return replace(best, lower_bound=bound)


def _priced(network: CostNetwork, rows: Sequence[Row], price: float) -> CostNetwork:
    if not price:
        return network
    made: dict[tuple[int, ...], Array] = {}

    def plus(cost: Array, extra: Sequence[Array | None]) -> Array:
        key = (id(cost), *map(id, extra))
        if key not in made:
            made[key] = cost + price * sum((a for a in extra if a is not None), np.zeros(()))
        return made[key]

    nodes = (plus(a, [row.nodes[i] for row in rows]) for i, a in enumerate(network.nodes))
    edges = ((i, j, plus(a, [row.edges[e] for row in rows])) for e, (i, j, a) in enumerate(network.edges))
    return CostNetwork(tuple(nodes), tuple(edges))


def _dearest(lines: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The price in [0, 1] at which the least of ``lines`` (value at 0, slope) is largest, and that value."""
    crossings = [0.0, 1.0]
    crossings += [(c - a) / (b - d) for a, b in lines for c, d in lines if b != d and 0 < (c - a) / (b - d) < 1]
    value, price = max((min(a + b * x for a, b in lines), x) for x in crossings)
    return price, value
