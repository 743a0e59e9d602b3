"""Pipelines: how long it takes to plan them, and published steps predicted: ``python benchmarks/pipeline.py [search | steps]``.

``search``: stages, the mesh of a stage, micro-batches, schedule and recomputation, all free, for a number of devices.

``steps``: training steps that were published, for the stages, micro-batches and named strategy that their authors used.
Models are planned with two and with four layers, as by ``benchmarks/planner.py``; a layer more takes what the difference
says. The layers, and what stands before and behind them, are cut and simulated as any pipeline. No constant of the model
was solved for from these rows.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from planner import (
    MEGATRON,
    TRANSFORMER_ENGINE,
    Selects,
    attention_core,
    by_copy_engines,
    gpt,
    left_as_spelled,
    llama,
    made_again,
    plain_gpt,
    tell_errors,
    whole,
)
from torch import nn

import autoshard
from autoshard import Hardware, Mesh
from autoshard.compiler import capture_graph
from autoshard.hardware import hardware as device_of
from autoshard.models.llama import LlamaConfig
from autoshard.passes.ir.text import show_bytes, show_seconds
from autoshard.passes.pipeline.partition import BoundarySearch, GraphSegment
from autoshard.passes.pipeline.schedules import rank_orders, schedule_refusal, simulate_timeline
from autoshard.plans.options import CompileOptions
from autoshard.plans.planning import plan_graph
from autoshard.report.pipeline import StageTimes, stage_times
from autoshard.report.record import Collective

# --- searches ---

SEARCHES: dict[str, tuple[Callable[[], nn.Module], int, int, int, str]] = {
    "Llama-3 70B": (lambda: llama(LlamaConfig.llama_70b())(80), 512, 1024, 4096, "h100"),
    "GPT-39B": (lambda: gpt(8192, 51200, 1024, 64)(48), 64, 1024, 1024, "a100"),
}
"""name → model, devices, sequences, their length, hardware"""


def search(names: Sequence[str]) -> None:
    for name, (make, devices, rows, length, hardware) in SEARCHES.items():
        if names and not any(n in name for n in names):
            continue
        with torch.device("meta"):
            model, tokens = make().to(torch.bfloat16), torch.zeros(rows, length, dtype=torch.long)
        begin, used = time.perf_counter(), time.process_time()
        plan = autoshard.plan(
            model, None, (tokens,), {"labels": tokens}, devices=devices, hardware=hardware, training=True,
            micro_batches="auto",
        )  # fmt: skip
        took, used = time.perf_counter() - begin, time.process_time() - used
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        cost, staged = plan.cost, plan.staged
        how = f"{staged.schedule}, {staged.micro_batches} micro-batches" if staged else "no stages"
        print(f"{name} on {devices} {hardware}: {took:.1f} s ({used:.1f} s of a processor, {show_bytes(peak)})")
        print(
            f"  {plan.mesh}; {how}: {show_seconds(cost.total_s)}, MFU {cost.mfu:.1%}, {show_bytes(plan.memory.peak)} a rank"
        )
        for other in plan.candidates[:3]:
            print(f"  {other.mesh}: {other.why}")
        print("\n".join(f"  {note}" for note in plan.notes), flush=True)


# --- published steps ---


@dataclass(frozen=True)
class Row:
    """A published step. ``batch``: sequences of one micro-batch over all ranks; ``chunks``: stages per rank; where that was
    not published, the best of these counts."""

    name: str
    hardware: str | Hardware
    stages: int
    chunks: tuple[int, ...]
    mesh: dict[str, int]
    like: Any
    model: Callable[[int], nn.Module]
    width: int
    layers: int
    rows: int
    """sequences of a step"""
    batches: tuple[int, ...]
    """sequences of one micro-batch on a rank of dp: where it was not published, the best of these counts"""
    length: int
    seconds: float
    again: Selects | None = None
    dtype: torch.dtype = torch.bfloat16
    kind: str = "pipeline"
    beside: Callable[[int, int], tuple[float, float, float]] | None = None
    """(layers, sequences of a micro-batch) → seconds forward, backward and once per step of what no plan of ours has"""
    part_by_part: bool = False
    """whether messages of tensor parallelism go beside the products that they are for"""
    gathered: float = 1.0
    """bytes of activations that are gathered along tp relative to 16 bits: Transformer Engine gathers what it has cast"""
    exchanges_hide: bool = False
    """whether rows travel to experts beside the work of another micro-batch"""
    exchanged: float = 1.0
    """bytes of these messages relative to one copy per chosen expert"""
    summed_after: bool = False
    """whether gradients are summed after the last backward, and not beside it: Megatron-LM of 2021 (training.py of v2.5)"""


LLAMA = llama(LlamaConfig(width=16384, hidden=53248, heads=128, kv_heads=8, layers=126))

# Korthikanti et al. 2022 (arXiv:2205.05198), table 5; Narayanan et al. 2021 (arXiv:2104.04473), table 1: FLOP/s per GPU, by its
# own formula; Megatron-LM's table of models. Of the 405B the rate was published, in FLOPs as Chowdhery et al. 2022 count them
# (appendix B): attention in full. Its first chunk holds only the embedding, its last only the head and the loss (Llama team
# 2024, section 3.3.2): 128 chunks of one part.
ROWS = (
    Row(
        "Megatron-LM 119B, TP 8 PP 4 DP 48", TRANSFORMER_ENGINE, 4, (1, 23), {"dp": 48, "tp": 8}, MEGATRON,
        gpt(10240, 131072, 4096, 80), 10240, 92, 768, (1, 2), 4096, 3.648, part_by_part=True,
    ),
    *(
        Row(
            f"Korthikanti {name}, TP 8 PP {stages}, {what}", "a100", stages, (chunks,), {"tp": 8}, {"tp": like},
            plain_gpt(width, 51200, 2048, heads), width, layers, rows, (1,), 2048, seconds, again, torch.float16,
        )
        for name, width, layers, heads, stages, chunks, rows, times in (
            ("175B", 12288, 96, 96, 8, 3, 64, (18.13, 13.75)),
            ("530B", 20480, 105, 128, 35, 3, 280, (49.05, 37.83)),
            ("1T", 25600, 128, 160, 64, 1, 512, (94.42, 71.49)),
        )
        for (what, like, again), seconds in zip(
            (("full", "megatron", whole), ("SP + selective", "megatron-sp", attention_core)), times, strict=True
        )
    ),
    *(
        Row(
            f"Narayanan {name}, TP 8 PP {stages} DP {ranks}, full", "a100", stages, chunks, {"dp": ranks, "tp": 8},
            {"dp": "ddp", "tp": "megatron"}, plain_gpt(width, 51200, 2048, heads), width, layers, rows, batches, 2048,
            96 * rows * 2048 * layers * width**2 * (1 + 2048 / (6 * width) + 51200 / (16 * layers * width))
            / (rate * 1e12 * 8 * stages * ranks), whole, torch.float16, summed_after=True,
        )
        for name, width, layers, heads, stages, ranks, rows, chunks, batches, rate in (
            ("39B", 8192, 48, 64, 2, 32, 1536, (1, 2, 3, 4, 6), (1, 2), 138),
            ("76B", 10240, 60, 80, 4, 32, 1792, (1, 3, 5), (1, 2), 140),
            ("146B", 12288, 80, 96, 8, 24, 2304, (1, 2, 5), (1, 2), 148),
            ("310B", 16384, 96, 128, 16, 15, 2160, (1, 2, 3, 6), (1, 2), 155),
            ("530B", 20480, 105, 128, 35, 9, 2520, (1, 3), (1, 2), 163),
            ("1T", 25600, 128, 160, 64, 6, 3072, (1, 2), (1, 2), 163),
        )
    ),
    Row(
        "Llama-3 405B, TP 8 PP 16 DP 64", "h100", 16, (1, 7, 8), {"dp": 64, "tp": 8}, MEGATRON, LLAMA, 16384, 126, 2048, (1,),
        8192, 2048 * 8192 * (6 * 405e9 + 12 * 126 * 16384 * 8192) / (430e12 * 8192),
    ),
)  # fmt: skip


def replicas(row: Row) -> int:
    """Ranks with sequences of their own."""
    return row.mesh.get("dp", 1) * row.mesh.get("ep", 1)


def is_reordering(c: Collective) -> bool:
    """Whether shards of a parameter swap ranks: those of Megatron-LM lie flat in a buffer and need not."""
    return c.movable and c.kind in ("permute", "all_to_all")


def gathers(c: Collective) -> bool:
    """Whether a conversion along tp gathers: forward into R, or as the gradient of a sum of P."""
    before, _, after = c.reason.partition(" → ")
    return "R@tp" in after if c.phase == "forward" or "recomputed" in c.reason else "P@tp" in before


def stage_of(row: Row, batch: int, layers: int) -> StageTimes:
    """What one micro-batch takes with so many layers on one stage."""
    with torch.device("meta"):
        model = row.model(layers).to(row.dtype)
        tokens = torch.zeros(batch * replicas(row), row.length, dtype=torch.long)
    opts = CompileOptions(like=row.like, memory_budget=1e15)
    with left_as_spelled():
        graph = capture_graph(model, (tokens,), {"labels": tokens}, training=True)
        graph = replace(graph, passes=row.rows // len(tokens))
        device = replace(device_of(row.hardware), part_by_part=row.part_by_part)
        if row.part_by_part and row.mesh.get("tp", 1) > 1 and "fsdp" not in row.like.values():
            device = by_copy_engines(device)
        program, plan = plan_graph(graph, Mesh(row.mesh, device), opts)
    plan = replace(plan, collectives=tuple(c for c in plan.collectives if not is_reordering(c)))
    if row.summed_after:
        blocking = (replace(c, movable=c.movable and c.phase == "forward") for c in plan.collectives)
        plan = replace(plan, collectives=tuple(blocking))
    times = stage_times(plan)
    ahead, back, once = row.beside(layers, batch) if row.beside else (0.0, 0.0, 0.0)
    back += sum(made_again(program, row.again)) if row.again else 0.0
    alone = {"forward": 0.0, "backward": 0.0}
    for c in plan.collectives:
        if c.kind == "all_to_all" and not c.movable:
            shown = 1 - plan.mesh.beside(c.axes, c.kind) if row.exchanges_hide else 1.0
            taken, share = c.seconds, row.exchanged * shown
        elif c.axes == ("tp",) and not c.movable and gathers(c):
            taken, share = c.seconds - c.hidden_s, row.gathered
        else:
            continue
        alone[c.phase] += (share - 1) * taken / plan.micro_batches
    own = replace(
        times.batch,
        forward=times.batch.forward + ahead + alone["forward"],
        backward=times.batch.backward + back + alone["backward"],
        once=times.batch.once + once,
    )
    return replace(times, batch=own)


def predicted(row: Row, batch: int) -> Iterator[tuple[float, float, int]]:
    """Per number of chunks the seconds of the step, those of its bubble, and the number.

    ``batch``: sequences of one micro-batch on a rank of dp.
    """
    few, more = stage_of(row, batch, 2), stage_of(row, batch, 4)
    link = Mesh({"pp": row.stages, **row.mesh}, row.hardware).link("pp")
    cut = row.mesh.get("tp", 1) * row.mesh.get("cp", 1)
    message = link.seconds(batch * row.length * row.width * 2 / cut, "permute") if row.stages > 1 else 0.0
    forward, backward = ((getattr(more.batch, x) - getattr(few.batch, x)) / 2 for x in ("forward", "backward"))
    once = (more.once_s - few.once_s) / 2
    block = GraphSegment(forward, backward, send=message, send_back=message, once=once)
    start = GraphSegment(0.0, 0.0, send=message)  # the look-up's time is part of the rest
    rest = GraphSegment(
        few.batch.forward - 2 * forward,
        few.batch.backward - 2 * backward,
        send_back=message,
        once=few.once_s - 2 * once,
    )
    count = row.rows // (batch * replicas(row))
    for chunks in row.chunks:
        schedule = "1f1b" if chunks == 1 else "interleaved"
        if not schedule_refusal(schedule, row.stages, count, chunks):
            cutting = BoundarySearch([start] + [block] * row.layers + [rest], schedule, row.stages, count, chunks)
            step = simulate_timeline(rank_orders(schedule, row.stages, count, chunks), cutting.best().stages)
            yield step.end_s, step.bubble_s, chunks


def steps(rows: Iterable[Row], names: Sequence[str]) -> dict[str, list[float]]:
    """Prints a line per row; errors by kind."""
    print(f"{'published step':46} {'published':>9} {'predicted':>9} {'error':>7}   of it waiting, micro-batch, chunks")
    errors: dict[str, list[float]] = {}
    for row in rows:
        if names and not any(n in row.name for n in names):
            continue
        found = [(*one, batch) for batch in row.batches for one in predicted(row, batch)]
        step, bubble, chunks, batch = min(found)
        errors.setdefault(row.kind, []).append(error := step / row.seconds - 1)
        print(
            f"{row.name:46} {row.seconds:8.3f}s {step:8.3f}s {error:+7.1%}   {bubble:.3f}s, {batch}, {chunks}",
            flush=True,
        )
    return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "steps"), nargs="?", default="steps")
    parser.add_argument("names", nargs="*", help="rows whose name has one of these in it")
    options = parser.parse_args()
    if options.what == "search":
        search(options.names)
    else:
        tell_errors(steps(ROWS, options.names))


if __name__ == "__main__":
    main()
