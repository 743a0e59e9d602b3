"""The planner against what others published and against this machine: ``python benchmarks/planner.py [steps | truth]``.

``steps``: training steps that were published, predicted for the same expert's plan. Models are planned with two and with
four layers; blocks are equal, so the step grows by the same for each further one. No constant of the model was solved
for from these rows, but their sources (autoshard/hardware/presets.py) were chosen with the errors in view.

``truth``: calibrates this machine, plans small models for two gloo ranks, and measures what was predicted: the ranking of
the experts' plans and of the free one, and how far the free plan is from the fastest.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import autoshard
from autoshard import Mesh
from autoshard.compiler import captured, planned
from autoshard.hardware import PRESETS, Hardware
from autoshard.models.gpt import Gpt, GptConfig
from autoshard.models.llama import Llama, LlamaConfig
from autoshard.passes.ir.program import Program
from autoshard.passes.propagate.objective import objective
from autoshard.passes.rules import rule_for
from autoshard.plans.schedule import step_end
from autoshard.plans.wishes import Wishes

Selects = Callable[[str, str, bool], float]
"""(module, operation, whether it is a product) → the share of it that is computed again in the backward"""


@dataclass(frozen=True)
class Row:
    """A published step. ``batch``: sequences of one micro-batch over all ranks; ``steps``: micro-batches."""

    name: str
    hardware: str | Hardware
    mesh: dict[str, int]
    like: Any
    model: Callable[[int], nn.Module]
    layers: int
    batch: int
    length: int
    vocab: int
    seconds: float
    again: Selects | None = None
    dtype: torch.dtype = torch.bfloat16


class PlainAttention(nn.Module):
    """Attention as Megatron-LM computed it before fused kernels: products, softmax and dropout, each with its matrix."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads, self.head_dim, self.dropout = config.heads, config.width // config.heads, config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.core = Core(config.dropout)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, width = x.shape
        qkv = self.qkv(x).view(batch, seq, self.heads, 3 * self.head_dim).transpose(1, 2)
        return self.out(self.core(*qkv.split(self.head_dim, dim=-1)).transpose(1, 2).reshape(batch, seq, width))


class Core(nn.Module):
    """What selective recomputation makes again."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        return torch.matmul(self.dropout(F.softmax(scores, dim=-1)), v)


def gpt(width: int, vocab: int, length: int, heads: int, dropout: float = 0.0) -> Callable[[int], nn.Module]:
    return lambda layers: Gpt(GptConfig(vocab, length, width, heads, layers, dropout))


def plain_gpt(width: int, vocab: int, length: int, heads: int) -> Callable[[int], nn.Module]:
    def make(layers: int) -> nn.Module:
        config = GptConfig(vocab, length, width, heads, layers)
        model = Gpt(config)
        for block in model.blocks:
            block.attention = PlainAttention(config)
        return model

    return make


def llama(config: LlamaConfig) -> Callable[[int], nn.Module]:
    return lambda layers: Llama(replace(config, layers=layers))


def whole(module: str, op: str, product: bool) -> float:
    """Full recomputation of every block."""
    return float(module.startswith("blocks."))


def attention_core(module: str, op: str, product: bool) -> float:
    """Selective recomputation (Korthikanti et al.)."""
    return float(".core" in module)


def every_second_product(module: str, op: str, product: bool) -> float:
    """torchtitan's selective recomputation per operation: attention and every second product are kept."""
    if not module.startswith("blocks.") or "attention.default" in op:
        return 0.0
    return 0.5 if product else 1.0


AT_500_WATTS = replace(PRESETS["h100"], flops=PRESETS["h100"].flops * (500 / 700) ** (1 / 3))
"""torchtitan's devices are held at 500 of 700 W: power goes with the cube of the clock"""

MEGATRON = {"dp": "zero1", "tp": "megatron-sp"}
SEQUENCE = {"length": 4096, "vocab": 131072}

