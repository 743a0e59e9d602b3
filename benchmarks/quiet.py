"""Everything here that wants a quiet machine, in one go: several worlds at a time, each rank on cores of its own.

    python benchmarks/quiet.py --seconds 460 --cores-per-rank 2 --out quiet

A world starts as soon as there are cores for it. Each has a limit of its own, and ends with what it has; what would not end
before ``--seconds`` is stopped then. The tables are printed as they come, and lie in ``--out``, with what was measured
as JSON. The machine is calibrated once for each number of ranks.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import worlds
from six_models import SIX

HERE = Path(__file__).parent


@dataclass
class Job:
    """A script of this folder that starts ``ranks`` processes. ``after``: jobs that have to end first."""

    name: str
    ranks: int
    limit: float
    command: list[str]
    after: tuple[str, ...] = ()
    cores: list[int] = field(default_factory=list)
    started: float = 0.0
    process: subprocess.Popen[bytes] | None = None


def jobs(options: argparse.Namespace) -> Iterator[Job]:
    """What is run, in the order of worth."""
    out, steps, seconds = options.out, str(options.steps), str(options.race)
    hardware = {n: out / f"hardware-{n}.json" for n in options.ranks}
    for n, file in hardware.items():
        yield Job(f"calibrate-{n}", n, 90, ["truth.py", "--models", "", "--ranks", str(n), "--hardware", str(file)])
    if options.decode:
        yield Job("decode", 2, 60, ["decode.py", "--steps", steps])
    yield Job("overhead", 2, 60, ["overhead.py", "--calls", str(options.calls)])
    tiny = ["step_time.py", "--models", "gpt:tiny,llama:tiny", "--steps", str(4 * options.steps), "--seconds", seconds]
    yield Job("tiny", 2, 90, tiny)
    for n, file in hardware.items():
        after, common = (f"calibrate-{n}",), ["--ranks", str(n), "--hardware", str(file), "--json", str(out)]
        for model in options.models.split(","):
            race = ["--models", model, "--steps", steps, "--seconds", seconds]
            yield Job(f"{model}-{n}", n, options.race + 120, ["truth.py", *race, *common], after)
        yield Job(f"machine-{n}", n, 90, ["machine.py", *common], after)
        yield Job(f"chunks-{n}", n, 40, ["chunked_products.py", "--ranks", str(n)])
        cuts = ["--hardware", str(file), "--rounds", steps, "--seconds", seconds, "--layers", "8" if n == 2 else "6"]
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(n), "--master-port", str(29500 + n)]
        yield Job(f"pipeline-{n}", n, options.race + 120, [*launcher, str(HERE / "pipeline_step.py"), *cuts], after)


def start(job: Job, cores: list[int], out: Path) -> None:
    """On ``cores``."""
    first, *rest = job.command
    script = job.command if first == "-m" else [str(HERE / first), *rest]
    env = {**os.environ, "OMP_NUM_THREADS": "1", worlds.PINNED: "1"}
    job.cores, job.started = cores, time.monotonic()
    with (out / f"{job.name}.txt").open("w") as file:
        job.process = subprocess.Popen(
            [sys.executable, *script],
            env=env,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(os.sched_setaffinity, 0, cores),
        )


def ended(job: Job, deadline: float, out: Path) -> bool:
    """Whether it has; where its time is over, it is stopped."""
    assert job.process is not None
    over = time.monotonic() > min(job.started + job.limit, deadline)
    if job.process.poll() is None and not over:
        return False
    if job.process.poll() is None:
        os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()
    took = time.monotonic() - job.started
    print(
        f"\n== {job.name}: {job.ranks} ranks, cores {job.cores}, {took:.0f} s, exit {job.process.returncode}",
        flush=True,
    )
    print((out / f"{job.name}.txt").read_text(errors="replace"), flush=True)
    return True


def run(waiting: list[Job], options: argparse.Namespace) -> None:
    """All of them, on all cores."""
    free, running, done = worlds.neighbours(os.sched_getaffinity(0)), list[Job](), set[str]()
    deadline = time.monotonic() + options.seconds
    while (waiting or running) and time.monotonic() < deadline:
        for job in [j for j in running if ended(j, deadline, options.out)]:
            running.remove(job)
            done.add(job.name)
            free = worlds.neighbours(free + job.cores)
        for job in [j for j in waiting if done.issuperset(j.after)]:
            wanted = job.ranks * options.cores_per_rank
            if wanted <= len(free):
                start(job, free[:wanted], options.out)
                free = free[wanted:]
                waiting.remove(job)
                running.append(job)
        time.sleep(0.2)
    for job in running:
        ended(job, deadline, options.out)
    if waiting:
        print("not run:", ", ".join(j.name for j in waiting))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("quiet"), help="a folder for tables and measurements")
    parser.add_argument("--seconds", type=float, default=460, help="for all of it")
    parser.add_argument("--race", type=float, default=30, help="seconds that the contestants of one model take turns")
    parser.add_argument("--steps", type=int, default=30, help="the most steps of each contestant")
    parser.add_argument("--calls", type=int, default=400, help="calls whose overhead is measured")
    parser.add_argument("--models", default=",".join(SIX), help="names from six_models.py, separated by commas")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of ranks")
    parser.add_argument(
        "--cores-per-rank", type=int, default=2, help="one for the rank, others for what gloo does beside it"
    )
    parser.add_argument("--only", help="names of jobs begin so; several separated by commas")
    parser.add_argument("--decode", action=argparse.BooleanOptionalAction, default=True, help="steps of decoding, too")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = [j for j in jobs(options) if not options.only or j.name.startswith(tuple(options.only.split(",")))]
    for job in chosen:
        job.after = tuple(n for n in job.after if any(j.name == n for j in chosen))
    run(chosen, options)


if __name__ == "__main__":
    main()
