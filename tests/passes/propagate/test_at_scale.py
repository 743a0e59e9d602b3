"""Plans at the sizes that rings and experts are for: within a device's memory, and no weights go between experts' ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import autoshard
from autoshard.compiler import capture_graph
from autoshard.passes.propagate.named_strategies import expand_tp_plan
from autoshard.plans.options import CompileOptions
from autoshard.plans.planning import plan_graph

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from context import chosen, of_a_million
from expert_parallel import model_of, sent_for_experts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.mark.parametrize(("axes", "like"), [({"cp": 8, "tp": 8}, {"cp": "ring"}), ({"cp": 16}, None)], ids=str)
def test_a_million_tokens_fit(axes: dict[str, int], like: Any) -> None:
    """Llama-3-8B, all 32 layers, with AdamW's state; some of what the backward reads is made again."""
    plan = of_a_million(axes, like, "auto")
    assert plan.memory is not None
    assert plan.memory.peak <= 80e9
    assert (chosen(plan), plan.folded) == ("zigzag ring", axes["cp"])
    assert 0.2 < plan.cost.mfu <= plan.cost.hfu < 1
    assert f"MFU {plan.cost.mfu:.1%}" in str(plan)


@pytest.mark.parametrize(
    ("kind", "axes", "like", "optimizer"),
    [
        ("MixtralForCausalLM", {"dp": 8, "ep": 8}, None, "adamw"),
        ("MixtralForCausalLM", {"dp": 32, "ep": 8}, {"ep": "expert"}, "adamw"),
        ("DeepseekV3ForCausalLM", {"node": 8, "ep": 8}, "expert", "sgd"),  # AdamW's state alone would be 84 GB a device
        ("DeepseekV3ForCausalLM", {"node": 32, "ep": 8}, None, "adamw"),
    ],
    ids=str,
)
def test_large_mixtures_fit_and_send_no_weights(kind: str, axes: dict[str, int], like: Any, optimizer: str) -> None:
    """A sequence of 4096 tokens per device; ``benchmarks/expert_parallel.py`` says how long the plan takes."""
    mesh = autoshard.Mesh(axes)
    tokens = torch.zeros(mesh.size, 4096, dtype=torch.long)
    graph = capture_graph(model_of(kind, None), (), {"input_ids": tokens, "labels": tokens}, training=True)
    opts = CompileOptions(like=expand_tp_plan(None, like), optimizer=optimizer, memory_budget=80e9)
    plan = plan_graph(graph, mesh, opts)[1]
    assert plan.memory is not None
    assert plan.memory.peak <= 80e9
    sent = sent_for_experts(plan)
    assert sent["rows"] > 0
    assert sent["weights"] == 0
