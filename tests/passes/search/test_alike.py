"""Equal layers searched as one: their choices are choices of the whole network, their bound is one of all choices."""

from __future__ import annotations

import math
from collections.abc import Hashable

import numpy as np
import pytest

from autoshard.errors import PlanError
from autoshard.passes.search import CostNetwork, LinearRow, Prepared, prepared, solve
from autoshard.passes.search.exact.elimination import Eliminator, Tables
from autoshard.passes.search.exact.pruning import Dual, _Edge
from autoshard.passes.search.limits import LIMITS
from autoshard.passes.search.network import Effort
from autoshard.passes.search.rows.tied_layers import tied_bound


@pytest.fixture(autouse=True)
def as_if_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared.Prepared, "large", 0)


def layers(seed: int, count: int) -> tuple[CostNetwork, tuple[LinearRow, ...], list[Hashable | None]]:
    """Of every layer two nodes and a leaf, in a chain that begins and ends unlike; a row of bytes, and one that is soft."""
    generator = np.random.default_rng(seed)

    def table(*shape: int) -> np.ndarray:
        array = generator.integers(0, 20, shape).astype(np.float64)
        array[generator.random(shape) < 0.1] = math.inf
        array.flat[0] = 10.0  # something is always allowed
        return array

    sizes = generator.integers(2, 4, 3)
    own, inside = [table(n) for n in sizes], table(sizes[0], sizes[1])
    between, leaf = table(sizes[1], sizes[0]), table(sizes[2], sizes[1])
    held = [generator.integers(0, 9, n).astype(np.float64) for n in sizes]
    soft = [generator.integers(-5, 6, n).astype(np.float64) for n in sizes]
    nodes, edges, labels = [], [], []
    for layer in range(count):
        at = 3 * layer
        nodes += own
        edges += [(at, at + 1, inside), (at + 2, at + 1, leaf)]
        edges += [(at - 2, at, between)] if layer else []
        labels += [("layer", k) for k in range(3)]
    ends = table(3), table(2)
    edges += [(len(nodes), 0, table(3, sizes[0])), (len(nodes) - 2, len(nodes) + 1, table(sizes[1], 2))]
    network = CostNetwork((*nodes, *ends), tuple(edges))
    nothing = (None,) * len(edges)
    limit = float(generator.uniform(0.2, 0.8) * 8 * 3 * count)
    rows = (
        LinearRow((*held * count, None, None), nothing, limit),
        LinearRow((*soft * count, None, None), nothing, 0.0, float(generator.choice([0.5, 1.0]))),
    )
    return network, rows, [*labels, None, None]


def best(network: CostNetwork, rows: tuple[LinearRow, ...]) -> float:
    """By the solver without labels, which is tested against brute force."""
    try:
        return solve(network, rows=rows).cost
    except PlanError:
        return math.inf


@pytest.mark.slow_cases("0", "40")
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_the_choice_is_allowed_and_the_bound_holds(first: int) -> None:
    gaps = []
    for seed in range(first, first + 20):
        network, rows, labels = layers(seed, 4 + seed % 3)
        least = best(network, rows)
        try:
            found = solve(network, rows=rows, alike=labels)
        except PlanError:
            assert math.isinf(least)  # what is feasible is found
            continue
        total = network.cost(found.choice)
        assert rows[0].used(network, found.choice) <= rows[0].limit
        total += max(rows[1].used(network, found.choice), 0.0) * rows[1].price
        assert found.cost == pytest.approx(total)
        assert found.lower_bound <= least + 1e-9 <= found.cost + 2e-9
        gaps.append((found.cost - least) / max(least, 1.0))
    assert np.median(gaps) < 0.05


@pytest.mark.slow
def test_the_bound_of_many_layers_is_nearly_their_least_cost() -> None:
    for seed in range(8):
        network, _, labels = layers(seed, 40)
        of = [hash(label) if label else i for i, label in enumerate(labels)]
        least, (lower, _) = solve(network).cost, tied_bound(network, of)
        assert lower <= least + 1e-9
        assert least - lower <= 0.03 * least


