"""What the search under a limit over time is made of: what cannot fit, changes of a part, neighbourhoods, the clock."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from search_problems import problem

from autoshard.errors import PlanError
from autoshard.passes.search import CostNetwork, solve
from autoshard.passes.search.exact import solver
from autoshard.passes.search.exact.milp import CoreSolution
from autoshard.passes.search.limits import LIMITS
from autoshard.passes.search.network import Array

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from contest import search
from contest.branch_and_bound import solve_below
from contest.liveness import Domains, LivenessProblem, Memory, least_between
from contest.local_search import Best, Neighbourhoods
from contest.search import solve_within_memory
from contest.subgradient import Core, subgradient_prices


def feasible(network: CostNetwork, memory: Memory) -> list[tuple[int, ...]]:
    lives = LivenessProblem.of(network, memory)
    choices = itertools.product(*(range(v.size) for v in network.nodes))
    return [choice for choice in choices if lives.judge(choice)[:2] == (0, 0.0)]


def test_only_what_no_choice_contains_is_dropped() -> None:
    dropped = none = 0
    for seed in range(40):
        network, memory = problem(seed, nodes=5, limit=9.0)
        domains = Domains.of(LivenessProblem.of(network, memory), math.inf)
        possible = feasible(network, memory)
        if domains is None:
            none += 1
            assert not possible
            continue
        for node, kept in enumerate(domains.kept):
            assert {choice[node] for choice in possible} <= set(kept.tolist())
            dropped += network.nodes[node].size - len(kept)
    assert dropped > 40
    assert none < 20


def test_the_cheapest_within_a_limit_over_time_beside_brute_force() -> None:
    exact = 0
    for seed in range(8):
        network, memory = problem(seed, nodes=5, limit=9.0)
        possible = feasible(network, memory)
        if not possible:
            with pytest.raises(PlanError):
                solve_within_memory(network, memory)
            continue
        found, best = solve_within_memory(network, memory), min(map(network.cost, possible))
        assert found.choice in possible
        assert found.lower_bound <= best <= found.cost
        assert not found.exact or found.cost == best
        exact += found.exact
    assert exact > 3


def test_the_least_between() -> None:
    values = np.random.default_rng(0).random(13)
    first, last = np.array([(a, b) for a in range(14) for b in range(a, 14)]).T
    expected = [values[a:b].min(initial=math.inf) for a, b in zip(first, last, strict=True)]
    assert least_between(values, first, last).tolist() == expected


def test_a_changed_part_is_judged_as_the_whole() -> None:
    network, memory = problem(0, nodes=30, limit=20.0)
    lives = LivenessProblem.of(network, memory)
    generator = np.random.default_rng(0)
    best = Best(lives, tuple(int(generator.integers(v.size)) for v in network.nodes))
    taken = 0
    for _ in range(300):
        nodes = generator.choice(30, 4, replace=False).tolist()
        taken += best.change({node: int(generator.integers(network.nodes[node].size)) for node in nodes})
        forbidden, excess, cost = lives.judge(best.choice)
        assert (best.forbidden, best.excess) == (forbidden, excess)
        assert best._cost == pytest.approx(cost, abs=1e-9)
        assert best.used.tolist() == lives.sums(lives.held(best.choice)).tolist()
        forbidding = [{i, j} for i, j, matrix in network.edges if math.isinf(matrix[best.choice[i], best.choice[j]])]
        assert all(pair & set(best.broken) for pair in forbidding)
        assert set(best.broken) <= set().union(*forbidding)
        seed = Neighbourhoods(best, solve_below, math.inf, [], [], [])._seed()
        assert not forbidding or any(seed in pair for pair in forbidding)
    assert taken > 10


@pytest.mark.slow
def test_neighbourhoods_alone_come_near_the_best() -> None:
    network, memory = problem(1, nodes=40, limit=20.0)
    lives = LivenessProblem.of(network, memory)
    exact = solve_within_memory(network, memory, effort=0.2)
    start = tuple(int(np.argmin(usage)) for usage in memory.usage)
    best = Best(lives, start)
    assert best.forbidden
    near = Neighbourhoods(best, solve_below, math.inf, [start], list(network.nodes), [0.0] * 40)
    near.sizes = dict.fromkeys(itertools.product((False, True), repeat=2), 12.0)
    for _ in range(60):
        near.step()
    assert exact.lower_bound <= best.cost <= 1.1 * exact.cost


@pytest.mark.slow
def test_messages_and_windows_come_near_the_best_of_a_large_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gap to the bound tells where to search: windows anywhere else better little."""
    network, memory = problem(1, nodes=200, limit=20.0)
    lives = LivenessProblem.of(network, memory)

    def found(aim: Callable[[Array], Array]) -> tuple[float, float]:
        best = Best(lives, tuple(int(np.argmin(usage)) for usage in memory.usage))
        assert best.forbidden
        messages = subgradient_prices(best, 20, 1.0, math.inf)
        near = Neighbourhoods(best, solve_below, math.inf, messages.seen, messages.scores, [0.0] * 200, messages.prices)
        for beside in (False, True):
            near.aim(lambda choice: aim(messages.core.gaps(choice)), 40, beside)
        return best.cost, messages.bound

    cost, bound = found(lambda gaps: gaps)
    assert bound <= cost <= 1.04 * bound
    assert found(np.zeros_like)[0] > cost
    monkeypatch.setattr(search, "MAX_NEIGHBOURHOOD", 199)
    monkeypatch.setattr(search, "WINDOWS", (40, 80))
    monkeypatch.setattr(search, "NEIGHBOURHOODS", 4)
    whole = solve_within_memory(network, memory)
    assert whole.lower_bound <= whole.cost <= 1.02 * whole.lower_bound


