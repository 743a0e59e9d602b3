"""Rows, sums that cost or must not exceed a limit, against brute force on thousands of small networks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from autoshard.errors import PlanError
from autoshard.passes.search import CostNetwork, LinearRow, solve
from autoshard.passes.search.arrays import CompactMatrix, Matrix, dense_matrix, stored_values
from autoshard.passes.search.exact.solver import solve_plain
from autoshard.passes.search.limits import LIMITS
from autoshard.passes.search.network import FULL
from autoshard.passes.search.rows import constrained, lagrangian
from autoshard.passes.search.rows.relaxation import planned_elimination
from autoshard.passes.search.rows.stacked import Stacked, stack_rows, undecided

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


def instance(seed: int) -> tuple[CostNetwork, tuple[LinearRow, ...]]:
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
        rows.append(LinearRow(on_nodes, on_edges, limit, price))
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


def brute_force(network: CostNetwork, rows: tuple[LinearRow, ...]) -> float:
    sizes = tuple(v.size for v in network.nodes)
    total = everything(sizes, network.nodes, network.edges)
    for row in rows:
        pairs = tuple((i, j, a) for a, (i, j, _) in zip(row.edges, network.edges, strict=True))
        over = np.maximum(everything(sizes, row.nodes, pairs) - row.limit, 0.0)
        total += np.where(over > 0, np.inf, 0.0) if math.isinf(row.price) else row.price * over
    return float(total.min())


def value(network: CostNetwork, rows: tuple[LinearRow, ...], choice: tuple[int, ...]) -> float:
    over = [max(row.used(network, choice) - row.limit, 0.0) for row in rows]
    return network.cost(choice) + sum(row.price * o for row, o in zip(rows, over, strict=True) if o)


def check(seed: int) -> dict[str, float]:
    """What the search did, where there is a choice."""
    network, rows = instance(seed)
    best = brute_force(network, rows)
    if math.isinf(best):
        with pytest.raises(PlanError):
            solve(network, rows=rows)
        return {}
    found = solve(network, rows=rows)
    assert found.cost == value(network, rows, found.choice) == pytest.approx(best, rel=1e-9, abs=1e-9), seed
    assert found.lower_bound <= best * (1 + 1e-9) + 1e-9, seed
    assert found.exact, seed
    return dict(found.stats)


@pytest.mark.slow_cases("100", "0")
@pytest.mark.parametrize("seed", range(0, 150, 50))
def test_rows_equal_brute_force(seed: int) -> None:
    for k in range(seed, seed + 50):
        check(k)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 6000, 1000))
def test_rows_equal_brute_force_in_thousands(seed: int) -> None:
    for k in range(seed, seed + 1000):
        check(k)


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a strategy that is beaten where rows cost nothing is not beaten; who drops it is caught."""
    monkeypatch.setattr(lagrangian, "probes", lambda problem: [(1.0, np.zeros(len(problem.limits)))])

    def several() -> None:
        for seed in range(24):
            check(seed)

    with pytest.raises((AssertionError, PlanError)):
        several()


@pytest.fixture
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small problems go the way of large ones: prices, mixtures, branches, message passing, the MILP."""
    monkeypatch.setattr(LIMITS, "direct_milp_entries", 0)
    monkeypatch.setattr(LIMITS, "enough", 1e-9)


@pytest.mark.slow_cases("0-taken1")
@pytest.mark.usefixtures("as_if_large")
@pytest.mark.parametrize(("most", "taken"), [(LIMITS.branches, ("mixtures", "branches")), (0, ("mixtures", "looks"))])
def test_the_way_of_large_problems_is_exact_too(
    most: int, taken: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By branches, and, where there are none, by the MILP of what message passing leaves."""
    monkeypatch.setattr(LIMITS, "branches", most)
    steps = [check(seed) for seed in range(300, 350)]
    for name in taken:
        assert any(step.get(name) for step in steps), name


