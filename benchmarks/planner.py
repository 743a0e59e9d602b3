"""The planner against what others published: ``python benchmarks/planner.py``. Against this machine: ``truth.py``.

Training steps that were published, predicted for the same named strategy. Models are planned with two and with
four layers; blocks are equal, so the step grows by the same for each further one. No constant of the model was solved
for from these rows, but their sources (autoshard/hardware/presets.py) were chosen with the errors in view. Steps that are a
check alone: ``published.py``.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from autoshard import Mesh
from autoshard.compiler import capture_graph
from autoshard.hardware import PRESETS, Hardware, hardware
from autoshard.models.gpt import Gpt, GptConfig
from autoshard.models.llama import Llama, LlamaConfig
from autoshard.passes.ir.graph import Node
from autoshard.passes.ir.program import COLLECTIVE_MATMULS, Program
from autoshard.passes.propagate.objective import objective
from autoshard.passes.propagate.prices.collective_matmul import overlapping_products as beside_products
from autoshard.passes.propagate.prices.collective_matmul import ring_transfers
from autoshard.passes.propagate.prices.roofline import is_fusible
from autoshard.passes.rules import rule_for
from autoshard.plans.options import CompileOptions
from autoshard.plans.plan import Plan
from autoshard.plans.planning import plan_graph
from autoshard.precision import Precision
from autoshard.report.schedule import step_end

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
    """of parameters; float32: with :data:`MIXED`"""
    part_by_part: bool = False
    """whether messages of activations go beside the products that they are for (asynchronous tensor parallelism)"""
    loss: float = 0.0
    """bytes that the loss moves per logit of a rank, forward and backward, with the cast to float32; 0: as planned"""
    buffers: float = 0.0
    """bytes that its buffers of gradients and parameters move per parameter that a rank works with; 0: as planned"""
    update: float = 0.0
    """bytes that its clipping and its optimizer move per parameter that a rank keeps, beyond a fused one"""


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
        scores = torch.matmul(q / math.sqrt(q.shape[-1]), k.transpose(-1, -2))  # the factor is the product's: baddbmm
        return torch.matmul(self.dropout(F.softmax(scores, dim=-1)), v)


class InFloat32:
    """The loss of logits in float32, as Megatron-LM (core/tensor_parallel/cross_entropy.py) and torchtitan compute it."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = super().forward(tokens).logits  # type: ignore[misc]
        return F.cross_entropy(logits.flatten(0, -2).float(), labels.flatten())


class MegatronGpt(InFloat32, Gpt):
    """As Megatron-LM trains it."""


class TitanLlama(InFloat32, Llama):
    """As torchtitan trains it."""


def gpt(width: int, vocab: int, length: int, heads: int, dropout: float = 0.0) -> Callable[[int], nn.Module]:
    return lambda layers: MegatronGpt(GptConfig(vocab, length, width, heads, layers, dropout))


def plain_gpt(width: int, vocab: int, length: int, heads: int) -> Callable[[int], nn.Module]:
    def make(layers: int) -> nn.Module:
        config = GptConfig(vocab, length, width, heads, layers)
        model = MegatronGpt(config)
        for block in model.blocks:
            block.attention = PlainAttention(config)
        return model

    return make


def llama(config: LlamaConfig) -> Callable[[int], nn.Module]:
    return lambda layers: TitanLlama(replace(config, layers=layers))


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


EAGER = {name: replace(PRESETS[name], fuses=False) for name in ("h100", "a100")}
"""not compiled: elementwise operations are kernels of their own"""

CUDNN = ((512, 315, 305), (1024, 410, 408), (2048, 484, 465), (4096, 518, 499), (8192, 529, 518), (16384, 539, 516))
"""TFLOP/s of cuDNN's attention on H100, causal, head dim 128: keys, forward, backward (Shah et al. 2024, figures 5 and 6)"""
TRANSFORMER_ENGINE = replace(
    PRESETS["h100"], attention=tuple((keys, ahead / 989.4, back / 989.4) for keys, ahead, back in CUDNN)
)
"""H100 of those who use Transformer Engine, as Megatron-LM does: it takes cuDNN's attention there"""


def by_copy_engines(device: Hardware) -> Hardware:
    """``device`` whose messages beside products are written by copy engines (``use_ce`` of Transformer Engine's user buffers;
    symmetric memory of PyTorch): they take no multiprocessors, and each byte is read once and written once in memory."""
    return replace(device, overlap=1 - 2 * device.node.bandwidth / device.memory_bandwidth)


AT_500_WATTS = PRESETS["h100_96gb_500w"]
"""torchtitan's devices (benchmarks/llama3_h100_202412_torchtitan.md there)"""

MIXED = Precision(torch.bfloat16, torch.float32)
"""parameters in float32, cast before they are gathered; gradients reduced in float32: torchtitan's default, and what the
distributed optimizer of Megatron-LM does in bfloat16 (accumulate_allreduce_grads_in_fp32)"""

