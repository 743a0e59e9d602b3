"""Llama-3 405B on a cluster of H100s: how long the search of mesh, stages and recomputation takes, and its step.

python benchmarks/scale.py [devices ...]    # default: 16384

The published figures are of The Llama 3 Herd of Models (2024), table 4: 8192 tokens in a sequence, 16 M tokens a
step, TP 8, PP 16 and DP 128 on 16,384 GPUs (DP 64 on 8192). The search is given none of this but the batch.
"""

from __future__ import annotations

import resource
import sys
import time

import torch

import autoshard
from autoshard.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(width=16384, hidden=53248, heads=128, kv_heads=8, layers=126)
TOKENS, LENGTH = 16 * 2**20, 8192  # of a step, of a sequence
PUBLISHED = {8192: 0.43, 16384: 0.41}  # MFU


def main(devices: list[int]) -> None:
    with torch.device("meta"):
        model, tokens = Llama(CONFIG).to(torch.bfloat16), torch.zeros(TOKENS // LENGTH, LENGTH, dtype=torch.long)
    for count in devices:
        began = time.perf_counter()
        plan = autoshard.plan(
            model,
            None,
            (tokens,),
            {"labels": tokens},
            devices=count,
            hardware="h100_llama3",
            training=True,
            micro_batches="auto",
            recompute="auto",
        )
        took, used = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        staged, cost = plan.staged, plan.cost
        pipeline = "" if staged is None else f", {staged.schedule}, {staged.micro_batches} micro-batches"
        published = f", published {PUBLISHED[count]:.0%}" if count in PUBLISHED else ""
        print(f"{count} H100: searched in {took:.0f} s, {used / 1e9:.2f} GB of this machine")
        print(f"  {plan.mesh}{pipeline}, at most {plan.memory.peak / 1e9:.1f} GB of a device")
        print(f"  step {cost.total_s:.2f} s, MFU {cost.mfu or 0.0:.1%}{published}")
        for other in plan.candidates[:5]:
            print(f"  {other.mesh}: {other.why}")


if __name__ == "__main__":
    main([int(n) for n in sys.argv[1:]] or [16384])
