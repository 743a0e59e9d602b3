"""What is asked of a plan beside the model and the mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoshard.layout import Layout
from autoshard.passes.propagate.recompute import Recompute
from autoshard.plans.plan import Plan
from autoshard.precision import Precision


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
    mixed_precision: Precision | None = None
    micro_batches: int = 1
    """parts of the batch that a step with a backward runs one after another"""
    inputs: tuple[Layout | None, ...] = ()
    """per leaf of the arguments the layout it comes in; None, or nothing: whole"""
    stages: str | None = None
    """the mesh axis along which the graph is cut into stages, instead of the tensors"""
    schedule: str = "1f1b"
    """the order in which stages run micro-batches: gpipe, 1f1b, interleaved or zero_bubble"""
    flying: int = 0
    """of one stage: the micro-batches that it keeps something for at once"""
    homes: Mapping[str, tuple[int, ...]] | None = None
    """the stages that an earlier compilation put the parameters and buffers into"""
