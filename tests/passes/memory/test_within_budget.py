"""Plans within a memory budget beside those of experts within the same one, and what their bound says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoshard
from autoshard import models
from autoshard.errors import PlanError
from autoshard.plans import planning

NAMES = ("replicate", "ddp", "fsdp", "megatron", "megatron-sp")


class Thrice(nn.Module):
    """One parameter read by every product: temporaries of its gradient are most of the peak, and no sum knows of them."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(30, 30))
        self.frozen = nn.Linear(30, 30).requires_grad_(False) if frozen else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.frozen(x @ self.weight))
        return x + x @ self.weight.t()


def planned(model: nn.Module, ranks: int, hardware: str = "h100", **how: Any) -> autoshard.Plan:
    mesh = autoshard.Mesh({"a": ranks}, hardware)
    return autoshard.plan(model, mesh, (torch.zeros(8, 30),), optimizer="sgd", **how)


@pytest.mark.slow_cases("[28]")
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_no_expert_is_cheaper_within_the_budget(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = [planned(Thrice(), ranks, like=name) for name in NAMES]
    found = []
    for budget in sorted({plan.memory.peak for plan in experts}):
        free = planned(Thrice(), ranks, memory_budget=budget)
        assert free.memory.peak <= budget
        within = [plan.cost.total_s for plan in experts if plan.memory.peak <= budget]
        assert free.cost.total_s <= min(within) * (1 + 1e-9)
        assert free.cost.lower_bound <= min(within) * (1 + 1e-9)
        found.append((budget, free.cost.total_s))
    # negative control: the search by itself finds a dearer one, or none
    monkeypatch.setattr(planning, "baseline_strategies", lambda *what: ())

    def alone(budget: float) -> float:
        try:
            return planned(Thrice(), ranks, memory_budget=budget).cost.total_s
        except PlanError:
            return float("inf")

    assert any(alone(budget) > seconds * 1.1 for budget, seconds in found)


@pytest.mark.slow
def test_an_expert_is_searched_within_the_budget_too() -> None:
    """The one that is quickest there is over it in its quickest form."""
    assert planned(Thrice(), 8, like="ddp").memory.peak > 12400.0
    found, expert = (planned(Thrice(), 8, memory_budget=12400.0, like=like) for like in (None, "ddp"))
    assert found.memory.peak <= 12400.0
    assert found.cost.total_s <= expert.cost.total_s * (1 + 1e-9)


@pytest.mark.slow_cases("[28]-*")
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "budget"), [(2, 18360.0), (4, 16920.0), (8, 17056.0)])
def test_no_plan_that_fits_is_below_the_bound(ranks: int, budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The search by itself is under limits that it learns from what it finds; others may hold more, and fit."""
    expert = planned(Thrice(frozen=True), ranks, "a100", memory_budget=budget, like="ddp")
    monkeypatch.setattr(planning, "baseline_strategies", lambda *what: ())
    free = planned(Thrice(frozen=True), ranks, "a100", memory_budget=budget)
    assert free.cost.total_s > expert.cost.total_s
    assert 0 < free.cost.lower_bound <= expert.cost.total_s


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp", "gpt", "llama", "moe", "dlrm", "vit"])
@pytest.mark.parametrize("axes", [{"a": 2}, {"a": 2, "b": 2}])
def test_no_expert_is_cheaper_within_any_budget(name: str, axes: dict[str, int]) -> None:
    reference = models.get(name)
    args, kwargs = reference.inputs(batch=8)
    model, mesh = reference.model(), autoshard.Mesh(axes, "cpu")

    def plan(**how: Any) -> autoshard.Plan:
        return autoshard.plan(model, mesh, args, kwargs, **how)

    free = plan()
    least = min(
        (plan(like=like, memory_budget=1e12) for like in NAMES), key=lambda found: found.memory.peak
    ).memory.peak
    for share in (0.1, 0.5, 0.9):
        budget = least + share * (free.memory.peak - least)
        found = plan(memory_budget=budget)
        assert found.memory.peak <= budget
        for like in NAMES:
            try:
                expert = plan(like=like, memory_budget=budget)
            except PlanError:
                continue
            assert found.cost.total_s <= expert.cost.total_s * (1 + 1e-9), (like, budget)
            assert found.cost.lower_bound <= expert.cost.total_s * (1 + 1e-9), (like, budget)
