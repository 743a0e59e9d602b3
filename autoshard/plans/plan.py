"""A plan as a user holds it: what was decided, as text and as pictures."""

from __future__ import annotations

import os
from dataclasses import dataclass

from autoshard.report.diff import diff
from autoshard.report.explain import explain
from autoshard.report.record import Record
from autoshard.report.text import plan_text
from autoshard.report.tp_plan import TpPlan, tp_plan
from autoshard.viz import visualize


@dataclass(frozen=True)
class Plan(Record):
    """All choices for a model on a mesh; ``str()`` gives tables."""

    def __str__(self) -> str:
        return plan_text(self)

    def explain(self, name: str) -> str:
        """Why a parameter, a module (fnmatch pattern) or an operation is laid out so, and what else it would cost."""
        return explain(self, name)

    def diff(self, other: Record) -> str:
        """This plan and ``other`` side by side: cost, memory, layouts, operations and collectives that differ."""
        return diff(self, other)

    def to_tp_plan(self, axis: str | None = None) -> TpPlan:
        """Pattern of modules → style, as transformers' ``tp_plan`` says it; ``.unsaid``: what has no words there.

        ``axis``: the mesh axis, by default the only one, or ``tp``.
        """
        return tp_plan(self, axis)

    def visualize(self, path: str | os.PathLike[str], other: Record | None = None) -> None:
        """Draw the plan into ``path``: .html, .dot, .svg, .json, .txt or .trace.json; ``other``: the plan before."""
        visualize(self, path, before=other)
