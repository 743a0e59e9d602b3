"""How an operation runs on a module's tensors: as DTensor's, on shards, or on full tensors."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autoshard.aten import aten
from autoshard.module.dtensors.module_dtensor import (
    ModuleDTensor,
    full_if_dtensor,
    handles,
    has_torch_layout,
    is_view_op,
    local_shard,
    module_dtensor,
    new_dtensor,
    replicated_dtensor,
    set_data,
    shard_full,
    tensors_of,
    written_operands,
)
from autoshard.torch_private.dtensor import DTensorSpec, TensorMeta, has_rule


@handles("any")
def run_as_dtensor(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` as DTensor does, on DTensors with the same shards; by :func:`run_on_full` if it
    lacks op or layout."""
    pairs: list[tuple[ModuleDTensor, DTensor]] = []
    plain = [x for x in written_operands(op, args, kwargs) if type(x) is Tensor]
    ruled = has_rule(op) and op is not aten.as_strided.default  # which takes global strides for those of the shard
    if not ruled and (made := op.decompose(*args, **kwargs)) is not NotImplemented:
        return made  # in inference mode; its operations come here
    if plain:
        return (_write_plain if op._schema.arguments[0].is_write else run_on_full)(op, args, kwargs)
    own, named = map_operands(lambda x: _twin(x, pairs), args, kwargs)
    ours = [x for x, _ in pairs]
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors_of(args, kwargs))
    if ours and not recorded:  # a plain tensor has equal values on every rank, as on one device
        own, named = map_operands(lambda x: _replicated_unless_scalar(ours[0], x), own, named)
    if not all(has_torch_layout(x._spec) for x in ours):
        made = on_shards(op, args, kwargs)
        return run_on_full(op, args, kwargs) if made is NotImplemented else made
    if torch.is_grad_enabled():
        for x in tensors_of(args, kwargs):
            if x.requires_grad and not isinstance(x, DTensor):
                with_plain_gradient(x)
    try:
        if not (ruled or _ignores_positions(op, tensors_of(args, kwargs))):
            raise NotImplementedError(f"DTensor has no rule of {op}, and would infer one from a decomposition")
        made = op(*own, **named)
    except (NotImplementedError, RuntimeError) as error:
        no_rule = isinstance(error, NotImplementedError) or "Sharding propagation failed" in str(error)
        lacks = no_rule or is_view_op(op)  # of a sharded dim
        if not lacks or any(x.gathers for x in ours):
            raise
        return run_on_full(op, args, kwargs)
    for x, twin in pairs:  # operations in place
        if twin._spec is not x._spec:
            x._local_tensor, x._spec = twin._local_tensor, twin._spec
    if isinstance(made, Tensor):
        return _ours(made, args, pairs)
    return type(made)([_ours(x, args, pairs) for x in made]) if isinstance(made, list | tuple) else made


def _ignores_positions(op: Any, operands: Sequence[Tensor]) -> bool:
    """Whether ``op`` may run on shards: elementwise or a sum, without index, dim or size."""
    counted = ("int" in str(a.type).lower() and a.name != "reduction" for a in op._schema.arguments)
    return not any(counted) and len({x.shape for x in operands if x.ndim}) <= 1


