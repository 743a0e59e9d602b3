"""Predicted against measured: the plans that there are for six models, on gloo ranks of this machine as it was calibrated.

    python benchmarks/truth.py --ranks 2 --steps 15
    python benchmarks/truth.py --models wide:middle,dlrm:middle --ranks 4 --hardware here.json

The machine is calibrated with as many ranks first, once, with a thread each. Then a world for each model, whose plans take
turns: forward, backward and fused AdamW. Predicted: ``plan.cost.total_s``. Measured: the median step of the slowest rank, and
the least processor time of the busiest one, which other work on the machine disturbs less. ρ: Spearman's rank correlation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from six_models import SIX
from step_time import Step, Task, Times, race, training_step

import autoshard
from autoshard.errors import AutoshardError

EVERYWHERE = ("ddp", "zero1", "zero2", "fsdp", "replicate", "megatron")
MORE = {
    "llama:middle": ("megatron-sp", "ulysses"),
    "vit:middle": ("megatron-sp",),
    "moe:middle": ("expert",),
    "dlrm:middle": ("table-wise", "row-wise", "column-wise"),
}
"""plans by name, beside the free one"""


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's, of lists without ties."""
    ranks = torch.tensor([xs, ys], dtype=torch.float64).argsort(1).argsort(1).double()
    return float(torch.corrcoef(ranks)[0, 1])


def compiled(task: Task, mesh: autoshard.Mesh) -> dict[str, tuple[float, Step]]:
    """Plan → (predicted seconds, a step). Plans that this model has not are left out."""
    found = {}
    for like in (None, *EVERYWHERE, *MORE.get(task.name, ())):
        try:
            sharded = autoshard.compile(task.model(), mesh, task.args, dict(task.kwargs), like=like, training=True)
        except AutoshardError as error:
            if dist.get_rank() == 0:
                print(f"{task.name} like={like!r}: {error}", file=sys.stderr)
            continue
        found[like or "free"] = sharded.plan.cost.total_s, training_step(sharded, task.args, task.kwargs)
    return found


def work(options: argparse.Namespace) -> None:
    """One rank; the first prints."""
    torch.set_num_threads(1)
    at = f"file://{options.rendezvous}"
    dist.init_process_group("gloo", init_method=at, rank=options.rank, world_size=options.ranks)
    if not options.models:
        hardware = autoshard.calibrate(quick=False)
        if options.rank == 0:
            hardware.save(options.hardware)
            print(hardware, flush=True)
    for name in filter(None, options.models.split(",")):
        plans = compiled(Task.of(name), autoshard.Mesh({"x": options.ranks}, hardware=str(options.hardware)))
        times = race({plan: step for plan, (_, step) in plans.items()}, options.steps)
        if options.rank == 0:
            report(name, {plan: seconds for plan, (seconds, _) in plans.items()}, times)
    dist.barrier()
    dist.destroy_process_group()


def report(name: str, predicted: dict[str, float], times: dict[str, Times]) -> None:
    """One line for each plan, the fastest first."""
    wall = {plan: statistics.median(t.wall) for plan, t in times.items()}
    cpu = {plan: min(t.cpu) for plan, t in times.items()}
    print(f"\n{name:22}{'predicted':>12}{'measured':>12}{'CPU':>10}   ms")
    for plan in sorted(wall, key=wall.__getitem__):
        print(f"  {plan:20}{predicted[plan] * 1e3:12.2f}{wall[plan] * 1e3:12.2f}{cpu[plan] * 1e3:10.2f}")
    for what, found in (("measured", wall), ("CPU", cpu)):
        rho = correlation([predicted[p] for p in found], list(found.values()))
        print(
            f"  {what}: ρ {rho:.2f}, the free plan {found['free'] / min(found.values()):.2f} × the fastest", flush=True
        )


def world(options: argparse.Namespace, models: str, hardware: Path) -> int:
    """Run all ranks; their exit code."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--models", models, "--ranks", str(options.ranks)]
        command += ["--steps", str(options.steps), "--hardware", str(hardware), "--rendezvous", f"{folder}/rendezvous"]
        ranks = [subprocess.Popen([*command, "--rank", str(r)], env=env) for r in range(options.ranks)]
        return max((rank.wait() for rank in ranks), key=abs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SIX), help="names from six_models.py, separated by commas")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--steps", type=int, default=15, help="timed steps of each plan")
    parser.add_argument("--hardware", type=Path, help="what calibrate() saved (default: it runs first)")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        hardware = options.hardware or Path(folder) / "hardware.json"
        first = [] if options.hardware else [""]
        sys.exit(max((world(options, name, hardware) for name in (*first, *options.models.split(","))), key=abs))


if __name__ == "__main__":
    main()
