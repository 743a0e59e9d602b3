"""What is made again in the backward: settings, Korthikanti's formulas, the search against brute force, the budget."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.compiler import build, captured
from autoshard.passes.ir.graph import Graph
from autoshard.plans.wishes import Wishes


class Block(nn.Module):
    """A GPT block as Korthikanti et al. count it: attention spelled out, three dropouts."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(width, width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm_1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = (q @ (k.transpose(2, 3) * k.shape[-1] ** -0.5)).softmax(-1)
        y = F.dropout(weights, 0.1) @ v
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm_2(x)))), 0.1)


class Gpt(nn.Module):
    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


S, B, H, A = 512, 2, 1024, 16
GRAPHS: dict[int, Graph] = {}


def gpt(layers: int) -> Graph:
    if layers not in GRAPHS:
        with torch.device("meta"):
            model = Gpt(layers, H, A).to(torch.bfloat16).train()
            x = torch.empty(B, S, H, dtype=torch.bfloat16, requires_grad=True)
        GRAPHS[layers] = captured(model, (x,), {}, training=True)
    return GRAPHS[layers]


HINTS = {
    "*.q": "colwise",
    "*.k": "colwise",
    "*.v": "colwise",
    "*.out": "rowwise",
    "*.up": "colwise",
    "*.down": "rowwise",
}


def per_layer(tp: int, sequence: bool, recompute: str) -> float:
    """Bytes of activations that one more layer keeps."""
    styles = {f"{name}.weight": style for name, style in HINTS.items()}
    like = None if tp == 1 else "megatron-sp" if sequence else "megatron"
    mesh = autoshard.Mesh({"tp": tp}, "a100")
    wishes = Wishes(like=like, recompute=recompute, memory_budget=1e18)
    assert styles
    two, three = (build(gpt(n), mesh, wishes).plan.memory.activations for n in (2, 3))
    return three - two


@pytest.mark.parametrize(
    ("tp", "sequence", "recompute", "formula"),
    [
        (1, False, "none", lambda t: 34 + 5 * A * S / H),
        (8, False, "none", lambda t: 10 + 24 / t + 5 * A * S / (H * t)),
        (8, True, "none", lambda t: (34 + 5 * A * S / H) / t),
        (1, False, "selective", lambda t: 34),
        (8, True, "selective", lambda t: 34 / t),
        (1, False, "blocks", lambda t: 2),
    ],
)
def test_korthikantis_formulas(tp: int, sequence: bool, recompute: str, formula: object) -> None:
    """Bytes per layer in 16 bit, arXiv:2205.05198, table 2."""
    expected = S * B * H * formula(tp)  # type: ignore[operator]
    assert per_layer(tp, sequence, recompute) == pytest.approx(expected, rel=0.02)
