"""A plan as a user holds it: what was decided, as text and as pictures."""

from __future__ import annotations

import os
from dataclasses import dataclass

from autoshard.plans.record import Record
from autoshard.plans.report import plan_text
from autoshard.viz import visualize


@dataclass(frozen=True)
class Plan(Record):
    """All choices for a model on a mesh; ``str()`` gives tables."""

    def __str__(self) -> str:
        return plan_text(self)

    def visualize(self, path: str | os.PathLike[str], other: Record | None = None) -> None:
        """Draw the plan into ``path``: .html, .dot, .svg, .json, .txt or .trace.json; ``other``: the plan before."""
        visualize(self, path, before=other)