def _write_plain(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A plain tensor is written: with full values. Others get its gradient as a DTensor."""
    for x in args[1:]:
        if isinstance(x, ModuleDTensor) and x.grad_fn is not None and torch.is_grad_enabled():
            mesh = x._spec.mesh
            x.grad_fn.register_prehook(lambda given, mesh=mesh: tuple([as_dtensor_on(mesh, g) for g in given]))
    with torch.no_grad():
        own, named = map_operands(full_if_dtensor, args, kwargs)
        op(*own, **named)
    return args[0] if op._schema.returns else None


def _replicated_unless_scalar(like: DTensor, x: Any) -> Any:
    return x if isinstance(x, Tensor) and not x.ndim else as_dtensor_on(like._spec.mesh, x)


def as_dtensor_on(mesh: DeviceMesh, x: Any) -> Any:
    """A plain tensor as a replicated DTensor; anything else unchanged."""
    return replicated_dtensor(mesh, x) if isinstance(x, Tensor) and not isinstance(x, DTensor) else x


_GETS_PLAIN_GRADIENT = "_autoshard_takes_plain"
"""marks a trained plain scalar that has the hook"""


def with_plain_gradient(x: Tensor) -> Tensor:
    """``x``, a plain scalar, such that DTensor gradients of it become plain."""
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(_full_gradients)  # not a tensor hook: those are the user's
    elif x.requires_grad and not hasattr(x, _GETS_PLAIN_GRADIENT):
        x.register_hook(full_if_dtensor)
        setattr(x, _GETS_PLAIN_GRADIENT, True)
    return x


def _full_gradients(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple([full_if_dtensor(g) for g in gradients])


def _twin(x: Any, pairs: list[tuple[ModuleDTensor, DTensor]]) -> Any:
    if not isinstance(x, ModuleDTensor):
        return x
    local: Tensor = x._local_tensor
    twin = new_dtensor(DTensor, local.detach() if local.requires_grad else local, x._spec, requires_grad=False)
    pairs.append((x, twin))
    return twin


def _ours(x: Any, args: Sequence[Any], pairs: Sequence[tuple[ModuleDTensor, DTensor]]) -> Any:
    if type(x) is DTensor:
        for own, twin in pairs:
            if twin is x:
                return own
        if not any(x is y for y in args):  # another's, written in place
            x.__class__ = ModuleDTensor
    return x


def map_operands(change: Callable[[Any], Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """The arguments of an op with ``change`` of each; lists of operands are changed inside."""
    own = [[change(y) for y in x] if isinstance(x, list | tuple) else change(x) for x in args]
    named = {n: [change(y) for y in x] if isinstance(x, list | tuple) else change(x) for n, x in kwargs.items()}
    return own, named


_SHARDWISE = frozenset(
    "alias clone copy_ detach empty_like fill fill_ full_like index_put_ ones_like _to_copy zero zero_ zeros_like".split()
)
_REDUCTIONS = frozenset("_foreach_norm _foreach_max _foreach_powsum".split())


@functools.cache
def _is_elementwise(op: Any) -> bool:
    name = op._schema.name.removeprefix("aten::")
    known = torch.Tag.pointwise in op.tags or name in _SHARDWISE or name.startswith(("_foreach_", "_fused_"))
    return known and name not in _REDUCTIONS


def on_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An elementwise ``op`` on local shards, if operands that belong together lie alike, else
    NotImplemented. Plain operands are scalars or belong together. (DTensor would compare layouts
    of each operand of a fused step.)"""
    if not _is_elementwise(op):
        return NotImplemented
    rows = [x if isinstance(x, list | tuple) else [x] for x in (*args, *kwargs.values())]
    specs = [_each(row, _SPEC_OF, _DIMS_OF) for row in rows if row and isinstance(row[0], Tensor)]
    if specs != _LAST_ALIKE.get(op):
        if not _lie_alike(*specs):
            return NotImplemented
        _LAST_ALIKE[op] = specs
    own = [_each(x, local_shard, None) if isinstance(x, list | tuple) else local_shard(x) for x in args]
    named = {
        n: _each(x, local_shard, None) if isinstance(x, list | tuple) else local_shard(x) for n, x in kwargs.items()
    }
    call = getattr(torch, op.overloadpacket.__name__, op) if "fused" in op._schema.name else op  # takes lists faster
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        made = call(*own, **named)
    if made is None or op._schema.is_mutable:
        return args[0] if isinstance(args[0], Tensor) else made
    return _wrapped_like(made, args[0]) if isinstance(made, Tensor) else [*map(_wrapped_like, made, args[0])]


_SPEC_OF, _DIMS_OF = map(operator.attrgetter, ("_spec", "ndim"))
_LAST_ALIKE: dict[Any, Sequence[Sequence[Any]]] = {}
"""specs in the last call of an op; lists of the same objects compare fast"""


def _each(xs: Sequence[Any], of_dtensor: Callable[[Any], Any], of_plain: Callable[[Any], Any] | None) -> list[Any]:
    """Map every operand (None: identity); without a test for each if all or none are DTensors."""
    kinds = {issubclass(kind, DTensor) for kind in {*map(type, xs)}}
    if len(kinds) > 1:
        return [_each([x], of_dtensor, of_plain)[0] for x in xs]
    of = of_dtensor if True in kinds else of_plain
    return [*xs] if of is None else [*map(of, xs)]


def _lie_alike(first: Sequence[Any], *others: Sequence[Any]) -> bool:
    """Whether the operands of a place have one layout, without partial sums, and shape, or are
    scalars. Plain tensors count by their number of dims; a row of one belongs to all places."""
    rows = [[*row] * len(first) if len(row) == 1 else row for row in others]
    for like, *given in zip(first, *rows, strict=False):
        if isinstance(like, int):
            alike = all(isinstance(own, int) for own in given)
        else:
            alike = not any(p.is_partial() for p in like.placements) and all(_fits(own, like) for own in given)
        if not alike:
            return False
    return True


def _fits(own: Any, like: DTensorSpec) -> bool:
    if isinstance(own, int):
        return own == 0
    alike = own is like or (own.mesh == like.mesh and own.placements == like.placements and own.shape == like.shape)
    return alike or (not own.shape and all(p.is_replicate() for p in own.placements))


def _wrapped_like(local: Tensor, like: Any) -> Any:
    if not isinstance(like, DTensor):
        return local
    spec: DTensorSpec = like._spec
    meta: Any = spec.tensor_meta
    same = local.dtype == meta.dtype and (local.is_sparse or local.stride() == like._local_tensor.stride())
    if not same:
        full = torch.empty_strided(meta.shape, meta.stride, device="meta")
        stride = full.contiguous().stride() if local.is_contiguous() else full.stride()
        spec = DTensorSpec(spec.mesh, spec.placements, TensorMeta(meta.shape, stride, local.dtype))
    return module_dtensor(local, spec)


def run_on_full(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` on full tensors; written operands keep their layout, even if their shape changes.
    Results with the shape of the first operand are sharded like it; others are replicated."""
    first: DTensor = next(x for x in tensors_of(args, kwargs) if isinstance(x, DTensor))
    draws = torch.Tag.nondeterministic_seeded in op.tags
    with torch.no_grad(), first_rank_generator(first, kwargs.get("generator")) if draws else contextlib.nullcontext():
        own, named = map_operands(lambda x: x.full_tensor().clone() if isinstance(x, DTensor) else x, args, kwargs)
        made = op(*own, **named)
        schema = op._schema.arguments
        given = {a.name: (x, new) for a, x, new in zip(schema, args, own, strict=False)}
        given |= {n: (x, named[n]) for n, x in kwargs.items()}
        written = [given[a.name] for a in schema if a.is_write and a.name in given]
        for x, new in written:
            for each, values in zip(x, new, strict=True) if isinstance(x, list | tuple) else [(x, new)]:
                store_full(each, values)
        if written:
            results = tuple(x for x, _ in written)
            return results if len(op._schema.returns) > 1 else results[0] if op._schema.returns else None
        spec = first._spec
        mesh = getattr(spec.mesh, "_of", spec.mesh)
        return pytree.tree_map_only(
            Tensor, lambda x: shard_full(x, spec) if x.shape == first.shape else replicated_dtensor(mesh, x), made
        )


def store_full(x: Any, new: Tensor) -> None:
    parts: Any = shard_full(new, x._spec) if isinstance(x, DTensor) else new
    if isinstance(x, DTensor) and x.shape != parts.shape:
        set_data(x, parts)
    elif isinstance(x, DTensor):
        x._spec = parts._spec
        x._local_tensor.copy_(parts._local_tensor)
    else:
        x.copy_(parts)


# --- random numbers ---


@contextlib.contextmanager
def first_rank_generator(x: DTensor, generator: torch.Generator | None) -> Iterator[None]:
    """Inside, the generator has the state of the first rank of ``x``'s mesh; other ranks resume
    their own. Collective."""
    mesh = x.device_mesh
    on_gpu = mesh.device_type == "cuda"
    generator = generator or (
        torch.cuda.default_generators[torch.cuda.current_device()] if on_gpu else torch.default_generator
    )
    before = generator.get_state()
    found = before.clone().to(mesh.device_type)
    for axis in reversed(range(mesh.ndim)):
        dist.broadcast(found, group=mesh.get_group(axis), group_src=0)
    first = found.to(before.device)
    alike = torch.equal(first, before)
    if not alike:
        generator.set_state(first)
    try:
        yield
    finally:
        if not alike:
            generator.set_state(before)
