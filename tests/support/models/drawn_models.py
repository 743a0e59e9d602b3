"""Models drawn at random, plans of them, and the same with another choice for one operation."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autoshard
from autoshard import Layout
from autoshard.compiler import Compiled, compile_graph
from autoshard.passes.ir.assignment import Assignment
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.propagate.op_space import axis_strategies
from autoshard.plans.options import CompileOptions
from autoshard.plans.plan import Plan


class Heads(nn.Module):
    """Several small results of one input; ``mode``: what becomes of them."""

    def __init__(self, heads: int, width: int, out: int, mode: str) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(width, out) for _ in range(heads))
        self.mode = mode

    def forward(self, x: torch.Tensor) -> Any:
        ys = [head(x) for head in self.heads]
        if self.mode == "losses":
            return tuple(y.square().mean() for y in ys)
        if self.mode == "joined":
            return torch.cat(ys, -1).softmax(-1).square().mean()
        return sum(ys).sigmoid().mean(), ys[0]  # type: ignore[attr-defined]


class Mlp(nn.Module):
    def __init__(self, layers: int, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.ups = nn.ModuleList(nn.Linear(width, hidden) for _ in range(layers))
        self.downs = nn.ModuleList(nn.Linear(hidden, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.gelu(up(self.norm(x))))
        return x.square().mean()


class Attention(nn.Module):
    """``alike``: queries, keys and values are one value, which one operation reads three times."""

    def __init__(self, width: int, alike: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, width if alike else 3 * width, bias=False)
        self.out = nn.Linear(width, width)
        self.alike = alike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = self.qkv(x)
        parts = [p.unflatten(-1, (2, -1)).transpose(1, 2) for p in read.chunk(3, -1)] if not self.alike else []
        q, k, v = parts or [read[:, None]] * 3
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)).square().mean()


def drawn(r: random.Random) -> tuple[nn.Module, torch.Tensor]:
    """A model and its input, on the meta device: of sizes worth splitting, or small and odd."""
    large = r.random() < 0.6
    width, hidden = r.choice([1024, 2048] if large else [6, 16, 30]), r.choice([1024, 3000, 8192] if large else [7, 12])
    rows = r.choice([256, 4096] if large else [3, 8])
    kind = r.choice(["heads", "mlp", "attention"])
    with torch.device("meta"):
        if kind == "heads":
            mode = r.choice(["losses", "joined", "summed"])
            return Heads(r.choice([2, 3, 8]), width, hidden, mode), torch.empty(rows, width)
        if kind == "mlp":
            return Mlp(r.choice([1, 2]), width, hidden), torch.empty(rows, width)
        return Attention(width, r.random() < 0.5), torch.empty(r.choice([1, 4]), min(rows, 512), width)


def compiled(
    graph: Graph, mesh: autoshard.Mesh, hints: dict[str, Any] | None = None, plan: Plan | None = None
) -> Compiled:
    return compile_graph(graph, mesh, CompileOptions(hints=hints, plan=plan))


def changed(assignment: Assignment, node: Node, labels: tuple[str, ...]) -> Assignment:
    """``assignment`` with another strategy of one operation."""
    strategies = {s.label: s for s in axis_strategies(node, assignment.graph)}
    result = replace(assignment, choices={**assignment.choices, node.name: tuple(strategies[x] for x in labels)})
    made = {o: Layout(assignment.mesh, result.made(node, i)) for i, o in enumerate(node.outputs)}
    return replace(result, layouts={**assignment.layouts, **made})
