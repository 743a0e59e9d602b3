"""What a compilation leaves to look at: ``AUTOSHARD_LOGS=programs,plan,…`` and ``AUTOSHARD_DUMP=folder``."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.program import Program
from autoshard.plans.plan import Plan

LOGS = ("programs", "capture", "plan", "redistribute", "collectives", "code")
"""names for AUTOSHARD_LOGS; each is the logger ``autoshard.<name>``"""

_runs = itertools.count(1)


def set_up_logs(names: str | None = None) -> None:
    """Send the loggers in ``names`` (comma separated; default: the variable AUTOSHARD_LOGS) to stderr at INFO.

    "all" is all of them. A name that does not exist is answered with a warning that lists the known ones.
    """
    asked = os.environ.get("AUTOSHARD_LOGS", "") if names is None else names
    ours = logging.getLogger("autoshard")
    if ours.level == logging.NOTSET:  # a program that logs at INFO did not ask for our stages
        ours.setLevel(logging.WARNING)
    for name in filter(None, (part.strip() for part in asked.split(","))):
        for known in LOGS if name == "all" else (name,):
            if known not in LOGS:
                ours.warning("AUTOSHARD_LOGS: there is no log %r; known are %s and all", name, ", ".join(LOGS))
                continue
            logger = logging.getLogger(f"autoshard.{known}")
            logger.setLevel(logging.INFO)
            if not any(isinstance(h, _Stderr) for h in logger.handlers):
                logger.addHandler(_Stderr(known))
                logger.propagate = False  # a program that logs at INFO would say it twice


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    def __init__(self, name: str) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(f"[autoshard.{name}] %(message)s"))


def captured(graph: Graph) -> Path | None:
    """Log the captured graph; where AUTOSHARD_DUMP names a folder, write it there and return this run's folder."""
    _log("capture", graph)
    folder = _folder()
    if folder is not None:
        _write(folder, "01_graph.txt", str(graph))
    return folder


def compiled(plan: Plan, program: Program, source: Callable[[], str], folder: Path | None = None) -> None:
    """Log the stages after capture, and write them into ``folder`` (from :func:`captured`), one file each.

    ``source``: gives the emitted file, which is not made for a plan that nobody logs.
    """
    _log("plan", plan)
    _log("redistribute", program)
    _log("collectives", "\n".join(map(str, plan.collectives)) or "none")
    _log("code", source)
    if folder is None:
        return
    _write(folder, "02_plan.txt", str(plan))
    _write(folder, "03_program.txt", str(program))
    _write(folder, "04_rank_module.py", source())
    for name in ("plan.json", "plan.html", "plan.dot", "plan.trace.json"):
        plan.visualize(folder / name)


def _log(name: str, what: object) -> None:
    """``what``: or a function that gives it."""
    logger = logging.getLogger(f"autoshard.{name}")
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", what() if callable(what) else what)


def _folder() -> Path | None:
    """AUTOSHARD_DUMP for the first compilation of this process, ``run_2`` inside it for the second, and so on."""
    asked = os.environ.get("AUTOSHARD_DUMP")
    if not asked or os.environ.get("RANK", "0") != "0":
        return None
    number = next(_runs)
    folder = Path(asked) if number == 1 else Path(asked) / f"run_{number}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
