"""This rank's module under torch.distributed: parameters are DTensors, the rank module runs on their local shards."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autoshard import runtime
from autoshard.errors import CaptureError, RuntimeMismatchError
from autoshard.layout import I, Layout, R, Shard
from autoshard.mesh import Mesh
from autoshard.module.base import Settings, ShardedModule
from autoshard.module.executable import Executable
from autoshard.module.simulate import shard_of
from autoshard.module.state import digest
from autoshard.passes.ir.graph import Ref, TensorType
from autoshard.passes.ir.program import Local
from autoshard.passes.redistribute import emit, redistribution

FIRST_CALLS = 8
"""how many calls are checked for equal inputs where the check waits for a GPU"""

_SHAPES = "the shapes and dtypes of the inputs"
_STATE = (
    "the state of the call: whether gradients are recorded, modules in train or eval mode, requires_grad and dtypes of "
    "parameters, autocast, or torch's defaults"
)
_VALUES = "the values of the inputs (every rank takes the same global batch)"


class DistributedModule(ShardedModule):
    """A sharded module of one process; every rank of the mesh has one."""

    device_mesh: DeviceMesh
    _comm: runtime.TorchCommunicator
    _device: torch.device
    _loaded: dict[int, Any]
    _calls: int

    def __init__(self, model: nn.Module, mesh: Mesh, settings: Settings, device_mesh: DeviceMesh | None) -> None:
        super().__init__(model, mesh, settings)
        kind = device_mesh.device_type if device_mesh is not None else _device_type()
        if device_mesh is None:
            device_mesh = init_device_mesh(kind, mesh.shape, mesh_dim_names=mesh.axes)
        set_ = object.__setattr__
        set_(self, "device_mesh", device_mesh)
        set_(self, "_comm", runtime.TorchCommunicator.of(device_mesh))
        set_(self, "_device", torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind))
        set_(self, "_loaded", {})
        set_(self, "_calls", 0)
        self._comm.device = self._device

    # --- tensors ---

    def _seed(self) -> int:
        return int(self._from_first(torch.tensor(torch.initial_seed())).item())

    def _from_first(self, value: torch.Tensor) -> torch.Tensor:
        """Rank 0's value, on every rank."""
        value = value.to(self._device)
        dist.broadcast(value, src=0)
        return value

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

    def specialise(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], number: int = 0, recorded: bool | None = None
    ) -> Executable:
        """See :meth:`ShardedModule.specialise`; every rank must come with the same inputs, in the same state."""
        known = len(self._executables)
        if self._device.type == "cpu" or self._calls < FIRST_CALLS:  # on a GPU the check waits for the device
            leaves = pytree.tree_leaves((tuple(args), dict(kwargs)))
            self._agree(
                (_SHAPES, _signature(leaves)),
                (_STATE, digest(self._state(leaves, recorded))),
                (_VALUES, _checksum(leaves)),
            )
        object.__setattr__(self, "_calls", self._calls + 1)
        executable = super().specialise(args, kwargs, number, recorded)
        if len(self._executables) > known:
            self._agree(("the generated program", zlib.crc32(executable.compiled.source.text.encode())))
        return executable

    def _agree(self, *claims: tuple[str, int]) -> None:
        """Raise on every rank if the ranks do not all have the same number for each ``(what, number)``."""
        numbers = [n for _, n in claims]
        mine = torch.tensor([*numbers, *(-n for n in numbers)], dtype=torch.int64, device=self._device)
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        high, low = mine.view(2, -1).tolist()
        for (what, _), a, b in zip(claims, high, low, strict=True):
            if a != -b:
                raise RuntimeMismatchError(f"the ranks disagree on {what}")

    def _run(self, executable: Executable, inputs: list[torch.Tensor]) -> tuple[list[Any], dict[str, torch.Tensor]]:
        program = executable.compiled.program
        module = self._rank_module(executable)
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
        first = len(program.outputs)
        return leaves, {fqn: results[first + i].detach() for i, fqn in enumerate(program.mutations)}

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


def _signature(leaves: Sequence[Any]) -> int:
    described = [(tuple(x.shape), str(x.dtype)) if isinstance(x, torch.Tensor) else repr(x) for x in leaves]
    return zlib.crc32(repr(described).encode())


def _checksum(leaves: Sequence[Any]) -> int:
    """A number that differs where the data differ; of a large tensor the first and last 256 KiB count."""
    number, part = 0, 1 << 18
    for x in leaves:
        if isinstance(x, torch.Tensor) and x.numel():
            data = x.detach().reshape(-1)
            ends = (data,) if data.nbytes <= 2 * part else (data[: part // x.itemsize], data[-part // x.itemsize :])
            for end in ends:
                number = zlib.crc32(end.cpu().contiguous().view(torch.uint8).numpy().tobytes(), number)
    return number