ROWS = (
    *(
        Row(
            f"Megatron-LM {name}, TP {tp} DP 48", "h100", {"dp": 48, "tp": tp}, MEGATRON if tp > 1 else {"dp": "zero1"},
            gpt(width, 131072, 4096, width // 128), layers, 192, seconds=seconds, **SEQUENCE,
        )
        for name, width, layers, tp, seconds in (
            ("1.7B", 2048, 24, 1, 0.452), ("7.1B", 4096, 30, 2, 0.800), ("32B", 7168, 48, 8, 0.892),
        )
    ),
    *(
        Row(
            f"Korthikanti 22B, TP 8, {what}", "a100", {"tp": 8}, {"tp": like},
            plain_gpt(6144, 51200, 2048, 64), 48, 4, 2048, 51200, seconds, again, torch.float16,
        )
        for what, like, again, seconds in (
            ("full", "megatron", whole, 1.42), ("SP + selective", "megatron-sp", attention_core, 1.10),
        )
    ),
    Row(
        "torchtitan Llama-3 8B, FSDP 8, selective", AT_500_WATTS, {"dp": 8}, {"dp": "fsdp"}, llama(LlamaConfig()), 32, 16, 8192,
        128256, 2.457, every_second_product,
    ),
    Row(
        "torchtitan Llama-3 70B, FSDP 32 TP 8, full", AT_500_WATTS, {"dp": 32, "tp": 8}, {"dp": "fsdp", "tp": "megatron-sp"},
        llama(LlamaConfig.llama_70b()), 80, 512, 8192, 128256, 27.43, whole,
    ),
)  # fmt: skip


def predicted(row: Row, layers: int) -> tuple[float, float]:
    """Seconds of a step of ``row`` with this many layers: of its timeline, and of its compute alone."""
    with torch.device("meta"):
        model = row.model(layers).to(row.dtype)
        tokens = torch.zeros(row.batch, row.length, dtype=torch.long)
    graph = captured(model, (tokens,), {"labels": tokens}, training=True)
    program, plan = planned(graph, Mesh(row.mesh, row.hardware), Wishes(like=row.like, memory_budget=1e15))
    if "zero1" in row.like.values():  # the gathered parameters are kept
        kept = tuple(c for c in plan.collectives if not c.reason.endswith("(gathered again)"))
        plan = replace(plan, collectives=kept)
    compute, waits = made_again(program, row.again) if row.again else (0.0, 0.0)
    return step_end(plan) + compute + waits, plan.cost.compute_s + compute


def made_again(program: Program, selects: Selects) -> tuple[float, float]:
    """The forward once more of what ``selects`` picks: its compute, and the conversions of activations inside it."""
    found, compute, waits = objective(program.assignment), 0.0, 0.0
    for node in program.graph.nodes:
        rule = rule_for(node.op)
        share = selects(node.fqn, str(node.op), rule is not None and rule.flops is not None)
        compute += share * found.operations[node.name].compute.forward
        waits += share * found.operations[node.name].inside.forward
    for part in (part for s in program.statements for part in s.parts):
        step = part.step
        if (
            step is not None
            and step.is_collective
            and not part.parameter
            and selects(part.block + ".", "", False) == 1.0
        ):
            waits += program.mesh.link(step.axes).seconds(step.forward_bytes, step.kind)
    return compute, waits


def steps(names: Sequence[str]) -> None:
    print(f"{'published step':46} {'published':>9} {'predicted':>9} {'error':>7}   of it compute")
    for row in ROWS:
        if names and not any(n in row.name for n in names):
            continue
        few, more = predicted(row, 2), predicted(row, 4)
        step, compute = (a + (row.layers - 2) * (b - a) / 2 for a, b in zip(few, more, strict=True))
        print(
            f"{row.name:46} {row.seconds:8.3f}s {step:8.3f}s {step / row.seconds - 1:+7.1%}   {compute:.3f}s",
            flush=True,
        )


# --- truth here ---


class Wide(nn.Module):
    """A wide MLP with a small batch: its weights are what is large."""

    def __init__(self, width: int = 1024, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x.square().mean()


class Convolutions(nn.Module):
    """Its activations are what is large."""

    def __init__(self, channels: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(3 if i == 0 else channels, channels, 3, padding=1) for i in range(4))
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x.mean((2, 3))).square().mean()


def small_llama() -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    tokens = torch.randint(0, 512, (4, 64))
    config = LlamaConfig(vocab=512, width=128, hidden=512, heads=4, kv_heads=4, layers=2)
    return Llama(config), (tokens,), {"labels": tokens}


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]] = {
    "Llama": small_llama,
    "wide MLP": lambda: (Wide(), (torch.rand(8, 1024),), {}),
    "convolutions": lambda: (Convolutions(), (torch.rand(8, 3, 48, 48),), {}),
}
PLANS = (None, "ddp", "fsdp", "megatron", "replicate")


def truth() -> None:
    """One process per rank, each with one thread; all take turns of the plans of one model after another."""
    ranks = 2
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        os.environ["OMP_NUM_THREADS"] = "1"
        sys.exit(subprocess.call([*command, __file__, "truth"]))
    dist.init_process_group("gloo")
    hardware = autoshard.calibrate()
    first = dist.get_rank() == 0
    if first:
        print(hardware, f"\n\n{'model':14}{'plan':12}{'predicted':>12}{'measured':>12}", flush=True)
    for name, make in MODELS.items():
        found = []
        for like in PLANS:
            torch.manual_seed(0)
            model, args, kwargs = make()
            mesh = Mesh({"tp" if like == "megatron" else "dp": ranks}, hardware)
            sharded = autoshard.compile(model, mesh, args, kwargs, like=like, training=True)
            measured = autoshard.measure(sharded, args, kwargs, steps=15)
            found.append((measured.predicted_s, measured.step_s))
            if first:
                print(
                    f"{name:14}{like or 'free':12}{found[-1][0] * 1e3:9.2f} ms{found[-1][1] * 1e3:9.2f} ms", flush=True
                )
        if first:
            free = found[0][1] / min(measured for _, measured in found)
            print(f"{name:14}rank correlation {correlation(found):.2f}; the free plan takes {free:.2f} × the fastest\n")
    dist.destroy_process_group()


def correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's."""
    ranks = torch.tensor(pairs, dtype=torch.float64).argsort(0).argsort(0).double().T
    return float(torch.corrcoef(ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["steps", "truth"], default="steps")
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name contains one of these")
    options = parser.parse_args()
    logging.getLogger("torch").setLevel(logging.ERROR)
    if options.what == "steps":
        steps(options.only)
    else:
        truth()


if __name__ == "__main__":
    sys.exit(main())
