"""Table-wise placement: tensors that one rank along an axis owns, as DTensors on the owners' mesh.

No placement says that one rank owns a tensor, so the mesh of such a DTensor has the owners only:
the part of the module's mesh at their coordinates, with as many axes. Along the other axes the
ranks hold replicas or shards, and use the module's process groups. Optimizers, state dicts and
torch.distributed.checkpoint handle such DTensors: other ranks take no part. ``full_tensor()`` is
collective over all ranks. ``foreach`` lists and full state dicts are patched here.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from autoshard.layout import Layout, Owned, R
from autoshard.mesh import Mesh
from autoshard.module.dtensors.from_local import dtensor_from_shard
from autoshard.runtime.operations.stacked import are_adjacent_in_memory
from autoshard.runtime.transport import sparse_gradients
from autoshard.runtime.transport.autograd import NoneGradFunction
from autoshard.runtime.transport.communicator import Communicator, bind
from autoshard.runtime.transport.groups import cleared_with_groups
from autoshard.runtime.transport.move import Move
from autoshard.torch_private.dtensor import DTensorSpec, TensorMeta, op_dispatcher


@functools.cache
def patch_full_state_dicts(
    is_owned: Callable[[Any], bool],
    part_of: Callable[[torch.Tensor, Any], DTensor],
    placed: Callable[[DTensor], DTensor],
) -> None:
    """Include every rank in gathers and scatters of DTensors with ``is_owned``.
    ``part_of(full, like)``: this rank's shard; ``placed(x)``: on the owners' device type."""
    states: Any = importlib.import_module("torch.distributed.checkpoint.state_dict")  # few programs need it
    inner, of_optimizer = states._gather_state_dict, states._get_optim_state_dict

    def owned(change: Callable[[Any], torch.Tensor], tree: Any) -> Any:
        return pytree.tree_map_only(DTensor, lambda x: change(x) if is_owned(x) else x, tree)

    @functools.wraps(inner)
    def gathered(found: Any, *args: Any, **kwargs: Any) -> Any:
        return inner(owned(lambda x: x.detach().full_tensor(), found), *args, **kwargs)

    @functools.wraps(of_optimizer)
    def on_one_device(*args: Any, **kwargs: Any) -> Any:
        return owned(placed, of_optimizer(*args, **kwargs))

    def cut(inner: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(inner)
        def by_rank(full: Any, local: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            of_others = {key: x for key, x in local.items() if is_owned(x)}
            local |= {
                k: torch.empty(x.shape, dtype=x.dtype, device=x.device_mesh.device_type) for k, x in of_others.items()
            }
            inner(full, local, *args, **kwargs)
            local |= {key: part_of(local[key], x) for key, x in of_others.items() if key in local}

        return by_rank

    states._gather_state_dict, states._get_optim_state_dict = gathered, on_one_device
    states._distribute_state_dict = cut(states._distribute_state_dict)
    states._broadcast_state_dict = cut(states._broadcast_state_dict)


_FOREACH_ELEMENTWISE = (
    *("abs add addcdiv addcmul clamp_max clamp_min copy div exp lerp".split()),
    *("maximum minimum mul neg pow reciprocal rsqrt sign sqrt sub zero".split()),
)


@functools.cache
def patch_foreach(is_owned: Callable[[Any], bool], local_of: Callable[[Any], torch.Tensor]) -> None:
    """Run ``foreach`` ops on local shards if a tensor of a list ``is_owned``; else as before."""
    handlers: dict[Any, Any] = op_dispatcher._custom_op_handlers

    def by_parts(before: Any) -> Any:
        def handle(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            if any(is_owned(x) for arg in args if isinstance(arg, list | tuple) for x in arg):
                own, named = pytree.tree_map_only(DTensor, local_of, (tuple(args), kwargs))
                return _wrap_like(args[0], op(*own, **named))
            if before is not None:
                return before(op, args, kwargs)
            del handlers[op]
            try:
                return op(*args, **kwargs)
            finally:
                handlers[op] = handle

        return handle

    for name in _FOREACH_ELEMENTWISE:
        for packet in (getattr(torch.ops.aten, f"_foreach_{name}{end}", None) for end in ("", "_")):
            for overload in packet.overloads() if packet is not None else ():
                op = getattr(packet, overload)
                handlers[op] = by_parts(handlers.get(op))


def _wrap_like(given: Sequence[Any], made: Sequence[torch.Tensor] | None) -> list[Any] | None:
    """Results as DTensors placed as ``given``; None for in-place ops."""
    if not made:
        return None
    pairs = zip(given, made, strict=True)
    return [DTensor(y, x._spec, requires_grad=False) if isinstance(x, DTensor) else y for x, y in pairs]


_OWNER_AXIS_SUFFIX = " of owners"
"""suffix of the axis names of an owners' mesh"""


