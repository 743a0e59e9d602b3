"""HiGHS, the solver of linear and mixed-integer programmes (Huangfu and Hall, 2018): one thread, quiet, the same every run."""

from __future__ import annotations

import highspy


def solver(**options: bool | int | float) -> highspy.Highs:
    """A solver with these of HiGHS's options."""
    highs = highspy.Highs()
    for name, value in {"output_flag": False, "random_seed": 0, "threads": 1, **options}.items():
        highs.setOptionValue(name, value)
    return highs


def run(highs: highspy.Highs) -> None:
    """Solve what ``highs`` was given. A process has one number of threads, that of its first programme: where that was
    another library's, it is taken."""
    if highs.run() == highspy.HighsStatus.kError:
        highs.setOptionValue("threads", 0)
        highs.run()
