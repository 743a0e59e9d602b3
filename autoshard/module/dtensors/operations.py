"""Operations on tensors of sharded modules that DTensor computes wrongly, refuses or is slow at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

from autoshard.aten import aten
from autoshard.errors import LayoutError
from autoshard.module.dtensors.dispatch import (
    as_dtensor_on,
    first_rank_generator,
    map_operands,
    on_shards,
    run_as_dtensor,
    run_on_full,
    store_full,
    with_plain_gradient,
)
from autoshard.module.dtensors.module_dtensor import (
    ModuleDTensor,
    full_if_dtensor,
    handles,
    has_torch_layout,
    is_owned,
    module_dtensor,
    set_data,
    shard_full,
    sum_partial,
    tensors_of,
)
from autoshard.module.dtensors.views import VIEWS_IN_PLACE, record_view_source, write_full
from autoshard.runtime.transport.process_group import all_reduce_sum
from autoshard.torch_private.dtensor import DTensorSpec, random_ops

Arguments = tuple[Any, ...]
Options = dict[str, Any]


def scalar_item(x: DTensor) -> Any:
    """``x.item()`` of a DTensor of a sharded module."""
    return x.item() if x.ndim else _scalar_value(aten._local_scalar_dense.default, (x,), {})


@handles(aten._local_scalar_dense.default, aten._is_any_true.default)  # the latter: anomaly mode
def _scalar_value(op: Any, args: Arguments, kwargs: Options) -> Any:
    """``x.item()``, all-reduced: DTensor's own returns the local partial sum."""
    x = args[0]
    spec = x._spec
    partial = [(i, p) for i, p in enumerate(spec.placements) if p.is_partial()]
    plain = all(type(p) is Partial and p.reduce_op in ("sum", "avg") for _, p in partial)
    if x.ndim or is_owned(x) or not plain or x.dtype not in (torch.float32, torch.float64):
        with torch.no_grad():
            return op(x.full_tensor())
    total = x._local_tensor.clone() if partial else x._local_tensor
    for i, p in partial:
        all_reduce_sum(total, spec.mesh.get_group(i)).wait()
        if p.reduce_op == "avg":
            total /= spec.mesh.size(i)
    return total.item()


@handles(aten.detach.default)
def _detach(op: Any, args: Arguments, kwargs: Options) -> Any:
    """``detach`` without DTensor's sharding propagation: autograd calls it for every gradient."""
    x = args[0]
    return module_dtensor(x._local_tensor.detach(), x._spec)


@handles(aten.pow_.Scalar, aten.fill_.Scalar, aten._foreach_mul_.List)  # Adafactor
def _in_place_on_summed(op: Any, args: Arguments, kwargs: Options) -> Any:
    """An in-place op on partial sums, all-reduced first: DTensor refuses them (norms of shards)."""
    for x in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
        if isinstance(x, DTensor):
            sum_partial(x)
    return (_foreach if isinstance(args[0], list | tuple) else run_as_dtensor)(op, args, kwargs)


