"""How many stages a rank has where a schedule interleaves: asked for, or chosen."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autoshard
from autoshard import Link, Mesh, Plan
from autoshard.errors import PlanError
from autoshard.hardware import PRESETS


class Layers(nn.Module):
    """``count`` equal layers, and a mean of squares as the loss."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def planned(mesh: Mesh, **asked: Any) -> Plan:
    with torch.device("meta"):
        model, x = Layers(8, 1024), torch.zeros(4096, 1024)
    return autoshard.plan(model, mesh, (x,), **{"training": True, "stages": "pp", "micro_batches": 2, **asked})


def of_each(plan: Plan) -> int:
    assert plan.staged is not None
    return len(plan.staged.plans) // plan.mesh.size_of("pp")


@pytest.mark.slow
@pytest.mark.parametrize(("bandwidth", "each"), [(1e15, 4), (2e9, 2)])
def test_as_many_as_make_the_step_shortest(bandwidth: float, each: int) -> None:
    """Of eight layers on two ranks: a layer each where messages cost nothing, and two stages a rank where they do."""
    link = Link(0.0, bandwidth)
    mesh = Mesh({"pp": 2}, replace(PRESETS["h100"], node=link, network=link))
    chosen = planned(mesh, schedule="interleaved")
    assert of_each(chosen) == each
    steps = {n: planned(mesh, schedule="interleaved", stages_per_rank=n).cost.total_s for n in (2, 3, 4)}
    assert chosen.cost.total_s == steps[each] == min(steps.values())
    assert len({*steps.values()}) == 3


def test_each_stage_more_shortens_the_bubble() -> None:
    """(p - 1) / (v m) of the work of a rank, for equal stages (Narayanan et al. 2021)."""
    mesh = Mesh({"pp": 2}, replace(PRESETS["h100"], node=Link(0.0, 1e15), network=Link(0.0, 1e15)))
    costs = [planned(mesh, schedule="interleaved", stages_per_rank=n).cost for n in (2, 4)]
    for n, cost in zip((2, 4), costs, strict=True):
        assert cost.bubble_s == pytest.approx(cost.compute_s / (n * 2), rel=0.1)  # the optimizer is in neither


@pytest.mark.slow
def test_a_plan_that_is_given_says_how_many() -> None:
    mesh, model, x = Mesh({"pp": 2}, PRESETS["h100"]), Layers(6, 8), torch.randn(8, 8)
    asked: dict[str, Any] = {"stages": "pp", "micro_batches": 2, "schedule": "interleaved"}
    assert of_each(autoshard.compile(model, mesh, (x,), **asked).plan) == 2
    made = autoshard.compile(model, mesh, (x,), stages_per_rank=3, **asked).plan
    plan = Plan.from_json(made.to_json())
    again = autoshard.compile(model, mesh, (x,), plan=plan).plan
    assert again.staged is not None
    assert made.staged is not None
    assert again.staged.boundaries == made.staged.boundaries
    assert of_each(again) == 3
    with pytest.raises(PlanError, match=r"stages_per_rank=5: the given plan was made for stages_per_rank=3"):
        autoshard.compile(model, mesh, (x,), plan=plan, stages_per_rank=5, **asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"stages_per_rank": 2}, "stages_per_rank=2, but '1f1b' runs one"),
        ({"stages_per_rank": 1, "schedule": "interleaved"}, "stages_per_rank=1, but 'interleaved' runs several"),
        ({"stages_per_rank": 0, "schedule": "zero_bubble"}, "stages_per_rank=0 is not a number of stages, such as 2"),
        ({"stages_per_rank": True, "schedule": "zero_bubble"}, "stages_per_rank=True is not a number of stages"),
        ({"stages_per_rank": 2, "stages": None}, "stages_per_rank=2 needs stages"),
        ({"stages_per_rank": 20, "schedule": "interleaved"}, "40 stages: the model has"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(Mesh({"pp": 2}, PRESETS["h100"]), **asked)


@pytest.mark.slow
def test_a_second_program_has_as_many() -> None:
    """In training and without gradients, and for another batch: parameters stay in their stages."""
    torch.manual_seed(0)
    model, x = Layers(6, 8).double(), torch.randn(8, 8, dtype=torch.float64)
    mesh = Mesh({"pp": 2}, PRESETS["ideal_network"])
    sharded = autoshard.compile(model, mesh, (x,), stages="pp", micro_batches=2, schedule="interleaved")
    assert of_each(sharded.plan) == 3
    for batch in (x, x[:4]):
        loss, expected = sharded(batch), model(batch)
        loss.backward()
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
        with torch.no_grad():
            torch.testing.assert_close(sharded(batch), expected, rtol=1e-12, atol=0)
    assert of_each(sharded.plan) == 3
