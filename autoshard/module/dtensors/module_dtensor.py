"""The tensors of a sharded module under torch.distributed: DTensors of a class of ours, as is what
operations make of them. An operation has a handler in :data:`OP_HANDLERS`, or runs as DTensor
has it. In layouts that DTensor lacks (segments by a ratio, tables of one owner) elementwise
operations run on shards, others on the full tensor."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard.errors import LayoutError
from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.module.dtensors.segments import (
    chunk_write_item,
    has_several_chunks,
    local_chunks,
    reorder_segments,
    shard_of,
)
from autoshard.runtime.transport.autograd import NoneGradFunction
from autoshard.runtime.transport.groups import cleared_with_groups
from autoshard.torch_private.dtensor import (
    DTensorSpec,
    StridedShard,
    TensorMeta,
    dispatch_subclass,
)

OpHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

OP_HANDLERS: dict[Any, OpHandler] = {}
"""op, or its kind ("view", "foreach", "any"), → what runs instead of DTensor's own"""

STAGE_MESHES: set[DeviceMesh] = set()
"""meshes with the ranks of one pipeline stage only"""

PART_MESHES: set[DeviceMesh] = set()
"""meshes of models that only some ranks of torch.distributed hold"""

new_dtensor: Any = inspect.unwrap(DTensor.__new__)
"""``__new__`` without the torch.compile guard, which costs several Python calls per tensor"""

_REPLICATED = Replicate()


def handles(*ops: Any) -> Callable[[OpHandler], OpHandler]:
    """Register a handler of ``ops``."""

    def register(handler: OpHandler) -> OpHandler:
        OP_HANDLERS.update(dict.fromkeys(ops, handler))
        return handler

    return register


