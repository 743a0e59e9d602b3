"""Experts that are fewer than ranks, or do not divide by them: no rank is idle, and the busiest one is what is priced."""

from __future__ import annotations

from typing import Any

import pytest
import routing_models
import torch
from harness import assert_equal_training, ideal
from state_experts import EVEN, batch
from test_experts import Loss, routed

import autoshard


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
        assert any("4 experts on 8 ranks" in note for note in report.plan.notes)
        weights = [x for n, x in report.plan.layouts.items() if n.startswith(("first", "second", "experts"))]
        assert all(isinstance(x["ep"], autoshard.Shard) for x in weights if "bias" not in str(x))


def test_work_is_that_of_the_rank_with_most_experts() -> None:
    """Three experts on two ranks: one computes two thirds of what goes to experts."""
    plan = autoshard.plan(Loss(3).double(), ideal({"ep": 2}), (batch(*EVEN),), like="expert", training=True)
    product, expert = 2 * 6 * 8 * 8, 2 * 6 * 2 * (12 * 8 + 8 * 6)
    assert plan.cost.flops_per_rank == pytest.approx(3 * (product / 2 + expert * 2 / 3) - product / 2)