def diamonds(seed: int, count: int, size: int = 6) -> tuple[CostNetwork, list[int]]:
    """Layers of two nodes, each joined to both of the layer before, between two ends that want something else; and classes."""
    generator = np.random.default_rng(seed)

    def table(most: int, *shape: int) -> np.ndarray:
        return generator.integers(0, most, shape).astype(np.float64)

    inside, skip, between = (table(20, size, size) for _ in range(3))
    nodes, edges = [table(20, size)] * (2 * count), []
    for at in range(0, 2 * count, 2):
        edges += [(at, at + 1, inside)]
        edges += [(at - 2, at, skip), (at - 1, at, between)] if at else []
    nodes[0], nodes[-1] = table(200, size), table(200, size)
    return CostNetwork(tuple(nodes), tuple(edges)), [0, 1, *(2 + k % 2 for k in range(2 * count - 4)), 4, 5]


@pytest.mark.slow
def test_what_the_ends_want_is_shared_by_the_layers_between(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = [diamonds(seed, 20) for seed in range(12)]
    least = [solve(network).cost for network, _ in networks]

    def gaps() -> np.ndarray:
        found = [tied_bound(*each)[0] for each in networks]
        assert all(lower <= cost + 1e-9 for lower, cost in zip(found, least, strict=True))
        return 1 - np.array(found) / least

    assert gaps().max() < 1e-9  # what has two neighbours is joined
    monkeypatch.setattr(LIMITS, "quick_join", 0)
    assert gaps().mean() < 0.04
    monkeypatch.setattr(LIMITS, "last_sweep_entries", 0)  # as if the tables were large: much is promised
    assert gaps().mean() < 0.04
    monkeypatch.setattr(LIMITS, "last_sweeps", 0)
    assert gaps().mean() > 0.2


@pytest.mark.slow
def test_what_is_joined_unlike_its_copies_is_swept_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """But where some bound is enough; before the sweeps through all copies, which make up for most of it here."""
    monkeypatch.setattr(LIMITS, "quick_join", 0)
    monkeypatch.setattr(LIMITS, "last_sweeps", 0)
    networks = [diamonds(seed, 20) for seed in range(24)]
    with_them, without = ([tied_bound(*each, enough=enough)[0] for each in networks] for enough in (math.inf, 1e9))
    assert all(a >= b for a, b in zip(with_them, without, strict=True))
    least = [solve(network).cost for network, _ in networks]
    gaps = [sum(1 - x / c for x, c in zip(found, least, strict=True)) for found in (with_them, without)]
    assert gaps[0] < 0.5 * gaps[1]


@pytest.mark.slow
def test_one_sweep_more_may_be_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMITS, "quick_join", 0)
    networks = [diamonds(seed, 20) for seed in range(24)]
    least = [solve(network).cost for network, _ in networks]

    def reached() -> int:
        found = [tied_bound(*each, enough=cost)[0] for each, cost in zip(networks, least, strict=True)]
        assert all(lower <= cost + 1e-9 for lower, cost in zip(found, least, strict=True))
        return sum(lower >= cost * (1 - 1e-9) for lower, cost in zip(found, least, strict=True))

    several = reached()
    monkeypatch.setattr(LIMITS, "last_sweeps", 1)
    assert 0 < reached() < several < len(networks)


