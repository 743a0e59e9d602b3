"""Tensors that one rank owns whole, as DTensors: on the mesh of the ranks that hold them, since no placement says so.

Optimizers, state dicts and torch.distributed.checkpoint know such DTensors: other ranks take no part. The meshes have no
process groups; nothing communicates over them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from autoshard.layout import Layout, Owned
from autoshard.mesh import Mesh
from autoshard.module.dtensors.made import dtensor
from autoshard.runtime.operations.stacked import are_neighbours
from autoshard.runtime.transport import sparse
from autoshard.runtime.transport.communicator import Communicator, bind
from autoshard.runtime.transport.move import Move

_NAMES = ("replicas",)
"""of the mesh of the ranks that own something"""


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """This rank's part of a tensor of global ``shape``; ``local`` has no rows where another rank owns the whole."""
    if not layout.owner:
        return dtensor(local, mesh, layout, shape)
    ranks = mesh.mesh
    for i, axis in reversed(list(enumerate(layout.mesh.axes))):
        if axis in layout.owner:
            ranks = ranks.select(i, layout.owner[axis])
    held = DeviceMesh(mesh.device_type, ranks.reshape(-1), mesh_dim_names=_NAMES, _init_backend=False)
    meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(held, (Replicate(),), tensor_meta=meta), requires_grad=local.requires_grad)


def side_by_side(tensors: Iterable[torch.Tensor]) -> None:
    """Have tables of one width that this rank owns lie one after another in memory, so that one look-up serves them all."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for x in tensors:
        if is_owned(x) and (local := local_of(x)).ndim == 2 and len(local):  # type: ignore[arg-type]
            groups.setdefault((local.dtype, local.shape[1]), []).append(local)
    for locals_ in groups.values():
        if len(locals_) > 1 and not are_neighbours(locals_):
            parts = torch.cat([x.detach() for x in locals_]).split([len(x) for x in locals_])
            for x, part in zip(locals_, parts, strict=True):
                x.data = part


def is_owned(x: torch.Tensor) -> bool:
    """Whether ``x`` is a DTensor as :func:`as_dtensor` makes them of what one rank owns."""
    return isinstance(x, DTensor) and x.device_mesh.mesh_dim_names == _NAMES


def device_type(x: torch.Tensor) -> str:
    """Where its owners hold ``x``: on other ranks torch makes it of nothing, on the CPU."""
    return str(x.device_mesh.device_type) if isinstance(x, DTensor) and is_owned(x) else x.device.type


def layout_on(mesh: Mesh, device_mesh: DeviceMesh, x: DTensor) -> Layout:
    """The layout of a DTensor on ``device_mesh``, or on that of its owners."""
    if not is_owned(x):
        return Layout.from_torch(mesh, x.placements)
    everyone = device_mesh.mesh.flatten().tolist()
    rows = [mesh.coordinates(everyone.index(rank)) for rank in x.device_mesh.mesh.flatten().tolist()]
    same = {a: n[0] for a, n in zip(mesh.axes, zip(*rows, strict=True), strict=True) if len(set(n)) == 1}
    return Layout(mesh, {a: Owned(owner=n) for a, n in same.items() if mesh.size_of(a) > 1})


def lies_in(layout: Layout, mesh: DeviceMesh, x: torch.Tensor) -> bool:
    """Whether ``x`` is a DTensor in this layout."""
    if not isinstance(x, DTensor):
        return False
    if layout.owner:
        return layout_on(layout.mesh, mesh, x).owner == layout.owner
    return x.placements == tuple(layout.to_torch())


def local_of(x: DTensor) -> torch.Tensor:
    """What this rank holds; of what others own, no rows: torch's own operations leave it without dims."""
    local: torch.Tensor = x._local_tensor
    if local.ndim == x.ndim:
        return local
    return local.new_empty(0, *x.shape[1:], device=x.device_mesh.device_type)


def part_of_owned(full: torch.Tensor, like: DTensor) -> DTensor:
    """A whole tensor in the layout of ``like``, which some ranks own."""
    mine = (
        full.detach().clone() if like.device_mesh.get_coordinate() is not None else full.new_empty(0, *full.shape[1:])
    )
    return DTensor(mine, like._spec, requires_grad=False)


def whole(x: DTensor, layout: Layout, comm: Communicator) -> torch.Tensor:
    """The whole of what one rank owns, on every rank. Collective."""
    local, axes = local_of(x), tuple(layout.owner)
    move = Move("P", "I", comm.active(axes))
    with torch.no_grad(), bind(comm):
        if local.is_sparse:
            numbers, rows = sparse.rows_of(local)
            return comm.apply(move, sparse.from_rows(numbers, rows, x.shape[0]))
        return comm.apply(move, local if local.shape == x.shape else local.new_zeros(x.shape))
