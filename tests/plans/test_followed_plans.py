"""What a followed plan keeps of the plan: optimizer, bound, memory budget, and the strategies beside it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autoshard
import autoshard.models
from autoshard import Mesh
from autoshard.errors import PlanError
from autoshard.report.explain import _layout_reason
from autoshard.report.summary import optimality_text

MESH, X = Mesh({"a": 2}, "h100"), torch.zeros(64, 64)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def test_a_followed_plan_keeps_its_optimizer_and_budget() -> None:
    plan = autoshard.plan(model(), MESH, (X,), optimizer="sgd", memory_budget=12e6)
    followed = autoshard.compile(model(), MESH, (X,), plan=plan).plan
    assert (followed.optimizer, followed.memory_budget) == ("sgd", 12e6)
    assert followed.memory.peak == plan.memory.peak
    assert followed.lower_bound == plan.lower_bound > 0


def test_the_bound_of_another_optimizer_is_dropped() -> None:
    plan = autoshard.plan(model(), MESH, (X,), optimizer="adamw")
    followed = autoshard.compile(model(), MESH, (X,), plan=plan, optimizer="sgd").plan
    assert followed.optimizer == "sgd"
    assert followed.lower_bound == 0
    assert optimality_text(followed).startswith("not compared")
    assert "has no bound" in _layout_reason(followed, "0.weight")
    assert plan.lower_bound > 0  # negative control
    assert "has no bound" not in _layout_reason(plan, "0.weight")


def test_beside_a_followed_plan_is_the_free_one_and_its_own_strategy_once() -> None:
    plan = autoshard.plan(model(), MESH, (X,), like="fsdp")
    followed = autoshard.compile(model(), MESH, (X,), plan=plan).plan
    names = [row[0] for row in followed.compared]
    assert [n for n in names if n in ("fsdp", "like='fsdp'")] == ["like='fsdp'"]
    assert "free" in names


def test_a_serving_plan_is_checked_like_others() -> None:
    reference = autoshard.models.get("gpt")
    args, _ = reference.inputs(batch=2)
    served, tokens = reference.model().eval(), args[:1]
    how = {"training": False, "objective": "throughput", "memory_budget": 1e9, "like": "megatron"}
    plan = autoshard.plan(served, MESH, tokens, **how)
    assert plan.memory_budget == 1e9
    assert autoshard.compile(served, MESH, tokens, plan=plan, training=False).plan.mesh == MESH  # negative control
    with pytest.raises(PlanError, match="made for the mesh"):
        autoshard.compile(served, Mesh({"b": 2}, "h100"), tokens, plan=plan, training=False)
    with pytest.raises(PlanError, match="made for inference"):
        autoshard.compile(reference.model().train(), MESH, tokens, plan=plan, training=True)
    with pytest.raises(PlanError, match="like="):
        autoshard.compile(served, MESH, tokens, plan=plan, training=False, like="fsdp")
