"""The search against brute force on small networks: exactness, memory limits, determinism, equal layers alike."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

import numpy as np
import pytest
from harness import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import PlanError
from autoshard.passes.search import CostNetwork, LinearRow, solve
from autoshard.passes.search.exact import elimination, solver
from autoshard.passes.search.exact.elimination import ORDERS, Eliminator, Order, Tables, by_join, by_result
from autoshard.passes.search.exact.milp import solve_core
from autoshard.passes.search.exact.pruning import Dual
from autoshard.passes.search.exact.solver import finish_search, solve_plain
from autoshard.passes.search.limits import LIMITS


def costs(draw: st.DrawFn, *shape: int, forbidden: float = 0.15) -> np.ndarray:
    """Small integers (many ties), some forbidden."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    array = generator.integers(0, 6, shape).astype(np.float64)
    array[generator.random(shape) < forbidden] = np.inf
    return array


@st.composite
def networks(draw: st.DrawFn, max_nodes: int = 7, max_edges: int = 12, forbidden: float = 0.15) -> CostNetwork:
    """Parallel edges, single strategies and disconnected parts all occur."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=max_nodes))
    pairs = st.tuples(st.integers(0, len(sizes) - 1), st.integers(0, len(sizes) - 1)).filter(lambda p: p[0] != p[1])
    chosen = draw(st.lists(pairs, max_size=max_edges)) if len(sizes) > 1 else []
    nodes = tuple(costs(draw, size, forbidden=forbidden) for size in sizes)
    return CostNetwork(nodes, tuple((i, j, costs(draw, sizes[i], sizes[j], forbidden=forbidden)) for i, j in chosen))


def brute_force(network: CostNetwork) -> float:
    return min(network.cost(choice) for choice in itertools.product(*(range(v.size) for v in network.nodes)))


def check(network: CostNetwork) -> None:
    best = brute_force(network)
    if math.isinf(best):
        with pytest.raises(PlanError, match="feasible"):
            solve(network)
        return
    found = solve(network)
    assert found.exact
    assert found.cost == found.lower_bound == best
    assert network.cost(found.choice) == best


@pytest.fixture(params=["eliminate", "bound", "guess", "milp"])
def route(request: pytest.FixtureRequest) -> Iterator[str]:
    """Every way through the solver: all by elimination, message passing before it, suppositions, and the MILP for the core."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "eliminate":
            patch.setattr(LIMITS, "easy_join", 1)
        if request.param in ("guess", "milp"):
            patch.setattr(LIMITS, "max_join", 12)
            patch.setattr(LIMITS, "max_sweeps", 1)
            patch.setattr(LIMITS, "trial_join", 12)
            patch.setattr(solver, "GUESSES", (1e-3, 0.5, 1.0) if request.param == "guess" else ())
        yield request.param


@settings(max_examples=examples(120))
@given(network=networks())
def test_equals_brute_force(network: CostNetwork) -> None:
    check(network)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.slow] * (n % 2)) for n in range(25)])
def test_every_route_equals_brute_force(route: str, seed: int) -> None:
    check(dense(np.random.default_rng(seed), nodes=6, size=3, forbidden=0.1))


def dense(generator: np.random.Generator, nodes: int, size: int, forbidden: float) -> CostNetwork:
    """All pairs joined: nothing has a small degree."""

    def table(*shape: int) -> np.ndarray:
        array = generator.integers(0, 9, shape).astype(np.float64)
        array[generator.random(shape) < forbidden] = np.inf
        return array

    pairs = itertools.combinations(range(nodes), 2)
    return CostNetwork(tuple(table(size) for _ in range(nodes)), tuple((i, j, table(size, size)) for i, j in pairs))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", range(5))
def test_every_order_equals_brute_force(order: Order, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elimination, "ORDERS", (order,))
    check(dense(np.random.default_rng(seed), nodes=6, size=3, forbidden=0.1))


