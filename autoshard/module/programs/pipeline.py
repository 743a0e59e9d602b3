"""The pipeline stages of one program: those of this rank, or one after another in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from autoshard.module.programs.executable import Executable
from autoshard.passes.ir.graph import Ref
from autoshard.passes.rules.facts import is_random
from autoshard.runtime.programs.pipeline import Message, Pipeline, RunStage, StageForm, StageRanks

BindLengths = Callable[[Sequence[int]], tuple[int, ...]]
"""symbolic shape → shape in a call, see :meth:`Executable.lengths`"""


class ProgramPipeline(Pipeline):
    """The stages of ``executable`` that this rank runs."""

    def __init__(
        self, executable: Executable, form: StageForm, along: StageRanks, device: torch.device, run: RunStage
    ) -> None:
        pipeline = executable.compiled.pipeline
        assert pipeline is not None
        self.executable, self.stages = executable, pipeline
        self.lengths: BindLengths = tuple
        """of the present call"""
        self.summed: dict[str, list[bool]] = {}
        """tied parameter → (whether any stage has its gradient, whether one is dense)"""
        super().__init__(form, along, device, run)

    def readers(self, name: str) -> tuple[int, ...]:
        """Stages that read an input; others may receive it for its shape."""
        return self._readers[name]

    @cached_property
    def _readers(self) -> dict[str, tuple[int, ...]]:
        graph, each = self.stages.whole, self.stages.each
        names = [i.name for i in graph.of_kind("input")]
        return {n: tuple(s.number for s in each if n in s.given and s.reads(n)) for n in names}

    @cached_property
    def reached(self) -> frozenset[str]:
        """Inputs of the step that a gradient reaches."""
        micro = self.executable.compiled.micro_batches
        if micro is None:
            return frozenset()
        return frozenset(micro.inputs[n][0] for n in self.stages.reached(micro.loss) if n in micro.inputs)

    def shapes(self, part: Executable) -> list[tuple[int, ...] | None]:
        """Global shapes of a stage's results in this call, see :meth:`Executable.shapes`."""
        return [None if shape is None else self.lengths(shape) for shape in part.global_shapes]


def stage_ranks(executable: Executable) -> list[list[int]]:
    """Per rank of the pipeline axis the global ranks of its stages, in the order of their mesh."""
    plan = executable.compiled.plan
    ranks = torch.arange(plan.mesh.size).view(plan.mesh.shape)
    at = [] if plan.staged is None else [plan.mesh.index(plan.staged.axis)]
    return ranks.movedim(at, [0] * len(at)).reshape(ranks.shape[at[0]] if at else 1, -1).tolist()


def pipeline_form(executable: Executable, rank: int, lengths: BindLengths = tuple) -> StageForm:
    """Schedule and messages between stages; ``rank``: on the mesh that programs run on."""
    pipeline, staged = executable.compiled.pipeline, executable.compiled.plan.staged
    assert pipeline is not None
    assert staged is not None
    micro, last = executable.compiled.micro_batches, len(pipeline) - 1
    loss = None if micro is None or micro.loss is None else pipeline.each[-1].results.index(micro.loss)

    reached = pipeline.reached(None if micro is None else micro.loss)

    def message(part: Executable, name: str) -> Message:
        program = part.compiled.program
        type_ = program.types[name]
        grad = type_.grad and name in reached
        return Message(program.layouts[name].local_shape(lengths(type_.shape), rank), type_.dtype, grad)

    sent = [
        tuple(message(executable.parts[stage.number + 1], name) for name in stage.sent) for stage in pipeline.each[:-1]
    ]
    made = executable.parts[last].compiled.program.outputs
    sent.append(() if loss is None else (message(executable.parts[last], made[loss].name),))
    draws = any(is_random(node) for node in pipeline.whole.nodes)
    return StageForm(staged.schedule, 1 if micro is None else micro.count, tuple(sent), loss, draws)


OutputsAndWrites = tuple[list[Any], dict[str, Tensor]]
RunOneStage = Callable[[Executable, list[Tensor]], OutputsAndWrites]


def run_stages_in_order(executable: Executable, inputs: list[Tensor], run: RunOneStage) -> OutputsAndWrites:
    """Outputs of all stages and mutated states. ``inputs``: in the full program's order."""
    pipeline = executable.compiled.pipeline
    assert pipeline is not None
    values = dict(zip(executable.compiled.source.inputs, inputs, strict=True))
    outputs = [None if isinstance(out, Ref) else out for out in executable.graph.outputs]
    written: dict[str, Tensor] = {}
    for stage, part in zip(pipeline.each, executable.parts, strict=True):
        found, mutated = run(part, [values[name] for name in part.compiled.source.inputs])
        values.update(zip(stage.sent, found, strict=False))
        for position, result in zip(stage.results, found[len(stage.sent) :], strict=True):
            outputs[position] = result
        written |= mutated
    return outputs, written
