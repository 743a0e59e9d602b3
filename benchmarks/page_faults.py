"""What a step takes beside its operations alone, and how often the system maps memory for it: one process, one thread.

    python benchmarks/page_faults.py --models wide:middle,llama:middle --steps 12

Forward, backward and fused AdamW of a model, as it stands and with malloc told to keep what it was given back
(``MALLOC_TRIM_THRESHOLD_``, ``MALLOC_MMAP_THRESHOLD_``): seconds of wall clock and of the processor, page faults of a step, and
what is predicted after a calibration of two ranks. Where both differ by much, it is mapping that takes the time.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

import torch
from step_time import Task, TrainingStep

import autoshard

KEPT = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TOP_PAD_": str(1 << 26)}


def steps(name: str, count: int) -> None:
    torch.set_num_threads(1)
    task = Task.of(name)
    step = TrainingStep(task.model(), task.args, task.kwargs)
    found = []
    for _ in range(count):
        faults, wall, cpu = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.perf_counter(), time.process_time()
        step()
        now = time.perf_counter() - wall, time.process_time() - cpu
        found.append((*now, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults))
    rows = found[count // 3 :]
    wall, cpu, faults = (statistics.median(x) for x in zip(*rows, strict=True))
    phases = [statistics.median(x) * 1e3 for x in zip(*step.phases[count // 3 :], strict=True)]
    forward, backward, update = phases
    print(
        f"{name:22} {wall * 1e3:9.1f} ms, processor {cpu * 1e3:9.1f} ms, {faults:9.0f} page faults; forward {forward:.1f}, "
        f"backward {backward:.1f}, update {update:.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="wide:middle,llama:middle,vit:middle,moe:middle")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--kept", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.kept:
        hardware = autoshard.calibrate()
        for name in options.models.split(","):
            task = Task.of(name)
            plan = autoshard.plan(
                task.model(), autoshard.Mesh({"x": 1}, hardware), task.args, dict(task.kwargs), training=True
            )
            cost = plan.cost
            ahead = sum(c.seconds - c.backward_s for c in plan.choices.values())
            back = cost.compute_s - cost.optimizer_s - ahead
            print(
                f"{name:22} {cost.total_s * 1e3:9.1f} ms predicted; forward {ahead * 1e3:.1f}, backward {back * 1e3:.1f}, "
                f"update {cost.optimizer_s * 1e3:.1f}",
                flush=True,
            )
    for name in options.models.split(","):
        steps(name, options.steps)
    if not options.kept:
        print("malloc keeps what it was given back:", flush=True)
        subprocess.run([sys.executable, *sys.argv, "--kept"], env={**os.environ, **KEPT}, check=True)


if __name__ == "__main__":
    main()