MEGATRON = {"dp": "zero1", "tp": "megatron-sp"}
MEGATRON_LOSS = 6.0 + 4 + 8 + 8 + 4 + 8 + 8 + 6
"""core/tensor_parallel/cross_entropy.py, kernel by kernel: to float32; maximum, difference, exp, sum, quotient; in the backward
a product, and back to 16 bits"""
MEGATRON_BUFFERS = 4.0 + 4 + 8
"""core/distributed/param_and_grad_buffer.py: gradients, in float32, are zeroed, looked through for NaN, and scaled"""
TITAN_LOSS = 6.0 + 16 + 4 + 16 + 6
"""its loss was not compiled (train.py of 2024: "compiling loss function causes CUDA errors, turning off for now"); ATen's
SoftMax.cu reads rows that shared memory does not hold three times and writes one, the backward of nll_loss writes zeros, that
of log_softmax reads its gradient twice and its result, and writes one"""
UNFUSED_UPDATE = 80.0 - 28 + 12
"""torch/optim/adamw.py without ``fused``, in float32: decay 8, first moment 12, second 8 + 12, root, quotient and sum 8 each,
step 16; clipping reads gradients once and scales them"""
SEQUENCE = {"length": 4096, "vocab": 131072}

ROWS = (
    *(
        Row(
            f"Megatron-LM {name}, TP {tp} DP 48", TRANSFORMER_ENGINE, {"dp": 48, "tp": tp},
            MEGATRON if tp > 1 else {"dp": "zero1"},
            gpt(width, 131072, 4096, width // 128), layers, 192, seconds=seconds, dtype=torch.float32,
            part_by_part=True, loss=MEGATRON_LOSS, buffers=MEGATRON_BUFFERS, **SEQUENCE,
        )
        for name, width, layers, tp, seconds in (
            ("1.7B", 2048, 24, 1, 0.452), ("7.1B", 4096, 30, 2, 0.800), ("32B", 7168, 48, 8, 0.892),
        )
    ),
    *(
        Row(
            f"Korthikanti 22B, TP 8, {what}", "a100", {"tp": 8}, {"tp": like},
            plain_gpt(6144, 51200, 2048, 64), 48, 4, 2048, 51200, seconds, again, torch.float16, loss=MEGATRON_LOSS,
        )
        for what, like, again, seconds in (
            ("full", "megatron", whole, 1.42), ("SP + selective", "megatron-sp", attention_core, 1.10),
        )
    ),
    *(
        Row(
            f"torchtitan Llama-3 8B, FSDP {ranks}, {how}", hardware, {"dp": ranks}, {"dp": "fsdp"}, llama(LlamaConfig()), 32,
            2 * ranks, 8192, 128256, 2 * 8192 / tokens, every_second_product, torch.float32, loss=TITAN_LOSS,
            update=UNFUSED_UPDATE,
        )
        for ranks, how, hardware, tokens in (
            (8, "selective", AT_500_WATTS, 6667), (8, "not compiled", replace(AT_500_WATTS, fuses=False), 5762),
            (128, "selective", AT_500_WATTS, 6514),
        )
    ),
    *(
        Row(
            f"torchtitan Llama-3 70B, FSDP 32 TP 8, {how}", AT_500_WATTS, {"dp": 32, "tp": 8},
            {"dp": "fsdp", "tp": "megatron-sp"}, llama(LlamaConfig.llama_70b()), 80, 512, 8192, 128256, 16 * 8192 / tokens / 8,
            whole, loss=TITAN_LOSS, part_by_part=how == "asynchronous TP",
            update=UNFUSED_UPDATE,
        )
        for how, tokens in (("full", 597.3), ("asynchronous TP", 652.4))
    ),
)  # fmt: skip


def predicted(row: Row, layers: int) -> tuple[float, float, float]:
    """Seconds of a step of ``row`` with this many layers: of its timeline, of its compute alone, and of the timeline of what is
    planned with ``like=`` and recomputed as in the row, without its other terms."""
    with torch.device("meta"):
        model = row.model(layers).to(row.dtype)
        if row.dtype is torch.float32:
            for name, table in [*model.named_buffers()]:  # rotary tables are computed with in bfloat16, too
                model.get_buffer(name).data = table.to(torch.bfloat16)
        tokens = torch.zeros(row.batch, row.length, dtype=torch.long)
    mixed = MIXED if row.dtype is torch.float32 else None
    opts = CompileOptions(like=row.like, memory_budget=1e15, mixed_precision=mixed)
    device = replace(hardware(row.hardware), part_by_part=row.part_by_part)
    if (
        row.part_by_part and row.mesh.get("tp", 1) > 1 and "fsdp" not in row.like.values()
    ):  # whose gathers take multiprocessors
        device = by_copy_engines(device)
    with left_as_spelled():
        graph = capture_graph(model, (tokens,), {"labels": tokens}, training=True, precision=mixed)
        program, plan = plan_graph(graph, Mesh(row.mesh, device), opts)
    compute, waits = made_again(program, row.again) if row.again else (0.0, 0.0)
    plain = step_end(plan) + compute + waits
    compute += beside(row, model, plan)
    return step_end(plan) + compute + waits, plan.cost.compute_s + compute, plain


def beside(row: Row, model: nn.Module, plan: Plan) -> float:
    """Seconds of what its authors' code moves through memory more than what is planned does."""
    seconds = plan.mesh.hardware.memory_seconds
    found = 0.0
    if row.buffers:
        ours = sum(c.copied_s for c in plan.collectives if c.movable)
        found += seconds(row.buffers * sum(p.numel() for p in model.parameters()) / row.mesh.get("tp", 1)) - ours
    if row.update:
        found += seconds(row.update * sum(p.numel() for p in model.parameters()) / plan.mesh.size)
    if row.loss:
        losses = [c for c in plan.choices.values() if not c.fqn and c.op in LOSS]
        moved = row.loss * row.batch * row.length * row.vocab / plan.mesh.size
        found += seconds(moved) - sum(c.seconds for c in losses)
    return found


LOSS = ("aten._to_copy.default", "aten.cross_entropy_loss.default")
"""the loss of :class:`InFloat32` in a plan"""


@contextmanager
def left_as_spelled() -> Iterator[None]:
    """Attention that a row spells out is none of our kernels: its authors ran it with its matrix.

    Megatron-LM fuses bias and GeLU; bias, dropout and sum; scale, mask and softmax by hand (Narayanan et al. 2021, section
    4.2), but not the dropout of attention's weights: no kernel of :class:`Core` joins another.
    """

    def joins(node: Node) -> bool:
        return ".core" not in node.fqn and is_fusible(node)

    with (
        patch("autoshard.passes.capture.translate.graph_from_export.fuse_attention", lambda graph: graph),
        patch("autoshard.passes.propagate.prices.roofline.is_fusible", joins),
    ):
        yield


def made_again(program: Program, selects: Selects) -> tuple[float, float]:
    """The forward once more of what ``selects`` picks: its compute, and the conversions of activations inside it."""
    found, compute, waits = objective(program.assignment), 0.0, 0.0
    for node in program.graph.nodes:
        rule = rule_for(node.op)
        share = selects(node.fqn, str(node.op), rule is not None and rule.flops is not None)
        compute += share * found.spaces[node].compute().forward
        waits += share * float(found.spaces[node].phases[2, 0, 0])
    near = beside_products(program.graph, program.mesh)
    for travels, part in ((s.call.fn in COLLECTIVE_MATMULS, part) for s in program.statements for part in s.parts):
        step = part.step
        if step is None or not step.is_collective or part.parameter or selects(part.block + ".", "", False) != 1.0:
            continue
        journey = None
        if travels:
            journey = ring_transfers(program.graph.types[part.value], near[part.value], step.src, step.dst)
        if journey is None:
            waits += program.mesh.link(step.axes).seconds(step.forward_bytes, step.kind)
        else:
            waits += journey[0].seconds - journey[0].hidden
    return compute, waits


def steps(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[float]]:
    """Prints a line per row; errors by kind."""
    print(f"{'published step':53} {'published':>9} {'predicted':>9} {'error':>7}   of it compute   like= alone   error")
    errors: dict[str, list[float]] = {}
    for row in rows:
        if names and not any(n in row.name for n in names):
            continue
        few, more = predicted(row, 2), predicted(row, 4)
        step, compute, plain = (a + (row.layers - 2) * (b - a) / 2 for a, b in zip(few, more, strict=True))
        print(
            f"{row.name:53} {row.seconds:8.3f}s {step:8.3f}s {step / row.seconds - 1:+7.1%}   {compute:12.3f}s"
            f" {plain:12.3f}s {plain / row.seconds - 1:+7.1%}",
            flush=True,
        )
        errors.setdefault("FSDP" if "fsdp" in row.like.values() else "dense", []).append(step / row.seconds - 1)
    return errors


def tell_errors(*parts: dict[str, list[float]]) -> None:
    """Median error by kind. Nothing is fitted to a row, so the error of a row is that of leaving it out."""
    errors: dict[str, list[float]] = {}
    for kind, found in (item for part in parts for item in part.items()):
        errors.setdefault(kind, []).extend(found)
    if len(errors) > 1:
        errors["all"] = [error for found in errors.values() for error in found]
    for kind, found in errors.items():
        near = sum(abs(error) <= 0.12 for error in found) / len(found)
        print(f"{kind}: median error {statistics.median(found):+.1%}, {near:.0%} of {len(found)} rows within 12 %")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="rows whose name contains one of these")
    options = parser.parse_args()
    logging.getLogger("torch").setLevel(logging.ERROR)
    tell_errors(steps(ROWS, options.only))


if __name__ == "__main__":
    sys.exit(main())
