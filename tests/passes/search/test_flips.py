"""Choices bettered node by node end where no node gains by doing otherwise, and inside the limits where that can be."""

from __future__ import annotations

import math

import numpy as np

from autoshard.passes.search import CostNetwork, LinearRow
from autoshard.passes.search.network import Choice
from autoshard.passes.search.rows.duality_gap import flip_nodes
from autoshard.passes.search.rows.stacked import Stacked, stack_rows


def total(problem: Stacked, choice: Choice) -> tuple[float, float]:
    """(what is too much of the hard row, cost with what the soft one adds)"""
    cost, *used = problem.sums(choice)
    over = np.maximum(used - problem.limits, 0.0)
    return float(over[0]), float(cost + over[1] * problem.prices[1])


def chain(generator: np.random.Generator, count: int) -> Stacked:
    """Two strategies per node at least, few forbidden; a hard row and a soft one, over nodes and edges."""
    sizes = generator.integers(2, 4, count)

    def amounts(*shape: int) -> np.ndarray:
        return generator.integers(-3, 9, shape).astype(np.float64)

    def costs(*shape: int) -> np.ndarray:
        return np.where(generator.random(shape) < 0.1, math.inf, amounts(*shape))

    pairs = [(i, i + 1) for i in range(count - 1)]
    network = CostNetwork(tuple(amounts(n) for n in sizes), tuple((i, j, costs(sizes[i], sizes[j])) for i, j in pairs))
    rows = [
        LinearRow(
            tuple(amounts(n) for n in sizes), tuple(amounts(sizes[i], sizes[j]) for i, j in pairs), 5.0 * count, price
        )
        for price in (math.inf, 0.5)
    ]
    return stack_rows(network, rows)


def test_no_node_alone_gains_by_doing_otherwise() -> None:
    inside = better = 0
    for seed in range(100):
        generator = np.random.default_rng(seed)
        problem = chain(generator, 8)
        choice = tuple(int(generator.integers(n)) for n in problem.sizes)
        if math.isinf(problem.sums(choice)[0]):
            continue
        found = flip_nodes(problem, np.zeros(2), choice)
        (over, cost), before = total(problem, found), total(problem, choice)
        assert (over, cost) <= before if before[0] == 0 else over <= before[0]
        better += (over, cost) < before
        inside += over == 0
        for i, n in enumerate(problem.sizes):
            for s in range(n):
                left, other = total(problem, (*found[:i], s, *found[i + 1 :]))
                assert math.isinf(other) or left > 0 or (over == 0 and other >= cost - 1e-6 * abs(cost))
    assert better > 40
    assert inside > 40


def test_what_is_too_much_goes_at_the_least_cost() -> None:
    held = np.array([4.0, 0.0])
    nodes = tuple(np.array([0.0, dear]) for dear in (3.0, 1.0, 2.0))
    row = LinearRow((held, held, held), (), 5.0)
    assert flip_nodes(stack_rows(CostNetwork(nodes, ()), [row]), np.zeros(1), (0, 0, 0)) == (0, 1, 1)


def test_what_is_forbidden_at_the_start_is_left() -> None:
    """A node's own cost, and a pair; no limit binds."""
    apart = np.array([[math.inf, 4.0], [0.0, 9.0]])
    network = CostNetwork((np.array([0.0, 1.0]), np.zeros(2), np.array([math.inf, 7.0])), ((0, 1, apart),))
    problem = stack_rows(network, [LinearRow((np.zeros(2),) * 3, (None,), 1.0)])
    with np.errstate(invalid="raise"):
        assert flip_nodes(problem, np.zeros(1), (0, 0, 0)) == (1, 0, 1)
