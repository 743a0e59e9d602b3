"""Pictures of plans and layouts: HTML, Graphviz, text, timelines, blocks per rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoshard.errors import PlanError
from autoshard.report.record import Record
from autoshard.viz.dot import dot, svg
from autoshard.viz.html import html
from autoshard.viz.layout_picture import visualize_layout
from autoshard.viz.text import tree_text
from autoshard.viz.trace import trace_json

__all__ = ["dot", "html", "svg", "trace_json", "tree_text", "visualize", "visualize_layout"]

_FORMATS: dict[str, Callable[[Record], str]] = {
    ".trace.json": trace_json,  # before .json, which it also ends in
    ".json": Record.to_json,
    ".html": html,
    ".dot": dot,
    ".svg": svg,
    ".txt": tree_text,
}


def visualize(what: Any, path: str | os.PathLike[str], *, before: Any = None) -> None:
    """Draw a plan into the file ``path``, in the format of its suffix.

    ``.html``: a self-contained page; ``.dot``, ``.svg``: Graphviz; ``.txt``: a tree; ``.json``: the
    plan (``plan.schema.json``); ``.trace.json``: the predicted timeline for Perfetto.

    Args:
        what: a :class:`Plan`, or an object with a ``plan``, such as a ``ShardedModule``.
        before: another plan, shown side by side; ``.html`` only.

    Raises :class:`PlanError` for another suffix, ``before`` in another format, or missing Graphviz.
    """
    name = str(os.fspath(path)).lower()
    suffix = next((s for s in _FORMATS if name.endswith(s)), None)
    if suffix is None:
        raise PlanError(f"cannot draw a plan into {str(path)!r}: the suffix must be one of {', '.join(_FORMATS)}")
    if before is not None and suffix != ".html":
        raise PlanError(f"two plans are compared in .html only, not in {suffix}")
    plan = _plan_of(what)
    text = html(plan, _plan_of(before)) if before is not None else _FORMATS[suffix](plan)
    Path(path).write_text(text, encoding="utf-8")


def _plan_of(what: Any) -> Record:
    plan = what if isinstance(what, Record) else getattr(what, "plan", None)
    if not isinstance(plan, Record):
        raise PlanError(f"expected a Plan or a compiled module, got {type(what).__name__}")
    return plan
