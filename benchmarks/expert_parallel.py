"""Plans of large mixtures of experts: predicted step, memory, and what is sent of rows, of experts' weights and gradients.

    python benchmarks/expert_parallel.py --layers 4       # of each; DeepSeek-V3 has 61, which 64 devices cannot hold
    python benchmarks/expert_parallel.py Mixtral          # one of them, all layers

Nothing is executed; models have no data. "planned in": processor seconds, without those of the capture. Of what is sent for
experts, per rank and step:

    rows         rows and their numbers, over the axes along which experts lie, and gradients of rows
    gradients    of weights, summed over the copies of an expert
    shards       weights of a rank's own experts, gathered from the shards in which copies keep them (FSDP)
    weights      weights, and their gradients, between ranks that hold different experts: what expert parallelism is to avoid
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import autoshard
from autoshard.compiler import capture_graph
from autoshard.errors import PlanError
from autoshard.passes.propagate.named_strategies import expand_tp_plan
from autoshard.plans.options import CompileOptions
from autoshard.plans.planning import plan_graph

SENT = ("rows", "gradients", "shards", "weights")

CASES: tuple[tuple[str, dict[str, int], Any], ...] = (
    ("MixtralForCausalLM", {"dp": 8, "ep": 8}, None),
    ("MixtralForCausalLM", {"dp": 8, "ep": 8}, {"ep": "expert"}),
    ("MixtralForCausalLM", {"dp": 32, "ep": 8}, None),
    ("MixtralForCausalLM", {"ep": 8, "tp": 8}, {"ep": "expert"}),
    ("MixtralForCausalLM", {"ep": 8, "tp": 8}, {"ep": "expert", "tp": "megatron"}),
    ("DeepseekV3ForCausalLM", {"node": 8, "ep": 8}, None),
    ("DeepseekV3ForCausalLM", {"node": 8, "ep": 8}, "expert"),
    ("DeepseekV3ForCausalLM", {"node": 32, "ep": 8}, None),
    ("DeepseekV3ForCausalLM", {"node": 32, "ep": 8}, "expert"),
)


def model_of(kind: str, layers: int | None) -> torch.nn.Module:
    """A model of transformers at the size of its default configuration, without data."""
    import transformers

    model_class = getattr(transformers, kind)
    sizes = {"use_cache": False} | ({} if layers is None else {"num_hidden_layers": layers})
    if layers is not None and kind.startswith("Deepseek"):
        sizes["first_k_dense_replace"] = 1
    with torch.device("meta"):
        model: torch.nn.Module = model_class(model_class.config_class(**sizes)).to(torch.bfloat16)
    return model.train()


def sent_for_experts(plan: autoshard.Plan) -> dict[str, float]:
    """Bytes per rank and step of :data:`SENT`."""
    between = {  # of each mixture the axes along which rows travel
        c.fqn: {a for a, label in zip(plan.mesh.axes, c.labels, strict=True) if label.startswith("exchange")}
        for c in plan.choices.values()
        if "experts" in c.op
    }
    found = dict.fromkeys(SENT, 0.0)
    for c in plan.collectives:
        if not c.fqn.endswith(".experts"):
            continue
        if not (c.movable or ": part" in c.reason or "of part" in c.reason):
            kind = "rows"
        elif between[c.fqn].intersection(c.axes):
            kind = "weights"
        else:
            kind = "gradients" if c.kind in ("reduce_scatter", "all_reduce") else "shards"
        found[kind] += c.bytes
    return found


def rows(name: str, layers: int | None, length: int, only: str = "") -> Iterator[tuple[str, ...]]:
    graphs: dict[tuple[str, int], Any] = {}
    for kind, axes, like in CASES:
        mesh = autoshard.Mesh(axes)
        if not kind.startswith(name) or only not in ("", str(mesh)):
            continue
        tokens = torch.zeros(mesh.size, length, dtype=torch.long)
        if (kind, mesh.size) not in graphs:
            model = model_of(kind, layers)
            graphs = {
                (kind, mesh.size): capture_graph(model, (), {"input_ids": tokens, "labels": tokens}, training=True)
            }
        begun = time.process_time()
        try:
            plan = plan_graph(graphs[kind, mesh.size], mesh, CompileOptions(like=expand_tp_plan(None, like)))[1]
        except PlanError as error:
            print(f"{kind} {mesh} {like}: {error}", file=sys.stderr)
            continue
        took = time.process_time() - begun
        sent = sent_for_experts(plan)
        assert plan.memory is not None
        yield (
            kind.removesuffix("ForCausalLM"), str(mesh), str(like or "(free)"), f"{plan.cost.total_s * 1e3:.0f} ms",
            f"{plan.cost.mfu:.1%}", f"{plan.memory.peak / 1e9:.1f} GB", *(f"{sent[x] / 1e9:.2f} GB" for x in SENT),
            f"{took:.0f} s",
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="how the model's name begins; default: all")
    parser.add_argument("--layers", type=int, default=None, help="instead of all")
    parser.add_argument("--mesh", default="", help="how the mesh prints, such as 'dp=32, ep=8'; default: all")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence; one sequence per device")
    options = parser.parse_args()
    table = Table("model", "mesh", "like", "step", "MFU", "peak", *SENT, "planned in", box=None)
    for row in rows(options.name, options.layers, options.length, options.mesh):
        table.add_row(*row)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
