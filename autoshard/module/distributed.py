"""This rank's module under torch.distributed: parameters are DTensors, the rank module runs on their local shards."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard import runtime
from autoshard.compiler import Compiled, build, captured
from autoshard.errors import CaptureError, CommunicationError
from autoshard.layout import I, Layout, R, Shard
from autoshard.mesh import Mesh
from autoshard.module.agreement import AFTERWARDS, Agreement, asked_checks
from autoshard.module.base import Settings, ShardedModule
from autoshard.module.checksum import checksum
from autoshard.module.executable import Executable, signature_of
from autoshard.module.gradients import one_verdict
from autoshard.module.replicas import check_replicas, named_tensors, of_first
from autoshard.module.simulate import shard_of
from autoshard.module.state import State, digest
from autoshard.passes.ir.graph import Ref, TensorType
from autoshard.passes.ir.program import Local
from autoshard.passes.redistribute import emit, redistribution
from autoshard.plans.plan import Plan
from autoshard.runtime.module import RankModule
from autoshard.wishes import Wishes

FIRST_CALLS = 8
"""how many calls are checked for equal inputs; AUTOSHARD_CHECK=inputs checks all"""

_SHAPES = "the shapes and dtypes of the inputs"
_STATE = (
    "the state of the call: whether gradients are recorded, modules in train or eval mode, requires_grad and dtypes of "
    "parameters, autocast, or torch's defaults"
)
_VALUES = "the values of the inputs (every rank takes the same global batch)"
_FAILED = "whether an earlier call failed (their collectives are out of step: start all processes again)"


class DistributedModule(ShardedModule):
    """A sharded module of one process; every rank of the mesh has one."""

    device_mesh: DeviceMesh
    _comm: runtime.TorchCommunicator
    _device: torch.device
    _loaded: dict[int, Any]
    _agreement: Agreement
    _checks: dict[str, int]
    _numbers: dict[Any, int]

    def __init__(self, model: nn.Module, mesh: Mesh, settings: Settings, device_mesh: DeviceMesh | None) -> None:
        super().__init__(model, mesh, settings)
        kind = device_mesh.device_type if device_mesh is not None else _device_type()
        if device_mesh is None:
            device_mesh = init_device_mesh(kind, mesh.shape, mesh_dim_names=mesh.axes)
        set_ = object.__setattr__
        set_(self, "device_mesh", device_mesh)
        set_(self, "_comm", runtime.TorchCommunicator.of(device_mesh))
        set_(self, "_device", torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))
        one_verdict()
        set_(self, "_loaded", {})
        set_(self, "_agreement", Agreement(self._comm.notes))
        set_(self, "_checks", asked_checks())
        set_(self, "_numbers", {})
        self._comm.device = self._device

    # --- tensors ---

    def _seed(self) -> int:
        return int(self._agreement.tensor_of_first(torch.tensor(torch.initial_seed(), device="cpu")))

    def _initial(self, model: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, torch.Tensor]:
        """See :meth:`ShardedModule._initial`. Where ranks come with other values, rank 0's are taken."""
        tensors = dict(named_tensors(model))
        first = of_first(self._agreement, tensors, self._title)
        found = {n: self._kept(full, layouts.get(n)).clone() for n, full in first}
        missing = any(x.is_meta for n, x in tensors.items() if n not in found)
        return {**super()._initial(model, layouts), **found} if missing else found

    def _kept(self, full: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        return full if layout is None else shard_of(full, layout, self._comm.rank)

    def _parameter(self, p: nn.Parameter, layout: Layout, initial: torch.Tensor | None) -> nn.Parameter:
        if initial is not None:
            local = initial.detach().to(self._device, copy=True).contiguous()
        elif p.is_meta:
            shape = layout.local_shape(p.shape, self._comm.rank)
            local = torch.zeros(shape, dtype=p.dtype, device=self._device)
        else:
            local = shard_of(p.detach(), layout, self._comm.rank).to(self._device, copy=True).contiguous()
        return nn.Parameter(self._dtensor(local, layout, p.shape), requires_grad=p.requires_grad)

    def _dtensor(self, local: torch.Tensor, layout: Layout, shape: Sequence[int]) -> DTensor:
        stride = torch.empty(tuple(shape), device="meta").stride()
        return DTensor.from_local(
            local, self.device_mesh, layout.to_torch(), run_check=False, shape=torch.Size(shape), stride=stride
        )

    def _buffer(self, b: torch.Tensor, initial: torch.Tensor | None) -> torch.Tensor:
        zeros = torch.zeros_like(b, device="cpu") if b.is_meta and initial is None else b
        return (zeros if initial is None else initial).detach().clone().to(self._device)

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.clone()
        # DTensor.full_tensor gathers axis by axis, with a warning; ours gathers the flattened axes at once.
        layout, local = Layout.from_torch(self.mesh, tensor.placements), tensor.to_local()
        plan = redistribution(layout, Layout(self.mesh), tuple(tensor.shape), self.mesh, tensor.dtype, False)
        with torch.no_grad(), runtime.bind(self._comm):
            full = execute(plan, local)
        return full.clone() if full is local else full

    def _load(self, tensor: torch.Tensor, full: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            layout = Layout.from_torch(self.mesh, tensor.placements)
            tensor.to_local().copy_(shard_of(full, layout, self._comm.rank))
        else:
            tensor.copy_(full)

    def _form(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        return *super()._form(tensor), tensor.placements if isinstance(tensor, DTensor) else None

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        layout = self._layout_of.get(name)
        if tensor.device.type != self._device.type:
            raise CaptureError(
                f"{name!r} was moved to {tensor.device}; the mesh is on {self._device.type}. Move it back."
            )
        if layout is None and isinstance(tensor, DTensor):
            raise CaptureError(
                f"buffer {name!r} was replaced by a DTensor. Every rank holds buffers whole: use full_tensor()."
            )
        placements = tensor.placements if isinstance(tensor, DTensor) else None
        if layout is not None and placements != tuple(layout.to_torch()):
            raise CaptureError(
                f"parameter {name!r} was replaced by one in layout {placements or 'of a plain tensor'}; it is kept as a "
                f"DTensor in {layout}. Copy values into it, or load them with load_full_state_dict."
            )

    # --- running ---

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See :meth:`ShardedModule.forward`. Where it fails on this rank alone, the others are told."""
        self._comm.notes.call += 1
        with self._comm.notes.told():
            return super().forward(*args, **kwargs)

    def specialise(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], number: int = 0, recorded: bool | None = None
    ) -> Executable:
        """See :meth:`ShardedModule.specialise`; every rank must come with the same inputs, in the same state.

        What the program is compiled for is compared in every call, while it runs; the values in the first calls.
        """
        with self._comm.notes.told():
            leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
            state = self._state(leaves, recorded)
            self._compare(leaves, spec, state, number)
            return super().specialise(args, kwargs, number, recorded)

    def _compare(self, leaves: Sequence[Any], spec: Any, state: State, number: int) -> None:
        agreement, notes = self._agreement, self._comm.notes
        key = self._key(leaves, spec, state, number)
        if key not in self._numbers:
            shapes = repr((*(signature_of(leaf, state.recorded) for leaf in leaves), spec, number))
            self._numbers[key] = zlib.crc32(_ADDRESS.sub("", shapes).encode())
        checked = notes.call <= FIRST_CALLS or "inputs" in self._checks
        values = _checksum(leaves) if checked else 0
        failed = (_FAILED, 2 * notes.failed + notes.broken)
        agreement.begin((_SHAPES, self._numbers[key]), (_STATE, digest(state)), (_VALUES, values), failed)
        if checked or key not in self._executables or notes.broken:
            agreement.finish()
        if notes.broken:
            raise CommunicationError(AFTERWARDS)

    def _compiled(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], wishes: Wishes, **options: Any
    ) -> Compiled:
        """Rank 0 plans, the others follow its plan; an error of one rank is raised on all."""
        agreement = self._agreement
        agreement.finish()
        graph = agreement.everywhere(lambda: captured(model, args, kwargs, **options))
        agreement.agree(("the graph captured from the model", zlib.crc32(str(graph).encode())))
        constants = dict(of_first(agreement, graph.constants, f"a constant of {self._title}"))
        graph = replace(graph, constants={**graph.constants, **constants})
        ours: list[Compiled] = []

        def plan() -> str:
            ours.append(build(graph, self.mesh, wishes, title=self._title))
            return ours[0].plan.to_json()

        def follow() -> Compiled:
            return ours[0] if ours else build(graph, self.mesh, replace(wishes, plan=received), title=self._title)

        received = Plan.from_json(agreement.from_first(plan))
        found = agreement.everywhere(follow)
        agreement.agree(("the generated program", zlib.crc32(found.source.text.encode())))
        return found

    def _run(self, executable: Executable, inputs: list[torch.Tensor]) -> tuple[list[Any], dict[str, torch.Tensor]]:
        program = executable.compiled.program
        module = self._rank_module(executable)
        if every := self._checks.get("replicas"):
            self._agreement.finish()
            if self._comm.notes.call % every == 0:
                check_replicas(self._agreement, self.mesh, dict(self.named_parameters()), dict(self.named_buffers()))
        with runtime.bind(self._comm), runtime.synchronised_rng(self._comm):
            module.bind_tensors(self._tensors(executable))
            try:
                results = module(*(x.to(self._device) for x in inputs))
            finally:
                module.release_tensors()
            actual = executable.lengths(inputs)
            leaves = [
                self._output(
                    results[i],
                    program.layouts[out.name],
                    _shape(program.types[out.name], results[i], actual),
                    executable.graph.training,
                )
                if isinstance(out, Ref)
                else results[i]
                for i, out in enumerate(program.outputs)
            ]
        self._agreement.finish()
        first = len(program.outputs)
        return leaves, {fqn: results[first + i].detach() for i, fqn in enumerate(program.mutations)}

    def rank_modules(self) -> list[RankModule]:
        """See :meth:`ShardedModule.rank_modules`."""
        return list(self._loaded.values())

    def _rank_module(self, executable: Executable) -> Any:
        if id(executable) not in self._loaded:
            self._loaded[id(executable)] = executable.rank_module()
        return self._loaded[id(executable)]

    def _tensors(self, executable: Executable) -> dict[str, torch.Tensor]:
        parameters = {i.fqn: self.tensor(i.fqn) for i in executable.graph.inputs if i.kind == "parameter"}
        trained = {n: p for n, p in parameters.items() if p.requires_grad}
        found = {n: p.to_local() for n, p in parameters.items() if n not in trained}
        if trained:
            locals_ = runtime.wait_gradients(*_Locals.apply(*trained.values()))  # type: ignore[no-untyped-call]
            found.update(zip(trained, locals_, strict=True))
        for value in executable.graph.inputs:
            if value.kind == "buffer":
                buffer = self.tensor(value.fqn)  # of one that is written after the forward, the backward has a copy
                written = executable.graph.training and value.fqn in executable.graph.mutations
                found[value.fqn] = buffer.clone() if written else buffer
            elif value.kind == "constant":
                found[value.fqn] = executable.graph.constants[value.name].to(self._device)
        for value in executable.graph.inputs:
            layout = executable.compiled.plan.layouts[value.fqn]
            if value.kind in ("buffer", "constant") and layout.axes_with(Shard):
                found[value.fqn] = shard_of(found[value.fqn], layout, self._comm.rank)
        return found

    def local_tensors(self, executable: Executable, rank: int) -> dict[str, torch.Tensor]:
        """See :meth:`ShardedModule.local_tensors`; only of this process's own rank."""
        with torch.no_grad(), runtime.bind(self._comm):
            return {name: t.detach() for name, t in self._tensors(executable).items()}

    def _output(self, local: torch.Tensor, layout: Layout, shape: tuple[int, ...], recorded: bool) -> torch.Tensor:
        """Scalars are plain; others a DTensor in their layout, or the full tensor.

        ``recorded``: whether the program has a backward, and outputs keep their layouts unless the user says otherwise.
        """
        asked = self._settings.gather_outputs
        gathers = not recorded if asked is None else asked
        if not layout.axes_with(Shard):
            return local if not shape or gathers else self._dtensor(local, layout, shape)
        if not gathers:
            return self._dtensor(local, layout, shape)
        whole = Layout(self.mesh, [I if local.requires_grad else R] * self.mesh.ndim)
        return execute(redistribution(layout, whole, shape, self.mesh, local.dtype, local.requires_grad), local)


def _shape(
    type_: TensorType, local: torch.Tensor, actual: Callable[[Sequence[int]], tuple[int, ...]]
) -> tuple[int, ...]:
    """The global shape of an output; one whose length depends on the data is whole."""
    return tuple(local.shape) if type_.unknown else actual(type_.shape)


class _Locals(torch.autograd.Function):
    """DTensor parameters → their local tensors; the backward makes DTensor gradients of the same placements."""

    @staticmethod
    def forward(ctx: Any, *parameters: Any) -> tuple[torch.Tensor, ...]:
        ctx.specs = [p._spec for p in parameters]
        ctx.set_materialize_grads(False)
        return tuple(p._local_tensor.view_as(p._local_tensor) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        given = [(g, spec) for g, spec in zip(gradients, ctx.specs, strict=True) if g is not None]
        made = iter(_Globals.apply([spec for _, spec in given], *(g for g, _ in given)))  # type: ignore[no-untyped-call]
        return tuple(None if g is None else next(made) for g in gradients)


class _Globals(torch.autograd.Function):
    """Local gradients → DTensors, as a node of the graph: where it is recorded (create_graph), it has a derivative."""

    @staticmethod
    def forward(ctx: Any, specs: list[Any], *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.specs = specs
        ctx.set_materialize_grads(False)
        return tuple(DTensor(g.detach(), s, requires_grad=False) for g, s in zip(gradients, specs, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *(
            None if g is None else g.redistribute(spec.mesh, spec.placements).to_local()
            for g, spec in zip(gradients, ctx.specs, strict=True)
        )


def execute(plan: Any, local: torch.Tensor) -> torch.Tensor:
    """Run the steps of a redistribution on this rank's tensor, on the bound communicator."""
    for step in plan.steps:
        name, args, kwargs = emit(step)
        plain = {k: runtime.size(v.size, v.axes) if isinstance(v, Local) else v for k, v in kwargs.items()}
        local = getattr(runtime, name)(local, *args, **plain)
    return local


def _device_type() -> str:
    return "cuda" if "nccl" in str(dist.get_backend()) else "cpu"


def _checksum(leaves: Sequence[Any]) -> int:
    """A number that differs where the data of the inputs do; DTensors are only compared by what they are."""
    number = 0
    for x in leaves:
        if isinstance(x, torch.Tensor) and not isinstance(x, DTensor):
            number = zlib.crc32(int(checksum(x)).to_bytes(8, "little", signed=True), number)
    return number


_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
"""in the ``repr`` of an argument without one of its own: other on every rank"""