@pytest.mark.usefixtures("as_if_large")
def test_bounds_hold_where_the_work_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "milp_entries", 0)
    monkeypatch.setattr(LIMITS, "branches", 3)
    ends = {True: 0, False: 0}
    for seed in range(400, 430):
        network, rows = instance(seed)
        best = brute_force(network, rows)
        try:
            found = solve(network, rows=rows)
        except PlanError:
            continue
        ends[found.exact] += 1
        assert found.lower_bound <= best * (1 + 1e-9) + 1e-9
        assert best <= found.cost * (1 + 1e-9)
        assert found.cost == value(network, rows, found.choice)
    assert min(ends.values()) > 0


def layers(count: int) -> tuple[CostNetwork, LinearRow]:
    """Equal layers of three nodes in a chain; each can be quick and large or slow and small, to change costs a little."""
    quick = np.array([0.0, 1.0, 4.0])
    held = np.array([8.0, 5.0, 1.0])
    turn = np.where(np.eye(3) > 0, 0.0, 0.25)
    nodes = (quick,) * (3 * count)
    edges = tuple((i, i + 1, turn) for i in range(3 * count - 1))
    return CostNetwork(nodes, edges), LinearRow((held,) * len(nodes), (None,) * len(edges), 0.0)


@pytest.mark.slow_cases("0.93", "0.3")
@pytest.mark.parametrize("room", [0.3, 0.5, 0.93])
def test_k_of_32_layers_change_their_state(room: float) -> None:
    """No single price makes equal layers differ, and the limit lies between what all of one kind hold."""
    network, row = layers(32)
    least, most = 96 * 1.0, 96 * 8.0
    row = LinearRow(row.nodes, row.edges, least + room * (most - least))
    found = solve(network, rows=[row])
    assert row.used(network, found.choice) <= row.limit
    assert found.cost - found.lower_bound <= 0.01 * found.cost
    changes = sum(a != b for a, b in itertools.pairwise(found.choice))
    assert 1 <= changes <= 4  # some layers one way, the others another: no patchwork


@pytest.mark.parametrize("strategies", [2, 3])
def test_layers_that_must_be_alike_are_no_mixture(strategies: int) -> None:
    """At the best price all quick and all small cost the same, and no layer may differ from its neighbour."""
    count = 100
    alike = np.where(np.eye(strategies) > 0, 0.0, np.inf)
    costs, held = (np.array(x)[:strategies] for x in ([1.0, 2.0, 1.6], [3.0, 0.0, 1.2]))
    network = CostNetwork((costs,) * count, tuple((i, i + 1, alike) for i in range(count - 1)))
    row = LinearRow((held,) * count, (None,) * (count - 1), 1.0 * count, 0.5)
    found = solve(network, rows=[row])
    assert found.cost == pytest.approx(count * min(c + 0.5 * max(h - 1, 0) for c, h in zip(costs, held, strict=True)))


def test_an_excess_that_is_cheaper_than_to_avoid_it_is_paid() -> None:
    network, row = layers(4)
    free = LinearRow(row.nodes, row.edges, 90.0, 0.01)
    assert solve(network, rows=[free]).choice == (0,) * 12
    assert solve(network, rows=[free]).cost == pytest.approx(0.01 * 6.0)
    dear = LinearRow(row.nodes, row.edges, 12.0, 2.0)
    assert solve(network, rows=[dear]).choice == (2,) * 12


@pytest.mark.slow
def test_the_same_every_time() -> None:
    for seed in range(20):
        network, rows = instance(seed)
        try:
            first, second = solve(network, rows=rows), solve(network, rows=rows)
        except PlanError:
            continue
        assert (first.choice, first.cost, first.lower_bound) == (second.choice, second.cost, second.lower_bound)


def test_what_cannot_be_met_is_told() -> None:
    network, row = layers(4)
    with pytest.raises(PlanError, match=r"limit of 11: the least that any choice uses is 12"):
        solve(network, rows=[LinearRow(row.nodes, row.edges, 11.0)])
    other = LinearRow(tuple(8.0 - a for a in row.nodes if a is not None), row.edges, 30.0)
    with pytest.raises(PlanError, match=r"no choice fits the limit of"):
        solve(network, rows=[LinearRow(row.nodes, row.edges, 40.0), other])


