"""The lower bound under a memory budget against plans that fit: no simulated plan within the budget is cheaper."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard import Mesh
from autoshard.compiler import capture_graph
from autoshard.passes.memory import lower_and_simulate, search_within_memory
from autoshard.passes.propagate.network import BuiltNetwork
from autoshard.passes.propagate.planner import Planner, decode_assignment
from autoshard.passes.search import Solution


class Tail(nn.Module):
    """A block, then operations whose workspaces never exist together."""

    def __init__(self, size: int = 64, after: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size, bias=False)])
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        for _ in range(self.after):
            x = torch.softmax(x, -1)
        return x.square().mean()


def test_a_larger_budget_has_no_bound_above_a_plan_that_fits_it() -> None:
    """Workspaces of the tail are no sum that a bound may count: with them a cheaper plan would seem too large."""
    mesh, x = Mesh({"a": 2}, "h100"), torch.zeros(16, 64)
    small, large = (
        autoshard.plan(Tail(), mesh, (x,), memory_budget=budget, recompute="none") for budget in (77828, 92163)
    )
    assert small.memory.peak <= 77828
    assert 0 < large.lower_bound <= small.cost.total_s * (1 + 1e-9)


def test_sums_of_the_bound_count_no_workspace_of_the_tail() -> None:
    graph = capture_graph(Tail(), (torch.zeros(16, 64),), {}, training=True)
    planner = Planner(graph, Mesh({"a": 2}, "h100"), {}, recompute="none")
    found = planner.least()
    peak, built = lower_and_simulate(found, "adamw")[1].peak, planner.network(limited=True)[1]
    with_work, without = (
        row.used(built.network, found.solution.choice) for row in (built.kept[0], built.least_kept[0])
    )
    assert without < with_work
    assert without <= peak


def _choices_below(built: BuiltNetwork, top: float) -> Iterator[tuple[float, tuple[int, ...]]]:
    """All choices cheaper than ``top``, by depth-first enumeration."""
    network, count = built.network, len(built.network.nodes)
    before: list[list[tuple[int, torch.Tensor]]] = [[] for _ in range(count)]
    for i, j, table in network.matrices:
        before[max(i, j)].append((min(i, j), table.T if i < j else table))
    least = [float(v.min()) + sum(float(m.min()) for _, m in before[k]) for k, v in enumerate(network.nodes)]
    rest = [sum(least[k:]) for k in range(count + 1)]

    def below(choice: tuple[int, ...], cost: float) -> Iterator[tuple[float, tuple[int, ...]]]:
        if (k := len(choice)) == count:
            total = cost + sum(max(0.0, r.used(network, choice) - r.limit) * r.price for r in built.hiding)
            if total < top:
                yield total, choice
            return
        costs = network.nodes[k] + sum(m[:, choice[j]] for j, m in before[k])
        for state, own in enumerate(costs.tolist()):
            if cost + own + rest[k + 1] < top:
                yield from below((*choice, state), cost + own)

    return below((), 0.0)


@pytest.mark.slow
def test_no_choice_that_fits_is_cheaper_than_the_bound() -> None:
    graph, mesh = capture_graph(Tail(), (torch.zeros(16, 64),), {}, training=True), Mesh({"a": 2}, "h100")

    def planner() -> Planner:
        return Planner(graph, mesh, {}, optimizer="sgd", recompute="none")

    network, built = (own := planner()).network(limited=True)
    low = lower_and_simulate(own.least(), "sgd")[1].peak
    high = lower_and_simulate(planner().cheapest(), "sgd")[1].peak
    tried = 0
    for share in (0.2, 0.5, 0.8):
        budget = low + share * (high - low)
        bound = search_within_memory(planner(), budget)[0].assignment.solution.lower_bound
        assert bound > 0
        for cost, choice in sorted(_choices_below(built, bound * (1 - 1e-9)))[:200]:
            tried += 1
            solution = Solution(choice, cost, 0.0, False)
            assert lower_and_simulate(decode_assignment(network, solution), "sgd")[1].peak > budget
    assert tried
