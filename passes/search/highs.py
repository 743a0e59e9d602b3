"""HiGHS, the LP and MILP solver (Huangfu and Hall, 2018): one thread, quiet, reproducible."""

from __future__ import annotations

import highspy


def solver(**options: bool | int | float) -> highspy.Highs:
    """A solver with these HiGHS options."""
    highs = highspy.Highs()
    for name, value in {"output_flag": False, "random_seed": 0, "threads": 1, **options}.items():
        highs.setOptionValue(name, value)
    return highs


def run(highs: highspy.Highs) -> None:
    """Solve. HiGHS has one thread count per process, set by its first run: if another library has
    set it, that count is used."""
    if highs.run() == highspy.HighsStatus.kError:
        highs.setOptionValue("threads", 0)
        highs.run()
