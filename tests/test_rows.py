"""Rows, sums that cost or must not exceed a limit, against brute force on thousands of small networks."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from autoshard.errors import PlanError
from autoshard.passes.search import CostNetwork, Row, solve

Generator = np.random.Generator


def table(generator: Generator, *shape: int, forbidden: float = 0.0, low: int = 0) -> np.ndarray:
    """Small integers: many ties, and sums without rounding."""
    array = generator.integers(low, 10, shape).astype(np.float64)
    array[generator.random(shape) < forbidden] = np.inf
    return array


def chain(generator: Generator) -> list[tuple[int, int]]:
    return [(i, i + 1) if generator.random() < 0.7 else (i + 1, i) for i in range(int(generator.integers(2, 7)))]


def tree(generator: Generator) -> list[tuple[int, int]]:
    return [(int(generator.integers(0, i)), i) for i in range(1, int(generator.integers(3, 8)))]


def cycle(generator: Generator) -> list[tuple[int, int]]:
    """A loop, a chord, and two nodes joined twice."""
    count = int(generator.integers(3, 7))
    around = [(i, (i + 1) % count) for i in range(count)]
    return [*around, (1, 0), *([(0, count // 2)] if count > 3 else [])]


SHAPES: tuple[Callable[[Generator], list[tuple[int, int]]], ...] = (chain, tree, cycle)


def instance(seed: int) -> tuple[CostNetwork, tuple[Row, ...]]:
    """One to four rows, soft and hard, some with negative amounts, some on edges or nodes only."""
    generator = np.random.default_rng(seed)
    pairs = SHAPES[seed % len(SHAPES)](generator)
    sizes = generator.integers(1, 5, max(map(max, pairs)) + 1)
    nodes = tuple(table(generator, n, forbidden=0.05) for n in sizes)
    edges = tuple((i, j, table(generator, sizes[i], sizes[j], forbidden=0.05)) for i, j in pairs)
    rows = []
    for _ in range(int(generator.integers(1, 5))):
        low = int(generator.choice([0, 0, -9]))
        on_nodes = tuple(table(generator, n, low=low) if generator.random() < 0.8 else None for n in sizes)
        on_edges = tuple(
            table(generator, sizes[i], sizes[j], low=low) if generator.random() < 0.5 else None for i, j in pairs
        )
        middle = 4.5 * sum(a is not None for a in (*on_nodes, *on_edges)) if low == 0 else 0.0
        limit = float(np.rint(middle * generator.uniform(0.5, 1.2)))
        price = math.inf if generator.random() < 0.5 else float(generator.choice([0.25, 0.5, 1.0, 4.0]))
        rows.append(Row(on_nodes, on_edges, limit, price))
    return CostNetwork(nodes, edges), tuple(rows)


def everything(sizes: tuple[int, ...], nodes: tuple, edges: tuple) -> np.ndarray:
    """The sum for every choice, as one array with an axis per node."""
    total = np.zeros(sizes)
    for i, vector in enumerate(nodes):
        if vector is not None:
            total += vector.reshape([-1 if k == i else 1 for k in range(len(sizes))])
    for i, j, matrix in edges:
        if matrix is not None:
            ordered = matrix if i < j else matrix.T
            total += ordered.reshape([sizes[k] if k in (i, j) else 1 for k in range(len(sizes))])
    return total


def brute_force(network: CostNetwork, rows: tuple[Row, ...]) -> float:
    sizes = tuple(v.size for v in network.nodes)
    total = everything(sizes, network.nodes, network.edges)
    for row in rows:
        pairs = tuple((i, j, a) for a, (i, j, _) in zip(row.edges, network.edges, strict=True))
        over = np.maximum(everything(sizes, row.nodes, pairs) - row.limit, 0.0)
        total += np.where(over > 0, np.inf, 0.0) if math.isinf(row.price) else row.price * over
    return float(total.min())


def value(network: CostNetwork, rows: tuple[Row, ...], choice: tuple[int, ...]) -> float:
    over = [max(row.used(network, choice) - row.limit, 0.0) for row in rows]
    return network.cost(choice) + sum(row.price * o for row, o in zip(rows, over, strict=True) if o)


def check(seed: int) -> None:
    network, rows = instance(seed)
    best = brute_force(network, rows)
    if math.isinf(best):
        with pytest.raises(PlanError):
            solve(network, rows=rows)
        return
    found = solve(network, rows=rows)
    assert found.cost == value(network, rows, found.choice) == pytest.approx(best, rel=1e-9, abs=1e-9), seed
    assert found.lower_bound <= best * (1 + 1e-9) + 1e-9, seed
    assert found.exact, seed


@pytest.mark.parametrize("seed", range(0, 1000, 100))
def test_rows_equal_brute_force(seed: int) -> None:
    for k in range(seed, seed + 100):
        check(k)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 6000, 1000))
def test_rows_equal_brute_force_in_thousands(seed: int) -> None:
    for k in range(seed, seed + 1000):
        check(k)
