"""What ``autoshard.measure`` counts of memory, beside what plans predict; and how reports tell changes of order."""

from __future__ import annotations

from typing import Any

import pytest

import autoshard
from autoshard import models


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"like": "ddp"}, marks=pytest.mark.slow),
        {"like": "fsdp"},
        {"like": "replicate", "recompute": "blocks"},
        pytest.param({"like": "ddp", "recompute": "selective"}, marks=pytest.mark.slow),
        {"like": "fsdp", "micro_batches": 2},
    ],
    ids=str,
)
def test_what_is_kept_is_counted_where_more_is_made_again(how: dict[str, Any]) -> None:
    """The runtime's own hooks are inside of those that count."""
    reference = models.get("gpt")
    args, kwargs = reference.inputs(batch=8)
    sharded = autoshard.compile(reference.model(), {"dp": 2}, args, kwargs, training=True, **how)
    found = autoshard.measure(sharded, args, kwargs, steps=1)
    assert found.kept_bytes == pytest.approx(found.predicted_kept_bytes, rel=0.02)


def test_a_change_of_order_is_told_by_both_orders() -> None:
    reference = models.get("gpt")
    args, kwargs = reference.inputs(batch=8)
    like = {"dp": "fsdp", "tp": "megatron-sp"}
    plan = autoshard.plan(reference.model(), {"dp": 2, "tp": 2}, args, kwargs, like=like, training=True)
    text = plan.report("full")
    assert "bias S(0)@dp S(0)@tp → S(0)@tp" in text  # what does not fit on the line goes on below
    assert "bias  →" not in text
