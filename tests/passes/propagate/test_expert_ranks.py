"""Experts that are fewer than ranks, or do not divide by them: no rank is idle, and the busiest one is what is priced."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import routing_models
import torch
from expert_models import Averaged, Loss, routed
from harness import assert_equal_training, ideal
from state_experts import EVEN, batch

import autoshard
from autoshard.layout import I, Owned, Shard
from autoshard.passes.ir.graph import TensorType
from autoshard.passes.propagate.hints import fixed_placements


@pytest.mark.parametrize(
    ("form", "axes", "like"),
    [
        ("dense", {"ep": 8}, "expert"),
        *(
            pytest.param(form, *case, marks=pytest.mark.slow)
            for form in ("dense", "modules")
            for case in (({"ep": 8}, "expert"), ({"ep": 4, "tp": 2}, {"ep": "expert"}), ({"x": 4, "y": 2}, None))
        ),
    ],
)
def test_no_rank_is_without_experts(form: str, axes: dict[str, int], like: Any) -> None:
    """Of four experts along eight ranks half of these would do nothing: rows stay along some axis."""
    x = torch.randn(8, 6, routing_models.WIDTH)
    report = assert_equal_training(routed(form), axes, (x,), like=like, steps=1)
    (labels,) = (c.labels for c in report.plan.choices.values() if "experts" in c.op)
    assert labels.count("exchange") < len(labels)
    if like == "expert":
        assert labels == ("rows",)
        assert any("4 experts cannot occupy 8 ranks" in note for note in report.plan.notes)
        weights = [x for n, x in report.plan.layouts.items() if n.startswith(("first", "second", "experts"))]
        assert all(isinstance(x["ep"], autoshard.Shard) for x in weights if "bias" not in str(x))


def test_work_is_that_of_the_rank_with_most_experts() -> None:
    """Three experts on two ranks: one computes two thirds of what goes to experts."""
    plan = autoshard.plan(Loss(3).double(), ideal({"ep": 2}), (batch(*EVEN),), like="expert", training=True)
    product, expert = 2 * 6 * 8 * 8, 2 * 6 * 2 * (12 * 8 + 8 * 6)
    assert plan.cost.flops_per_rank == pytest.approx(3 * (product / 2 + expert * 2 / 3) - product / 2)


@pytest.mark.parametrize("gated", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("axes", "like"),
    [
        ({"ep": 2, "tp": 2}, {"ep": "expert", "tp": "megatron"}),
        pytest.param({"tp": 2, "ep": 2}, {"ep": "expert", "tp": "megatron"}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "ep": 2}, {"dp": "fsdp", "ep": "expert"}, marks=pytest.mark.slow),
        pytest.param({"dp": 2, "ep": 2, "tp": 2}, {"dp": "zero1", "ep": "expert", "tp": "megatron"}, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_experts_in_modules_are_cut_inside(gated: bool, axes: dict[str, int], like: Any) -> None:
    """Each belongs to one rank along ep, and other axes cut it: its features as in Megatron, or in shards that are gathered."""
    x, model = torch.randn(8, 6, routing_models.WIDTH), routing_models.Modules("modules", gated)
    plan = assert_equal_training(model, axes, (x,), like=like, steps=3).plan
    names = [n for n in plan.layouts if n.startswith("experts") and n.endswith("weight")]
    whole = {n: model.get_parameter(n).numel() for n in names}
    for rank in range(plan.mesh.size):
        local = [math.prod(plan.layouts[n].local_shape(model.get_parameter(n).shape, rank)) for n in names]
        assert sum(local) * plan.mesh.size == sum(whole.values())
    moved = [c for c in plan.collectives if c.movable and "experts." in c.reason and ".weight" in c.reason]
    assert {c.axes for c in moved} <= {("dp",)}, moved
    (labels,) = (c.labels for c in plan.choices.values() if "autoshard.experts" in c.op)
    inside = dict(zip(axes, labels, strict=True))
    assert inside["ep"] == "exchange"
    assert inside.get("tp", "hidden").startswith("hidden")


def test_what_a_rank_owns_is_cut_in_chunks_of_one_length() -> None:
    """25 features on two ranks are not: others hold none of its rows, and cannot tell what is left of its columns."""
    type_ = TensorType((25, 8), torch.float32, True, tables=4)
    mesh = autoshard.Mesh({"ep": 2, "tp": 2})
    cuts = {p for p in fixed_placements(type_, mesh) if Owned() in p}
    assert (Owned(), Shard(1)) in cuts
    assert (Owned(), Shard(0)) not in cuts
    assert (Owned(), Shard(0)) in fixed_placements(replace(type_, shape=(24, 8)), mesh)
    assert all(p == (Owned(), Owned()) or I in p for p in fixed_placements(replace(type_, looked_up=9), mesh)), "tables"


@pytest.mark.slow
def test_a_later_call_that_reads_experts_otherwise() -> None:
    """One rank has each of them: an error says so, and training goes on."""
    x, model = torch.randn(8, 6, routing_models.WIDTH), Averaged("modules", True)
    sharded = autoshard.compile(copy.deepcopy(model), ideal({"ep": 2}), (x,), like="expert")
    with pytest.raises(autoshard.PlanError, match=r"'experts\.\d\.\w+\.weight' is stored on one rank .O.\d.@ep."):
        sharded.eval()(x)
    torch.testing.assert_close(sharded.train()(x), model(x))
