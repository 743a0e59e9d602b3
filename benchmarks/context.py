"""How attention is divided along the sequence, by length, heads, ranks and links: the table of docs/context.md.

    python benchmarks/context.py [--quick]
    python benchmarks/context.py --million    # the table of Llama-3-8B with one sequence of 1,048,576 tokens

Plans two blocks of a Llama per cell, without weights, and prints what the planner chooses for attention, the predicted time
of a step, and beside it that of a ring throughout (``like="ring"``). Nothing is run.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import autoshard
from autoshard.models.llama import Llama, LlamaConfig

LENGTHS = (4096, 16384, 65536, 262144, 1048576)
CASES: tuple[tuple[str, dict[str, int], int, int], ...] = (
    ("one node, 32 heads of 8 key heads", {"cp": 8}, 32, 8),
    ("one node, 4 heads", {"cp": 8}, 4, 4),
    ("four nodes, the 8 heads of a node cut", {"cp": 4, "tp": 8}, 8, 8),
)
NAMES = {
    "heads": "Ulysses",
    "query heads": "query heads",
    "queries": "gather",
    "folded queries": "folded gather",
    "gathered in pieces": "pieces",
    "folded, gathered in pieces": "folded pieces",
    "ring": "ring",
    "folded ring": "folded ring",
    "ring with helpers": "ring with helpers",
    "I": "whole",
    "R": "whole",
}


def planned(length: int, axes: dict[str, int], heads: int, kv_heads: int, like: Any) -> autoshard.Plan:
    """The plan of two blocks with heads of 128 features, for one sequence."""
    width = 128 * heads
    config = LlamaConfig(vocab=1024, width=width, hidden=3 * width, heads=heads, kv_heads=kv_heads, layers=2)
    with torch.device("meta"):
        model, tokens = Llama(config).to(torch.bfloat16), torch.zeros(1, length, dtype=torch.long)
    return autoshard.plan(model, autoshard.Mesh(axes, "h100"), (tokens, tokens), like=like, memory_budget=1e15)


class LossAlone(nn.Module):
    """Llama-3-8B without its logits among the results, where they would stay: 17 GB on 16 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Llama(LlamaConfig.llama_8b())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens, tokens).loss
        return loss


MILLION: tuple[tuple[dict[str, int], Any, str], ...] = (
    ({"cp": 8, "tp": 8}, {"cp": "ring"}, "auto"),
    ({"cp": 8, "tp": 8}, {"cp": "ring"}, "blocks"),
    ({"cp": 16}, None, "auto"),
    ({"cp": 16}, None, "blocks"),
)


def of_a_million(axes: dict[str, int], like: Any, recompute: str) -> autoshard.Plan:
    """The plan of a training step of Llama-3-8B in bfloat16 with AdamW, for one sequence of 2**20 tokens, within 80 GB."""
    with torch.device("meta"):
        model, tokens = LossAlone().to(torch.bfloat16), torch.zeros(1, 2**20, dtype=torch.long)
    mesh = autoshard.Mesh(axes, "h100")
    return autoshard.plan(model, mesh, (tokens,), like=like, recompute=recompute, memory_budget=80e9, training=True)


def chosen(plan: autoshard.Plan) -> str:
    """How the last attention is divided along the first axis."""
    labels = [c.labels[0] for c in plan.choices.values() if "scaled_dot_product_attention" in c.op]
    return NAMES.get(labels[-1], labels[-1])


def _short(plan: autoshard.Plan) -> str:
    """Milliseconds in three digits."""
    return f"{float(f'{plan.cost.total_s * 1e3:.3g}'):g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the shortest and the longest sequence only")
    parser.add_argument("--million", action="store_true", help="Llama-3-8B with one sequence of 1,048,576 tokens")
    options = parser.parse_args()
    if options.million:
        print("| mesh | asked for | attention | step | MFU | HFU | peak |\n|---|---|---|---|---|---|---|")
        for axes, like, recompute in MILLION:
            plan = of_a_million(axes, like, recompute)
            assert plan.memory is not None
            figures = f"{plan.cost.total_s:.1f} s | {plan.cost.mfu:.1%} | {plan.cost.hfu:.1%} | {plan.memory.peak / 1e9:.1f} GB"
            print(f"| {axes} | {like}, {recompute} | {chosen(plan)} | {figures} |", flush=True)
        return
    lengths = LENGTHS[:: len(LENGTHS) - 1] if options.quick else LENGTHS
    print("| | " + " | ".join(f"{n // 1024} k" for n in lengths) + " |")
    print("|---|" + "---|" * len(lengths))
    for title, axes, heads, kv_heads in CASES:
        cells = []
        rest = {"tp": "megatron"} if "tp" in axes else None
        for length in lengths:
            free = planned(length, axes, heads, kv_heads, rest)
            ring = planned(length, axes, heads, kv_heads, {"cp": "ring", **(rest or {})})
            cells.append(f"{chosen(free)} {_short(free)} ({_short(ring)}) ms")
        print(f"| {title} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
