"""How attention is divided along the sequence, by length, heads, ranks and links: the table of docs/internals/context.md.

    python benchmarks/context.py [--quick]
    python benchmarks/context.py --million    # the table of Llama-3-8B with one sequence of 1,048,576 tokens
    python benchmarks/context.py --folded     # the table of the zigzag order, carried or not
    python benchmarks/context.py --pieces     # the table of attention without a causal mask, in key-value chunks

Plans two blocks of a Llama per cell, without weights, and prints what the planner chooses for attention, the predicted time
of a step, and beside it that of a ring throughout (``like="ring"``). Nothing is run.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard.hardware import PRESETS
from autoshard.models.llama import Llama, LlamaConfig
from autoshard.passes.rules.families import context_parallel
from autoshard.plans import planning

LENGTHS = (4096, 16384, 65536, 262144, 1048576)
CASES: tuple[tuple[str, dict[str, int], int, int], ...] = (
    ("one node, 32 heads of 8 key heads", {"cp": 8}, 32, 8),
    ("one node, 4 heads", {"cp": 8}, 4, 4),
    ("four nodes, 8 heads sharded in the node", {"cp": 4, "tp": 8}, 8, 8),
)
NAMES = {
    "heads": "Ulysses",
    "query heads": "query heads",
    "queries": "gather",
    "zigzag queries": "zigzag gather",
    "gathered in chunks": "chunks",
    "zigzag, gathered in chunks": "zigzag chunks",
    "ring": "ring",
    "zigzag ring": "zigzag ring",
    "ring with helpers": "ring with helpers",
    "I": "replicated",
    "R": "replicated",
}


def planned(length: int, axes: dict[str, int] | autoshard.Mesh, heads: int, kv_heads: int, like: Any) -> autoshard.Plan:
    """The plan of two blocks with heads of 128 features, for one sequence."""
    mesh = axes if isinstance(axes, autoshard.Mesh) else autoshard.Mesh(axes, "h100")
    width = 128 * heads
    config = LlamaConfig(vocab=1024, width=width, hidden=3 * width, heads=heads, kv_heads=kv_heads, layers=2)
    with torch.device("meta"):
        model, tokens = Llama(config).to(torch.bfloat16), torch.zeros(1, length, dtype=torch.long)
    return autoshard.plan(model, mesh, (tokens, tokens), like=like, memory_budget=1e15)


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


APART = replace(PRESETS["h100"], devices_per_node=1)
WITHOUT_MASK: tuple[tuple[str, autoshard.Mesh, int], ...] = (
    ("four nodes of one device, 3 heads", autoshard.Mesh({"cp": 4}, APART), 3),
    ("eight nodes of one device, 4 heads", autoshard.Mesh({"cp": 8}, APART), 4),
    ("four nodes, 32 heads sharded over the 8 devices of a node", autoshard.Mesh({"cp": 4, "tp": 8}, "h100"), 32),
)


class Layers(nn.Module):
    """Two layers of attention without a mask, of heads of 128 features."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(self.projections(128 * heads)) for _ in range(2))

    @staticmethod
    def projections(width: int) -> list[nn.Module]:
        return [nn.Linear(width, n * width, bias=False) for n in (1, 2, 1)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for query, both, out in self.layers:  # type: ignore[misc]
            k, v = both(x).chunk(2, -1)
            q, k, v = (y.unflatten(-1, (-1, 128)).transpose(1, 2) for y in (query(x), k, v))
            x = x + out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x.float().square().mean()


CARRIED: tuple[tuple[str, dict[str, int], int], ...] = (
    ("2 nodes, 8 key heads", {"cp": 2}, 8),
    ("4 nodes, 8 key heads", {"cp": 4}, 8),
    ("8 nodes, 8 key heads", {"cp": 8}, 8),
    ("8 nodes, 32 key heads", {"cp": 8}, 32),
    ("16 nodes, 8 key heads", {"cp": 16}, 8),
)


def in_either_order(length: int, axes: dict[str, int], kv_heads: int) -> tuple[autoshard.Plan, autoshard.Plan]:
    """The plans of two blocks on nodes of one device, and without a zigzag order that the graph carries."""
    mesh = autoshard.Mesh(axes, APART)
    with patch.object(planning, "zigzag_ranks", lambda assignment: 0):
        plain = planned(length, mesh, 32, kv_heads, None)
    return planned(length, mesh, 32, kv_heads, None), plain


def without_mask(length: int, mesh: autoshard.Mesh, heads: int, pieces: bool) -> autoshard.Plan:
    """The plan of two layers of attention for one sequence; ``pieces``: whether keys may be gathered in chunks."""
    with torch.device("meta"):
        layers, x = Layers(heads).bfloat16(), torch.zeros(1, length, 128 * heads, dtype=torch.bfloat16)
    like = {"tp": "megatron"} if "tp" in mesh.axes else None
    with nullcontext() if pieces else patch.object(context_parallel, "CHUNKED_LABELS", ()):
        return autoshard.plan(layers, mesh, (x,), like=like, memory_budget=1e15)


def chosen(plan: autoshard.Plan) -> str:
    """How the last attention is divided along the first axis."""
    labels = [c.labels[0] for c in plan.choices.values() if "attention" in c.op]
    return NAMES.get(labels[-1], labels[-1])


def _short(plan: autoshard.Plan) -> str:
    """Milliseconds in three digits."""
    return f"{float(f'{plan.cost.total_s * 1e3:.3g}'):g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the shortest and the longest sequence only")
    parser.add_argument("--million", action="store_true", help="Llama-3-8B with one sequence of 1,048,576 tokens")
    parser.add_argument("--pieces", action="store_true", help="attention without a mask, in key-value chunks")
    parser.add_argument("--folded", action="store_true", help="the zigzag order of a sequence, carried or not")
    options = parser.parse_args()
    if options.folded:
        print("| | 16 k | 64 k | 128 k |\n|---|---|---|---|")
        for title, axes, kv_heads in CARRIED:
            cells = []
            for length in (16384, 65536, 131072):
                free, rest = in_either_order(length, axes, kv_heads)
                beside = f" ({chosen(rest)} {_short(rest)})" if free.folded else ""
                cells.append(f"{chosen(free)} {_short(free)}{beside} ms")
            print(f"| {title} | " + " | ".join(cells) + " |", flush=True)
        return
    if options.pieces:
        print("| | 16 k | 64 k | 256 k |\n|---|---|---|---|")
        for title, mesh, heads in WITHOUT_MASK:
            cells = []
            for length in (16384, 65536, 262144):
                free, rest = (without_mask(length, mesh, heads, pieces) for pieces in (True, False))
                beside = f" ({chosen(rest)} {_short(rest)})" if chosen(rest) != chosen(free) else ""
                cells.append(f"{chosen(free)} {_short(free)}{beside} ms")
            print(f"| {title} | " + " | ".join(cells) + " |", flush=True)
        return
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
