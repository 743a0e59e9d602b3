"""Logs, checks and dumps: ``AUTOSHARD_LOGS=programs,plan,…``, ``AUTOSHARD_CHECK=inputs,…``, ``AUTOSHARD_DUMP=folder``."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path

from autoshard.errors import PlanError
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.program import Program
from autoshard.plans.plan import Plan

LOGS = ("programs", "capture", "plan", "redistribute", "collectives", "code")
"""names for AUTOSHARD_LOGS; each is the logger ``autoshard.<name>``"""

CHECKS = ("inputs", "replicas", "errors")
"""names for AUTOSHARD_CHECK"""

_runs = itertools.count(1)


def set_up_logs(names: str | None = None) -> None:
    """Send the loggers in ``names`` (comma separated; default: AUTOSHARD_LOGS) to stderr at INFO.
    "all" selects all. An unknown name logs a warning that lists the known ones."""
    asked = os.environ.get("AUTOSHARD_LOGS", "") if names is None else names
    ours = logging.getLogger("autoshard")
    if ours.level == logging.NOTSET:  # a root logger at INFO does not mean ours
        ours.setLevel(logging.WARNING)
    for name in filter(None, (part.strip() for part in asked.split(","))):
        for known in LOGS if name == "all" else (name,):
            if known not in LOGS:
                ours.warning("AUTOSHARD_LOGS: there is no log %r. Known: %s and all", name, ", ".join(LOGS))
                continue
            logger = logging.getLogger(f"autoshard.{known}")
            logger.setLevel(logging.INFO)
            if not any(isinstance(h, _Stderr) for h in logger.handlers):
                logger.addHandler(_Stderr(known))
                logger.propagate = False  # else a root logger at INFO repeats it


class _Stderr(logging.StreamHandler):  # type: ignore[type-arg]
    def __init__(self, name: str) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(logging.Formatter(f"[autoshard.{name}] %(message)s"))


def asked_checks() -> dict[str, int]:
    """Parse AUTOSHARD_CHECK (``inputs,replicas=100``): name → check every n-th call. Raises
    :class:`PlanError` for an unknown name."""
    found = {}
    for part in filter(None, (p.strip() for p in os.environ.get("AUTOSHARD_CHECK", "").split(","))):
        name, _, every = part.partition("=")
        if name not in CHECKS or not (every or "1").isdigit() or every == "0":
            raise PlanError(
                f"AUTOSHARD_CHECK={part} is not known. Known: {', '.join(CHECKS)}; an "
                "interval is set by a number, as in replicas=100"
            )
        found[name] = int(every or 1)
    return found


def dump_graph(graph: Graph) -> Path | None:
    """Log the captured graph, dump it under AUTOSHARD_DUMP, return this run's folder."""
    _log_stage("capture", graph)
    folder = _run_folder()
    if folder is not None:
        _write_stage_file(folder, "01_graph.txt", str(graph))
    return folder


def dump_compilation(plan: Plan, program: Program, source: Callable[[], str], folder: Path | None = None) -> None:
    """Log the stages after capture, one file each in ``folder`` (of :func:`dump_graph`).
    ``source``: gives the generated file; called only if it is logged or written."""
    _log_stage("plan", plan)
    _log_stage("redistribute", program)
    _log_stage("collectives", "\n".join(map(str, plan.collectives)) or "none")
    _log_stage("code", source)
    if folder is None:
        return
    _write_stage_file(folder, "02_plan.txt", plan.report())
    _write_stage_file(folder, "03_program.txt", str(program))
    _write_stage_file(folder, "04_rank_module.py", source())
    for name in ("plan.json", "plan.html", "plan.dot", "plan.trace.json"):
        plan.visualize(folder / name)


def _log_stage(name: str, what: object) -> None:
    """``what``: a value, or a function that gives it."""
    logger = logging.getLogger(f"autoshard.{name}")
    if logger.isEnabledFor(logging.INFO):
        logger.info("%s", what() if callable(what) else what)


def _run_folder() -> Path | None:
    """AUTOSHARD_DUMP for this process's first compilation, ``run_2`` in it for the second, …"""
    asked = os.environ.get("AUTOSHARD_DUMP")
    if not asked or os.environ.get("RANK", "0") != "0":
        return None
    number = next(_runs)
    folder = Path(asked) if number == 1 else Path(asked) / f"run_{number}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write_stage_file(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
