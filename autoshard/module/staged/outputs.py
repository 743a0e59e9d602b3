"""Outputs of pipeline stages: on every rank, except state that stays on its stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.errors import PlanError
from autoshard.layout import Shard
from autoshard.module.dtensors.of_stage import Home, OfStage
from autoshard.module.programs.executable import Executable
from autoshard.module.ranks.arrivals import part_for
from autoshard.module.ranks.distributed import DistributedModule
from autoshard.module.staged.pipeline import ProgramPipeline
from autoshard.passes.ir.graph import Ref
from autoshard.runtime.programs.along import Along


class StageOutputs(DistributedModule):
    """The outputs of a module with pipeline stages."""

    _along: Along

    def _home_of(self, number: int) -> Home:
        return Home(self._along, self._along.runs(number))

    def _written(self, pipeline: ProgramPipeline, number: int) -> dict[str, torch.Tensor]:
        """States that a stage writes in the last micro-batch."""
        part = pipeline.executable.parts[number]
        return self._new_values(part.compiled.program, pipeline.made[number][-1], pipeline.shapes(part))

    def _made_everywhere(self, pipeline: ProgramPipeline, given: Mapping[str, torch.Tensor]) -> list[list[Any]]:
        """The model's outputs per micro-batch, on every rank, sent from their stages.

        Inputs that are returned (``given``) are on every rank already.
        """
        graph = pipeline.executable.graph
        made = [[None if isinstance(out, Ref) else out for out in graph.outputs] for _ in range(pipeline.count)]
        for number, stage in enumerate(pipeline.stages.each):
            part = pipeline.executable.parts[number]
            for at, position in enumerate(stage.results, len(stage.sent)):
                own = [results[at] for results in pipeline.made[number]] if number in pipeline.mine else None
                if self._stays(pipeline, part, at):
                    leaves = self._kept_by(pipeline, number, at, own)
                else:
                    name = part.compiled.program.outputs[at].name
                    locals_ = self._as_given(pipeline, part, name, given) or self._of_stage(pipeline, number, name, own)
                    leaves = [self._leaf(part, at, local, pipeline.shapes(part)[at]) for local in locals_]
                for outputs, leaf in zip(made, leaves, strict=True):
                    outputs[position] = leaf
        return made

    def _as_given(
        self, pipeline: ProgramPipeline, part: Executable, name: str, given: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        """This rank's shard of a returned input if the batch is not split; empty for others."""
        x = given.get(name)
        if x is None or pipeline.count > 1 or x.requires_grad or isinstance(x, OfStage):
            return []
        return [part_for(x, part.compiled.program.layouts[name], self.device_mesh, self._device)]

    def _stays(self, pipeline: ProgramPipeline, part: Executable, at: int) -> bool:
        """Whether a result stays on its stage: state for the next call, of known shape."""
        shape = pipeline.shapes(part)[at]
        return self._along.ranks > 1 and not part.graph.training and bool(shape) and self._keeps(part, at)

    def _kept_by(
        self, pipeline: ProgramPipeline, number: int, at: int, own: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Result ``at`` of a stage per micro-batch, with data on that stage's ranks."""
        part = pipeline.executable.parts[number]
        program, shape = part.compiled.program, pipeline.shapes(part)[at]
        name = program.outputs[at].name
        layout, dtype = program.layouts[name], program.types[name].dtype
        assert shape is not None
        if own is None:
            empty = torch.empty(layout.local_shape(shape, self._comm.rank), dtype=dtype, device="meta")
            own = [empty] * pipeline.count
        # Contiguous, as the empty ones: ranks must agree whether a reshape is a view.
        parts = [self._dtensor(local.detach().contiguous(), layout, shape) for local in own]
        return [OfStage.at(x, self._home_of(number)) for x in parts]

    def _inputs_written(self, pipeline: ProgramPipeline, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Inputs that stages write, on every rank; state that stays on a stage is written there."""
        found = {}
        for number, stage in enumerate(pipeline.stages.each):
            part = pipeline.executable.parts[number]
            program, inputs = part.compiled.program, {i.fqn: i.name for i in stage.graph.inputs if i.kind == "input"}
            for at, (fqn, name) in enumerate(program.mutations.items(), len(program.outputs)):
                if fqn in inputs and not isinstance(given[inputs[fqn]], OfStage):
                    own = [results[at] for results in pipeline.made[number]] if number in pipeline.mine else None
                    (local,) = self._of_stage(pipeline, number, name, own)
                    shape, layout = pipeline.shapes(part)[at], program.layouts[name]
                    whole = shape is None or not layout.axes_with(Shard)
                    found[fqn] = local if whole else self._full(self._dtensor(local, layout, shape or ()))
        return found

    def _of_stage(
        self, pipeline: ProgramPipeline, number: int, name: str, own: Sequence[torch.Tensor] | None
    ) -> Sequence[torch.Tensor]:
        """A stage's value per micro-batch: local, or from the stage's rank in the same place."""
        program = pipeline.executable.parts[number].compiled.program
        type_, layout = program.types[name], program.layouts[name]
        if type_.unknown or type_.number is not None:
            raise PlanError(f"stages: an output, {type_}, whose length depends on the data is not supported")
        shape = layout.local_shape(pipeline.lengths(type_.shape), self._comm.rank)
        if own is None:
            both = torch.empty((pipeline.count, *shape), dtype=type_.dtype, device=self._device)
        else:
            both = torch.stack([*own]).contiguous()
        self._along.tell(number, both, name)
        return both.unbind(0)