@pytest.mark.slow
def test_alike_nodes_differ_where_that_costs_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without hard rows the messages of the bound lead to a choice, too: here the ends want something of all layers."""
    cases = [diamonds(seed, 20) for seed in range(12)]
    least = np.array([solve(network).cost for network, _ in cases])

    def costs() -> np.ndarray:
        return np.array([solve(network, alike=of).cost for network, of in cases])

    found = costs()
    assert (found >= least - 1e-9).all()
    assert (found / least).max() < 1 + LIMITS.enough
    monkeypatch.setattr(LIMITS, "enough", math.inf)
    assert (costs() / least).mean() > 1.03


def test_equal_messages_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    network, _ = diamonds(0, 40, 32)
    computed, least = [], _Edge.least
    monkeypatch.setattr(_Edge, "least", lambda self, side: computed.append(1) or least(self, side))
    found = {}
    for shared in (True, False):
        dual = Dual(Eliminator.of(network, Tables()), alike=shared)
        computed.clear()
        for _ in range(4):
            dual.sweep(math.inf)
        found[shared] = dual.bound, len(computed)
    assert found[True][0] == found[False][0]
    assert found[True][1] < 0.9 * found[False][1]
    assert found[False][1] < 2.5 * 4 * len(network.edges)  # two for each edge in a sweep: others were moved before


def test_labels_of_unlike_tables_tie_nothing() -> None:
    network, rows, labels = layers(3, 4)
    other = CostNetwork(tuple(a + 0.01 * i for i, a in enumerate(network.nodes)), network.edges)
    assert solve(other, rows=rows, alike=labels).cost == solve(other, rows=rows).cost


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_prepared_once_serves_all_limits(tied: bool) -> None:
    """As if prepared for each of them, whichever came before; the bound is found when it is asked for."""
    waited = set()
    for seed in range(8):
        network, rows, labels = layers(seed, 4)
        alike = labels if tied else None
        prepared = Prepared(network, rows, alike)
        for share in (1.0, 0.8, 1.3, 1.0):
            limits = share * rows[0].limit, rows[1].limit
            alone = (LinearRow(rows[0].nodes, rows[0].edges, limits[0]), rows[1])
            try:
                found = prepared.solve(limits)
            except PlanError:
                with pytest.raises(PlanError):
                    solve(network, rows=alone, alike=alike)
                continue
            waited.add(found.prove is not None)
            proven, fresh = found.proven(), solve(network, rows=alone, alike=alike)
            assert (proven.cost, proven.lower_bound, proven.exact) == (fresh.cost, fresh.lower_bound, fresh.exact)
            assert proven.prove is None
            assert proven.lower_bound <= best(network, alone) + 1e-9
    assert waited == {tied}


def test_a_rough_search_can_be_searched_on() -> None:
    """In it equal layers choose alike; from there the search ends where it would have without it."""
    dearer = 0
    for seed in range(8):
        network, rows, labels = layers(seed, 5)
        try:
            rough = Prepared(network, rows, labels).solve(effort=Effort(rough=True))
        except PlanError:
            continue
        if rough.search_on is None:  # layers had to differ
            continue
        layer = np.array(rough.choice[:-2]).reshape(5, 3)
        assert (layer == layer[0]).all()
        found, direct = rough.search_on(), Prepared(network, rows, labels).solve()
        assert found.search_on is None
        assert (found.choice, found.cost) == (direct.choice, direct.cost)
        dearer += rough.cost > found.cost
    assert dearer


def test_the_bound_is_a_number_where_choices_are_forbidden() -> None:
    """Infinite messages are not taken from one another."""
    generator, count = np.random.default_rng(0), 6
    down, along = (generator.integers(0, 9, (3, 3)).astype(np.float64) for _ in range(2))
    down[2], along[:, 1] = math.inf, math.inf
    edges = [(2 * i, 2 * i + 1, down) for i in range(count)]
    edges += [(i, i + 2, along) for i in range(2 * (count - 1))]
    network = CostNetwork(tuple(np.arange(3.0) for _ in range(2 * count)), tuple(edges))
    with np.errstate(invalid="raise"):
        assert 0 < tied_bound(network, [i % 2 for i in range(2 * count)])[0] <= best(network, ()) + 1e-9


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_prepared_needs_no_other_tables(tied: bool) -> None:
    """Network and rows are views of what is solved: costs, sums and solutions are those of the tables they came from."""
    for seed in range(6):
        network, rows, labels = layers(seed, 4)
        network = CostNetwork(
            network.nodes, (*network.edges, (1, 0, np.ones((network.nodes[1].size, network.nodes[0].size))))
        )
        rows = tuple(LinearRow(row.nodes, (*row.edges, None), row.limit, row.price) for row in rows)
        full = Prepared(network, rows, labels if tied else None)
        lean = Prepared(network, rows, labels if tied else None).lean()
        assert all(
            np.shares_memory(vector, lean.stacks.arrays[lean._problem.factors[i,]])
            for i, vector in enumerate(lean.network.nodes)
        )
        try:
            found = full.solve().proven()
        except PlanError:
            with pytest.raises(PlanError):
                lean.solve()
            continue
        again = lean.solve().proven()
        assert (again.choice, again.cost, again.lower_bound) == (found.choice, found.cost, found.lower_bound)
        assert lean.network.cost(found.choice) == pytest.approx(network.cost(found.choice))
        for one, other in zip(lean.rows, rows, strict=True):
            assert one.used(lean.network, found.choice) == pytest.approx(other.used(network, found.choice))
        ones = tuple(np.ones(vector.size) for vector in network.nodes)
        free = [LinearRow(ones, (None,) * len(of.network.edges), 1e9) for of in (lean, full)]
        more = (Prepared(of.network, (*of.rows, row), of.alike) for of, row in zip((lean, full), free, strict=True))
        assert [of.solve().cost for of in more] == pytest.approx([found.cost] * 2)
