"""Worlds of gloo processes on this machine: how the scripts here start their ranks, and keep them on cores of their own."""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from autoshard.check.clock import MOST_STOLEN, steal_seconds

PINNED = "BENCHMARK_PINNED"
"""set by :mod:`quiet`: the cores of a world are its own, and each rank takes its share of them"""


KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_MMAP_THRESHOLD_": str(1 << 25)}
"""for glibc: memory that is freed stays with the process. Else which contestant pays for new pages is chance"""

NOTES = "ratios.jsonl"
"""beside the rendezvous of the worlds"""

ROW, WARM = 4, 3
"""steps of a turn of those that are :func:`beside` one another, and the rounds of turns to warm up"""

Made = TypeVar("Made")

_rendezvous = Path()
"""of the world that this process is in: its races have orders of their own"""


class Taken(NamedTuple):
    """A step: seconds of the slowest rank, processor seconds of the busiest, the share of all cores that was stolen."""

    wall: float
    cpu: float
    stolen: float


def launch(script: str, arguments: Sequence[str], ranks: int, keeping: bool = True, count: int = 1) -> int:
    """Run ``script`` once per rank, with ``--rank`` and ``--rendezvous`` on top; the exit code that is largest.

    ``keeping``: with freed memory kept, as :data:`KEEPING` says; not where memory is what is measured. ``count``: worlds,
    one after another; of the ratios that they :func:`note` the medians are printed. Ratios of two equal programs differ by
    some per cent from world to world, however many steps each of them has.
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1", **(KEEPING if keeping else {})}
    codes = list[int]()
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, NOTES)
        notes.touch()
        for world in range(count):
            command = [sys.executable, script, *arguments, "--rendezvous", f"{folder}/rendezvous{world}"]
            workers = [subprocess.Popen([*command, "--rank", str(r)], env=env) for r in range(ranks)]
            codes += [worker.wait() for worker in workers]
        if count > 1:
            _summarise([json.loads(line) for line in notes.read_text().splitlines()])
    return max(codes, key=abs)


def shuffled(forms: Sequence[Made]) -> list[Made]:
    """``forms`` in the order in which this world makes them: the memory of later ones lies between what others left."""
    return random.Random(_rendezvous.name).sample(forms, len(forms))


def note(name: str, ratio: float) -> None:
    """Keep a ratio of this world for the summary of all."""
    with _rendezvous.with_name(NOTES).open("a") as file:
        print(json.dumps([name, ratio]), file=file)


def _summarise(notes: Sequence[tuple[str, float]]) -> None:
    print("ratios of medians, over worlds:")
    for name in dict.fromkeys(name for name, _ in notes):
        found = [ratio for n, ratio in notes if n == name]
        shown = f"median {statistics.median(found):.3f}, {min(found):.2f} … {max(found):.2f} in {len(found)} worlds"
        print(f"  {name}: {shown}", flush=True)


def join(rank: int, ranks: int, rendezvous: str | os.PathLike[str]) -> None:
    """Become a rank of a gloo world, with one thread."""
    global _rendezvous
    pin(rank, ranks)
    _rendezvous = Path(rendezvous)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=ranks)


def beside(
    sharded: Any,
    x: torch.Tensor,
    by_hand: Mapping[str, Callable[[], torch.Tensor]],
    steps: int,
) -> None:
    """Steps of ``sharded`` on ``x`` and of the same written ``by_hand``, in turns: their losses have to agree.

    Rank 0 prints what they took. Turns have :data:`ROW` steps; those of the first :data:`WARM` rounds do not count, as a
    module compares the ranks' inputs in its first calls.
    """

    def compiled() -> torch.Tensor:
        sharded.zero_grad()
        loss: torch.Tensor = sharded(x)
        loss.backward()
        return loss.detach()

    forms = {"compiled": compiled, **by_hand}
    losses = {name: float(run()) for name, run in forms.items()}
    assert all(abs(losses["compiled"] - loss) < 1e-5 * loss for loss in losses.values()), losses
    taken: dict[str, list[Taken]] = {name: [] for name in forms}
    rounds = -(-steps // (ROW - 1))
    for number in range(WARM + rounds):
        for name, place in turns(forms, number, ROW):
            took = timed(forms[name])[1]
            if number >= WARM and is_timed(place, ROW):
                taken[name].append(took)
    if dist.get_rank():
        return
    whole = {name: counted(times) for name, times in taken.items()}
    print(", ".join(f"{len(times)} of {len(taken[name])} steps {name} counted" for name, times in whole.items()))
    for i, clock in enumerate(("wall", "processor")):
        for what, of in (("median", statistics.median), ("least", min)):
            found = {name: of([t[i] for t in times]) for name, times in whole.items()}
            ratios = {f"compiled / {name}": found["compiled"] / found[name] for name in by_hand}
            print(clock, what, {name: f"{s * 1e3:.1f} ms" for name, s in found.items()}, end=" ")
            print(", ".join(f"{name}: {ratio:.2f}" for name, ratio in ratios.items()))
            if what == "median":
                for name, ratio in ratios.items():
                    note(f"{clock}, {name}", ratio)


def turns(names: Iterable[str], round_: int, row: int) -> Iterator[tuple[str, int]]:
    """Whose step is next, and its place among the ``row`` of a turn.

    Their order is another one in every round and world, as a step after a heavy one is slower. Of several in a row the first
    is not timed (:func:`is_timed`): no step of a training follows one of another model.
    """
    ordered = sorted(names)
    yield from itertools.product(
        random.Random(f"{_rendezvous.name} {round_}").sample(ordered, len(ordered)), range(row)
    )


def is_timed(place: int, row: int) -> bool:
    """Whether a step counts at this place of a row of several: the first does not, what the others did emptied the caches."""
    return place > 0 or row == 1


def timed(step: Callable[[], Made]) -> tuple[Made, Taken]:
    """What ``step`` returns, and what it took; ranks begin together, and agree on the latter."""
    dist.barrier()
    begin = time.perf_counter(), time.process_time(), steal_seconds()
    made = step()
    ended = time.perf_counter(), time.process_time(), steal_seconds()
    took = torch.tensor([b - a for a, b in zip(begin, ended, strict=True)], dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    wall, cpu, gone = took.tolist()
    return made, Taken(wall, cpu, gone / (wall * (os.cpu_count() or 1)))


def counted(steps: Sequence[Taken]) -> list[Taken]:
    """Those in which this machine had its cores, as calibration means it; all, where these are not two."""
    whole = [taken for taken in steps if taken.stolen <= MOST_STOLEN]
    return whole if len(whole) > 1 else list(steps)


def keep() -> None:
    """Start this script anew with freed memory kept (:data:`KEEPING`), as calibration has its memory, where it is not."""
    if any(os.environ.get(name) != value for name, value in KEEPING.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEPING})


def pin(rank: int, ranks: int) -> None:
    """One thread; and where :data:`PINNED` is set, this rank's share of the cores that its world may use."""
    torch.set_num_threads(1)
    if os.environ.get(PINNED) and len(cores := neighbours(os.sched_getaffinity(0))) >= ranks:
        each = len(cores) // ranks
        os.sched_setaffinity(0, cores[rank * each : (rank + 1) * each])


def neighbours(cores: Iterable[int]) -> list[int]:
    """``cores`` with those side by side that are threads of one."""

    def place(core: int) -> tuple[int, int, int]:
        topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology")
        try:
            package, one = (int((topology / n).read_text()) for n in ("physical_package_id", "core_id"))
        except (OSError, ValueError):
            return 0, core, core
        return package, one, core

    return sorted(cores, key=place)
