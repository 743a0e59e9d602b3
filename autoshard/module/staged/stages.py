"""Pipeline stages in one process: one after another, as one autograd graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from autoshard.module.programs.executable import Executable
from autoshard.passes.ir.graph import Ref

Results = tuple[list[Any], dict[str, torch.Tensor]]
Run = Callable[[Executable, list[torch.Tensor]], Results]


def one_after_another(executable: Executable, inputs: list[torch.Tensor], run: Run) -> Results:
    """Outputs of all stages and mutated states. ``inputs``: in the full program's order."""
    pipeline = executable.compiled.pipeline
    assert pipeline is not None
    values = dict(zip(executable.compiled.source.inputs, inputs, strict=True))
    outputs = [None if isinstance(out, Ref) else out for out in executable.graph.outputs]
    written: dict[str, torch.Tensor] = {}
    for stage, part in zip(pipeline.each, executable.parts, strict=True):
        found, mutated = run(part, [values[name] for name in part.compiled.source.inputs])
        values.update(zip(stage.sent, found, strict=False))
        for position, result in zip(stage.results, found[len(stage.sent) :], strict=True):
            outputs[position] = result
        written |= mutated
    return outputs, written
