"""Clocks of calibration: what a call takes, and what all ranks agree on."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from autoshard.check.stolen import Watch

SHORT, LONG, MOST = 0.01, 0.05, 1000
"""seconds that a repetition takes at least where every rank has a core, and where ranks share cores; the most calls in it"""

TURNS = 2
"""of how many ranks are at work, for every repetition of all else"""

USED = {"cpu": torch.float32, "cuda": torch.bfloat16}
"""the dtype that kernels are measured in, if not in several"""


def on_this_machine() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))


def agreed(value: float, pick: Callable[[Sequence[float]], float]) -> float:
    """The slowest rank's, or the smallest: the same on every rank."""
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, float(value))
    return pick(found)


def slowest(found: Sequence[Sequence[float]]) -> list[list[float]]:
    """Of numbers that all ranks have the largest of any rank, each."""
    every: list[Sequence[Sequence[float]]] = [found] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return [[max(column) for column in zip(*rows, strict=True)] for rows in zip(*every, strict=True)]


def lower_quartile(found: Sequence[float]) -> float:
    """The number that a quarter of those in ``found`` lies below."""
    return sorted(found)[len(found) // 4]


class Clock:
    """The mean of several repetitions, after one to warm up. A step is the sum of its operations: some of them fall into
    moments in which a core is slow, which no quartile of short repetitions has.

    Where ranks share cores a repetition goes on for so long that all of them have their turns in it. What the host of this
    machine disturbed is measured again, by all ranks (:class:`~autoshard.check.stolen.Watch`).
    """

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.cores, self.threads = os.cpu_count() or 1, torch.get_num_threads()
        self.shared = device.type == "cpu" and on_this_machine() * self.threads > self.cores
        self.long = LONG if self.shared else SHORT
        at_work = on_this_machine() * (1 if device.type == "cuda" else self.threads)
        self.watch = Watch(lambda value: agreed(value, max), time.perf_counter, min(self.cores, at_work))

    def seconds(self, call: Callable[[], object], together: bool = False) -> float:
        """Of one call. ``together``: all ranks begin at once, and call equally often."""
        return self._mean(call, together, time.perf_counter)

    def computing(self, call: Callable[[], object]) -> float:
        """Of one call that waits for no other rank, while all ranks make as many: see :meth:`now`."""
        return self._mean(call, True, self.now)

    def relative(self, call: Callable[[], object], counts: Sequence[int]) -> list[float]:
        """Seconds of one call while so many ranks of each machine make as many, and the others wait, for each of ``counts``,
        relative to the last of them.

        Counts take turns, and medians count of what each turn finds: the speed of a machine changes by more, within a second,
        than what they differ by. Of a turn the mean of the ranks is taken: of more of them the slowest is slower.
        """
        often, place = self._often(call, True), dist.get_rank() % on_this_machine()

        def turn() -> list[float]:
            taken = []
            for ranks in counts:
                dist.barrier()
                own = self._took(call, often, partial(self.now, ranks)) if place < ranks else 0.0
                taken.append(agreed(own, sum) / ranks)
            return [seconds / taken[-1] for seconds in taken]

        turns = [self.watch.undisturbed(turn) for _ in range(TURNS * self.repeats)]
        return [statistics.median(column) for column in zip(*turns, strict=True)]

    def in_turns(self, calls: Sequence[Callable[[], object]]) -> list[list[float]]:
        """Seconds on the wall of each of the ``calls``, once a round: what else the machine does meets all of them alike."""
        for call in calls:
            self._took(call, 1)

        def once(call: Callable[[], object]) -> float:
            dist.barrier()
            return self._took(call, 1)

        return [[self.watch.undisturbed(partial(once, call)) for call in calls] for _ in range(self.repeats)]

    def now(self, ranks: int | None = None) -> float:
        """Seconds to take the difference of, of what waits for no other rank.

        Where ranks share cores, what ``ranks`` of them (default: all) wait for the processor is added to what they have of
        it. Taken by the clock, an operation would mostly lie within one turn, as if no other rank were there, and of a
        longer one the ranks that had their turns first would be the fast ones.
        """
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
        """How many calls a repetition has."""
        self._took(call, 1)
        often = max(1, min(MOST, round(self.long / self._took(call, 1))))
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
