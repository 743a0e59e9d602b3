"""What one step of lowering changes, as text."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autoshard
from autoshard.compiler import captured, planned
from autoshard.passes.ir.program import Program
from autoshard.passes.lower.lowering import lower
from autoshard.passes.lower.precision import in_precision
from autoshard.passes.lower.tables import tables_together
from autoshard.plans.wishes import Wishes

STEPS = (in_precision, tables_together)


def change(
    step: Callable[[Program], Program], model: nn.Module, *args: torch.Tensor, training: bool = True, **wishes: Any
) -> list[str]:
    """The lines that ``step`` takes from the lowered program, and those that it puts there, without comments."""
    asked = Wishes(**wishes)
    graph = captured(model, args, {}, training=training, precision=asked.mixed_precision)
    program, _ = planned(graph, autoshard.Mesh({"tp": 2}, "ideal_network"), asked)
    before = lower(graph, program.assignment)
    for earlier in STEPS:
        if earlier is not step:
            before = earlier(before)
    texts = [[line.partition("    #")[0] for line in str(p).splitlines()] for p in (before, step(before))]
    return [" ".join(line.split()) for line in difflib.ndiff(*texts) if line[0] in "+-" and " = " in line]