@handles(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale_on_shards(op: Any, args: Arguments, kwargs: Options) -> None:
    """Unscale shards; :func:`~autoshard.module.optimizers.patch_grad_scaler` combines findings."""
    given, found, inverse = args
    parts = [g.to_local() if isinstance(g, DTensor) else g for g in given]  # sparse ones: values
    op([x._values() if x.is_sparse else x for x in parts], found, inverse, **kwargs)


@handles("foreach")
def _foreach(op: Any, args: Arguments, kwargs: Options) -> Any:
    """An op on lists: on shards if they lie alike; plain tensors in them count as replicated."""
    made = on_shards(op, args, kwargs)
    if made is not NotImplemented:
        return made
    mesh = next(x for x in tensors_of(args, kwargs) if isinstance(x, DTensor)).device_mesh
    rows = [x for x in args if isinstance(x, list | tuple) and any(isinstance(y, DTensor) for y in x)]
    own = [[as_dtensor_on(mesh, y) for y in x] if any(x is row for row in rows) else x for x in args]
    return run_as_dtensor(op, tuple(own), kwargs)


@handles(aten._foreach_norm.Scalar)
def _norms(op: Any, args: Arguments, kwargs: Options) -> Any:
    """One after the other where DTensor lacks a layout: no two full tensors at once."""
    if all(has_torch_layout(x._spec) for x in args[0] if isinstance(x, DTensor)):
        return _foreach(op, args, kwargs)
    order, dtype = args[1] if len(args) > 1 else 2, kwargs.get("dtype")
    return [aten.linalg_vector_norm.default(x, order, None, False, dtype=dtype) for x in args[0]]


@handles(aten.linalg_vector_norm.default)
def _norm(op: Any, args: Arguments, kwargs: Options) -> Any:
    """The norm of all elements, whose order does not matter: segments count as plain shards."""
    x, spec = args[0], args[0]._spec
    if _rounds_parts(args):
        return run_on_full(op, args, kwargs)
    if is_owned(x) or (len(args) > 2 and args[2]):
        return run_as_dtensor(op, args, kwargs)
    placements = tuple([Shard(p.dim) if hasattr(p, "split_factor") else p for p in spec.placements])
    plain = DTensorSpec(spec.mesh, placements, spec.tensor_meta)
    return run_as_dtensor(op, (module_dtensor(x._local_tensor, plain), *args[1:]), kwargs)


@handles(aten.mm.default, aten.addmm.default)
def _product(op: Any, args: Arguments, kwargs: Options) -> Any:
    """A product of matrices, as Muon's iteration has it; replicated if parts would be rounded."""
    return (run_on_full if _rounds_parts(args) else run_as_dtensor)(op, args, kwargs)


def _rounds_parts(args: Sequence[Any]) -> bool:
    """Whether an operand is sharded in half precision: sums of parts round otherwise."""
    given = [x for x in args if isinstance(x, DTensor)]
    return any(x.dtype.itemsize == 2 and not all(p.is_replicate() for p in x._spec.placements) for x in given)


@handles(aten.index_put_.default)
def _write_elements(op: Any, args: Arguments, kwargs: Options) -> Any:
    """On local shards, if a mask lies as the tensor does; else on the full tensor."""
    (mask, *others) = args[1]
    masked = not others and mask.dtype == torch.bool
    made = on_shards(op, args, kwargs) if masked else NotImplemented
    if made is NotImplemented:
        with torch.no_grad():
            write_full(op, args, kwargs)
    return args[0]


@handles(aten.cat.default, aten.stack.default)
def _cat_or_stack(op: Any, args: Arguments, kwargs: Options) -> Any:
    """``cat`` and ``stack`` with plain tensors, which count as replicated (autograd makes zeros for
    unused results of ``split``). Scalars without gradient turn plain."""
    numbers = not any(x.ndim or (x.requires_grad and torch.is_grad_enabled()) for x in args[0])
    if numbers and not all(isinstance(x, DTensor) for x in args[0]):
        with torch.no_grad():
            return op([full_if_dtensor(x) for x in args[0]], *args[1:], **kwargs)
    mesh = next(x for x in args[0] if isinstance(x, DTensor)).device_mesh
    given = [as_dtensor_on(mesh, x if isinstance(x, DTensor) else with_plain_gradient(x)) for x in args[0]]
    return run_as_dtensor(op, (given, *args[1:]), kwargs)


@handles(aten.copy_.default, aten.fill_.Tensor)
def _copy_or_fill(op: Any, args: Arguments, kwargs: Options) -> Any:
    """``x[…] = y``, after the view of ``x`` was taken."""
    x, new = args[:2]
    if not isinstance(x, DTensor):
        x.copy_(new.full_tensor())
        return x
    if not isinstance(new, DTensor) and new.ndim:  # plain: the full tensor
        with torch.no_grad():
            write_full(op, args, kwargs)
        return x
    if op is aten.fill_.Tensor:
        sum_partial(x)
        op(x.to_local(), full_if_dtensor(new))
        return x
    return run_as_dtensor(op, args, kwargs)


@handles(aten.set_.source_Tensor, aten.set_.default)
def _set_storage(op: Any, args: Arguments, kwargs: Options) -> Any:
    """``x.set_(y)`` as ``x.data = y``."""
    if len(args) < 2:
        raise LayoutError("set_() without a tensor would leave a parameter of a sharded module without data")
    args[0].data = args[1]
    return args[0]


_MORE_RANDOM_OPS = (aten.exponential_, aten.geometric_, aten.log_normal_)
"""ops that torch classifies as pointwise"""


@handles(*random_ops, *(packet.default for packet in _MORE_RANDOM_OPS))
def _draw_on_full(op: Any, args: Arguments, kwargs: Options) -> Any:
    """Draw the full tensor, as on one device, with the generator state of the first rank, in the
    layout of the first operand: on CPUs DTensor's replicas may differ, and shards repeat."""
    like: DTensor = args[0]
    if is_owned(like):
        return run_as_dtensor(op, args, kwargs)
    writes = op._schema.name.endswith("_")
    blank = writes or "_like" in op._schema.name  # strides matter, as they decide the order of draws
    own, named = map_operands(_blank if blank else full_if_dtensor, args, kwargs)
    with first_rank_generator(like, named.get("generator")):
        made = op(*own, **named)
    if writes:
        store_full(like, made)
        return like
    return pytree.tree_map_only(Tensor, lambda x: shard_full(x, like._spec), made)


def _blank(x: Any) -> Any:
    """A full tensor like a DTensor, without values."""
    if not isinstance(x, DTensor):
        return x
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x._local_tensor.device)


_FACTORY_NAMES = "arange eye full linspace logspace normal ones rand randint randn randperm zeros".split()


# with ``out=`` (``init.eye_``) DTensor would make the shard as large as the full tensor
handles(
    *(
        op
        for packet in (getattr(aten, name) for name in _FACTORY_NAMES)
        for op in (getattr(packet, name) for name in packet.overloads() if name.endswith("out"))
        if sum("Tensor" in str(a.type) for a in op._schema.arguments) == 1
    )
)(run_on_full)


@handles(*VIEWS_IN_PLACE)
def _view_in_place(op: Any, args: Arguments, kwargs: Options) -> Any:
    """``x.transpose_(0, 1)``: DTensor changes the shard or the shape, not both."""
    x, view = args[0], VIEWS_IN_PLACE[op]
    if x.gathers:
        name = view.overloadpacket.__name__
        raise LayoutError(
            f"{name}_() changes the shape of a sharded output ({list(x.shape)}): use the result of {name}()"
        )
    made = view(*args, **kwargs)
    set_data(x, made)
    if "_of" in x.__dict__:
        x.__dict__["_of"] = made.__dict__["_of"]
    return x


@handles("view")
def _view(op: Any, args: Arguments, kwargs: Options) -> Any:
    """A view; where DTensor has gathered, a copy whose writes reach its source."""
    x, made = args[0], run_as_dtensor(op, args, kwargs)
    each = made[0] if isinstance(made, list | tuple) and made else made
    kept = isinstance(x, ModuleDTensor) and not x.gathers and x.grad_fn is None and type(x._local_tensor) is Tensor
    if kept and isinstance(each, ModuleDTensor):
        own, other = (y._local_tensor.untyped_storage()._cdata for y in (x, each))
        if own != other or any(p.is_partial() for p in x._spec.placements):  # a sum has no values of its own yet
            record_view_source(x, made, op, args[1:])
    return made
