"""Queries, keys and values that go together pay one latency in what the search counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autoshard
from autoshard.hardware import PRESETS, Link
from autoshard.passes.propagate.prices import coalescing

LATE = replace(PRESETS["cpu"], node=Link(latency=2e-3, bandwidth=1e9))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.made = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.out = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(2, (4, 8)).transpose(1, 2) for layer in self.made)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).square().mean()


@pytest.mark.slow
def test_queries_keys_and_values_pay_for_the_one_message_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each by itself pays two latencies too much, each way."""

    def merged() -> float:
        with torch.device("meta"):
            model, x = Attention(), torch.zeros(2, 64, 32)
        plan = autoshard.plan(model, autoshard.Mesh({"x": 4}, hardware=LATE), (x,), like="ulysses", training=True)
        assert any(c.kind == "all_to_all" for c in plan.collectives)
        return plan.cost.merged_s

    latency = autoshard.Mesh({"x": 4}, hardware=LATE).link("x").rate("all_to_all")[0]
    counted = merged()
    monkeypatch.setattr(coalescing, "_coalesced_shares", lambda graph, waits: {})
    assert merged() - counted == pytest.approx(2 * 2 * latency, rel=1e-2)
