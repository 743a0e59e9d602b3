"""Table-wise placement: tensors that one rank along an axis owns, as DTensors on a mesh of the
owners only, with as many axes as the module's and its process groups. Optimizers, state dicts
and torch.distributed.checkpoint handle them; other ranks take no part. ``full_tensor()`` and a
redistribution to Replicate are collective over all ranks. The loading of full state dicts is
patched here."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.layout import Layout, Owned, R
from autoshard.mesh import Mesh
from autoshard.module.dtensors.module_dtensor import (
    ModuleDTensor,
    dtensor_from_shard,
    is_owned,
    local_shard,
    new_dtensor,
    shard_full,
)
from autoshard.module.dtensors.segments import has_several_chunks
from autoshard.runtime.operations.stacked import are_adjacent_in_memory
from autoshard.runtime.transport import sparse_gradients
from autoshard.runtime.transport.communicator import Communicator, bind
from autoshard.runtime.transport.groups import cleared_with_groups
from autoshard.runtime.transport.move import Move
from autoshard.torch_private.dtensor import DTensorSpec, TensorMeta


@functools.cache
def patch_loading_of_state_dicts() -> None:
    """Have torch load full state dicts into layouts that it lacks: it slices by placements, and
    sends in the groups of the tensor's mesh, which an owners' mesh lacks, to save processes'
    groups."""
    states: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")  # few programs need it

    def cut(inner: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(inner)
        def by_rank(full: Any, local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            ours = {n: x for n, x in local.items() if is_owned(x) or (isinstance(x, DTensor) and has_several_chunks(x))}
            local |= {n: torch.empty(x.shape, dtype=x.dtype, device=x.device_mesh.device_type) for n, x in ours.items()}
            inner(full, local, *args, **kwargs)
            local |= {n: shard_full(local[n], x._spec) for n, x in ours.items() if n in local}

        return by_rank

    states._distribute_state_dict = cut(states._distribute_state_dict)
    states._broadcast_state_dict = cut(states._broadcast_state_dict)


def as_dtensor(local: Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """This rank's shard of a tensor of global ``shape``; non-owners pass zero rows."""
    if layout.owner or layout.grouped:
        patch_loading_of_state_dicts()
    if not layout.owner:
        return dtensor_from_shard(local, mesh, layout, shape)
    held = _owners_mesh(mesh, layout.mesh, tuple(layout.owner.items()))
    meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), local.dtype)
    spec = DTensorSpec(held, _owner_placements(layout), tensor_meta=meta)
    return new_dtensor(ModuleDTensor, local, spec, requires_grad=local.requires_grad)


@cleared_with_groups
@functools.lru_cache(maxsize=1 << 10)
def _owners_mesh(mesh: DeviceMesh, axes: Mesh, owner: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """The mesh of the ranks with these coordinates; axes that ``owner`` names have size 1."""
    ranks = mesh.mesh
    for axis, number in owner:
        ranks = ranks.narrow(axes.index(axis), number, 1)
    names = tuple(f"{axis}_of_owners" for axis in axes.axes)
    held = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names, _init_backend=False)
    held._of = mesh  # type: ignore[attr-defined]
    held._dim_group_names = mesh._dim_group_names if held.get_coordinate() is not None else []
    return held


def _owner_placements(layout: Layout) -> tuple[Any, ...]:
    """Placements on the owners' mesh."""
    return tuple(layout.replace(dict.fromkeys(layout.owner, R)).to_torch())


def make_tables_contiguous(tensors: Iterable[Tensor]) -> None:
    """Make this rank's tables of equal width contiguous in memory, for one grouped look-up."""
    groups: dict[Any, list[Tensor]] = {}
    for x in tensors:
        if is_owned(x) and (local := local_shard(x)).ndim == 2 and len(local):
            groups.setdefault((local.dtype, local.shape[1]), []).append(local)
    for locals_ in groups.values():
        if len(locals_) > 1 and not are_adjacent_in_memory(locals_):
            parts = torch.cat([x.detach() for x in locals_]).split([len(x) for x in locals_])
            for x, part in zip(locals_, parts, strict=True):
                x.data = part


def owner_device_type(x: Tensor) -> str:
    """Device type of the owners' data; torch puts the empty tensors of other ranks on the CPU."""
    return str(x.device_mesh.device_type) if isinstance(x, DTensor) and is_owned(x) else x.device.type


def dtensor_layout(mesh: Mesh, device_mesh: DeviceMesh, x: DTensor) -> Layout:
    """The layout of a DTensor on ``device_mesh``, or on an owners' mesh within it."""
    if not is_owned(x):
        return Layout.from_torch(mesh, x.placements)
    first = device_mesh.mesh.flatten().tolist().index(int(x.device_mesh.mesh.flatten()[0]))
    pairs = zip(mesh.axes, mesh.coordinates(first), strict=True)
    owner = {a: Owned(owner=n) for a, n in pairs if x.device_mesh.size(mesh.index(a)) < mesh.size_of(a)}
    return Layout.from_torch(mesh, x.placements).replace(owner)


def has_layout(layout: Layout, mesh: DeviceMesh, x: Tensor) -> bool:
    if not isinstance(x, DTensor):
        return False
    owner = dtensor_layout(layout.mesh, mesh, x).owner if is_owned(x) else {}
    return owner == layout.owner and x.placements == _owner_placements(layout)


def gather_owned(local: Tensor, shape: Sequence[int], owner: Sequence[str], comm: Communicator) -> Tensor:
    """The full tensor of ``shape`` from its owner along the axes ``owner``. Collective."""
    move = Move("P", "I", comm.active(tuple(owner)))
    with torch.no_grad(), bind(comm):
        if local.is_sparse:
            numbers, rows = sparse_gradients.rows_of(local)
            return comm.apply(move, sparse_gradients.from_rows(numbers, rows, shape[0]))
        return comm.apply(move, local if local.shape == torch.Size(shape) else local.new_zeros(shape))
