"""What one step of lowering changes, as text."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import autoshard
from autoshard.compiler import capture_graph
from autoshard.passes.ir.program import Program
from autoshard.passes.lower.coalescing import group_look_ups
from autoshard.passes.lower.lowering import lower_graph
from autoshard.passes.lower.mixed_precision import cast_parameters
from autoshard.plans.options import CompileOptions
from autoshard.plans.planning import plan_graph

STEPS = (cast_parameters, group_look_ups)


def change(
    step: Callable[[Program], Program], model: nn.Module, *args: torch.Tensor, training: bool = True, **opts: Any
) -> list[str]:
    """The lines that ``step`` takes from the lowered program, and those that it puts there, without comments."""
    asked = CompileOptions(**opts)
    graph = capture_graph(model, args, {}, training=training, precision=asked.mixed_precision)
    program, _ = plan_graph(graph, autoshard.Mesh({"tp": 2}, "ideal_network"), asked)
    before = lower_graph(graph, program.assignment)
    for earlier in STEPS:
        if earlier is not step:
            before = earlier(before)
    texts = [[line.partition("    #")[0] for line in str(p).splitlines()] for p in (before, step(before))]
    return [" ".join(line.split()) for line in difflib.ndiff(*texts) if line[0] in "+-" and " = " in line]
