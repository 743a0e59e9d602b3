"""Training steps on this GPU, beside what a plan for it predicts: seconds and memory.

    python benchmarks/gpu_steps.py --hardware h100 --models llama,gpt
    python benchmarks/gpu_steps.py --small          # the same on a CPU, to try the script

A step is forward, backward and fused AdamW. *plain*: the model as it is, *ours*: compiled for a mesh of one rank, each run
eagerly and under torch.compile. *predicted*: ``plan.cost.total_s`` for a device that runs every operation as a kernel, and for
one that fuses chains of elementwise operations. Memory: the allocator's peak in a step, and ``plan.memory.peak``.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from six_models import Convolutions
from torch import nn

import autoshard
from autoshard.hardware.presets import hardware
from autoshard.models import DlrmConfig, GptConfig, LlamaConfig, MoeConfig, VitConfig, dlrm, gpt, llama, moe, vit

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
Case = tuple[Callable[[], nn.Module], Callable[[], Any], torch.dtype, tuple[str, ...]]


def cases(small: bool) -> dict[str, Case]:
    """Name → (model, inputs, dtype, settings of recompute)."""
    bf16, full = torch.bfloat16, torch.float32
    l8b = LlamaConfig.tiny() if small else LlamaConfig(layers=4)
    gpt2 = GptConfig.tiny() if small else GptConfig(layers=12, dropout=0.1)
    base = VitConfig.tiny() if small else VitConfig.base()
    experts = MoeConfig.tiny() if small else MoeConfig(32000, 1024, 3584, 16, 8, 4)
    tables = DlrmConfig.tiny() if small else DlrmConfig(rows=(4_000_000, 1_000_000, 100_000, 10_000, 1000, 100))
    every = ("none", "selective", "blocks")
    return {
        "llama": (lambda: llama.Llama(l8b), lambda: llama.example_inputs(l8b, 2, 32 if small else 4096), bf16, every),
        "gpt": (lambda: gpt.Gpt(gpt2), lambda: gpt.example_inputs(gpt2, 2 if small else 16, 32 if small else 1024), bf16, every),
        "gpt float32": (lambda: gpt.Gpt(gpt2), lambda: gpt.example_inputs(gpt2, 2 if small else 8, 32 if small else 1024), full, ("none",)),
        "vit": (lambda: vit.Vit(base), lambda: vit.example_inputs(base, 2 if small else 64, 0), bf16, ("none", "blocks")),
        "moe": (lambda: moe.Moe(experts), lambda: moe.example_inputs(experts, 2 if small else 8, 16 if small else 1024), bf16, ("none",)),
        "dlrm": (lambda: dlrm.Dlrm(tables), lambda: dlrm.example_inputs(tables, 8 if small else 65536, 0), full, ("none",)),
        "convolutions": (lambda: Convolutions(8 if small else 256), lambda: ((torch.rand(2 if small else 64, 3, 56, 56),), {}), bf16, ("none",)),
    }  # fmt: skip


def loss_of(output: Any) -> torch.Tensor:
    return output.float().square().mean() if isinstance(output, torch.Tensor) else output.loss


def moved(tree: Any, dtype: torch.dtype) -> Any:
    def move(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(DEVICE, dtype) if x.is_floating_point() else x.to(DEVICE)

    return torch.utils._pytree.tree_map(move, tree)


def ready() -> None:
    if CUDA:
        torch.cuda.synchronize()


def measured(model: nn.Module, args: Any, kwargs: Any, seconds: float, inductor: bool) -> tuple[float, float, float]:
    """(seconds of a step, bytes at its peak, the loss of the first step); the model is trained meanwhile."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    call = torch.compile(model) if inductor else model

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(call(*args, **kwargs))
        loss.backward()
        optimizer.step()
        return loss.detach()

    torch.manual_seed(0)
    first = float(step())
    step()
    ready()
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    times, end = list[float](), time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        step()
        ready()
        times.append(time.perf_counter() - begin)
    return statistics.median(times), torch.cuda.max_memory_allocated() if CUDA else 0.0, first


def run(name: str, case: Case, h: Any, seconds: float, inductor: bool) -> None:
    make, inputs, dtype, settings = case
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = make().to(dtype)
    args, kwargs = moved(inputs(), dtype)
    count = sum(p.numel() for p in model.parameters())
    print(f"\n{name}: {count / 1e6:.0f} M parameters, {dtype}{'ms':>33}{'GB':>9}{'loss':>12}", flush=True)
    mesh = autoshard.Mesh({"x": 1}, hardware=h)
    forms = (False, True) if inductor else (False,)
    for compiled in forms:
        report(f"plain{', torch.compile' * compiled}", measured, copy.deepcopy(model), args, kwargs, seconds, compiled)
    for recompute in settings:
        for fuses in forms if recompute == "none" else (False,):
            plan = autoshard.plan(model, mesh.with_hardware(replace(h, fuses=fuses)) if hasattr(mesh, "with_hardware") else
                                  autoshard.Mesh({"x": 1}, hardware=replace(h, fuses=fuses)), args, kwargs, recompute=recompute)  # fmt: skip
            cost = plan.cost
            line(f"predicted, {recompute}{', fused' * fuses}", cost.total_s, plan.memory.peak)
            if not fuses:
                print(f"    {'':40}compute {cost.compute_s * 1e3:.2f}, optimizer {cost.optimizer_s * 1e3:.2f}")
        for compiled in forms if recompute == "none" else (False,):
            sharded = autoshard.compile(copy.deepcopy(model), mesh, args, kwargs, recompute=recompute)
            report(
                f"ours, {recompute}{', torch.compile' * compiled}", measured, sharded, args, kwargs, seconds, compiled
            )
            del sharded


def report(what: str, measure: Callable[..., tuple[float, float, float]], *given: Any) -> None:
    try:
        line(what, *measure(*given))
    except Exception as error:
        traceback.print_exc(limit=-4)
        print(f"    {what:40}{type(error).__name__}: {str(error)[:200]}", flush=True)
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


def line(what: str, seconds: float, peak: float, loss: float | None = None) -> None:
    print(f"    {what:40}{seconds * 1e3:12.2f}{peak / 1e9:9.2f}{'' if loss is None else f'{loss:12.6f}'}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hardware", default="h100")
    parser.add_argument("--models", default="")
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, for each line")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--no-inductor", action="store_true")
    options = parser.parse_args()
    found = cases(options.small)
    for name in options.models.split(",") if options.models else found:
        try:
            run(name, found[name], hardware(options.hardware), options.seconds, not options.no_inductor)
        except Exception:
            traceback.print_exc()
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
