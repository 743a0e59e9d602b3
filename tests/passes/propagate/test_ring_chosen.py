"""Which attention along a sequence that is cut is chosen where nothing is asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ring_steps import Attention
from torch import nn

import autoshard
from autoshard.hardware import PRESETS

H100 = PRESETS["h100"]
APART = replace(H100, devices_per_node=1)


class Layers(nn.Module):
    def __init__(self, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(128 * heads, heads, kv_heads) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer.mixed(x)
        return x.float().square().mean()


def picked(length: int, ranks: int, heads: int, kv_heads: int, hardware: autoshard.Hardware) -> str:
    """How the second layer's attention is divided where nothing is asked for."""
    with torch.device("meta"):
        layers = Layers(heads, kv_heads).to(torch.bfloat16)
        x = torch.zeros(1, length, 128 * heads, dtype=torch.bfloat16)
    plan = autoshard.plan(layers, autoshard.Mesh({"cp": ranks}, hardware), (x,), memory_budget=1e15)
    return [c.labels[0] for c in plan.choices.values() if "attention" in c.op][-1]


@pytest.mark.parametrize(
    ("hardware", "length", "heads", "label"),
    [
        pytest.param(H100, 2048, (2, 2), "I", marks=pytest.mark.slow),
        (H100, 16384, (8, 4), "heads"),
        pytest.param(APART, 16384, (2, 2), "queries", marks=pytest.mark.slow),
        (H100, 65536, (2, 2), "ring with helpers"),
        pytest.param(H100, 16384, (8, 2), "query heads", marks=pytest.mark.slow),
        (APART, 524288, (8, 2), "zigzag ring"),
    ],
    ids=["whole", "ulysses", "gather", "helpers", "query_heads", "ring_between_nodes"],
)
def test_crossovers(hardware: autoshard.Hardware, length: int, heads: tuple[int, int], label: str) -> None:
    """On 4 ranks: whole, gathered keys with too few heads, heads where there are enough; else rings that hide, between nodes
    in an order that the graph carries."""
    assert picked(length, 4, *heads, hardware) == label


def test_rings_of_at_most_256_ranks() -> None:
    """A longer one takes too long to price: pairs of ranks are counted one by one."""
    for ranks, rings in ((4, True), (512, False)):
        with torch.device("meta"):
            layers, x = Layers(2, 2).to(torch.bfloat16), torch.zeros(1, 4096, 256, dtype=torch.bfloat16)
        plan = autoshard.plan(layers, autoshard.Mesh({"cp": ranks}), (x,), like={"cp": "ring"}, memory_budget=1e15)
        assert any("ring" in c.labels[0] for c in plan.choices.values() if "attention" in c.op) == rings
