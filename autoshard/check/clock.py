"""Clocks for calibration, agreed on by all ranks; steal time of the host repeats a measurement."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

MOST_STOLEN = 0.02
"""stolen share of core time above which a measurement counts as disturbed"""

REPEAT_SECONDS, REPEAT_RATIO = 2.0, 1.0
"""limit of repeating: seconds, plus a multiple of the time that first measurements took"""

MeasuredResult = TypeVar("MeasuredResult")


def steal_seconds() -> float:
    """Steal time of all cores so far, in seconds (proc(5)'s ``stat``, steps of 10 ms); 0 where it
    is not reported."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return float(first[8]) / os.sysconf("SC_CLK_TCK") if len(first) > 8 else 0.0


class StealWatch:
    """Repeats measurements that steal time disturbed.

    Args:
        agree: maximum over all ranks, so that all ranks repeat or none: one alone would block.
        now: a clock in seconds.
        cores: cores at work during a measurement.

    Repeating takes at most :data:`REPEAT_SECONDS` seconds plus :data:`REPEAT_RATIO` times all first
    measurements. So it ends on a host that is always busy, and outlasts a burst of some seconds.
    """

    def __init__(self, agree: Callable[[float], float], now: Callable[[], float], cores: int) -> None:
        self.agree, self.now, self.cores = agree, now, max(1, cores)
        self.measured = self.disturbed = 0
        self.spent = self.repeating = 0.0

    def undisturbed(self, measure: Callable[[], MeasuredResult]) -> MeasuredResult:
        """Result of ``measure`` with at most :data:`MOST_STOLEN` stolen, else the best try."""
        share, took, found = self._once(measure)
        self.spent += took
        while share > MOST_STOLEN and self.repeating + took <= REPEAT_SECONDS + REPEAT_RATIO * self.spent:
            repeated_share, took, other = self._once(measure)
            self.repeating += took
            if repeated_share < share:
                share, found = repeated_share, other
        self.measured += 1
        self.disturbed += share > MOST_STOLEN
        return found

    def _once(self, measure: Callable[[], MeasuredResult]) -> tuple[float, float, MeasuredResult]:
        """(stolen share, seconds, result) of one try; the first two are maxima over ranks."""
        begin, before = self.now(), steal_seconds()
        found = measure()
        took, gone = self.now() - begin, steal_seconds() - before
        return self.agree(gone / (self.cores * took) if took > 0 else 0.0), self.agree(took), found

    def share(self) -> float:
        """Share of measurements since the last call that stayed disturbed."""
        share = self.disturbed / max(1, self.measured)
        self.measured = self.disturbed = 0
        return share


SHORT_REPETITION, LONG_REPETITION, MOST_CALLS = 0.01, 0.05, 1000
"""least seconds of a repetition, without and with ranks sharing cores; most calls in it"""

TURNS_PER_REPEAT = 2
"""turns of :meth:`Clock.relative` per repetition of other measurements"""

KERNEL_DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""dtype of kernels that are measured in one dtype only"""


def on_this_machine() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def agreed(value: float, pick: Callable[[Sequence[float]], float]) -> float:
    """``pick`` (max, min, sum) over the values of all ranks; a collective call."""
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, float(value))
    return pick(found)


def slowest_ranks(found: Sequence[Sequence[float]]) -> list[list[float]]:
    """Elementwise maximum over ranks of a table of numbers; a collective call."""
    every: list[Sequence[Sequence[float]]] = [found] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return [[max(column) for column in zip(*rows, strict=True)] for rows in zip(*every, strict=True)]


def lower_quartile(found: Sequence[float]) -> float:
    return sorted(found)[len(found) // 4]


class Clock:
    """Timer that takes the mean of several repetitions after a warm-up. Means, since a step sums
    its operations, also while a core is slow. Where ranks share cores, a repetition lasts long
    enough for all. Disturbed measurements are repeated
    (:class:`~autoshard.check.clock.StealWatch`)."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.cores, self.threads = os.cpu_count() or 1, torch.get_num_threads()
        self.shared = device.type == "cpu" and on_this_machine() * self.threads > self.cores
        self.long = LONG_REPETITION if self.shared else SHORT_REPETITION
        at_work = on_this_machine() * (1 if device.type == "cuda" else self.threads)
        self.watch = StealWatch(lambda value: agreed(value, max), time.perf_counter, min(self.cores, at_work))

    def seconds(self, call: Callable[[], object], together: bool = False) -> float:
        """Wall seconds of a call. ``together``: start at a barrier, equally many calls per rank."""
        return self._mean(call, together, time.perf_counter)

    def compute_seconds(self, call: Callable[[], object]) -> float:
        """Seconds of a call without communication while all ranks run it: see :meth:`now`."""
        return self._mean(call, True, self.now)

    def relative(self, call: Callable[[], object], counts: Sequence[int]) -> list[float]:
        """Seconds of a call with n ranks per machine at work, relative to the last n of ``counts``;
        others wait. The counts take turns, and medians of turns count, because speeds change
        within a second. A turn takes the mean over ranks: the slowest of more ranks would be
        slower by chance."""
        often, place = self._often(call, True), dist.get_rank() % on_this_machine()

        def turn() -> list[float]:
            taken = []
            for ranks in counts:
                dist.barrier()
                own = self._took(call, often, partial(self.now, ranks)) if place < ranks else 0.0
                taken.append(agreed(own, sum) / ranks)
            return [seconds / taken[-1] for seconds in taken]

        turns = [self.watch.undisturbed(turn) for _ in range(TURNS_PER_REPEAT * self.repeats)]
        return [statistics.median(column) for column in zip(*turns, strict=True)]

    def interleaved_seconds(self, calls: Sequence[Callable[[], object]]) -> list[list[float]]:
        """Wall seconds [round][call]: calls alternate, so other load meets all of them."""
        for call in calls:
            self._took(call, 1)

        def once(call: Callable[[], object]) -> float:
            dist.barrier()
            return self._took(call, 1)

        return [[self.watch.undisturbed(partial(once, call)) for call in calls] for _ in range(self.repeats)]

    def now(self, ranks: int | None = None) -> float:
        """Clock (seconds) for work without communication. Where ranks share cores, processor time
        scaled by how many of ``ranks`` (default: all) share one: by wall time a short operation
        would look alone, and a long one fast on the ranks scheduled first."""
        if not self.shared:
            return time.perf_counter()
        ranks = on_this_machine() if ranks is None else ranks
        return time.process_time() * max(1 / self.threads, ranks / self.cores)

    def _mean(self, call: Callable[[], object], together: bool, now: Callable[[], float]) -> float:
        often = self._often(call, together)

        def once() -> float:
            found = []
            for _ in range(self.repeats):
                if together:
                    dist.barrier()
                found.append(self._took(call, often, now))
            return statistics.mean(found)

        return self.watch.undisturbed(once)

    def _often(self, call: Callable[[], object], together: bool) -> int:
        """Calls per repetition."""
        self._took(call, 1)
        often = max(1, min(MOST_CALLS, round(self.long / self._took(call, 1))))
        return round(agreed(often, max)) if together else often

    def _took(self, call: Callable[[], object], often: int, now: Callable[[], float] = time.perf_counter) -> float:
        self._wait()
        begin = now()
        for _ in range(often):
            call()
        self._wait()
        return (now() - begin) / often

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