@functools.cache
def is_view_op(op: Any) -> bool:
    """Whether the result of ``op`` is a view of its first operand in eager."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


@functools.cache
def _handler_of(op: Any) -> OpHandler:
    found = OP_HANDLERS.get(op)
    if found is None:
        lists = op._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))
        kind = "foreach" if lists else "view" if is_view_op(op) else "any"
        found = OP_HANDLERS[kind]
    return found


def _read_values(name: str) -> Any:
    """A method of torch that reads all values: of full shards only. Outputs gather instead."""

    def read(self: ModuleDTensor, *args: Any, **kwargs: Any) -> Any:
        plain = self if self.gathers else self._plain(self.is_full())
        return getattr(Tensor, name)(plain, *args, **kwargs)

    return read


class ModuleDTensor(DTensor):
    """A DTensor of a sharded module. Subclasses have rules of their own."""

    gathers = False
    """whether operations that DTensor lacks gather before (outputs), not in the operation"""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _enter_class(cls)

    @staticmethod
    def of(x: DTensor) -> ModuleDTensor:
        """The same DTensor as one of a sharded module, as are gradients that leave its node."""
        if type(x) is DTensor:
            x.__class__ = ModuleDTensor
            if x.grad_fn is not None:
                x.grad_fn.register_hook(_own_gradients)
        return x  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, op: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _handler_of(op)(op, args, kwargs or {})

    def is_full(self) -> bool:
        """Whether every rank of the module holds the full tensor."""
        whole = all(p.is_replicate() for p in self._spec.placements)
        return whole and not is_owned(self) and self._spec.mesh not in STAGE_MESHES

    # --- conversions ---

    def to_local(self, **kwargs: Any) -> Tensor:
        """See :meth:`DTensor.to_local`."""
        return _hooked(super().to_local(**kwargs))

    def redistribute(
        self, device_mesh: DeviceMesh | None = None, placements: Sequence[Any] | None = None, **kwargs: Any
    ) -> DTensor:
        """See :meth:`DTensor.redistribute`. A table of one owner is replicated on all ranks."""
        spec = self._spec
        mesh, given = device_mesh or spec.mesh, tuple(placements or ())
        summands = any(p.is_partial() for p in spec.placements)
        if mesh == spec.mesh and is_owned(self) and set(given) == {_REPLICATED} and not summands:
            return self._on_all_ranks()
        if mesh == spec.mesh and not any(map(_has_segments, (*spec.placements, *given))):
            x: Any = self if torch.is_grad_enabled() else self.detach()  # torch 2.11 would call detach_() of a DTensor
            return ModuleDTensor.of(DTensor.redistribute(x, device_mesh, placements, **kwargs))
        if mesh == spec.mesh and spec.placements == given:
            return self
        return _ByFullTensor.apply(self, DTensorSpec(mesh, given, spec.tensor_meta))

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """See :meth:`DTensor.full_tensor`. Of a table of one owner, on all ranks."""
        if not is_owned(self):
            return _hooked(super().full_tensor(grad_placements=grad_placements))
        return to_local_shard(self._on_all_ranks())

    def _on_all_ranks(self) -> DTensor:
        """A table of one owner, replicated. Collective over the ranks of the module."""
        mesh = self._spec.mesh._of  # type: ignore[attr-defined]
        spec = DTensorSpec(mesh, (_REPLICATED,) * mesh.ndim, self._spec.tensor_meta)
        return _ByFullTensor.apply(self, spec)

    # --- leaving torch ---

    def _plain(self, allowed: bool) -> Tensor:
        if not allowed:
            raise LayoutError(
                f"rank {dist.get_rank()} is about to save a tensor of shape {list(self.shape)}, or pass it to code "
                f"outside torch, but holds only {list(self._local_tensor.shape)} of it ({self.placements}). Save "
                "sharded.full_state_dict() and autoshard.full_optimizer_state_dict(sharded, optimizer) on one rank, or "
                "state_dict() with torch.distributed.checkpoint. For a single tensor call .full_tensor() on every rank."
            )
        return self._local_tensor.detach()

    numpy, tolist, __array__, __dlpack__ = map(_read_values, ("numpy", "tolist", "__array__", "__dlpack__"))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain tensor, if every rank holds it in full."""
        whole = self._plain(self.is_full()).requires_grad_(self.requires_grad)
        kept = nn.Parameter(whole, self.requires_grad) if isinstance(self, nn.Parameter) else whole
        return kept.__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        """``copy.copy`` within this process."""
        rebuild, args = super().__reduce_ex__(4)  # type: ignore[no-untyped-call]
        return rebuild(*args)

    def data_ptr(self) -> int:
        """0: torch would add the offset of the local tensor to it."""
        return 0

    def storage(self) -> Any:
        """Refused for what a plain tensor would need; safetensors calls it."""
        return super().storage() if self.gathers else self._plain(False)  # type: ignore[no-untyped-call]

    def share_memory_(self) -> Any:
        """Refused: other processes could not use a shard."""
        if self.gathers:
            return super().share_memory_()  # type: ignore[no-untyped-call]
        raise LayoutError(
            f"share_memory() of a sharded tensor of shape {list(self.shape)}: rank {dist.get_rank()} holds only "
            f"{list(self._local_tensor.shape)} of it ({self.placements}), so other processes could not use it. Share "
            "the tensors of sharded.full_state_dict(). For a second module in this process use copy.deepcopy(sharded)."
        )

    def __format__(self, spec: str) -> str:
        """``f"{loss:.3f}"`` of a scalar, which Tensor's own refuses. No communication."""
        if not spec or self.ndim:
            return object.__format__(self, spec)
        if any(p.is_partial() for p in self.placements):
            raise LayoutError(
                "a number is formatted whose partial sums are on several ranks "
                f"({self.placements}): call its .item() on every rank first"
            )
        return format(self.detach().item(), spec)

    @property
    def data(self) -> Tensor:
        """The tensor without history; ``x.data = new`` sets the shard, too, unlike torch's own."""
        return Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, new: Tensor) -> None:
        set_data(self, new if isinstance(new, DTensor) else shard_full(new.detach(), self._spec))

    # --- torch.distributed.checkpoint, of which a chunk of several is one item ---

    def __create_write_items__(self, fqn: str, given: Any) -> Any:
        if not has_several_chunks(self):
            return super().__create_write_items__(fqn, given)
        return [chunk_write_item(fqn, self, c) for c in local_chunks(self)]

    def __create_chunk_list__(self) -> Any:
        if not has_several_chunks(self):
            return super().__create_chunk_list__()  # type: ignore[no-untyped-call]
        return [c.metadata for c in local_chunks(self)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        if not has_several_chunks(self):
            return super().__get_tensor_shard__(index)  # type: ignore[no-untyped-call]
        return next(c.local for c in local_chunks(self) if c.metadata.offsets == index.offset)


def _unflatten(kind: type[ModuleDTensor], inner: Any, spec: Any, size: Any, stride: Any) -> DTensor:
    """Keeps the class: a compiled ``optimizer.step`` guards on it."""
    made: DTensor = DTensor.__tensor_unflatten__(inner, spec, size, stride)
    made.__class__ = kind
    return made


def _enter_class(kind: type[ModuleDTensor]) -> None:
    kind.__tensor_unflatten__ = staticmethod(functools.partial(_unflatten, kind))  # type: ignore[method-assign]
    dispatch_subclass(kind)


_enter_class(ModuleDTensor)


def module_dtensor(local: Tensor, spec: DTensorSpec) -> ModuleDTensor:
    """The tensor of a module with this local shard; not differentiable."""
    local = local.detach() if local.requires_grad else local
    return new_dtensor(ModuleDTensor, local, spec, requires_grad=False)


# --- layouts ---


def is_owned(x: object) -> bool:
    """Whether ``x`` is a DTensor on an owners' mesh: a table of one owner."""
    return isinstance(x, DTensor) and "_of" in vars(x._spec.mesh)


def _has_segments(placement: Any) -> bool:
    return hasattr(placement, "parts")


def has_torch_layout(spec: Any) -> bool:
    """Whether DTensor knows the layout: no segments by a ratio, no owner."""
    return "_of" not in vars(spec.mesh) and not any(map(_has_segments, spec.placements))


def summed(placements: Iterable[Any]) -> tuple[Any, ...]:
    """``placements`` with Replicate in place of Partial."""
    return tuple([_REPLICATED if p.is_partial() else p for p in placements])


def sum_partial(x: DTensor) -> DTensor:
    """``x`` with its partial sums reduced, in place."""
    if any(p.is_partial() for p in x._spec.placements):
        set_shard(x, x.redistribute(placements=summed(x._spec.placements)))
    return x


def set_shard(x: DTensor, new: DTensor) -> None:
    """Give ``x`` the local shard and layout of ``new``."""
    x._local_tensor, x._spec = new._local_tensor.detach(), new._spec


def set_data(x: DTensor, new: DTensor) -> None:
    Tensor.data.__set__(x, new)  # type: ignore[attr-defined]
    set_shard(x, new)


@cleared_with_groups
@functools.lru_cache(maxsize=1 << 8)
def contiguous_spec(
    mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """The spec of a contiguous tensor. Cached: equal layers share it."""
    steps = itertools.accumulate(reversed(shape), lambda n, length: n * max(length, 1), initial=1)
    stride = [*steps][len(shape) - 1 :: -1] if shape else ()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(stride), dtype))


