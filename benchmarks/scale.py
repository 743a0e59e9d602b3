"""Llama-3 405B on a cluster of H100s: how long the search of mesh, stages and recomputation takes, and its step.

python benchmarks/scale.py [devices ...]    # default: 16384
python benchmarks/scale.py --long           # 131,072 tokens in a sequence, in the published layout

The published figures are of The Llama 3 Herd of Models (2024), table 4: 16 M tokens a step in sequences of 8192 tokens
on TP 8, PP 16 and DP 128 (64 on 8192 GPUs), or of 131,072 on TP 8, CP 16, PP 16 and DP 8. The search is given none of this
but the batch. MFU counts causal attention as half; the rate beside the published one counts it in full, as the paper does
(the MFU of Chowdhery et al. 2022). Its chunks are eight a rank.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

import torch

import autoshard
from autoshard.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(width=16384, hidden=53248, heads=128, kv_heads=8, layers=126)
TOKENS = 16 * 2**20  # of a step
PARAMETERS = 405e9
PUBLISHED = {(8192, 8192): 430e12, (16384, 8192): 400e12, (16384, 131072): 380e12}  # FLOP/s of a GPU
AXES = {"pp": 16, "dp": 8, "cp": 16, "tp": 8}
LONG: dict[str, Any] = {
    "stages": "pp",
    "like": {"dp": "zero1", "cp": "ring", "tp": "megatron-sp"},
    "micro_batches": 16,
    "schedule": "interleaved",
    "stages_per_rank": 8,
}


def plan_of(devices: int, length: int) -> autoshard.Plan:
    with torch.device("meta"):
        model, tokens = Llama(CONFIG).to(torch.bfloat16), torch.zeros(TOKENS // length, length, dtype=torch.long)
    searched = {"devices": devices, "hardware": "h100_llama3", "micro_batches": "auto"}
    mesh = autoshard.Mesh(AXES, "h100_llama3") if length > 8192 else None
    options = searched if mesh is None else LONG
    return autoshard.plan(model, mesh, (tokens,), {"labels": tokens}, training=True, recompute="auto", **options)


def main(rows: list[tuple[int, int]]) -> None:
    for devices, length in rows:
        began = time.perf_counter()
        plan = plan_of(devices, length)
        took, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        staged, cost = plan.staged, plan.cost
        pipeline = "" if staged is None else f", {staged.schedule}, {staged.micro_batches} micro-batches"
        flops = TOKENS * (6 * PARAMETERS + 12 * CONFIG.layers * length * CONFIG.width)
        rate, published = flops / devices / cost.total_s, PUBLISHED.get((devices, length))
        beside = f", published {published / 1e12:.0f}" if published else ""
        print(f"{devices} H100, sequences of {length}: planned in {took:.0f} s, {used / 1e9:.2f} GB of this machine")
        print(f"  {plan.mesh}{pipeline}, at most {plan.memory.peak / 1e9:.1f} GB of a device")
        print(f"  step {cost.total_s:.2f} s, MFU {cost.mfu or 0.0:.1%}, {rate / 1e12:.0f} TFLOP/s of a GPU{beside}")
        for other in plan.candidates[:5]:
            print(f"  {other.mesh}: {other.why}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("devices", nargs="*", type=int)
    parser.add_argument("--long", action="store_true")
    given = parser.parse_args()
    main([(16384, 131072)] if given.long else [(n, 8192) for n in given.devices or [16384]])