def test_malformed_rows_are_refused() -> None:
    network, row = layers(4)
    with pytest.raises(PlanError, match="one entry per node"):
        solve(network, rows=[LinearRow(row.nodes[1:], row.edges, 1.0)])
    with pytest.raises(PlanError, match="shape"):
        solve(network, rows=[LinearRow((np.zeros(2),) * 12, row.edges, 1.0)])
    with pytest.raises(PlanError, match="finite"):
        solve(network, rows=[LinearRow((np.full(3, np.inf),) * 12, row.edges, 1.0)])
    with pytest.raises(PlanError, match="price"):
        solve(network, rows=[LinearRow(row.nodes, row.edges, 1.0, -1.0)])


def copied(
    generator: Generator, network: CostNetwork, rows: tuple[LinearRow, ...]
) -> tuple[CostNetwork, tuple[LinearRow, ...]]:
    """The same with some strategies several times, which only the vectors of nodes tell apart; their matrices are folded."""
    maps = [generator.integers(0, len(vector), len(vector) + 2) for vector in network.nodes]

    def vector(i: int, values: np.ndarray | None) -> np.ndarray | None:
        return None if values is None else values[maps[i]]

    def edges(matrices: Sequence[Matrix | None]) -> tuple[CompactMatrix | None, ...]:
        pairs = zip(network.edges, matrices, strict=True)
        return tuple(None if m is None else CompactMatrix(stored_values(m), maps[i], maps[j]) for (i, j, _), m in pairs)

    own = [v[maps[i]] + generator.integers(0, 2, len(maps[i])) for i, v in enumerate(network.nodes)]
    found = zip(network.edges, edges([m for *_, m in network.edges]), strict=True)
    more = (LinearRow(tuple(map(vector, itertools.count(), r.nodes)), edges(r.edges), r.limit, r.price) for r in rows)
    return CostNetwork(tuple(own), tuple((i, j, m) for (i, j, _), m in found if m is not None)), tuple(more)


@pytest.mark.slow
def test_folded_tables_are_what_they_stand_for() -> None:
    solved = 0
    for seed in range(24):
        generator = np.random.default_rng(seed)
        network, rows = copied(generator, *instance(seed))
        assert any(stored_values(m).shape != m.shape for *_, m in network.edges)
        plain = CostNetwork(network.nodes, network.matrices)
        same = tuple(replace(r, edges=tuple(None if m is None else dense_matrix(m) for m in r.edges)) for r in rows)
        for given in ((), rows):
            try:
                expected = solve(plain, rows=same if given else ())
            except PlanError:
                with pytest.raises(PlanError):
                    solve(network, rows=given)
                continue
            found = solve(network, rows=given)
            assert (found.choice, found.cost, found.lower_bound) == (
                expected.choice,
                expected.cost,
                expected.lower_bound,
            )
            solved += 1
    assert solved > 24


def test_what_is_decided_counts_with_the_rest() -> None:
    generator = np.random.default_rng(0)
    sizes = (1, 3, 1, 2, 1)
    edges = tuple((i, j, generator.random((sizes[i], sizes[j]))) for i, j in itertools.combinations(range(5), 2))
    network = CostNetwork(tuple(map(generator.random, sizes)), edges)
    rows = (LinearRow(tuple(map(generator.random, sizes)), tuple(generator.random(m.shape) for *_, m in edges), 1.0),)
    problem = stack_rows(network, rows)
    some = undecided(problem)
    assert some.nodes.tolist() == [1, 3]
    for a, b in itertools.product(range(3), range(2)):
        assert np.allclose(some.alone.sums((a, b)), problem.sums((0, a, 0, b, 0)), rtol=1e-12)


def test_what_is_solved_once_is_not_planned_to_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    network, row = layers(4)
    planned: list[Stacked] = []
    monkeypatch.setattr(
        lagrangian, "planned_elimination", lambda problem: planned.append(problem) or planned_elimination(problem)
    )
    assert constrained.run_search(stack_rows(network, (replace(row, limit=1e9, price=1.0),)), FULL).closed
    assert not planned
    problem = stack_rows(network, (replace(row, price=1.0),))
    wanted = constrained.run_search(problem, FULL).total
    assert planned
    monkeypatch.setattr(lagrangian, "solve_plain", lambda *of, **how: replace(solve_plain(*of, **how), exact=False))
    assert constrained.run_search(problem, FULL).total == wanted