def as_dtensor(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """This rank's shard of a tensor of global ``shape``; non-owners pass zero rows."""
    if not layout.owner:
        return dtensor_from_shard(local, mesh, layout, shape)
    held = _owners_mesh(mesh, layout.mesh, tuple(layout.owner.items()))
    meta = TensorMeta(torch.Size(shape), torch.empty(tuple(shape), device="meta").stride(), local.dtype)
    return DTensor(
        local, DTensorSpec(held, _owner_placements(layout), tensor_meta=meta), requires_grad=local.requires_grad
    )


@cleared_with_groups
@functools.lru_cache(maxsize=1 << 10)
def _owners_mesh(mesh: DeviceMesh, axes: Mesh, owner: tuple[tuple[str, int], ...]) -> DeviceMesh:
    """The mesh of the ranks with these coordinates; axes that ``owner`` names have size 1."""
    ranks = mesh.mesh
    for axis, number in owner:
        ranks = ranks.narrow(axes.index(axis), number, 1)
    names = tuple(axis + _OWNER_AXIS_SUFFIX for axis in axes.axes)
    held = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names, _init_backend=False)
    held._of = mesh  # type: ignore[attr-defined]
    patch_foreach(is_owned, local_tensor_of)
    _patch_full_tensor()
    patch_full_state_dicts(is_owned, owned_shard_of, _on_owners_device)
    held._dim_group_names = mesh._dim_group_names if held.get_coordinate() is not None else []
    return held


@functools.cache
def _patch_full_tensor() -> None:
    """Broadcast ``full_tensor()`` from the owners: torch returns an empty tensor elsewhere."""
    of_holders = DTensor.full_tensor

    @functools.wraps(of_holders)
    def full_tensor(x: DTensor, *, grad_placements: Any = None) -> torch.Tensor:
        whole: torch.Tensor = of_holders(x, grad_placements=grad_placements)
        return _BroadcastFromOwners.apply(whole, x.shape, x.device_mesh) if is_owned(x) else whole

    DTensor.full_tensor = full_tensor  # type: ignore[assignment, method-assign]


class _BroadcastFromOwners(NoneGradFunction):
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


def _owner_placements(layout: Layout) -> tuple[Any, ...]:
    """Placements on the owners' mesh."""
    return tuple(layout.replace(dict.fromkeys(layout.owner, R)).to_torch())


def make_tables_contiguous(tensors: Iterable[torch.Tensor]) -> None:
    """Make this rank's tables of equal width contiguous in memory, for one grouped look-up."""
    groups: dict[Any, list[torch.Tensor]] = {}
    for x in tensors:
        if is_owned(x) and (local := local_tensor_of(x)).ndim == 2 and len(local):  # type: ignore[arg-type]
            groups.setdefault((local.dtype, local.shape[1]), []).append(local)
    for locals_ in groups.values():
        if len(locals_) > 1 and not are_adjacent_in_memory(locals_):
            parts = torch.cat([x.detach() for x in locals_]).split([len(x) for x in locals_])
            for x, part in zip(locals_, parts, strict=True):
                x.data = part


def is_owned(x: torch.Tensor) -> bool:
    """Whether ``x`` is a DTensor on an owners' mesh, from :func:`as_dtensor`."""
    return isinstance(x, DTensor) and (x.device_mesh.mesh_dim_names or ("",))[0].endswith(_OWNER_AXIS_SUFFIX)


def owner_device_type(x: torch.Tensor) -> str:
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


def has_layout(layout: Layout, mesh: DeviceMesh, x: torch.Tensor) -> bool:
    """Whether ``x`` is a DTensor in this layout."""
    if not isinstance(x, DTensor):
        return False
    owner = dtensor_layout(layout.mesh, mesh, x).owner if is_owned(x) else {}
    return owner == layout.owner and x.placements == _owner_placements(layout)


def local_tensor_of(x: DTensor) -> torch.Tensor:
    """This rank's shard; if others own it, zero rows, with the dims that torch's ops drop."""
    local: torch.Tensor = x._local_tensor
    return local if local.ndim == x.ndim else _empty_shard(local, x)


def _empty_shard(data: torch.Tensor, like: DTensor) -> torch.Tensor:
    """The empty shard of a rank that does not own ``like``; owners' shards have equal lengths."""
    mesh, placed = like.device_mesh, enumerate(like.placements)
    cut = [(p.dim, mesh.size(i)) for i, p in placed if isinstance(p, Shard)]
    rest = [n // math.prod(ranks for d, ranks in cut if d == dim) for dim, n in enumerate(like.shape)]
    return data.new_empty(0, *rest[1:], device=mesh.device_type)


def _on_owners_device(x: DTensor) -> DTensor:
    """The same DTensor; an empty shard gets its rank and the device type of the owners."""
    local = x._local_tensor
    lies = local.ndim == x.ndim and local.device.type == x.device_mesh.device_type
    return x if lies else DTensor(_empty_shard(local, x), x._spec, requires_grad=False)


def owned_shard_of(full: torch.Tensor, like: DTensor) -> DTensor:
    """A full tensor in the table-wise layout of ``like``."""
    if like.device_mesh.get_coordinate() is None:
        return DTensor(_empty_shard(full, like), like._spec, requires_grad=False)
    cut = distribute_tensor(full.detach(), like.device_mesh, like.placements, src_data_rank=None)
    return DTensor(cut.to_local().clone(), like._spec, requires_grad=False)


def gather_owned(local: torch.Tensor, shape: Sequence[int], owner: Sequence[str], comm: Communicator) -> torch.Tensor:
    """The full tensor of ``shape`` from its owner along the axes ``owner``. Collective."""
    move = Move("P", "I", comm.active(tuple(owner)))
    with torch.no_grad(), bind(comm):
        if local.is_sparse:
            numbers, rows = sparse_gradients.rows_of(local)
            return comm.apply(move, sparse_gradients.from_rows(numbers, rows, shape[0]))
        return comm.apply(move, local if local.shape == torch.Size(shape) else local.new_zeros(shape))
