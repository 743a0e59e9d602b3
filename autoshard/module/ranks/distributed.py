"""This rank's module under torch.distributed: DTensor parameters, programs on shards."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard import runtime
from autoshard.compiler import capture_graph, compile_graph
from autoshard.dumps import asked_checks
from autoshard.errors import CaptureError, CommunicationError, PlanError
from autoshard.layout import I, Layout, R, Shard
from autoshard.mesh import Mesh
from autoshard.module.dtensors.dispatch import with_plain_gradient
from autoshard.module.dtensors.module_dtensor import PART_MESHES, STAGE_MESHES, local_shard
from autoshard.module.dtensors.outputs import ShardedOutput
from autoshard.module.dtensors.segments import reorder_segments, shard_of
from autoshard.module.dtensors.table_wise import (
    as_dtensor,
    dtensor_layout,
    gather_owned,
    has_layout,
    make_tables_contiguous,
    owner_device_type,
)
from autoshard.module.inputs import InputLayouts, meta_input
from autoshard.module.logits import ShardedLogits
from autoshard.module.model.parameters import copy_dtensor
from autoshard.module.optimizers import patch_grad_scaler, patch_load_state_dict, patch_steps
from autoshard.module.programs.call_checks import CallLock
from autoshard.module.programs.compiling import CompileSettings
from autoshard.module.programs.executable import Executable, ModuleCall
from autoshard.module.programs.kv_cache import StageResidentOutput
from autoshard.module.ranks import rank_calls
from autoshard.module.ranks.agreement import (
    RESTART_ADVICE,
    Agreement,
    check_replicas,
    named_tensors,
    rank0_values,
)
from autoshard.module.ranks.parameters import RankProgram
from autoshard.module.ranks.rank_calls import gather_inputs, input_shard, inputs_on_rank, stated_layout
from autoshard.module.sharded_module import ShardedModule
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import Local, Program
from autoshard.passes.propagate.named_strategies import expand_tp_plan
from autoshard.passes.redistribute import redistribution, runtime_call
from autoshard.passes.redistribute.resharding import without_fixed
from autoshard.plans.options import CallArguments, CompileOptions, KnownLayouts
from autoshard.plans.plan import Compiled, Plan
from autoshard.runtime.programs.module import RankModule
from autoshard.runtime.transport.groups import group_of, mesh_of


class RankLocalModule(ShardedModule):
    """A sharded module with the tensors of one rank."""

    device_mesh: DeviceMesh
    _comm: runtime.TorchCommunicator
    _device: torch.device
    _agreement: Agreement
    has_local_tensors = True

    def relay(self, layouts: Mapping[str, Layout], kept: Mapping[str, Tensor] | None = None) -> None:
        """See :meth:`Compiling.relay`; the tensors are replaced by their shards."""
        of, made = self._original_model, dict[int, Any]()
        for name, layout in layouts.items():
            x = of.tensor(name)
            if id(x) not in made:
                made[id(x)] = x
                if layout.axes_with(Shard) or kept is not None:
                    is_parameter = name in of.parameters
                    full: Any = kept[name] if kept is not None else local_shard(x) if isinstance(x, DTensor) else x
                    new = self._parameter(full, layout, None) if is_parameter else self._buffer(full, layout, None)
                    vars(new).update(vars(x))
                    made[id(x)] = new.requires_grad_(x.requires_grad)
            holder, leaf = of.slots[name]
            holder[leaf] = made[id(x)]
        buffers = {n for n in layouts if n not in of.parameters and not layouts[n].axes_with(Shard)}
        super().relay({n: layout for n, layout in layouts.items() if n not in buffers})

    @contextlib.contextmanager
    def same_draws(self) -> Iterator[None]:
        """See :meth:`Compiling.same_draws`. Collective."""
        own = random.getstate(), numpy.random.get_state()
        text = _states_as_json(own)
        agreed = self._agreement.from_first(lambda: text)
        (version, words, after), kind = json.loads(agreed)
        random.setstate((version, tuple(words), after))
        numpy.random.set_state(tuple(kind))
        try:
            with runtime.synchronised_rng(self._comm):
                self._comm.random_states()
                yield
        finally:
            if agreed != text:
                random.setstate(own[0])
                numpy.random.set_state(own[1])

    def _seed(self) -> int:
        return int(self._agreement.tensor_of_first(torch.tensor(torch.initial_seed(), device="cpu")))

    def _initial(self, model: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
        """See :meth:`Compiling._initial`. Values of rank 0 win where ranks differ."""
        tensors = dict(named_tensors(model))
        first = rank0_values(self._agreement, tensors, self._title)
        found = {n: self._initial_shard(full, layouts.get(n)).clone() for n, full in first}
        missing = any(x.is_meta for n, x in tensors.items() if n not in found)
        return {**super()._initial(model, layouts), **found} if missing else found

    def _agree_on_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**tensors, **dict(rank0_values(self._agreement, tensors, self._title))} if tensors else tensors

    def _initial_shard(self, full: Tensor, layout: Layout | None) -> Tensor:
        return full if layout is None else shard_of(full, layout, self._comm.rank)

    def _parameter(self, p: nn.Parameter, layout: Layout, initial: Tensor | None) -> nn.Parameter:
        return nn.Parameter(
            self._dtensor(self._part(p, layout, initial), layout, p.shape), requires_grad=p.requires_grad
        )

    def _part(self, full: Tensor, layout: Layout, initial: Tensor | None) -> Tensor:
        """This rank's shard of a tensor, or a copy of its ``initial`` shard; zeros without data."""
        if initial is not None:
            return initial.detach().to(self._device, copy=True).contiguous()
        if full.is_meta:
            shape = layout.local_shape(full.shape, self._comm.rank)
            return torch.zeros(shape, dtype=full.dtype, device=self._device)
        return shard_of(full.detach(), layout, self._comm.rank).to(self._device, copy=True).contiguous()

    def _dtensor(self, local: Tensor, layout: Layout, shape: Sequence[int]) -> DTensor:
        return as_dtensor(local, self.device_mesh, layout, shape)

    def _buffer(self, b: Tensor, layout: Layout | None, initial: Tensor | None) -> Tensor:
        if layout is not None:
            return ShardedOutput.of(self._dtensor(self._part(b, layout, initial), layout, b.shape))
        zeros = torch.zeros_like(b, device="cpu") if b.is_meta and initial is None else b
        return (zeros if initial is None else initial).detach().clone().to(self._device)

    def _full(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.clone()
        # DTensor.full_tensor gathers axis by axis; this gathers the flattened axes at once.
        layout, local, shape = (
            dtensor_layout(self._program_mesh, self.device_mesh, tensor),
            local_shard(tensor),
            tuple(tensor.shape),
        )
        owner = {a: layout[a] for a in layout.owner}
        src = without_fixed(layout) if layout.grouped else layout
        plan = redistribution(src, Layout(self._program_mesh, owner), shape, self._program_mesh, tensor.dtype, False)
        with torch.no_grad(), runtime.bind(self._comm):
            full = run_redistribution(plan, local)
        if owner:
            return gather_owned(full, shape, tuple(owner), self._comm)
        return full.clone() if full is local else reorder_segments(full, layout)

    def _load(self, tensor: Tensor, full: Tensor) -> None:
        if isinstance(tensor, DTensor):
            layout = dtensor_layout(self._program_mesh, self.device_mesh, tensor)
            part = local_shard(full) if isinstance(full, DTensor) else shard_of(full, layout, self._comm.rank)
            tensor, full = local_shard(tensor), part
        if not full.is_set_to(tensor):  # else written in place
            tensor.copy_(full)

    def _form(self, tensor: Tensor) -> tuple[Any, ...]:
        shape, dtype, _ = super()._form(tensor)
        return shape, dtype, owner_device_type(tensor), tensor.placements if isinstance(tensor, DTensor) else None

    def _check(self, name: str, tensor: Tensor) -> None:
        layout = self._layout_of.get(name)
        if owner_device_type(tensor) != self._device.type:
            raise CaptureError(
                f"{name!r} was moved to {tensor.device}; the mesh is on {self._device.type}. Move it back."
            )
        if layout is None and isinstance(tensor, DTensor):
            raise CaptureError(f"buffer {name!r} was replaced by a DTensor. It must be full: use full_tensor().")
        placements = tensor.placements if isinstance(tensor, DTensor) else None
        if layout is not None and not has_layout(layout, self.device_mesh, tensor):
            raise CaptureError(
                f"{name!r} was replaced by a tensor in layout {placements or 'of a plain tensor'}; it is kept as a "
                f"DTensor in {layout.without_gradient()}. Copy values into it, or load them with load_full_state_dict."
            )


def _states_as_json(states: tuple[Any, Any]) -> str:
    """States of Python's and numpy's generators."""
    python, (kind, words, *rest) = states
    return json.dumps([python, [kind, words.tolist(), *rest]])


def run_redistribution(plan: Any, local: Tensor) -> Tensor:
    """Run a redistribution on this rank's tensor, on the bound communicator."""
    for step in plan.steps:
        name, args, kwargs = runtime_call(step)
        plain = {k: runtime.size(v.size, v.axes) if isinstance(v, Local) else v for k, v in kwargs.items()}
        local = getattr(runtime, name)(local, *args, **plain)
    return local


_untraced_redistribution = torch.compiler.disable(redistribution)
"""a search, which torch.compile would trace with warnings"""


class DistributedModule(RankLocalModule):
    """The sharded module of one process; every rank of the mesh has one."""

    _home: torch.device
    _loaded: dict[int, RankProgram]
    _checks: dict[str, int]
    _comparisons: rank_calls.InputComparisons
    _compared: Any
    """the last compared call: repetitions are not compared"""
    _on_gloo: bool
    _generating: bool = False
    """whether logits go to a generation loop"""

    def __init__(self, model: nn.Module, mesh: Mesh, settings: CompileSettings, device_mesh: DeviceMesh | None) -> None:
        super().__init__(model, mesh, settings)
        kind = device_mesh.device_type if device_mesh is not None else default_device_type()
        if device_mesh is None:
            device_mesh = mesh_of(kind, torch.arange(mesh.size, device="cpu").view(mesh.shape), mesh.axes)
        set_ = object.__setattr__
        set_(self, "device_mesh", device_mesh)
        part = not self.is_staged and mesh.size < dist.get_world_size()
        own = tuple(device_mesh.mesh.flatten().tolist()) if part else ()
        if part:
            PART_MESHES.add(device_mesh)
        set_(self, "_comm", runtime.TorchCommunicator.of(device_mesh, own))
        set_(self, "_device", torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))
        set_(self, "_home", next((t.device for _, t in named_tensors(model) if not t.is_meta), torch.device("cpu")))
        set_(self, "_call_lock", CallLock(waits=False))
        patch_grad_scaler()
        patch_load_state_dict()
        patch_steps()
        if self.is_staged:
            STAGE_MESHES.add(device_mesh)
        set_(self, "_loaded", {})
        set_(self, "_agreement", Agreement(self._comm.notes, group_of(own, "agreement", "gloo") if own else None))
        set_(self, "_checks", asked_checks())
        set_(self, "_comparisons", rank_calls.InputComparisons())
        set_(self, "_compared", None)
        set_(
            self, "_on_gloo", all(dist.get_backend(device_mesh.get_group(i)) == "gloo" for i in range(device_mesh.ndim))
        )
        self._comm.device = self._device

    def save(self, directory: str | os.PathLike[str]) -> None:
        """See :meth:`ShardedModule.save`. :class:`PlanError` on a ``DeviceMesh`` of some ranks."""
        if not self.is_staged and self.device_mesh in PART_MESHES:
            raise PlanError(
                f"save() needs a module of all {dist.get_world_size()} ranks, but the mesh ({self.mesh}) has "
                f"{self.mesh.size}. Save full_state_dict() and plan.to_json()"
            )
        super().save(directory)

    def _shared(self) -> list[Any]:
        """See :meth:`Compiling._shared`."""
        return [*super()._shared(), self.device_mesh, self._comm, self._agreement, self._compared]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """See :meth:`ShardedModule.__deepcopy__`. Loaded programs are not copied."""
        memo[id(self._loaded)] = {}
        for p in self._original_model.tensors():
            if isinstance(p, DTensor):  # deepcopy of a DTensor would keep its gradient
                memo[id(p)] = copy_dtensor(p)
        return super().__deepcopy__(memo)

    def _alone(self) -> None:
        object.__setattr__(self, "_loaded", {})
        object.__setattr__(self, "_comparisons", rank_calls.InputComparisons())
        object.__setattr__(self, "_compared", None)

    # --- inputs ---

    def _device_type(self) -> str | None:
        return None

    def _inputs_as_called(
        self, leaves: Sequence[Any], spec: Any, cuts: InputLayouts | None = None
    ) -> tuple[Sequence[Any], InputLayouts]:
        if cuts is None:
            are_global = self._settings.inputs == "global"
            cuts = () if are_global else super()._input_layouts(*pytree.tree_unflatten(leaves, spec))
        return inputs_on_rank(leaves, cuts, self.device_mesh, self._device), cuts

    def _input_layouts(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> InputLayouts:
        return tuple(stated_layout(x, self._program_mesh) for x in pytree.tree_leaves((tuple(args), dict(kwargs))))

    def _whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """See :meth:`Compiling._whole`: plain tensors on the device of capture. Collective for
        local inputs; large ones have no data."""

        def whole(x: Tensor) -> Tensor:
            if not isinstance(x, DTensor) and (x.is_meta or x.device.type == self._home.type):
                return x
            full = meta_input(x, x.shape) if isinstance(x, DTensor) else x.detach()
            present = x.everywhere() if full is None and isinstance(x, StageResidentOutput) else x
            full = self._full(present.detach()) if full is None else full
            return (full if full.is_meta else full.to(self._home)).requires_grad_(x.requires_grad)

        return pytree.tree_map_only(Tensor, whole, (tuple(args), dict(kwargs)))

    def gathered_inputs(self, leaves: Sequence[Any], spec: Any) -> Sequence[Any]:
        """See :meth:`Compiling.gathered_inputs`. Collective for local inputs."""
        called = self._inputs_as_called(leaves, spec)[0]
        return [gather_inputs({"": x})[""].to(self._device) if isinstance(x, Tensor) else x for x in called]

    def _gather_local_inputs(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """See :meth:`ShardedModule._put_together`."""
        return gather_inputs(inputs)

    # --- running ---

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        """Run module hooks and forward; other ranks are notified of a failure."""
        notes = self._comm.notes
        before = notes.call
        with notes:
            try:
                return super()._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
            except Exception:
                if notes.call == before:  # in a pre-forward hook: others have begun the call
                    notes.begin()
                raise

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`ShardedModule.forward`. Other ranks are notified of a failure."""
        with self._comm.notes, self._call_lock:
            self._comm.notes.begin()
            return self._called(args, kwargs)

    def run_as_part(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """See :meth:`ShardedModule.run_as_part`. Other ranks fail alike."""
        with self._call_lock:
            self._comm.notes.begin()
            return self._run_one_graph(args, kwargs)

    @contextlib.contextmanager
    def meeting(self, what: str) -> Iterator[None]:
        """See :meth:`ShardedModule.meeting`."""
        notes = self._comm.notes
        with notes, self._call_lock:
            notes.begin(meeting=True)
            notes.present(what, lambda: rank_calls.meeting_claims(notes, what))
            self._agreement.agree(*notes.claims())
            if notes.broken:
                raise CommunicationError(RESTART_ADVICE)
            yield

    def specialise(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], number: int = 0, recorded: bool | None = None
    ) -> Executable:
        """See :meth:`Compiling.specialise`; ranks pass the same inputs in the same state."""
        with self._comm.notes, self._call_lock:
            return super().specialise(args, kwargs, number, recorded)

    def _serving(self, call: ModuleCall, number: int) -> Executable:
        """See :meth:`Compiling._serving`. Ranks compare the guards while the program runs, unless
        this one repeats its last call and called no other module since; again while waiting
        (:class:`Notes`). Input values are compared before (:class:`Comparisons`)."""
        notes, agreement = self._comm.notes, self._agreement
        executable, again = self._program_for(call, number), notes.calls_again()
        # Lengths of a growing KV cache are known to all ranks.
        in_parts = [x for x in call.leaves if isinstance(x, DTensor)]
        present = (
            call.key(number, exactly=_is_not_dtensor if in_parts else True),
            self._deferred,
            notes.failed,
            notes.broken,
        )
        most = self._comparisons.due(executable, notes.failed)
        most = None if "inputs" in self._checks else most if agreement.ranks > 1 else 0
        of_call = functools.partial(rank_calls.call_claims, notes, call, number, self._settings.inputs, self._deferred)
        notes.present("a call", of_call)
        if most != 0 or not again or executable is None or present != self._compared or not self._repeats(executable):
            object.__setattr__(self, "_compared", present)
            agreement.begin(
                *notes.claims(), *rank_calls.value_claims(call.leaves, self._program_mesh, self._places, most)
            )
            if most != 0 or executable is None or notes.broken:
                agreement.finish()
        if notes.broken:
            raise CommunicationError(RESTART_ADVICE)
        if executable is None:
            return super()._serving(call, number)
        object.__setattr__(self, "_latest", executable)
        return executable

    @property
    def _places(self) -> Sequence[Sequence[int]]:
        """The ranks of each stage."""
        return (range(self.mesh.size),)

    def _repeats(self, executable: Executable) -> bool:
        """Whether ranks need not compare repeated calls, as a collective would notice a difference:
        inside no_sync() the backward may have none, and backends other than gloo may hang."""
        collectives = executable.compiled.plan.collectives
        return self._on_gloo and any(c.phase == "forward" or not self._deferred for c in collectives)

    def _compiled(
        self, model: nn.Module, example: CallArguments, opts: CompileOptions, known: KnownLayouts, **options: Any
    ) -> Compiled:
        """Rank 0 plans, others follow its plan; an error of one rank is raised on all."""
        agreement, opts = self._agreement, replace(opts, like=expand_tp_plan(model, opts.like))
        agreement.finish()
        graph = agreement.everywhere(lambda: capture_graph(model, *example, precision=opts.mixed_precision, **options))
        agreement.agree(("the graph captured from the model", zlib.crc32(str(graph).encode())))
        constants = dict(rank0_values(agreement, graph.constants, f"a constant of {self._title}"))
        graph = replace(graph, constants={**graph.constants, **constants})
        ours: list[Compiled] = []
        received: Plan | None = None

        def plan() -> str:
            ours.append(compile_graph(graph, self.mesh, opts, known))
            return ours[0].plan.to_json(alternatives=False)

        def follow() -> Compiled:
            return ours[0] if ours else compile_graph(graph, self.mesh, replace(opts, plan=received), known)

        def agreed() -> Compiled:
            nonlocal received
            received = Plan.from_json(agreement.from_first(plan))
            found = agreement.everywhere(follow)
            agreement.agree(("the generated program", zlib.crc32(found.source.text.encode())))
            return found

        return self._shared_program(graph, known, agreed)

    def _run(self, executable: Executable, inputs: list[Tensor]) -> tuple[list[Any], dict[str, Tensor]]:
        if every := self._checks.get("replicas"):
            self._agreement.finish()
            if self._comm.notes.call % every == 0:
                check_replicas(self._agreement, self.mesh, dict(self.named_parameters()), dict(self.named_buffers()))
        with runtime.bind(self._comm), runtime.synchronised_rng(self._comm):
            results = self._results(executable, inputs)
            program, shapes = executable.compiled.program, executable.shapes(inputs)
            made = enumerate(zip(results[: len(program.outputs)], shapes, strict=False))
            leaves = [self._leaf(executable, i, result, shape) for i, (result, shape) in made]
        self._agreement.finish()
        return leaves, self._new_values(program, results, shapes)

    def _new_values(
        self, program: Program, results: Sequence[Any], shapes: Sequence[Sequence[int] | None]
    ) -> dict[str, Tensor]:
        """Mutated states from the rank module, by original name: DTensors if sharded. ``shapes``:
        global, of outputs and states."""
        found, first = {}, len(program.outputs)
        for (fqn, name), new, shape in zip(program.mutations.items(), results[first:], shapes[first:], strict=True):
            layout, local = program.layouts[name], new.detach()
            found[fqn] = self._dtensor(local, layout, shape) if shape and layout.axes_with(Shard) else local
        return found

    def _results(self, executable: Executable, inputs: Sequence[Tensor]) -> Sequence[Any]:
        """Local outputs and mutated states of the rank module."""
        program, loaded = executable.compiled.program, self._load_program(executable)
        module = loaded.module
        self._comm.deferred = self._deferred
        if not loaded.recorded:
            self._comm.spare.clear()
        aside: Mapping[str, Tensor] = {}
        if self._part_of is not None:
            between, path = self._part_of
            if aside := between.plain.read_within(path, loaded.parameters):
                loaded = self._loaded[id(executable)] = loaded.without_last()
        module.bind_tensors(loaded.tensors(self._original_model, aside))
        _, self._comm.summed_last = loaded.last
        try:
            named = zip(executable.compiled.source.inputs, inputs, strict=True)
            parts = [input_shard(x, program.layouts[n], self.device_mesh, self._device) for n, x in named]
            results: Sequence[Any] = module(*parts)
        finally:
            module.release_tensors()
            self._comm.summed_last = ()
        return results

    def _leaf(self, executable: Executable, number: int, local: Any, shape: Sequence[int] | None) -> Any:
        """Output ``number``, of global ``shape``, for the user; ``local``: the rank module's."""
        program = executable.compiled.program
        out = program.outputs[number]
        if not isinstance(out, Ref):
            return local
        whole = local.shape if shape is None else shape
        layout, keeps = program.layouts[out.name], self._stays_sharded(executable, number)
        if self._generating and not keeps and local.is_floating_point() and layout.axes_of(len(whole) - 1):
            return ShardedLogits.of(local, layout, whole, self._comm, partial(self._output, kept=False))
        return self._output(local, layout, whole, keeps)

    @contextlib.contextmanager
    def same_draws_on_ranks(self) -> Iterator[None]:
        """Inside, all ranks draw as rank 0: other seeds would sample other tokens. Collective."""
        with runtime.synchronised_rng(self._comm):
            self._comm.random_states()
            yield

    def _enter(self, index: int, count: int) -> None:
        self._comm.enter(index, count)

    def rank_modules(self) -> list[RankModule]:
        """See :meth:`ShardedModule.rank_modules`."""
        return [loaded.module for loaded in self._loaded.values()]

    def _load_program(self, executable: Executable) -> RankProgram:
        """The program on this rank, loaded once."""
        if id(executable) not in self._loaded:
            make_tables_contiguous(map(self.tensor, self._layout_of))
            self._loaded[id(executable)] = RankProgram.of(executable, self._comm, self._device)
        return self._loaded[id(executable)]

    def local_tensors(self, executable: Executable, rank: int) -> dict[str, Tensor]:
        """See :meth:`ShardedModule.local_tensors`; for this process's rank only."""
        with torch.no_grad(), runtime.bind(self._comm):
            return {
                name: t.detach() for name, t in self._load_program(executable).tensors(self._original_model).items()
            }

    def _output(self, local: Tensor, layout: Layout, shape: Sequence[int], kept: bool) -> Tensor:
        """The full tensor, or an :class:`ShardedOutput` if ``kept`` and sharded; scalars plain."""
        cut, state = layout.axes_with(Shard), self._settings.gather_outputs is None and not local.requires_grad
        if kept and (cut or (shape and not state)):
            return ShardedOutput.of(self._dtensor(local, layout, shape))
        if not cut:
            return local if shape else with_plain_gradient(local)
        mesh = self._program_mesh
        whole = Layout(mesh, [I if local.requires_grad else R] * mesh.ndim)
        return run_redistribution(
            _untraced_redistribution(layout, whole, tuple(shape), mesh, local.dtype, local.requires_grad), local
        )


def _is_not_dtensor(leaf: Any) -> bool:
    return not isinstance(leaf, DTensor)


def default_device_type() -> str:
    return "cuda" if "nccl" in str(dist.get_backend()) else "cpu"
