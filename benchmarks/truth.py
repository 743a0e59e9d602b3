"""Predicted against measured: the plans that there are for six models, on gloo ranks of this machine as it was calibrated.

    python benchmarks/truth.py --ranks 2 --steps 15
    python benchmarks/truth.py --ranks 4 --models "" --hardware here.json   # calibrates only
    python benchmarks/truth.py --ranks 4 --models wide:middle,dlrm:middle --hardware here.json

The machine is calibrated with as many ranks, a thread each, before each model, as the speed of a machine that others share
differs from one quarter of an hour to the next; with ``--hardware`` once. A world for each model, whose plans take turns with
DDP, FSDP2 and, for a Llama, ``parallelize_module``: forward, backward and fused AdamW. Each turn is a few steps, of which the
first does not count, as no training step follows one of another plan; a program that several plans have takes part once.
Predicted:
``plan.cost.total_s``, the same less what merged messages save (``merged_s``), and the end of the timeline (``schedule_s``).
Measured: the median step of the slowest rank, its lower quartile, and the least processor
time of the busiest one: both are disturbed less by other work on the machine. Forward, backward, optimizer: of rank 0, medians.
ρ: Spearman's rank correlation. ``--json``: a folder to which all of it is written, a file for each model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import worlds
from six_models import SIX
from step_time import CONTESTANTS, Task, Times, TrainingStep, race

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
ROW = 3
"""steps of a turn"""
PEERS = ("DDP", "FSDP2", "parallelize_module")

Predicted = dict[str, float]
"""total_s, with messages merged, the timeline's end; seconds"""


def correlation(*columns: list[float]) -> float:
    """Spearman's, of two lists; equal numbers share their ranks."""
    x = torch.tensor(columns, dtype=torch.float64)
    ranks = (x[:, :, None] > x[:, None]).double().sum(2) - (x[:, :, None] < x[:, None]).double().sum(2)
    return float(torch.corrcoef(ranks)[0, 1])


def compiled(task: Task, mesh: autoshard.Mesh) -> dict[str, tuple[autoshard.Plan, TrainingStep]]:
    """Name → its plan and a step. Plans that this model has not are left out. One that is another's program shares its turns,
    as "free = megatron"."""
    found: dict[str, tuple[autoshard.Plan, TrainingStep]] = {}
    names: dict[str, str] = {}
    for like in (None, *EVERYWHERE, *MORE.get(task.name, ())):
        try:
            sharded = autoshard.compile(task.model(), mesh, task.args, dict(task.kwargs), like=like, training=True)
        except AutoshardError as error:
            if dist.get_rank() == 0:
                print(f"{task.name} like={like!r}: {error}", file=sys.stderr)
            continue
        name = like or "free"
        if same := names.get(sharded.source):
            found[f"{same} = {name}"] = found.pop(same)
        else:
            found[name] = sharded.plan, TrainingStep(sharded, task.args, task.kwargs)
        names[sharded.source] = f"{same} = {name}" if same else name
    return found


def work(options: argparse.Namespace) -> None:
    """One rank; the first prints."""
    worlds.join(options.rank, options.ranks, options.rendezvous)
    if not options.models:
        hardware = autoshard.calibrate(quick=False)
        if options.rank == 0:
            hardware.save(options.hardware)
            print(hardware, flush=True)
    for name in filter(None, options.models.split(",")):
        task = Task.of(name)
        plans = compiled(task, autoshard.Mesh({"x": options.ranks}, hardware=str(options.hardware)))
        family = name.split(":")[0]
        peers = {c.name: c.make(task) for c in CONTESTANTS if c.name in PEERS and c.only in ("", family)}
        times = race(
            {**{plan: step for plan, (_, step) in plans.items()}, **peers}, options.steps, options.seconds, ROW
        )
        if options.rank == 0:
            report(name, plans, times)
            if options.json:
                write(options.json / f"{name}-{options.ranks}.json", plans, times)
    dist.barrier()
    dist.destroy_process_group()


def predictions(plan: autoshard.Plan) -> tuple[float, float, float]:
    """total_s, the same with messages merged, the timeline's end."""
    return plan.cost.total_s, plan.cost.total_s - plan.cost.merged_s, plan.cost.schedule_s


def report(name: str, plans: dict[str, tuple[autoshard.Plan, TrainingStep]], times: dict[str, Times]) -> None:
    """One line for each plan, the fastest first."""
    wall = {plan: statistics.median(t.wall) for plan, t in times.items()}
    quartile = {plan: statistics.quantiles(t.wall, n=4)[0] for plan, t in times.items()}
    cpu = {plan: min(t.cpu) for plan, t in times.items()}
    steps = len(next(iter(times.values())).wall)
    print(
        f"\n{name}, {dist.get_world_size()} ranks, {steps} steps; ms\n{'':24}{'predicted':>10}{'merged':>9}{'timeline':>10}"
        f"{'median':>9}{'quartile':>9}{'CPU':>9}{'forward':>9}{'backward':>9}{'update':>8}"
    )
    for plan in sorted(wall, key=wall.__getitem__):
        row = [f"{x * 1e3:.2f}" for x in predictions(plans[plan][0])] if plan in plans else [""] * 3
        row += [f"{x[plan] * 1e3:.2f}" for x in (wall, quartile, cpu)]
        row += [f"{x * 1e3:.2f}" for x in plans[plan][1].medians(ROW)] if plan in plans else []
        print(f"  {plan:22}" + "".join(f"{x:>{n}}" for x, n in zip(row, (10, 9, 10, 9, 9, 9, 9, 9, 8), strict=False)))
    free = next(plan for plan in plans if plan.split(" = ")[0] == "free")
    for what, found in (("median", wall), ("quartile", quartile), ("CPU", cpu)):
        rhos = [
            correlation([predictions(plan)[i] for plan, _ in plans.values()], [found[p] for p in plans])
            for i in range(3)
        ]
        over = found[free] / min(found.values())
        print(
            f"  {what}: ρ {rhos[0]:.2f}, merged {rhos[1]:.2f}, timeline {rhos[2]:.2f}; the free plan takes {over:.2f} × "
            f"the fastest ({min(found, key=found.__getitem__)})",
            flush=True,
        )


def write(path: Path, plans: dict[str, tuple[autoshard.Plan, TrainingStep]], times: dict[str, Times]) -> None:
    """What was predicted and measured, as JSON."""
    found: dict[str, Any] = {name: {"wall": t.wall, "cpu": t.cpu} for name, t in times.items()}
    for name, (plan, step) in plans.items():
        found[name] |= {"cost": asdict(plan.cost), "phases": step.phases}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SIX), help="names from six_models.py, separated by commas")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--steps", type=int, default=15, help=f"turns of each plan, of {ROW - 1} timed steps")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end the race of a model after so long")
    parser.add_argument("--json", type=Path, help="a folder for everything that was measured")
    parser.add_argument(
        "--hardware", type=Path, help="what calibrate() saved, or shall save: it runs first where there is none"
    )
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        work(options)
        return
    more = ["--ranks", str(options.ranks), "--steps", str(options.steps), "--seconds", str(options.seconds)]
    more += ["--json", str(options.json)] if options.json else []
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for model in list(filter(None, options.models.split(","))) or [""]:
            hardware = options.hardware or Path(folder) / f"before {model}.json"
            chosen = [*([] if hardware.exists() else [""]), *filter(None, [model])]
            for what in chosen:
                failed |= worlds.launch(__file__, ["--models", what, *more, "--hardware", str(hardware)], options.ranks)
    sys.exit(failed)


if __name__ == "__main__":
    main()