def rotary(layers: int) -> CostNetwork:
    """Attention in a row; each layer's queries and keys are turned by cosines and sines, which it hands to the next."""
    sizes, edges, before = [4, 4, 4, 4], [], range(4)
    for _ in range(layers):
        cosine, sine, x, attention = here = range(len(sizes), len(sizes) + 4)
        sizes += [4, 4, 4, 4]
        edges += [(x, attention), *zip(before, here, strict=True)]
        before = here
        for _ in range(2):
            given, left, right, turned = range(len(sizes), len(sizes) + 4)
            sizes += [12, 16, 16, 12]
            edges += [(x, given), (given, left), (given, right), (left, cosine), (right, sine)]
            edges += [(left, turned), (right, turned), (turned, attention)]
    tables = tuple((i, j, np.zeros((sizes[i], sizes[j]))) for i, j in edges)
    return CostNetwork(tuple(map(np.zeros, sizes)), tables)


def test_the_order_of_the_smaller_joins_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Eliminator.of(rotary(layers=3), Tables())
    joined, order = work.cheapest_order(10**5)
    assert order is by_result
    assert joined < 10**6
    monkeypatch.setattr(elimination, "ORDERS", (by_join,))
    assert work.cheapest_order(10**6)[0] == math.inf


def test_the_milp_route_uses_the_milp(monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    monkeypatch.setattr(LIMITS, "easy_join", 1)
    monkeypatch.setattr(LIMITS, "max_join", 12)
    monkeypatch.setattr(LIMITS, "max_sweeps", 1)
    monkeypatch.setattr(solver, "solve_core", lambda *a, **k: called.append(1) or solve_core(*a, **k))
    network = dense(np.random.default_rng(3), nodes=7, size=3, forbidden=0.0)
    assert solve(network).cost == brute_force(network)
    assert called


def test_the_milp_takes_over_where_joins_would_cost_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells of a loop share their weights: few variables, but joins over all weights at once."""
    called = []
    monkeypatch.setattr(solver, "solve_core", lambda *a, **k: called.append(1) or solve_core(*a, **k))
    monkeypatch.setattr(LIMITS, "easy_join", 1)
    monkeypatch.setattr(LIMITS, "max_sweeps", 1)
    network = dense(np.random.default_rng(3), nodes=7, size=3, forbidden=0.0)
    assert solve(network).cost == brute_force(network)
    assert not called
    monkeypatch.setattr(LIMITS, "easy_total", 1)
    monkeypatch.setattr(LIMITS, "joined_per_variable", 1)
    assert solve(network).cost == brute_force(network)
    assert called


def test_of_a_large_core_a_choice_close_to_the_bound_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "easy_join", 1)
    monkeypatch.setattr(LIMITS, "max_join", 12)
    monkeypatch.setattr(LIMITS, "max_sweeps", 1)
    network = dense(np.random.default_rng(3), nodes=7, size=3, forbidden=0.0)
    dear = CostNetwork(tuple(v + 1e7 for v in network.nodes), network.edges)
    best = brute_force(dear)
    assert solve(dear).exact  # small enough for the MILP
    monkeypatch.setattr(LIMITS, "large_core", 0)
    found = solve(dear)
    assert not found.exact
    assert found.lower_bound < best <= found.cost <= found.lower_bound * (1 + LIMITS.close_to_bound)
    assert solve(network).exact  # here the same gap is a large part of the cost


@pytest.mark.parametrize("join", [12, 1_000_000])
@pytest.mark.parametrize("seed", range(8))
def test_a_right_supposition_proves_the_optimum(join: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The core never goes to the MILP as a whole: what costs at most the supposition is searched, and contains it."""
    sizes = []
    monkeypatch.setattr(LIMITS, "easy_join", 1)
    monkeypatch.setattr(LIMITS, "max_join", 12)
    monkeypatch.setattr(LIMITS, "max_sweeps", 1)
    monkeypatch.setattr(LIMITS, "trial_join", join)
    monkeypatch.setattr(solver, "GUESSES", (1e-3, 1.0))
    monkeypatch.setattr(solver, "finish_search", lambda run: sizes.append(run.upper - run.bound) or finish_search(run))
    network = dense(np.random.default_rng(seed), nodes=7, size=3, forbidden=0.0)
    found = solve(network)
    assert found.cost == brute_force(network)
    assert found.exact
    assert sizes == [0.0]


def test_tiny_costs_are_resolved_by_the_milp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds of 1e-9 lie far below the MILP solver's absolute tolerances."""
    monkeypatch.setattr(LIMITS, "easy_join", 1)
    monkeypatch.setattr(LIMITS, "max_join", 12)
    monkeypatch.setattr(LIMITS, "max_sweeps", 1)
    network = dense(np.random.default_rng(5), nodes=6, size=3, forbidden=0.0)
    small = CostNetwork(tuple(v * 1e-9 for v in network.nodes), tuple((i, j, m * 1e-9) for i, j, m in network.edges))
    assert solve(small).cost == pytest.approx(brute_force(network) * 1e-9, rel=1e-9)


def test_real_costs() -> None:
    generator = np.random.default_rng(1)
    nodes = tuple(generator.random(3) * 1e-4 for _ in range(7))
    edges = tuple((i, (i * 3 + 1) % 7, generator.random((3, 3)) * 1e-4) for i in range(7) if i != (i * 3 + 1) % 7)
    network = CostNetwork(nodes, edges)
    assert solve(network).cost == pytest.approx(brute_force(network), rel=1e-12)


def test_infeasible() -> None:
    never = np.full((2, 2), np.inf)
    with pytest.raises(PlanError, match="feasible"):
        solve(CostNetwork((np.zeros(2), np.zeros(2)), ((0, 1, never),)))
    # every pair is possible, all three together are not: each node differs from the other two, with two values
    differ = np.where(np.eye(2) > 0, np.inf, 0.0)
    with pytest.raises(PlanError, match="feasible"):
        solve(CostNetwork((np.zeros(2),) * 3, ((0, 1, differ), (1, 2, differ), (0, 2, differ))))


def test_malformed_networks_are_refused() -> None:
    with pytest.raises(PlanError, match="shape"):
        CostNetwork((np.zeros(2), np.zeros(3)), ((0, 1, np.zeros((3, 2))),))
    with pytest.raises(PlanError, match="joins two"):
        CostNetwork((np.zeros(2),), ((0, 0, np.zeros((2, 2))),))
    with pytest.raises(PlanError, match="non-empty"):
        CostNetwork((np.zeros(0),), ())


def test_ties_go_to_the_lowest_index() -> None:
    nodes = tuple(np.zeros(3) for _ in range(5))
    edges = tuple((i, i + 1, np.zeros((3, 3))) for i in range(4))
    assert solve(CostNetwork(nodes, edges)).choice == (0, 0, 0, 0, 0)


def layered(layers: int, size: int = 5, seed: int = 0) -> CostNetwork:
    """Equal layers in a row, all reading two hubs: (in) → a, b → out, and hub edges. Arrays are shared."""
    generator = np.random.default_rng(seed)
    vector = {k: generator.integers(0, 9, size).astype(np.float64) for k in "xabh"}
    matrix = {
        k: generator.integers(0, 9, (size, size)).astype(np.float64) for k in ("xa", "xb", "ax", "bx", "ha", "kb")
    }
    nodes, edges = [vector["h"], vector["h"], vector["x"]], []
    x = 2
    for _ in range(layers):
        a, b, out = len(nodes), len(nodes) + 1, len(nodes) + 2
        nodes += [vector["a"], vector["b"], vector["x"]]
        edges += [(x, a, matrix["xa"]), (x, b, matrix["xb"]), (0, a, matrix["ha"]), (1, b, matrix["kb"])]
        edges += [(a, out, matrix["ax"]), (b, out, matrix["bx"])]
        x = out
    return CostNetwork(tuple(nodes), tuple(edges))


@pytest.mark.parametrize("seed", range(8))
def test_equal_layers_choose_alike(seed: int) -> None:
    """In the middle of a long stack, away from its ends, all layers do the same or alternate in a fixed period."""
    choice = solve(layered(24, seed=seed)).choice
    layers = [choice[k : k + 3] for k in range(3, len(choice), 3)][6:-6]
    assert any(all(layers[k] == layers[k + period] for k in range(len(layers) - period)) for period in (1, 2, 3))


def test_equal_layers_cost_like_one() -> None:
    few, many = solve(layered(8)).stats["tables"], solve(layered(64)).stats["tables"]
    assert many < 2 * few


def test_sharing_arrays_changes_nothing() -> None:
    network = layered(6)
    copied = CostNetwork(tuple(v.copy() for v in network.nodes), tuple((i, j, m.copy()) for i, j, m in network.edges))
    assert solve(network).choice == solve(copied).choice


@settings(max_examples=examples(30))
@given(network=networks(forbidden=0.0))
def test_the_same_every_time(network: CostNetwork) -> None:
    first, second = solve(network), solve(network)
    assert (first.choice, first.cost) == (second.choice, second.cost)


@settings(max_examples=examples(60))
@given(network=networks(forbidden=0.0))
def test_message_passing_bounds_from_below(network: CostNetwork) -> None:
    dual = Dual(Eliminator.of(network, Tables()))
    best, bounds = brute_force(network), []
    for _ in range(6):
        dual.sweep(best)
        bounds.append(dual.bound)
    assert all(bound <= best + 1e-9 for bound in bounds)
    assert all(later >= earlier - 1e-9 for earlier, later in itertools.pairwise(bounds))


def test_rounding_does_not_prune_the_optimum() -> None:
    """Found by the test above: thirds of costs are not exact, and with the optimum as limit it was dropped."""
    steep = np.array([[5.0, 3.0], [3.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    wide = np.array([[3.0, 2.0, 0.0, 1.0], [2.0, 1.0, 4.0, 1.0], [0.0, 5.0, 0.0, 5.0], [3.0, 4.0, 2.0, 0.0]])
    four, two, one = np.array([5.0, 3.0, 3.0, 1.0]), np.array([5.0, 3.0]), np.array([5.0])
    last = np.array([[2.0, 3.0], [4.0, 5.0], [0.0, 0.0], [4.0, 5.0]])
    edges = [(0, 1, steep)] * 6
    edges += [(0, 2, steep), (1, 2, np.array([[5.0, 3.0], [3.0, 1.0]])), (0, 4, wide), (0, 1, last)]
    network = CostNetwork((four, two, two, one, four, one, one), tuple(edges))
    dual, best = Dual(Eliminator.of(network, Tables())), brute_force(network)
    for _ in range(6):
        dual.sweep(best)
    assert dual.bound <= best + 1e-9


@pytest.mark.slow
def test_a_deadline_leaves_a_valid_interval() -> None:
    network = dense(np.random.default_rng(0), nodes=24, size=8, forbidden=0.0)
    found = solve_plain(network, deadline=time.perf_counter() + 1.0)
    assert found.lower_bound <= found.cost == network.cost(found.choice)
    assert not found.exact  # proving this optimum takes far longer


def test_the_check_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an elimination that forgets the costs is caught by the comparison with brute force."""
    network = dense(np.random.default_rng(4), nodes=5, size=3, forbidden=0.0)
    check(network)
    monkeypatch.setattr(elimination, "min_sum", lambda parts, shape: np.zeros(shape))
    with pytest.raises(AssertionError):
        check(network)


def test_equal_layers_may_have_to_differ_for_memory() -> None:
    """Ten equal nodes, room for three dear ones: no price of memory makes equal nodes differ, the MILP does."""
    cost, usage = np.array([0.0, 1.0]), np.array([10.0, 1.0])
    found = solve(CostNetwork((cost,) * 10, ()), rows=[LinearRow((usage,) * 10, (), 3 * 10.0 + 7 * 1.0)])
    assert found.exact
    assert found.cost == 7
    assert sorted(found.choice) == [0] * 3 + [1] * 7


def test_memory_that_cannot_be_met_says_what_is_needed() -> None:
    network = CostNetwork((np.zeros(2),) * 3, ())
    with pytest.raises(PlanError, match=r"limit of 5: the least that any choice uses is 6"):
        solve(network, rows=[LinearRow((np.array([2.0, 5.0]),) * 3, (), 5.0)])
    with pytest.raises(PlanError, match="one entry per node"):
        solve(network, rows=[LinearRow((np.zeros(2),), (), 5.0)])


def test_memory_to_spare_changes_nothing() -> None:
    network = layered(6)
    row = LinearRow(tuple(np.ones(v.size) for v in network.nodes), (None,) * len(network.edges), 1e9)
    assert solve(network, rows=[row]).choice == solve(network).choice
