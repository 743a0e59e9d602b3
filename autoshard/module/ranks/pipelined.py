"""This rank's module with pipeline stages: it holds and runs its stages on a schedule."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from autoshard import runtime
from autoshard.errors import PlanError
from autoshard.layout import Shard
from autoshard.mesh import Mesh
from autoshard.module.dtensors.module_dtensor import local_shard
from autoshard.module.microbatches import micro_batch_slice, step_outputs, whole_batch_values, without_checkpoint_hooks
from autoshard.module.model.submodules import state_dict_entries
from autoshard.module.optimizers import is_of_stage, mark_stage_gradient
from autoshard.module.programs.call_checks import collective_method
from autoshard.module.programs.compiling import CompileSettings
from autoshard.module.programs.executable import Executable
from autoshard.module.programs.kv_cache import StageHome, StageResidentOutput
from autoshard.module.programs.pipeline import BindLengths, ProgramPipeline, pipeline_form
from autoshard.module.ranks.distributed import DistributedModule, default_device_type
from autoshard.module.ranks.rank_calls import input_shard
from autoshard.passes.ir.graph import Ref
from autoshard.plans.stages import mesh_without_axis
from autoshard.runtime.programs.pipeline import StageRanks, packed_generator_states, unpacked_generator_states
from autoshard.runtime.transport import sparse_gradients, torch_state
from autoshard.runtime.transport.groups import mesh_of


class StageOutputsModule(DistributedModule):
    """The outputs of a module with pipeline stages."""

    _along: StageRanks

    def _home_of(self, number: int) -> StageHome:
        return StageHome(self._along, self._along.runs(number))

    def _written(self, pipeline: ProgramPipeline, number: int) -> dict[str, Tensor]:
        """States that a stage writes in the last micro-batch."""
        part = pipeline.executable.parts[number]
        return self._new_values(part.compiled.program, pipeline.made[number][-1], pipeline.shapes(part))

    def _made_everywhere(self, pipeline: ProgramPipeline, given: Mapping[str, Tensor]) -> list[list[Any]]:
        """The model's outputs per micro-batch, on every rank, sent from their stages; returned
        inputs (``given``) are there already."""
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
        self, pipeline: ProgramPipeline, part: Executable, name: str, given: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """This rank's shard of a returned input if the batch is not split; empty for others."""
        x = given.get(name)
        if x is None or pipeline.count > 1 or x.requires_grad or isinstance(x, StageResidentOutput):
            return []
        return [input_shard(x, part.compiled.program.layouts[name], self.device_mesh, self._device)]

    def _stays(self, pipeline: ProgramPipeline, part: Executable, at: int) -> bool:
        """Whether a result stays on its stage: state for the next call, of known shape."""
        shape = pipeline.shapes(part)[at]
        return self._along.ranks > 1 and not part.graph.training and bool(shape) and self._stays_sharded(part, at)

    def _kept_by(self, pipeline: ProgramPipeline, number: int, at: int, own: Sequence[Tensor] | None) -> list[Tensor]:
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
        return [StageResidentOutput.at(x, self._home_of(number)) for x in parts]

    def _inputs_written(self, pipeline: ProgramPipeline, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Inputs that stages write, on every rank; state that stays on a stage is written there."""
        found = {}
        for number, stage in enumerate(pipeline.stages.each):
            part = pipeline.executable.parts[number]
            program, inputs = part.compiled.program, {i.fqn: i.name for i in stage.graph.of_kind("input")}
            for at, (fqn, name) in enumerate(program.mutations.items(), len(program.outputs)):
                if fqn in inputs and not isinstance(given[inputs[fqn]], StageResidentOutput):
                    own = [results[at] for results in pipeline.made[number]] if number in pipeline.mine else None
                    (local,) = self._of_stage(pipeline, number, name, own)
                    shape, layout = pipeline.shapes(part)[at], program.layouts[name]
                    whole = shape is None or not layout.axes_with(Shard)
                    found[fqn] = local if whole else self._full(self._dtensor(local, layout, shape or ()))
        return found

    def _of_stage(
        self, pipeline: ProgramPipeline, number: int, name: str, own: Sequence[Tensor] | None
    ) -> Sequence[Tensor]:
        """A stage's value per micro-batch: local, or from the stage's rank in the same place."""
        program = pipeline.executable.parts[number].compiled.program
        type_, layout = program.types[name], program.layouts[name]
        if type_.unknown or type_.number is not None:
            raise PlanError(f"stages: an output ({type_}) whose length depends on the data is not supported")
        shape = layout.local_shape(pipeline.lengths(type_.shape), self._comm.rank)
        if own is None:
            both = torch.empty((pipeline.count, *shape), dtype=type_.dtype, device=self._device)
        else:
            both = torch.stack([*own]).contiguous()
        self._along.tell(number, both, name)
        return both.unbind(0)


ParameterLeaves = list[tuple[Tensor, Tensor]]

_ALL_DTYPES = [None, *sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)]
"""all dtypes, in the same order on every rank"""


class PipelinedModule(StageOutputsModule):
    """A sharded module with stages; ``named_parameters()`` are those of this rank's stages."""

    _pipelines: dict[int, ProgramPipeline]
    _by_stage: list[list[int]]

    def __init__(self, model: nn.Module, mesh: Mesh, settings: CompileSettings, device_mesh: DeviceMesh | None) -> None:
        axis = settings.opts.stages
        assert axis is not None
        kind = device_mesh.device_type if device_mesh is not None else default_device_type()
        ranks = device_mesh.mesh if device_mesh is not None else torch.arange(mesh.size, device="cpu").view(mesh.shape)
        own = mesh_without_axis(mesh, axis)
        ranks = ranks.movedim(mesh.index(axis), 0).reshape(-1, *own.shape)
        axes = f"{axis}_stages", *own.axes
        whole = mesh_of(kind, ranks, axes)
        super().__init__(model, mesh, settings, whole[own.axes if len(own.axes) > 1 else own.axes[0]])
        object.__setattr__(self, "_along", StageRanks(whole.get_group(axes[0]), self._comm.notes))
        object.__setattr__(self, "_pipelines", {})
        object.__setattr__(self, "_by_stage", ranks.flatten(1).tolist())

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """See :meth:`ShardedModule.__deepcopy__`. Pipelines are not copied."""
        memo[id(self._pipelines)] = {}
        return super().__deepcopy__(memo)

    def _shared(self) -> list[Any]:
        """See :meth:`Compiling._shared`."""
        return [*super()._shared(), self._along, self._stage_homes]

    # --- tensors ---

    def _mark(self) -> None:
        """Mark gradients as those of a stage, if there are other stages."""
        for p in self.parameters() if self._along.ranks > 1 else ():
            if p.requires_grad and p.is_leaf and not is_of_stage(p):
                p.register_post_accumulate_grad_hook(mark_stage_gradient)

    def _holds(self, name: str) -> bool:
        return self._stage_homes is None or any(map(self._along.is_mine, self._stage_homes.get(name, (0,))))

    def _form(self, tensor: Tensor) -> tuple[Any, ...]:
        return tuple(tensor.shape), tensor.dtype  # ranks hold different tensors

    def _check(self, name: str, tensor: Tensor) -> None:
        if name not in self._original_model.elsewhere:
            super()._check(name, tensor)

    def _repeats(self, executable: Executable) -> bool:
        return False  # no collective of a stage involves all ranks

    def _stage_of(self, name: str) -> int:
        """The first stage that holds a parameter or buffer."""
        assert self._stage_homes is not None
        tied = {alias: i.fqn for i in self._latest_executable().graph.inputs for alias in i.aliases}
        return self._stage_homes.get(tied.get(name, name), (0,))[0]

    @property
    def is_staged(self) -> bool:
        """See :attr:`ShardedModule.is_staged`."""
        return True

    def unduplicated_gradients(self) -> list[Any]:
        """See :meth:`ShardedModule.gradients_once`."""
        named = ((n, p.grad) for n, p in nn.Module.named_parameters(self) if p.grad is not None)
        return [g for n, g in named if self._along.is_mine(self._stage_of(n))]

    def _full_entries(self) -> Iterator[tuple[str, Tensor]]:
        own, named = self.state_dict(keep_vars=True), state_dict_entries(self._original_model.model)
        for n, like in self.all_stages_state_dict().items():
            x = own[n].detach() if n in own else None
            yield n, self.everywhere(named[n][0], like, x) if n in named else self._full(own[n].detach())

    def all_stages_state_dict(self) -> dict[str, Tensor]:
        """See :meth:`ShardedModule.whole_state_dict`."""
        own = self.state_dict(keep_vars=True)
        named = state_dict_entries(self._original_model.model)  # in the dtypes of the last capture
        whole = {n: own.get(n, self._original_model.elsewhere.get(name, x)) for n, (name, x) in named.items()}
        return {**whole, **own}  # also of modules added later, which all ranks have

    def all_stages_names(self) -> list[str]:
        """Original names of all parameters of the model, tied ones once."""
        return [n for n, _ in self._original_model.model.named_parameters()]

    def gathered(self, mine: Any) -> list[Any]:
        """``mine`` of every rank along the pipeline axis. Collective."""
        return self._along.gathered(mine)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """See :meth:`ShardedModule.load_full_state_dict`; a rank loads its stages' entries."""
        self._check_state(self.all_stages_state_dict(), state)
        with torch.no_grad():
            for name, tensor in self.state_dict(keep_vars=True).items():
                self._load(tensor, state[name])

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """See :meth:`ShardedModule.load_state_dict`; a rank loads its stages' entries. A misshapen
        entry of another stage raises here, too."""
        whole = self.all_stages_state_dict()
        elsewhere = whole.keys() - self.state_dict().keys()
        for n in sorted(elsewhere & state_dict.keys()):
            if state_dict[n].shape != whole[n].shape:
                sizes = f"{list(state_dict[n].shape)} from checkpoint, {list(whole[n].shape)} in the model"
                raise RuntimeError(f"size mismatch for {n} of another stage: {sizes}")
        mine = OrderedDict((n, x) for n, x in state_dict.items() if n not in elsewhere)
        if hasattr(state_dict, "_metadata"):
            mine._metadata = state_dict._metadata  # type: ignore[attr-defined]
        return super().load_state_dict(mine, *args, **kwargs)

    @collective_method
    def full_gradients(self) -> dict[str, Tensor]:
        """Original parameter name → full gradient (if any), on every rank. Collective."""
        own = {n: p.grad for n, p in self.named_parameters() if p.grad is not None}
        paths = dict(
            zip(
                self.all_stages_names(),
                (n for n, _ in nn.Module.named_parameters(self._original_model.model)),
                strict=True,
            )
        )
        names = {n: self._original_model.tensor(path) for n, path in paths.items()}
        kinds = [(n in own, n in own and own[n].is_sparse) for n in names]
        there = torch.tensor(kinds, dtype=torch.int32, device=self._device)
        self._along.add_up(there, range(self._along.ranks), "which gradients there are")
        found = {}
        for (n, x), (known, rows) in zip(names.items(), there.tolist(), strict=True):
            if known:
                bring = self._rows_everywhere if rows else self.everywhere
                found[n] = bring(paths[n], x, own.get(n))
        return found

    def everywhere(self, name: str, like: Tensor, own: Tensor | None) -> Tensor:
        """The full tensor of a name on every rank; ``own``: this rank's, if any. Collective."""
        full = None if own is None else self._full(own).to(self._device).contiguous()
        if full is None:
            full = torch.empty(like.shape, dtype=like.dtype, device=self._device)
        self._along.tell(self._stage_of(name), full, name)
        return full

    def _rows_everywhere(self, name: str, like: Tensor, own: Tensor | None) -> Tensor:
        """As :meth:`everywhere`, for the rows of a sparse gradient. Collective."""
        numbers, rows = sparse_gradients.rows_of(self._full(own).to(self._device)) if own is not None else (None, None)
        count = torch.tensor(0 if numbers is None else len(numbers), device=self._device)
        self._along.tell(self._stage_of(name), count, name)
        if numbers is None or rows is None:
            numbers = torch.empty(int(count), dtype=torch.int64, device=self._device)
            rows = torch.empty(int(count), *like.shape[1:], dtype=like.dtype, device=self._device)
        for part in (numbers, rows):
            self._along.tell(self._stage_of(name), part, name)
        return sparse_gradients.from_rows(numbers, rows, like.shape[0]).coalesce()

    # --- running ---

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._follow_others()
        return super()._called(args, kwargs)

    def specialise(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], number: int = 0, recorded: bool | None = None
    ) -> Executable:
        """See :meth:`Compiling.specialise`."""
        with self._comm.notes:
            self._follow_others()
        return super().specialise(args, kwargs, number, recorded)

    def _follow_others(self) -> None:
        """Update dtypes and requires_grad of other stages' tensors. Collective."""
        if not self._original_model.adopted:
            return
        held = self._original_model.held()
        own = [
            0 if n in self._original_model.elsewhere else 2 * _ALL_DTYPES.index(x.dtype) + x.requires_grad
            for n, x in held.items()
        ]
        for (name, x), reported in zip(held.items(), self._agreement.known(own), strict=True):
            if (
                name in self._original_model.elsewhere
                and reported
                and (x.dtype, x.requires_grad) != (_ALL_DTYPES[reported // 2], reported % 2)
            ):
                x.data = x.data.to(_ALL_DTYPES[reported // 2])
                x.requires_grad_(bool(reported % 2))

    @property
    def _places(self) -> Sequence[Sequence[int]]:
        return self._by_stage

    def _step(self, executable: Executable, inputs: Mapping[str, Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
        """See :meth:`ShardedModule._step`; runs all micro-batches on this rank's stages."""
        pipeline, micro = self._pipeline(executable, inputs), executable.compiled.micro_batches
        training = pipeline.training
        if training or pipeline.count > 1:
            inputs = self._gather_local_inputs(inputs)
        given = {
            n: x.detach().requires_grad_() if x.requires_grad else x for n, x in self._where_read(pipeline, inputs)
        }
        if training:
            self._mark()
        self._agreement.finish()
        if micro is not None:
            given |= whole_batch_values(micro, given, self._whole_buffer)
        pipeline.run = partial(self._run_stage, pipeline, given)
        own = torch_state.generator_states(cuda=self._device.type == "cuda")
        before = self._defer_reduction(True)
        try:
            with contextlib.ExitStack() as inside, without_checkpoint_hooks():
                pairs: ParameterLeaves = inside.enter_context(self._original_model.leaf_stand_ins()) if training else []
                begin = self._state_of_first() if pipeline.draws and 0 in pipeline.mine else None
                with runtime.bind(self._comm):
                    pipeline.step(self._comm.notes, [leaf for _, leaf in pairs], begin)
        finally:
            self._enter(0, 1)
            self._defer_reduction(before)
            torch_state.set_generator_states(own)
        self._agreement.everywhere(partial(_raise_if_failed, pipeline.failed))
        self._end(pipeline)
        written = {fqn: x for number in pipeline.mine for fqn, x in self._written(pipeline, number).items()}
        with runtime.bind(self._comm):
            made = self._made_everywhere(pipeline, given)
            written |= self._inputs_written(pipeline, given)
        pipeline.made = {}
        if micro is None or not training:
            return (made[0] if micro is None else step_outputs(micro, made, ())), written
        self._sum_tied(pipeline, pairs)
        wanted = [*pairs, *self._of_inputs(pipeline, inputs, given)]
        if not wanted:  # nothing is trained here, but the user calls backward on every rank
            wanted = [(torch.zeros((), requires_grad=True), torch.zeros(()))]
        return step_outputs(micro, made, wanted), written

    def _pipeline(self, executable: Executable, inputs: Mapping[str, Tensor]) -> ProgramPipeline:
        """The pipeline for these inputs; its messages have the lengths of the call."""
        found = self._pipelines.get(id(executable))
        lengths: BindLengths = tuple
        if found is None or executable.compiled.symbols.read:
            if executable.compiled.symbols.read:
                lengths = executable.lengths([inputs[name] for name in executable.compiled.source.inputs])
            form, none = pipeline_form(executable, self._comm.rank, lengths), lambda *_: ()
            if found is None or found.form != form:
                found = ProgramPipeline(executable, form, self._along, self._device, none)
                self._pipelines[id(executable)] = found
            found.lengths = lengths
        return found

    def _where_read(self, pipeline: ProgramPipeline, inputs: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The inputs; state that another stage reads is sent to all ranks. Collective then."""
        for name, x in inputs.items():
            elsewhere = isinstance(x, StageResidentOutput) and any(
                x.home != self._home_of(n) for n in pipeline.readers(name)
            )
            yield name, x.everywhere() if elsewhere else x  # type: ignore[attr-defined]

    def _whole_buffer(self, name: str) -> Tensor:
        """A full buffer on all ranks, from the stage that holds it. Collective."""
        x = self._original_model.tensor(name)
        return self.everywhere(name, x, None if name in self._original_model.elsewhere else x.detach())

    def _run_stage(
        self,
        pipeline: ProgramPipeline,
        given: Mapping[str, Tensor],
        number: int,
        index: int,
        received: list[Tensor],
    ) -> Sequence[Tensor]:
        """Local results of a stage's rank module for a micro-batch."""
        part, stage = pipeline.executable.parts[number], pipeline.stages.each[number]
        micro = pipeline.executable.compiled.micro_batches
        values = dict(zip(stage.received, received, strict=True))
        for name in stage.given:
            source, dim = (name, None) if micro is None else micro.inputs[name]
            values[name] = micro_batch_slice(given[source], dim, index, pipeline.count)
        self._comm.enter(index, pipeline.count, number)
        self._defer_reduction(index < pipeline.count - 1)
        return self._results(part, [values[name] for name in part.compiled.source.inputs])

    # --- between stages ---

    @contextlib.contextmanager
    def same_draws_on_ranks(self) -> Iterator[None]:
        """See :meth:`DistributedModule.drawing_alike`; for the ranks of all stages."""
        own, before, state = (
            torch_state.generator_states(self._device.type == "cuda"),
            packed_generator_states(self._device),
            self._state_of_first(),
        )
        self._along.tell(0, state, "the random state")
        torch_state.set_generator_states(unpacked_generator_states(state, self._device))
        try:
            yield
        finally:
            if not torch.equal(before, state):
                torch_state.set_generator_states(own)

    def _state_of_first(self) -> Tensor:
        """The generator state of this stage's first rank, on all of its ranks."""
        state = packed_generator_states(self._device)
        if self._comm.world_size > 1:
            group = self._comm.process_group(self._comm.active(tuple(self._comm.mesh)))
            self._comm.during(None, "broadcast of the random state")
            self._comm.run(group, dist.broadcast, state, self._comm.ranks[0])
        return state

    def _end(self, pipeline: ProgramPipeline) -> None:
        """Give rank 0's generators the state after the last stage."""
        if not pipeline.draws:
            return
        state = pipeline.end if pipeline.last in pipeline.mine else None
        state = packed_generator_states(self._device) if state is None else state
        self._along.tell(pipeline.last, state, "the random state")
        if self._agreement.rank == 0:
            torch_state.set_generator_states(unpacked_generator_states(state, self._device))

    def _sum_tied(self, pipeline: ProgramPipeline, pairs: ParameterLeaves) -> None:
        """Add up the gradients of tied parameters over all stages that hold them, also where this
        program reads them in fewer."""
        assert self._stage_homes is not None
        leaves, read = {id(p): leaf for p, leaf in pairs}, pipeline.stages.homes
        for fqn, homes in sorted(self._stage_homes.items()):
            if len(homes) == 1 or fqn not in read or fqn not in self._original_model.parameters:
                continue
            leaf = leaves.get(id(self._original_model.tensor(fqn)))
            if leaf is None:
                continue
            grad = leaf.grad
            in_rows = grad is not None and local_shard(grad).is_sparse
            if fqn not in pipeline.summed:  # the graph decides it, for all steps
                known = torch.tensor([grad is not None, not in_rows], dtype=torch.int32, device=self._device)
                self._along.add_up(known, homes, f"whether {fqn} has a gradient")
                pipeline.summed[fqn] = [bool(n) for n in known.tolist()]
            some, dense = pipeline.summed[fqn]
            if some:
                if grad is None or (dense and in_rows):
                    rows, grad = grad, torch.zeros_like(leaf)
                    if rows is not None:
                        local_shard(grad).add_(local_shard(rows))
                    leaf.grad = grad
                self._along.add_up(local_shard(grad), homes, f"the gradient of {fqn}")

    def _of_inputs(
        self, pipeline: ProgramPipeline, inputs: Mapping[str, Tensor], given: Mapping[str, Tensor]
    ) -> ParameterLeaves:
        """(input, leaf with the summed gradient) of inputs that want a gradient."""
        found = []
        for name, x in inputs.items():
            if x.requires_grad:
                leaf = given[name]
                if name not in pipeline.reached:
                    found.append((x, leaf))
                    continue
                leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                self._along.add_up(leaf.grad, range(self._along.ranks), f"the gradient of {name}")
                found.append((x, leaf))
        return found


def _raise_if_failed(error: Exception | None) -> None:
    if error is not None:
        raise error
