"""Steal time, in which the host of a virtual machine gives its cores to other guests."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

MOST = 0.02
"""stolen share of core time above which a measurement counts as disturbed"""

PATIENCE, AGAIN = 2.0, 1.0
"""limit of repeating: seconds, plus a multiple of the time that first measurements took"""

Found = TypeVar("Found")


def stolen() -> float:
    """Steal time of all cores so far, in seconds (``steal`` in proc(5)'s ``stat``, steps of 10 ms).

    0 where the system does not report it."""
    try:
        first = Path("/proc/stat").read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return float(first[8]) / os.sysconf("SC_CLK_TCK") if len(first) > 8 else 0.0


class Watch:
    """Repeats measurements that steal time disturbed.

    Args:
        agree: maximum over all ranks, so that all ranks repeat or none: one alone would block.
        now: a clock in seconds.
        cores: cores at work during a measurement.

    Repeating takes at most :data:`PATIENCE` seconds plus :data:`AGAIN` times all first
    measurements. So it ends on a host that is always busy, and outlasts a burst of some seconds.
    """

    def __init__(self, agree: Callable[[float], float], now: Callable[[], float], cores: int) -> None:
        self.agree, self.now, self.cores = agree, now, max(1, cores)
        self.measured = self.disturbed = 0
        self.spent = self.repeating = 0.0

    def undisturbed(self, measure: Callable[[], Found]) -> Found:
        """Result of ``measure`` with at most :data:`MOST` stolen, else the least disturbed try."""
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
        """(stolen share, seconds, result) of one try; the first two are maxima over ranks."""
        begin, before = self.now(), stolen()
        found = measure()
        took, gone = self.now() - begin, stolen() - before
        return self.agree(gone / (self.cores * took) if took > 0 else 0.0), self.agree(took), found

    def share(self) -> float:
        """Share of measurements since the last call that stayed disturbed."""
        share = self.disturbed / max(1, self.measured)
        self.measured = self.disturbed = 0
        return share
