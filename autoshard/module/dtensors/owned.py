"""Table-wise placement: tensors that one rank along an axis owns, as DTensors on the owners' mesh.

No placement says that one rank owns a tensor. So the mesh is the part of the module's mesh at the
owners' coordinates, with its process groups. Optimizers, state dicts and
torch.distributed.checkpoint skip other ranks. ``full_tensor()`` is collective over all ranks.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from autoshard.layout import Layout, Owned, R
from autoshard.mesh import Mesh
from autoshard.module.dtensors.full_states import mend_full_states
from autoshard.module.dtensors.lists import mend_lists
from autoshard.module.dtensors.made import dtensor
from autoshard.runtime.operations.stacked import are_neighbours
from autoshard.runtime.transport import sparse
from autoshard.runtime.transport.communicator import Communicator, bind
from autoshard.runtime.transport.groups import forgotten
from autoshard.runtime.transport.handed_on import HandingOn
from autoshard.runtime.transport.move import Move

_OF_OWNERS = " of owners"
"""suffix of the axis names of an owners' mesh"""


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """This rank's shard of a tensor of global ``shape``; non-owners pass zero rows."""
    if not layout.owner:
        return dtensor(local, mesh, layout, shape)
    held = _held(mesh, layout.mesh, tuple(layout.owner.items()))
    meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), local.dtype)
    return DTensor(local, DTensorSpec(held, _placements(layout), tensor_meta=meta), requires_grad=local.requires_grad)


@forgotten
@functools.lru_cache(maxsize=1 << 10)
def _held(mesh: DeviceMesh, axes: Mesh, owner: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """The mesh of the ranks with these coordinates; axes that ``owner`` names have size 1."""
    ranks = mesh.mesh
    for axis, number in owner:
        ranks = ranks.narrow(axes.index(axis), number, 1)
    names = tuple(axis + _OF_OWNERS for axis in axes.axes)
    held = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names, _init_backend=False)
    held._of = mesh  # type: ignore[attr-defined]
    mend_lists(is_owned, local_of)
    _mend_full_tensor()
    mend_full_states(is_owned, part_of_owned, _placed)
    held._dim_group_names = mesh._dim_group_names if held.get_coordinate() is not None else []
    return held


@functools.cache
def _mend_full_tensor() -> None:
    """Broadcast ``full_tensor()`` from the owners: torch returns an empty tensor elsewhere."""
    of_holders = DTensor.full_tensor

    @functools.wraps(of_holders)
    def full_tensor(x: DTensor, *, grad_placements: Any = None) -> torch.Tensor:
        whole: torch.Tensor = of_holders(x, grad_placements=grad_placements)
        return _Told.apply(whole, x.shape, x.device_mesh) if is_owned(x) else whole

    DTensor.full_tensor = full_tensor  # type: ignore[assignment, method-assign]


class _Told(HandingOn):
    """Broadcast from the owners' mesh ``held`` to the mesh that it is part of."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, shape: torch.Size, held: Any) -> torch.Tensor:
        mesh, holds = held._of, held.get_coordinate() is not None
        ctx.empty = None if holds else x.shape
        whole = x.contiguous() if holds else torch.empty(shape, dtype=x.dtype, device=held.device_type)
        first = (mesh.mesh == held.mesh.flatten()[0]).nonzero()[0].tolist()
        for axis, owner in enumerate(first):
            if held.size(axis) < mesh.size(axis):
                dist.broadcast(whole, group=mesh.get_group(axis), group_src=owner)
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient if ctx.empty is None else gradient.new_zeros(ctx.empty), None, None


def _placements(layout: Layout) -> tuple[Any, ...]:
    """Placements on the owners' mesh."""
    return tuple(layout.replace(dict.fromkeys(layout.owner, R)).to_torch())


def side_by_side(tensors: Iterable[torch.Tensor]) -> None:
    """Make this rank's tables of equal width contiguous in memory, for one grouped look-up."""
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
    """Whether ``x`` is a DTensor on an owners' mesh, from :func:`as_dtensor`."""
    return isinstance(x, DTensor) and (x.device_mesh.mesh_dim_names or ("",))[0].endswith(_OF_OWNERS)


def device_type(x: torch.Tensor) -> str:
    """Device type of the owners' data; torch puts the empty tensors of other ranks on the CPU."""
    return str(x.device_mesh.device_type) if isinstance(x, DTensor) and is_owned(x) else x.device.type


def layout_on(mesh: Mesh, device_mesh: DeviceMesh, x: DTensor) -> Layout:
    """The layout of a DTensor on ``device_mesh``, or on an owners' mesh within it."""
    if not is_owned(x):
        return Layout.from_torch(mesh, x.placements)
    first = device_mesh.mesh.flatten().tolist().index(int(x.device_mesh.mesh.flatten()[0]))
    pairs = zip(mesh.axes, mesh.coordinates(first), strict=True)
    owner = {a: Owned(owner=n) for a, n in pairs if x.device_mesh.size(mesh.index(a)) < mesh.size_of(a)}
    return Layout.from_torch(mesh, x.placements).replace(owner)


def lies_in(layout: Layout, mesh: DeviceMesh, x: torch.Tensor) -> bool:
    """Whether ``x`` is a DTensor in this layout."""
    if not isinstance(x, DTensor):
        return False
    owner = layout_on(layout.mesh, mesh, x).owner if is_owned(x) else {}
    return owner == layout.owner and x.placements == _placements(layout)


def local_of(x: DTensor) -> torch.Tensor:
    """This rank's shard; if others own it, zero rows, with the dims that torch's ops drop."""
    local: torch.Tensor = x._local_tensor
    return local if local.ndim == x.ndim else _no_rows(local, x)


def _no_rows(data: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The empty shard of a rank that does not own ``like``; owners' shards have equal lengths."""
    mesh, placed = like.device_mesh, enumerate(like.placements)
    cut = [(p.dim, mesh.size(i)) for i, p in placed if isinstance(p, Shard)]
    rest = [n // math.prod(ranks for d, ranks in cut if d == dim) for dim, n in enumerate(like.shape)]
    return data.new_empty(0, *rest[1:], device=mesh.device_type)


def _placed(x: DTensor) -> DTensor:
    """The same DTensor; an empty shard gets its rank and the device type of the owners."""
    local = x._local_tensor
    lies = local.ndim == x.ndim and local.device.type == x.device_mesh.device_type
    return x if lies else DTensor(_no_rows(local, x), x._spec, requires_grad=False)


def part_of_owned(full: torch.Tensor, like: DTensor) -> DTensor:
    """A full tensor in the table-wise layout of ``like``."""
    if like.device_mesh.get_coordinate() is None:
        return DTensor(_no_rows(full, like), like._spec, requires_grad=False)
    cut = distribute_tensor(full.detach(), like.device_mesh, like.placements, src_data_rank=None)
    return DTensor(cut.to_local().clone(), like._spec, requires_grad=False)


def whole(local: torch.Tensor, shape: Sequence[int], owner: Sequence[str], comm: Communicator) -> torch.Tensor:
    """The full tensor of ``shape`` from its owner along the axes ``owner``. Collective."""
    move = Move("P", "I", comm.active(tuple(owner)))
    with torch.no_grad(), bind(comm):
        if local.is_sparse:
            numbers, rows = sparse.rows_of(local)
            return comm.apply(move, sparse.from_rows(numbers, rows, shape[0]))
        return comm.apply(move, local if local.shape == torch.Size(shape) else local.new_zeros(shape))
