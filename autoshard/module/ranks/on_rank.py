"""Parameters and buffers on one rank of torch.distributed: DTensors if sharded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard import runtime
from autoshard.errors import CaptureError
from autoshard.layout import Layout
from autoshard.module.base import ShardedModule
from autoshard.module.dtensors.chunks import in_order
from autoshard.module.dtensors.outputs import Output
from autoshard.module.dtensors.owned import as_dtensor, device_type, layout_on, lies_in, local_of, whole
from autoshard.module.programs.simulate import shard_of
from autoshard.module.ranks.agreement import Agreement
from autoshard.module.ranks.replicas import named_tensors, of_first
from autoshard.passes.ir.program import Local
from autoshard.passes.redistribute import emit, redistribution
from autoshard.passes.redistribute.query import in_chunks


class OnRank(ShardedModule):
    """A sharded module with the tensors of one rank."""

    device_mesh: DeviceMesh
    _comm: runtime.TorchCommunicator
    _device: torch.device
    _agreement: Agreement

    def _seed(self) -> int:
        return int(self._agreement.tensor_of_first(torch.tensor(torch.initial_seed(), device="cpu")))

    def _initial(self, model: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, torch.Tensor]:
        """See :meth:`Compiling._initial`. Values of rank 0 win where ranks differ."""
        tensors = dict(named_tensors(model))
        first = of_first(self._agreement, tensors, self._title)
        found = {n: self._kept(full, layouts.get(n)).clone() for n, full in first}
        missing = any(x.is_meta for n, x in tensors.items() if n not in found)
        return {**super()._initial(model, layouts), **found} if missing else found

    def _agreed(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {**tensors, **dict(of_first(self._agreement, tensors, self._title))} if tensors else tensors

    def _kept(self, full: torch.Tensor, layout: Layout | None) -> torch.Tensor:
        return full if layout is None else shard_of(full, layout, self._comm.rank)

    def _parameter(self, p: nn.Parameter, layout: Layout, initial: torch.Tensor | None) -> nn.Parameter:
        return nn.Parameter(
            self._dtensor(self._part(p, layout, initial), layout, p.shape), requires_grad=p.requires_grad
        )

    def _part(self, full: torch.Tensor, layout: Layout, initial: torch.Tensor | None) -> torch.Tensor:
        """This rank's shard of a tensor, or a copy of its ``initial`` shard; zeros without data."""
        if initial is not None:
            return initial.detach().to(self._device, copy=True).contiguous()
        if full.is_meta:
            shape = layout.local_shape(full.shape, self._comm.rank)
            return torch.zeros(shape, dtype=full.dtype, device=self._device)
        return shard_of(full.detach(), layout, self._comm.rank).to(self._device, copy=True).contiguous()

    def _dtensor(self, local: torch.Tensor, layout: Layout, shape: Sequence[int]) -> DTensor:
        return as_dtensor(local, self.device_mesh, layout, shape)

    def _buffer(self, b: torch.Tensor, layout: Layout | None, initial: torch.Tensor | None) -> torch.Tensor:
        if layout is not None:
            return Output.of(self._dtensor(self._part(b, layout, initial), layout, b.shape))
        zeros = torch.zeros_like(b, device="cpu") if b.is_meta and initial is None else b
        return (zeros if initial is None else initial).detach().clone().to(self._device)

    def _full(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor.clone()
        # DTensor.full_tensor gathers axis by axis; this gathers the flattened axes at once.
        layout, local, shape = layout_on(self._running, self.device_mesh, tensor), local_of(tensor), tuple(tensor.shape)
        owner = {a: layout[a] for a in layout.owner}
        src = in_chunks(layout) if layout.grouped else layout
        plan = redistribution(src, Layout(self._running, owner), shape, self._running, tensor.dtype, False)
        with torch.no_grad(), runtime.bind(self._comm):
            full = execute(plan, local)
        if owner:
            return whole(full, shape, tuple(owner), self._comm)
        return full.clone() if full is local else in_order(full, layout)

    def _load(self, tensor: torch.Tensor, full: torch.Tensor) -> None:
        if isinstance(tensor, DTensor):
            layout = layout_on(self._running, self.device_mesh, tensor)
            part = local_of(full) if isinstance(full, DTensor) else shard_of(full, layout, self._comm.rank)
            tensor, full = local_of(tensor), part
        if not full.is_set_to(tensor):  # else written in place
            tensor.copy_(full)

    def _form(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        shape, dtype, _ = super()._form(tensor)
        return shape, dtype, device_type(tensor), tensor.placements if isinstance(tensor, DTensor) else None

    def _check(self, name: str, tensor: torch.Tensor) -> None:
        layout = self._layout_of.get(name)
        if device_type(tensor) != self._device.type:
            raise CaptureError(
                f"{name!r} was moved to {tensor.device}; the mesh is on {self._device.type}. Move it back."
            )
        if layout is None and isinstance(tensor, DTensor):
            raise CaptureError(
                f"buffer {name!r} was replaced by a DTensor. Every rank holds it whole: use full_tensor()."
            )
        placements = tensor.placements if isinstance(tensor, DTensor) else None
        if layout is not None and not lies_in(layout, self.device_mesh, tensor):
            raise CaptureError(
                f"{name!r} was replaced by a tensor in layout {placements or 'of a plain tensor'}; it is kept as a "
                f"DTensor in {layout}. Copy values into it, or load them with load_full_state_dict."
            )


def execute(plan: Any, local: torch.Tensor) -> torch.Tensor:
    """Run a redistribution on this rank's tensor, on the bound communicator."""
    for step in plan.steps:
        name, args, kwargs = emit(step)
        plain = {k: runtime.size(v.size, v.axes) if isinstance(v, Local) else v for k, v in kwargs.items()}
        local = getattr(runtime, name)(local, *args, **plain)
    return local
