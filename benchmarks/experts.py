"""The plan that is found against named strategies, in the same cost model: predicted step and the ratio to the free plan.

    python benchmarks/experts.py                       # the small reference models and models of transformers
    python benchmarks/experts.py --large               # Llama-3 8B and 70B as well (minutes)
    python benchmarks/experts.py llama:8b --seq 4096   # one model

No ratio is below 1: what an expert writes is in the space that is searched. Nothing is executed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from autoshard.compiler import capture_graph
from autoshard.errors import PlanError
from autoshard.mesh import Mesh
from autoshard.models.by_name import load
from autoshard.passes.propagate.named_strategies import expand_tp_plan
from autoshard.plans.options import CompileOptions
from autoshard.plans.planning import plan_graph

SMALL = ("mlp", "gpt", "llama", "moe", "dlrm", "vit", "hf:llama", "hf:gpt2", "hf:bert", "hf:t5")
LARGE = ("llama:8b", "llama:70b")
MESHES: tuple[dict[str, int], ...] = ({"x": 8}, {"dp": 2, "tp": 4}, {"dp": 2, "cp": 2, "tp": 2})
LARGE_MESHES: tuple[dict[str, int], ...] = ({"dp": 8, "tp": 8},)
ONE = ("replicate", "ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron-sp", "ulysses")
SEVERAL: tuple[Any, ...] = (
    "ddp", "fsdp", "hsdp",
    {"dp": "ddp", "cp": "ulysses", "tp": "megatron"},
    {"dp": "fsdp", "cp": "ulysses", "tp": "megatron-sp"},
)  # fmt: skip


def experts(axes: dict[str, int], has_plan: bool) -> Iterator[Any]:
    """Names for all axes, or per axis; the model's own plan along tp where it has one."""
    for like in ONE if len(axes) == 1 else SEVERAL:
        yield {a: like[a] for a in axes} if isinstance(like, dict) else like
    if has_plan:
        yield "tp_plan" if len(axes) == 1 else {"tp": "tp_plan"}


def rows(
    name: str, batch: int, seq: int, meshes: tuple[dict[str, int], ...]
) -> Iterator[tuple[str, str, str, float, float]]:
    """(model, mesh, expert, predicted seconds, ratio to the free plan)."""
    make, args, kwargs = load(name, batch, seq)
    with torch.device("meta"):
        model = make().train()
    has_plan = bool(getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None))
    graph = capture_graph(model, args, kwargs, training=True)
    for axes in meshes:
        mesh = Mesh(axes)
        free = plan_graph(graph, mesh, CompileOptions())[1].cost.total_s
        yield name, str(mesh), "(free)", free, 1.0
        for like in experts(axes, has_plan):
            try:
                plan = plan_graph(graph, mesh, CompileOptions(like=expand_tp_plan(model, like)))[1]
            except PlanError as error:  # it does not fit
                print(f"{name} {mesh} {like}: {error}", file=sys.stderr)
                continue
            yield name, str(mesh), str(like), plan.cost.total_s, plan.cost.total_s / free


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(SMALL))
    parser.add_argument("--large", action="store_true", help="Llama-3 8B and 70B as well")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=64)
    options = parser.parse_args()
    table = Table("model", "mesh", "expert", "step", "÷ free", box=None)
    worst = 1.0
    work = [(name, options.batch, options.seq, MESHES) for name in options.models]
    work += [(name, 16, 8192, LARGE_MESHES) for name in LARGE if options.large]
    for case in work:
        for model, mesh, expert, seconds, ratio in rows(*case):
            table.add_row(model, mesh, expert, f"{seconds * 1e3:.4g} ms", f"{ratio:.3f}")
            worst = min(worst, ratio)
    Console(width=140).print(table)
    print(
        f"least ratio {worst:.6f}: {'no expert is below' if worst >= 1 - 1e-9 else 'AN EXPERT IS BELOW'} the plan found"
    )
    return 0 if worst >= 1 - 1e-9 else 1


if __name__ == "__main__":
    sys.exit(main())
