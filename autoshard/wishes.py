"""What is asked of a plan beside the model and the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.layout import Layout
from autoshard.passes.propagate.recompute import Recompute
from autoshard.plans.plan import Plan


@dataclass(frozen=True)
class Wishes:
    """What is asked of a plan beside the model and the mesh; see :func:`autoshard.compile`."""

    hints: Mapping[str, Any] | None = None
    memory_budget: float | None = None
    optimizer: str = "adamw"
    recompute: Recompute = "auto"
    strict: bool = False
    plan: Plan | None = None
    """choices to follow instead of a search"""
    like: Any = None
    """an expert's plan: a name, a name per mesh axis, or styles by module"""
    parameters: Mapping[str, Layout] | None = None
    """layouts that an earlier compilation gave the parameters"""

    @property
    def told(self) -> str:
        """The expert's plan that is followed, as text."""
        if self.plan is not None:
            return self.plan.like
        return "" if self.like is None else repr(self.like)