# --- full tensors to shards, and back ---


def shard_full(full: Tensor, like: DTensorSpec) -> ModuleDTensor:
    """This rank's shard of ``full`` in the layout of ``like``, without partial sums."""
    mesh, placements = like.mesh, summed(like.placements)
    meta = TensorMeta(full.shape, full.stride(), full.dtype)
    place = mesh.get_coordinate()
    if place is None:  # another rank owns it
        local = empty_shard(full, like)
    else:
        axes = Mesh.of(mesh)
        local = shard_of(full.detach(), Layout.from_torch(axes, placements), axes.rank(list(place)))
        local = local.to(mesh.device_type, copy=True)
    return module_dtensor(local, DTensorSpec(mesh, placements, meta))


def empty_shard(data: Tensor, like: DTensorSpec) -> Tensor:
    """The empty shard of a rank that owns nothing; owners' shards have equal lengths."""
    cut = [(p.dim, like.mesh.size(i)) for i, p in enumerate(like.placements) if isinstance(p, Shard)]
    rest = [
        n // functools.reduce(lambda a, c: a * c[1], (c for c in cut if c[0] == d), 1) for d, n in enumerate(like.shape)
    ]
    return data.new_empty(0, *rest[1:], device=like.mesh.device_type)


def _gather(x: DTensor) -> Tensor:
    """The full tensor of a layout that DTensor lacks."""
    spec = x._spec
    mesh, local = spec.mesh, x._local_tensor
    placements = tuple([Shard(p.dim) if isinstance(p, StridedShard) else p for p in spec.placements])
    if mesh.get_coordinate() is not None:
        plain = new_dtensor(DTensor, local, DTensorSpec(mesh, placements, spec.tensor_meta), requires_grad=False)
        local = reorder_segments(plain.full_tensor(), Layout.from_torch(Mesh.of(mesh), spec.placements))
    return broadcast_from_owners(local, spec) if is_owned(x) else local


def broadcast_from_owners(x: Tensor, spec: DTensorSpec) -> Tensor:
    """The full tensor ``x`` of the owners' mesh on all ranks of the mesh that this is part of."""
    held: Any = spec.mesh
    mesh, holds = held._of, held.get_coordinate() is not None
    whole = x.contiguous() if holds else torch.empty(spec.shape, dtype=x.dtype, device=held.device_type)
    first = (mesh.mesh == held.mesh.flatten()[0]).nonzero()[0].tolist()
    for axis, owner in enumerate(first):
        if held.size(axis) < mesh.size(axis):
            dist.broadcast(whole, group=mesh.get_group(axis), group_src=owner)
    return whole