def test_what_is_left_at_prices_is_what_the_whole_network_costs() -> None:
    """The bound of a tree is exact, whatever was repriced before; a choice costs its gaps more than the bound."""
    generator = np.random.default_rng(0)
    for seed in range(20):
        network, memory = problem(seed, nodes=9, limit=1.0, never=0.05)
        lives = LivenessProblem.of(network, memory)
        core = Core(lives)
        for _ in range(3):
            prices = generator.random(lives.count) * (generator.random(lives.count) < 0.5)
            core.reprice(prices)
            for _ in range(30):
                core.dual.sweep(math.inf)
            weights = lives.weights(prices)
            paid = [c + w * u for c, w, u in zip(network.nodes, weights, lives.usage, strict=True)]
            at = CostNetwork(tuple(paid), network.edges)
            best = solve(at)
            assert core.dual.bound <= best.cost - prices @ lives.room + 1e-9
            choice = core.decode()
            assert at.cost(choice) - prices @ lives.room == pytest.approx(core.dual.bound + core.gaps(choice).sum())


@pytest.mark.slow
def test_the_time_limit_holds_for_a_large_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", time.process_time)  # whatever else the machine does
    network, memory = problem(2, nodes=3000, limit=40.0, alive=4, never=0.0)
    begin = time.process_time()
    solve_within_memory(network, memory, 0.0)  # what no limit saves: reading the problem
    middle = time.process_time()
    found = solve_within_memory(network, memory, 1.5)
    assert time.process_time() - middle < 1.5 + 1.25 * (middle - begin)
    lives = LivenessProblem.of(network, memory)
    assert lives.judge(found.choice)[:2] == (0, 0.0)
    assert found.lower_bound <= found.cost == network.cost(found.choice)


def test_what_cannot_fit_is_told() -> None:
    """Each strategy would fit beside the least of the other node; those that are allowed together do not."""
    usage, apart = np.array([1.0, 5.0]), np.array([[math.inf, 0.0], [0.0, math.inf]])
    network = CostNetwork((np.zeros(2),) * 2, ((0, 1, apart),))
    assert solve_within_memory(network, Memory((usage,) * 2, 6.0, ((0, 2),) * 2)).exact
    with pytest.raises(PlanError, match=r"no choice that costs do not forbid fits the limit of 5\.5"):
        solve_within_memory(network, Memory((usage,) * 2, 5.5, ((0, 2),) * 2))


def test_what_was_not_found_in_time_is_not_proven_to_be_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound stays that of message passing where the MILP solver's time is up; else a proof would follow from it."""
    generator = np.random.default_rng(0)
    pairs = itertools.combinations(range(9), 2)
    network = CostNetwork((np.zeros(6),) * 9, tuple((i, j, generator.random((6, 6))) for i, j in pairs))
    best = solve_below(network, math.inf, math.inf).cost
    monkeypatch.setattr(LIMITS, "max_join", 0)
    monkeypatch.setattr(LIMITS, "easy_join", 0)
    monkeypatch.setattr(solver.Eliminator, "cost", lambda self, choice: math.inf)  # nor do the messages find one
    monkeypatch.setattr(solver, "solve_core", lambda *args, **kwargs: CoreSolution(None, -math.inf, False))
    found = solve_below(network, math.inf, math.inf)
    assert found.choice == ()
    assert found.lower_bound <= best


def mortal(seed: int, nodes: int = 60) -> tuple[CostNetwork, Memory]:
    """A chain with short cuts whose nodes live for a while: cheaper strategies hold more, and the limit binds."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(2, 9, nodes)
    cost = tuple(np.sort(generator.integers(0, 50, n)).astype(np.float64) for n in sizes)
    usage = tuple(np.sort(generator.integers(1, 30, n)).astype(np.float64)[::-1].copy() for n in sizes)
    pairs = [(i, i + 1) for i in range(nodes - 1)] + [(i, i + 5) for i in range(0, nodes - 5, 3)]
    edges = tuple((i, j, generator.integers(0, 20, (sizes[i], sizes[j])).astype(np.float64)) for i, j in pairs)
    lives = tuple((i, i + int(generator.integers(0, 12))) for i in range(nodes))
    return CostNetwork(cost, edges), Memory(usage, 100.0, lives)


@pytest.mark.parametrize("seed", range(3))
def test_a_choice_within_the_memory_is_there_when_the_time_is_up(seed: int) -> None:
    network, memory = mortal(seed)
    found, lives = solve_within_memory(network, memory, 1.0), LivenessProblem.of(network, memory)
    assert lives.judge(found.choice)[1] == 0
    assert lives.judge(solve(network).choice)[1] > 0  # it does bind
    assert found.lower_bound <= found.cost == network.cost(found.choice)


@pytest.mark.slow
def test_without_a_time_limit_the_search_is_the_same_every_time() -> None:
    network, memory = mortal(3, nodes=30)
    first, second = (solve_within_memory(network, memory, effort=0.2) for _ in range(2))
    assert (first.choice, first.lower_bound) == (second.choice, second.lower_bound)
