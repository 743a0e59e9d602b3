"""Time that the host of a virtual machine gives to others: no clock in here sees it, and no step of this machine has it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

MOST = 0.02
"""of the time of the cores at work: where more was stolen, what was measured is not this machine's"""

PATIENCE, AGAIN = 2.0, 1.0
"""seconds, and times what all was measured in once, that may be spent on measuring again"""

Found = TypeVar("Found")


def stolen() -> float:
    """Seconds, of all cores together, that the host gave to others so far (``steal`` of proc(5)'s ``stat``, in steps of 10 ms);
    0 where no system says so."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return float(first[8]) / os.sysconf("SC_CLK_TCK") if len(first) > 8 else 0.0


class Watch:
    """Measures again what the host disturbed.

    Args:
        agree: the largest of all ranks' numbers. All of them repeat, or none: one that repeats alone waits for the others.
        now: a clock, in seconds.
        cores: how many work while something is measured.

    Repeating takes at most :data:`PATIENCE` seconds and :data:`AGAIN` times what measuring once took so far: it ends on a host
    that never gives way, and outlasts a burst of some seconds.
    """

    def __init__(self, agree: Callable[[float], float], now: Callable[[], float], cores: int) -> None:
        self.agree, self.now, self.cores = agree, now, max(1, cores)
        self.measured = self.disturbed = 0
        self.spent = self.repeating = 0.0

    def undisturbed(self, measure: Callable[[], Found]) -> Found:
        """What ``measure`` returns when no more than :data:`MOST` is stolen; else of several times the least disturbed."""
        share, took, found = self._once(measure)
        self.spent += took
        while share > MOST and self.repeating + took <= PATIENCE + AGAIN * self.spent:
            again, took, other = self._once(measure)
            self.repeating += took
            if again < share:
                share, found = again, other
        self.measured += 1
        self.disturbed += share > MOST
        return found

    def _once(self, measure: Callable[[], Found]) -> tuple[float, float, Found]:
        """The share that was stolen, and seconds, as all ranks have them, and what was found."""
        begin, before = self.now(), stolen()
        found = measure()
        took, gone = self.now() - begin, stolen() - before
        return self.agree(gone / (self.cores * took) if took > 0 else 0.0), self.agree(took), found

    def share(self) -> float:
        """Of what was measured since this was last asked: how much was disturbed each time."""
        share = self.disturbed / max(1, self.measured)
        self.measured = self.disturbed = 0
        return share
