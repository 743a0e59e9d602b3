"""The plan as a user holds it: choices, costs and memory, as text and pictures."""

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
        """Reasons and alternatives for a parameter, module (fnmatch pattern) or operation."""
        return explain(self, name)

    def diff(self, other: Record) -> str:
        """Differences to ``other``: cost, memory, layouts, operations and collectives."""
        return diff(self, other)

    def to_tp_plan(self, axis: str | None = None) -> TpPlan:
        """Module pattern → style, as in transformers' ``tp_plan``; ``.unsaid``: the rest.

        ``axis``: the mesh axis, by default the only one, or ``tp``.
        """
        return tp_plan(self, axis)

    def visualize(self, path: str | os.PathLike[str], other: Record | None = None) -> None:
        """Draw into ``path`` (.html .dot .svg .json .txt .trace.json); ``other``: earlier plan."""
        visualize(self, path, before=other)