class _ByFullTensor(NoneGradFunction):
    """A redistribution by way of the full tensor, to ``spec``."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = x._spec
        return shard_full(full_if_dtensor(x.detach()) if has_torch_layout(x._spec) else _gather(x), spec)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        spec = ctx.spec
        if not isinstance(gradient, DTensor):
            gradient = replicated_dtensor(getattr(spec.mesh, "_of", spec.mesh), gradient)
        return _ByFullTensor.apply(gradient, DTensorSpec(spec.mesh, summed(spec.placements), spec.tensor_meta)), None


def _own_gradients(given: Sequence[Any], _: Any) -> None:
    """Gradients that a node of torch's returns are of the module, too."""
    for x in given:
        if type(x) is DTensor:
            ModuleDTensor.of(x)


def _hooked(local: Tensor) -> Tensor:
    """A local tensor, whose node returns gradients of the module."""
    if local.grad_fn is not None:
        local.grad_fn.register_hook(_own_gradients)
    return local


def dtensor_from_shard(local: Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """This rank's shard of a tensor of global ``shape`` as a DTensor; differentiable."""
    return from_local_shard(local, contiguous_spec(mesh, tuple(layout.to_torch()), torch.Size(shape), local.dtype))


def from_local_shard(local: Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor with local shard (or partial sum) ``local``; differentiable."""
    if local.requires_grad and torch.is_grad_enabled():
        found: DTensor = _FromLocalShard.apply(local, spec)
    else:  # nothing for autograd to record
        found = module_dtensor(local.view_as(local), spec)
    return found


def dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """A DTensor with local shard ``local`` and the layout of ``like``; differentiable."""
    spec = like._spec
    if local.dtype != like.dtype:
        meta: Any = spec.tensor_meta
        spec = DTensorSpec(spec.mesh, spec.placements, TensorMeta(meta.shape, meta.stride, local.dtype))
    return from_local_shard(local, spec)


def replicated_dtensor(mesh: DeviceMesh, x: Tensor) -> DTensor:
    """``x``, equal on all ranks, as a replicated DTensor; differentiable."""
    return from_local_shard(x, contiguous_spec(mesh, (_REPLICATED,) * mesh.ndim, x.shape, x.dtype))


def to_local_shard(x: DTensor) -> Tensor:
    """This rank's shard of a DTensor without partial sums; differentiable."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x._local_tensor
    return _ToLocalShard.apply(x)


EXTERNAL_GRADIENT = "_autoshard_given"
"""marks a local gradient that its owner keeps although autograd counts one reference to it"""


class _FromLocalShard(NoneGradFunction):
    """``DTensor.from_local`` for a known global shape, without its checks in every call."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = spec
        return new_dtensor(ModuleDTensor, local.view_as(local), spec, requires_grad=True)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:
        local = local_gradient(gradient, ctx.spec)
        if not torch.is_grad_enabled():
            setattr(local, EXTERNAL_GRADIENT, True)
        return local, None


def local_gradient(gradient: Tensor, spec: DTensorSpec) -> Tensor:
    """The local gradient for a tensor of this ``spec``; for partial sums the full gradient."""
    wanted = summed(spec.placements)
    if not isinstance(gradient, DTensor):  # zeros made by autograd
        gradient = replicated_dtensor(spec.mesh, gradient)
    if gradient._spec.placements != wanted:
        gradient = gradient.redistribute(spec.mesh, wanted)
    if torch.is_grad_enabled():
        return gradient.to_local(grad_placements=spec.placements)
    return gradient._local_tensor


class _ToLocalShard(NoneGradFunction):
    """Inverse of :class:`_FromLocalShard`, for sharded and replicated placements."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> Tensor:
        ctx.spec = x._spec
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        return from_local_shard(gradient, ctx.spec)


def local_shard(x: Any) -> Any:
    """This rank's shard; of a table of others no rows, with the dims that torch drops."""
    if not isinstance(x, DTensor):
        return x
    local: Tensor = x._local_tensor
    return local if local.ndim == x.ndim else empty_shard(local, x._spec)


def full_if_dtensor(x: Tensor) -> Tensor:
    """The full tensor of a DTensor; other tensors unchanged. Collective."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def written_operands(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that ``op`` writes, by its schema: first operand (or list), or ``out=``."""
    if not op._schema.is_mutable:
        return []
    places = enumerate(op._schema.arguments)
    return tensors_of([args[i] if i < len(args) else kwargs.get(a.name) for i, a in places if a.is_write], {})


def tensors_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors among the arguments of an op, also in lists."""
    given = [*args, *kwargs.values()] if kwargs else args
    rows = [x if isinstance(x, list | tuple) else (x,) for x in given]
    return [x for row in rows for x in row if isinstance(x, Tensor)]
