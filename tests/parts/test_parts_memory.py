"""Memory of models in parts: the sum over a step, and plans of each part within what the others leave."""

from __future__ import annotations

import copy

import pytest
import torch
from harness import ideal
from torch import nn

import autoshard
from autoshard.errors import BudgetError
from autoshard.module.parts.memory import HeldMemory
from autoshard.module.ranks import agreement

AXES = {"tp": 2}


class Two(nn.Module):
    """Two parts and a head with plain code between; the head has the first one's weight."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.one, self.other = (
            nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)) for _ in "ab"
        )
        self.head, self.scale = nn.Linear(width, width), nn.Parameter(torch.ones(width))
        self.head.weight = self.one[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x) * self.scale
        return x if float(x.detach().sum()) > 1e9 else self.head(self.other(x)).square().mean()


def _two(width: int = 16) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Two(width).double(), torch.randn(64, width).double()


def _sharded_bytes(sharded: autoshard.ShardedModule) -> float:
    """Bytes of all parameters on a rank."""
    each = {id(p): (n, p) for n, p in sharded.named_parameters(remove_duplicate=False)}
    return sum(8 * torch.Size(sharded.plan.layouts[n].local_shape(p.shape, 0)).numel() if n in sharded.plan.layouts
               else 8 * p.numel() for n, p in each.values())  # fmt: skip


def test_the_sum_of_the_parts() -> None:
    """Tensors count once, also tied ones and those of plain code; each call adds what its backward reads."""
    model, x = _two()
    sharded = autoshard.compile(model, ideal(AXES), (x,), optimizer="adamw")
    assert sharded.parts == ("one", "other", "head")
    memory, plans = sharded.plan.memory, sharded.plans
    assert memory.parameters == memory.gradients == _sharded_bytes(sharded)
    assert memory.optimizer == 2 * memory.parameters
    assert sum(memory.at_peak.values()) == memory.peak == sharded.plan.cost.memory_bytes
    assert memory.peak < sum(p.memory.peak for p in plans.values())  # not all at once
    assert memory.peak > max(p.memory.peak for p in plans.values()) + memory.optimizer / 4
    inputs = x.nbytes * 3
    assert memory.activations == sum(p.memory.activations for p in plans.values()) + inputs
    held = HeldMemory(sharded, training=True)
    alone = held.of("other")
    assert sum((held.total - alone).values()) == sum(held.by_others("other", []).values())
    assert held.by_others("other", ["one"])["gradients"] < held.by_others("other", [])["gradients"]
    one = autoshard.compile(nn.Sequential(model.one, model.other, model.head), ideal(AXES), (x,)).plan.memory
    assert memory.peak == pytest.approx(one.peak, rel=0.3)


def test_the_part_that_prevents_a_budget_is_named() -> None:
    model, x = _two(8)
    with pytest.raises(
        BudgetError, match=r"Two does not fit into 4 kB per rank: part '\w+' \(\w+\) prevents it"
    ) as error:
        autoshard.compile(model, ideal(AXES), (x,), memory_budget=4e3)
    assert error.value.peak > 4e3
    sharded = autoshard.compile(model, ideal(AXES), memory_budget=4e3)
    with pytest.raises(BudgetError, match="prevents it"):  # the first call compiles
        sharded(x)
    assert torch.equal(model(x), Two.forward(model, x))


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [True, False])
def test_parts_share_a_budget(ahead: bool) -> None:
    model, x = _two(32)
    mesh = autoshard.Mesh({"dp": 2}, hardware="h100")
    free = autoshard.compile(copy.deepcopy(model), mesh, (x,)).plan.memory.peak
    budget = 0.75 * free
    sharded = autoshard.compile(model, mesh, (x,) if ahead else (), memory_budget=budget)
    loss = sharded(x)
    assert sharded.plan.memory.peak <= budget == sharded.plan.memory_budget
    assert all(plan.memory_budget is not None and plan.memory_budget < budget for plan in sharded.plans.values())
    loss.backward()
    expected = model(x)
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    for name, gradient in sharded.full_gradients().items():
        torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-9, atol=1e-12)


def test_an_error_of_rank_0_is_the_same_on_the_others() -> None:
    """They plan again, too, where rank 0 found no plan."""
    kept, plain = BudgetError("no plan", 3e3), KeyError("a")
    kept.untraceable = True
    same = agreement._error_from_json(agreement._error_as_json(kept))
    assert (type(same), str(same), same.peak, same.untraceable) == (BudgetError, "no plan", 3e3, True)
    assert type(agreement._error_from_json(agreement._error_as_json(plain))) is KeyError
