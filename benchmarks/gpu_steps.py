"""Training steps on this GPU, beside what a plan for it predicts: seconds and memory.

    python benchmarks/gpu_steps.py --hardware h100 --models "llama;gpt" --inductor
    python benchmarks/gpu_steps.py --small          # sizes that a CPU computes, too, as it does where there is no GPU

A step is forward, backward and fused AdamW. *plain*: the model as it is, *ours*: compiled for a mesh of one rank of
torch.distributed, each run eagerly and, if asked for, under torch.compile. *predicted*: ``plan.cost.total_s`` for a device
that runs every operation as a kernel, and for one that fuses chains of elementwise operations. Memory: the allocator's peak
in a step beside what there was before, and ``plan.memory.peak`` with moments in the dtype of the parameters, as torch's AdamW
has them.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from six_models import Convolutions
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import autoshard
from autoshard.hardware.device import Hardware
from autoshard.hardware.presets import hardware
from autoshard.models import DlrmConfig, GptConfig, LlamaConfig, MoeConfig, VitConfig, dlrm, gpt, llama, moe, vit

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")


class Setting(NamedTuple):
    """A model at work."""

    model: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    dtype: torch.dtype
    recompute: tuple[str, ...] = ("none",)


def settings(small: bool) -> dict[str, Setting]:
    """By name. ``small``: sizes that a CPU computes in no time."""
    tiny = LlamaConfig.tiny(), GptConfig.tiny(), VitConfig.tiny(), MoeConfig.tiny(), DlrmConfig.tiny()
    real = (
        LlamaConfig(layers=4),
        GptConfig.small(),
        VitConfig.base(),
        MoeConfig(32000, 1024, 3584, 16, 8, 4),
        DlrmConfig(rows=(4_000_000, 1_000_000, 100_000, 10_000, 1000, 100)),
    )
    large, gpt2, base, experts, tables = tiny if small else real
    batch, length = (2, 16) if small else (8, 1024)
    every, bf16 = ("none", "selective", "blocks"), torch.bfloat16
    images = torch.rand(2 if small else 64, 3, 56, 56)
    return {
        "llama": Setting(lambda: llama.Llama(large), lambda: llama.example_inputs(large, 2, 4 * length), bf16, every),
        "gpt": Setting(lambda: gpt.Gpt(gpt2), lambda: gpt.example_inputs(gpt2, 2 * batch, length), bf16, every),
        "gpt, no dropout": Setting(
            lambda: gpt.Gpt(replace(gpt2, dropout=0.0)), lambda: gpt.example_inputs(gpt2, 2 * batch, length), bf16
        ),
        "gpt, float32": Setting(
            lambda: gpt.Gpt(replace(gpt2, dropout=0.0)), lambda: gpt.example_inputs(gpt2, batch, length), torch.float32
        ),
        "vit": Setting(lambda: vit.Vit(base), lambda: vit.example_inputs(base, 8 * batch), bf16),
        "moe": Setting(lambda: moe.Moe(experts), lambda: moe.example_inputs(experts, batch, length), bf16),
        "dlrm": Setting(lambda: dlrm.Dlrm(tables), lambda: dlrm.example_inputs(tables, 64 * length), torch.float32),
        "convolutions": Setting(lambda: Convolutions(8 if small else 256), lambda: ((images,), {}), bf16),
    }


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


def measured(
    model: nn.Module, args: Any, kwargs: Any, seconds: float, inductor: bool = False
) -> tuple[float, float, float]:
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


def run(name: str, given: Setting, h: Hardware, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = given.model().to(given.dtype)
    args, kwargs = moved(given.inputs(), given.dtype)
    count = sum(p.numel() for p in model.parameters())
    print(f"\n{name}: {count / 1e6:.0f} M parameters, {given.dtype}{'ms':>33}{'GB':>9}{'loss':>12}", flush=True)
    world = init_device_mesh(DEVICE.type, (1,), mesh_dim_names=("x",))
    inductors = (False, True) if options.inductor else (False,)
    step = partial(measured, args=args, kwargs=kwargs, seconds=options.seconds)
    moments = 2.0 * sum(p.nbytes for p in model.parameters())
    for inductor in inductors:
        report(f"plain{', torch.compile' * inductor}", step, lambda: copy.deepcopy(model), inductor=inductor)
    report("DistributedDataParallel", step, lambda: DistributedDataParallel(copy.deepcopy(model)))
    for recompute in given.recompute:
        both = inductors if recompute == "none" else (False,)
        for fuses in both:
            mesh = autoshard.Mesh({"x": 1}, replace(h, fuses=fuses))
            plan = autoshard.plan(model, mesh, args, kwargs, recompute=recompute)
            peak = plan.memory.peak - plan.memory.optimizer + moments
            line(f"predicted, {recompute}{', fused' * fuses}", plan.cost.total_s, peak)
        make = partial(autoshard.compile, mesh=world, example_args=args, example_kwargs=kwargs, recompute=recompute)
        for inductor in both:
            what = f"ours, {recompute}{', torch.compile' * inductor}"
            report(what, step, lambda make=make: make(copy.deepcopy(model)), inductor=inductor)


def report(
    what: str, measure: Callable[..., tuple[float, float, float]], make: Callable[[], nn.Module], **options: Any
) -> None:
    held = torch.cuda.memory_allocated() if CUDA else 0
    try:
        seconds, peak, loss = measure(make(), **options)
        line(what, seconds, peak - held if CUDA else 0.0, loss)
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
    parser.add_argument("--inductor", action="store_true", help="under torch.compile, too")
    options = parser.parse_args()
    found = settings(options.small or not CUDA)
    with tempfile.TemporaryDirectory() as folder:
        at = f"file://{folder}/rendezvous"
        dist.init_process_group("nccl" if CUDA else "gloo", init_method=at, rank=0, world_size=1)
        for name in options.models.split(";") if options.models else found:
            try:
                run(name, found[name], hardware(options.hardware), options)
            except Exception:
                traceback.print_exc()
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
