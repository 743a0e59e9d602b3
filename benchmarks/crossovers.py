"""Where one strategy ends and the next begins: predicted steps of named strategies over that of the plan found, as a picture.

    python benchmarks/crossovers.py          # writes docs/figures/crossovers.svg

Left two blocks of a Llama by length of the sequence, right two of a mixture of experts by width of an expert. Nothing is run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import autoshard
from autoshard.compiler import capture_graph
from autoshard.hardware import PRESETS
from autoshard.models import Llama, LlamaConfig, Moe, MoeConfig
from autoshard.passes.propagate.named_strategies import expand_tp_plan
from autoshard.plans.options import CompileOptions
from autoshard.plans.planning import plan_graph

COLOURS = ("#c0392b", "#2c5f9e", "#222222")
WIDTH, HEIGHT, LEFT, BOTTOM = 480, 320, 44, 58
MOST = 3.0
"""ratios above leave the picture"""


class Panel(NamedTuple):
    """Curves over one quantity, on a logarithmic axis."""

    title: str
    quantity: str
    at: Sequence[int]
    chosen: Sequence[str]
    """what the plan found does there"""
    curves: dict[str, Sequence[float]]
    """seconds over those of the plan found"""


def ratios(
    model: nn.Module, mesh: autoshard.Mesh, tokens: torch.Tensor, likes: dict[str, Any], of: str
) -> tuple[str, list[float]]:
    """(the strategy of operations named so in the plan found, predicted seconds of each named strategy over it)."""
    graph = capture_graph(model, (tokens, tokens), {}, training=True)
    free = plan_graph(graph, mesh, CompileOptions(memory_budget=1e15))[1]
    found = [
        plan_graph(graph, mesh, CompileOptions(like=expand_tp_plan(model, like), memory_budget=1e15))[1]
        for like in likes.values()
    ]
    label = [c.labels[0] for c in free.choices.values() if of in c.op][-1]
    return label, [plan.cost.total_s / free.cost.total_s for plan in found]


def panel(
    title: str, quantity: str, likes: dict[str, Any], cells: Sequence[tuple[int, Any, Any, Any]], of: str
) -> Panel:
    """``cells``: (quantity, model without data, mesh, tokens)."""
    labels, found = [], []
    for n, model, mesh, tokens in cells:
        label, made = ratios(model, mesh, tokens, likes, of)
        print(title, n, label, *(f"{name} {r:.3f}" for name, r in zip(likes, made, strict=True)), flush=True)
        labels.append(label)
        found.append(made)
    curves = {name: [made[i] for made in found] for i, name in enumerate(likes)}
    return Panel(title, quantity, [n for n, *_ in cells], labels, curves)


def attention() -> Panel:
    """On 8 nodes of one device: 16 heads that share 2 key heads."""
    mesh, cells = autoshard.Mesh({"cp": 8}, _apart()), list[Any]()
    config = LlamaConfig(vocab=1024, width=2048, hidden=6144, heads=16, kv_heads=2, layers=2)
    for length in (4096, 16384, 65536, 262144, 1048576):
        with torch.device("meta"):
            cells.append((length, Llama(config).to(torch.bfloat16), mesh, torch.zeros(1, length, dtype=torch.long)))
    return panel("one sequence, 8 nodes", "positions", {"ring": "ring", "Ulysses": "ulysses"}, cells, "attention")


def _apart() -> autoshard.Hardware:
    return replace(PRESETS["h100"], devices_per_node=1)


def experts() -> Panel:
    """16 experts on 16 devices, 4096 tokens each."""
    cells = list[Any]()
    for hidden in (256, 1024, 4096, 16384):
        config = MoeConfig(vocab=1024, width=2048, hidden=hidden, heads=16, kv_heads=16, layers=2, experts=16)
        with torch.device("meta"):
            model, tokens = Moe(config).to(torch.bfloat16), torch.zeros(16, 4096, dtype=torch.long)
        cells.append((hidden, model, autoshard.Mesh({"ep": 16}), tokens))
    return panel(
        "16 experts, 2 nodes of 8", "features of an expert", {"ep": "expert", "FSDP": "fsdp"}, cells, "experts"
    )


def drawn(shown: Panel, offset: int) -> list[str]:
    """The panel as lines of an SVG."""
    low, high = (math.log(n) for n in (shown.at[0], shown.at[-1]))

    def x(n: float) -> float:
        return offset + LEFT + 20 + (math.log(n) - low) / (high - low) * (WIDTH - LEFT - 56)

    def y(ratio: float) -> float:
        return HEIGHT - BOTTOM - (min(ratio, MOST) - 0.9) / (MOST - 0.9) * (HEIGHT - BOTTOM - 40)

    lines = [f'<text x="{offset + WIDTH / 2}" y="18" text-anchor="middle" font-weight="bold">{shown.title}</text>']
    for ratio in (1.0, 1.5, 2.0, 2.5, 3.0):
        lines.append(f'<path d="M{offset + LEFT} {y(ratio):.1f}H{offset + WIDTH - 16}" stroke="#ddd"/>')
        lines.append(f'<text x="{offset + LEFT - 6}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio}</text>')
    for n, label in zip(shown.at, shown.chosen, strict=True):
        lines.append(f'<text x="{x(n):.1f}" y="{HEIGHT - 38}" text-anchor="middle">{n}</text>')
        lines.append(f'<text x="{x(n):.1f}" y="{HEIGHT - 22}" text-anchor="middle" fill="#777">{label}</text>')
    middle = offset + WIDTH / 2
    lines.append(f'<text x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{shown.quantity} (grey: found)</text>')
    for i, (name, curve) in enumerate(shown.curves.items()):
        points = " ".join(f"{x(n):.1f},{y(r):.1f}" for n, r in zip(shown.at, curve, strict=True))
        stroke = f'stroke="{COLOURS[i]}" stroke-width="2"'
        lines.append(f'<polyline points="{points}" fill="none" {stroke}/>')
        at = offset + WIDTH - 120
        lines.append(f'<path d="M{at} {36 + 16 * i}h20" {stroke}/><text x="{at + 26}" y="{40 + 16 * i}">{name}</text>')
    return lines


def main() -> None:
    panels = [attention(), experts()]
    size = f'viewBox="0 0 {WIDTH * len(panels)} {HEIGHT}"'
    lines = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">']
    lines.append(f'<rect width="{WIDTH * len(panels)}" height="{HEIGHT}" fill="white"/>')
    for i, shown in enumerate(panels):
        lines += drawn(shown, WIDTH * i)
    path = Path(__file__).parents[1] / "docs" / "figures" / "crossovers.svg"
    path.write_text("\n".join([*lines, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
