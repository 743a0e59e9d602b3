"""Patches of torch's DTensor: operations it computes wrongly, refuses or is slow at, and pickling.

DTensors on meshes without a sharded module are left alone. DTensors of others on an equal mesh
cannot be told apart, since DTensor gives the result of one the mesh of the other: patched is what
torch refuses, or computes of one shard only.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim import _muon

from autoshard.aten import aten
from autoshard.errors import LayoutError
from autoshard.module.dtensors.fallback import (
    OUT_FACTORIES,
    foreach_ops,
    patch_missing_ops,
    pointwise_ops,
    replicate_plain_tensors,
    run_on_full,
)
from autoshard.module.dtensors.from_local import full_if_dtensor, new_dtensor, replicated_dtensor
from autoshard.module.dtensors.random_ops import RANDOM_OPS, draw_on_full
from autoshard.module.dtensors.segments import patch_checkpoint_chunks, patch_strided_shard
from autoshard.module.dtensors.table_wise import is_owned
from autoshard.module.dtensors.views import (
    VIEW_OPS,
    ViewCopy,
    record_view_copy,
    replicated_on,
    write_full,
    write_through_view,
)
from autoshard.runtime.transport.process_group import all_reduce_sum
from autoshard.torch_private.dtensor import op_dispatcher

_VALUE_READERS = "numpy tolist __array__ __dlpack__".split()
_STORAGE_READERS = "storage share_memory_".split()
"""methods that read a storage, which DTensors lack; safetensors calls ``storage``"""


def patch_serialization(is_ours: Callable[[object], bool], is_whole: Callable[[DTensor], bool]) -> None:
    """Serialize DTensors of sharded modules as plain tensors if ``is_whole``; refuse others."""
    of: Any = DTensor
    reduced, at, shared = of.__reduce_ex__, of.data_ptr, of.share_memory_

    def plain(x: DTensor, allowed: bool) -> torch.Tensor:
        if not allowed:
            raise LayoutError(
                f"rank {dist.get_rank()} is about to save, or to hand to something other than torch, a tensor of shape "
                f"{list(x.shape)} of which it holds {list(x._local_tensor.shape)} ({x.placements}). Save "
                "sharded.full_state_dict() and autoshard.full_optimizer_state_dict(sharded, optimizer) on one rank, or "
                "state_dict() with torch.distributed.checkpoint; of single tensors take .full_tensor() on every rank."
            )
        return x._local_tensor.detach()

    def reduce_ex(x: DTensor, protocol: Any) -> Any:
        if not is_ours(x):
            return reduced(x, protocol)
        whole = plain(x, is_whole(x)).requires_grad_(x.requires_grad)
        return (nn.Parameter(whole, x.requires_grad) if isinstance(x, nn.Parameter) else whole).__reduce_ex__(protocol)

    def copied(x: DTensor) -> Any:
        """``copy.copy`` within this process."""
        rebuild, args = reduced(x, 4)
        return rebuild(*args)

    def reading(read: Callable[..., Any], of_whole: bool) -> Callable[..., Any]:
        def wrapped(x: DTensor, *args: Any, **kwargs: Any) -> Any:
            ours = type(x) in (DTensor, ViewCopy) and is_ours(x)  # outputs gather
            if ours and read is shared:
                raise LayoutError(
                    f"share_memory() of a tensor of shape {list(x.shape)} of a sharded module, of which rank {dist.get_rank()} "
                    f"holds {list(x._local_tensor.shape)} ({x.placements}): other processes could not use it. Share the "
                    "tensors of sharded.full_state_dict(); a module of its own in this process is copy.deepcopy(sharded)."
                )
            return read(plain(x, of_whole and is_whole(x)) if ours else x, *args, **kwargs)

        return wrapped

    of.__reduce_ex__, of.__copy__ = reduce_ex, copied
    of.data_ptr = lambda x: 0 if is_ours(x) else at(x)  # torch adds the local tensor's offset to 0
    for name in (*_VALUE_READERS, *_STORAGE_READERS):
        setattr(of, name, reading(getattr(of, name), name in _VALUE_READERS))


OpHandler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_GETS_PLAIN_GRADIENT = "_autoshard_takes_plain"
"""marks a trained plain scalar that has the hook"""


def patch_mixed_numbers(
    ops: Iterable[Any],
    is_ours: Callable[[object], bool],
    handle: Callable[[Any, OpHandler], None],
    as_it_was: OpHandler,
) -> None:
    """Convert gradients of ``ops`` to the kind of each operand, for DTensors with ``is_ours``.

    ``handle`` installs an op handler; ``as_it_was`` is DTensor's own.
    """

    def beside_plain(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _match_gradient_kinds(args, result_is_plain=False)
        return as_it_was(op, args, kwargs)

    for op in ops:
        handle(op, beside_plain)
    of: Any = type(op_dispatcher)
    tail = of._dispatch_fast_path_python_tail  # in-place ops, among others

    def written(dispatcher: Any, op: Any, args: tuple[Any, ...], *more: Any) -> Any:
        into_plain = bool(args) and type(args[0]) is torch.Tensor and op._schema.is_mutable
        if into_plain or torch.is_grad_enabled():
            _match_gradient_kinds(args, into_plain)
        # a scalar's shard is the scalar, and is already written
        return args[0] if into_plain else tail(dispatcher, op, args, *more)

    of._dispatch_fast_path_python_tail = written


def _match_gradient_kinds(args: tuple[Any, ...], result_is_plain: bool) -> None:
    for x in args:
        if isinstance(x, torch.Tensor) and x.requires_grad and isinstance(x, DTensor) is result_is_plain:
            if isinstance(x, DTensor):
                _with_dtensor_gradient(x)
            else:
                with_plain_gradient(x)


def with_plain_gradient(x: torch.Tensor) -> torch.Tensor:
    """``x``, a plain scalar, such that DTensor gradients of it become plain."""
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(_gather_gradients)  # not a tensor hook: those are the user's
    elif x.requires_grad and not hasattr(x, _GETS_PLAIN_GRADIENT):
        x.register_hook(full_if_dtensor)
        setattr(x, _GETS_PLAIN_GRADIENT, True)
    return x


def _gather_gradients(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple([full_if_dtensor(g) for g in gradients])


def _with_dtensor_gradient(x: DTensor) -> None:
    """``x`` is written into a plain scalar: its gradient arrives plain and becomes a DTensor."""

    def whole(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            [g if g is None or isinstance(g, DTensor) else replicated_dtensor(x._spec.mesh, g) for g in gradients]
        )

    if x.grad_fn is not None:
        x.grad_fn.register_prehook(whole)


_FUSED_STEP_OPS = (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_)


_MODULE_MESHES: set[DeviceMesh] = set()
"""meshes of sharded modules: torch handles DTensors on other meshes"""


_STAGE_MESHES: set[DeviceMesh] = set()
"""the subset that has the ranks of one pipeline stage"""


def patch_dtensor(mesh: DeviceMesh, of_stage: bool = False) -> None:
    """Install the patches for DTensors on ``mesh``; ``of_stage``: it has one stage's ranks only."""
    _MODULE_MESHES.add(mesh)
    if of_stage:
        _STAGE_MESHES.add(mesh)
    _patch_dtensor_once()


def is_module_dtensor(x: object) -> TypeGuard[DTensor]:
    """Whether ``x`` is a DTensor on the mesh of a sharded module."""
    return isinstance(x, DTensor) and (x._spec.mesh in _MODULE_MESHES or is_owned(x))


def _is_full_on_every_rank(x: DTensor) -> bool:
    """Whether every rank of the module holds the full ``x``, a DTensor of ours."""
    whole = all(p.is_replicate() for p in x.placements)
    return whole and not is_owned(x) and x._spec.mesh not in _STAGE_MESHES


@functools.cache
def _patch_dtensor_once() -> None:
    for op in (aten._local_scalar_dense.default, aten._is_any_true.default):  # the latter: anomaly mode
        _install_handler(op, _scalar_value)
    _install_handler(aten.detach.default, _detach_op)
    for op in (aten.pow_.Scalar, aten._foreach_mul_.List):  # Adafactor
        _install_handler(op, _in_place_on_summed)
    for packet in _FUSED_STEP_OPS:
        for name in packet.overloads():
            _install_handler(getattr(packet, name), _fused_step_on_shards)
    for op in (aten.index_put_.default, aten._foreach_copy_.default):
        _install_handler(op, _write_on_shards)
    for op in (aten.cat.default, aten.stack.default):
        _install_handler(op, _cat_or_stack)
    for op in VIEW_OPS:
        _install_handler(op, _view_op)
    for op in RANDOM_OPS:
        _install_handler(op, _random_op)
    for op in (aten.copy_.default, aten.fill_.Tensor):
        _install_handler(op, _copy_or_fill)
    for op in (aten.set_.source_Tensor, aten.set_.default):
        _install_handler(op, _set_storage)
    _install_handler(aten._amp_foreach_non_finite_check_and_unscale_.default, _unscale_on_shards)
    for op in OUT_FACTORIES:
        _install_handler(op, run_on_full)
    for op in foreach_ops() - _ORIGINAL_HANDLERS.keys():
        _install_handler(op, _foreach_op)
    patch_checkpoint_chunks()
    patch_strided_shard()
    patch_missing_ops(lambda x: is_module_dtensor(x) and not is_owned(x))
    patch_mixed_numbers(pointwise_ops(), is_module_dtensor, _install_handler, _original_op)
    patch_serialization(is_module_dtensor, _is_full_on_every_rank)
    DTensor.__format__ = _format_scalar  # type: ignore[assignment, method-assign]
    DTensor.data = property(torch.Tensor.data.__get__, _set_data)  # type: ignore[assignment, attr-defined]
    _muon._zeropower_via_newtonschulz = _muon_on_full_matrix(_muon._zeropower_via_newtonschulz)


_ORIGINAL_HANDLERS: dict[Any, OpHandler | None] = {}
"""torch's own op handlers"""


def _install_handler(op: Any, handler: OpHandler) -> None:
    handlers: dict[Any, Any] = op_dispatcher._custom_op_handlers
    _ORIGINAL_HANDLERS[op] = handlers.get(op)

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = (*args, *kwargs.values()) if kwargs else args
        ours = any(
            any(map(is_module_dtensor, x)) if isinstance(x, list | tuple) else is_module_dtensor(x) for x in given
        )
        return (handler if ours else _original_op)(op, args, kwargs)

    handlers[op] = handle


def _original_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` by DTensor's own handler."""
    before, handlers = _ORIGINAL_HANDLERS[op], op_dispatcher._custom_op_handlers
    if before is not None:
        return before(op, args, kwargs)
    ours = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = ours


def _format_scalar(x: DTensor, spec: str) -> str:
    """``f"{loss:.3f}"`` of a scalar DTensor, which Tensor's own refuses. No communication."""
    if not spec or x.ndim or not is_module_dtensor(x):
        return object.__format__(x, spec)
    if any(p.is_partial() for p in x.placements):
        raise LayoutError(
            f"a number whose summands lie on the ranks ({x.placements}) is formatted: take its .item() on every rank before"
        )
    return format(x.detach().item(), spec)


def _set_data(x: DTensor, new: torch.Tensor) -> None:
    """``x.data = new``: torch sets the data of the outer tensor only, and the write is lost."""
    if not is_module_dtensor(x):
        torch.Tensor.data.__set__(x, new)  # type: ignore[attr-defined]
        return
    if not isinstance(new, DTensor):
        new = distribute_tensor(new.detach(), x.device_mesh, x.placements, src_data_rank=None)
    torch.Tensor.data.__set__(x, new)  # type: ignore[attr-defined]
    x._local_tensor, x._spec = new._local_tensor.detach(), new._spec


def _set_storage(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.set_(y)`` as ``x.data = y``."""
    if len(args) < 2:
        raise LayoutError("set_() without a tensor would leave a parameter of a sharded module without data")
    _set_data(args[0], args[1])
    return args[0]


def _muon_on_full_matrix(orthogonal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Run Muon's iteration on full matrices: on shards bfloat16 would round differently."""

    def wrapped(gradient: torch.Tensor, *args: Any) -> torch.Tensor:
        if not is_module_dtensor(gradient):
            return orthogonal(gradient, *args)
        made = orthogonal(gradient.full_tensor(), *args)
        return distribute_tensor(made, gradient.device_mesh, gradient.placements, src_data_rank=None)

    return wrapped


def _write_on_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A pointwise in-place op on local shards, if operands that belong together have one layout."""
    first, *others = ([x] if isinstance(x, torch.Tensor) else x for x in args[:3] if not isinstance(x, bool))
    layouts = [(x.placements, x.shape) if isinstance(x, DTensor) else None for x in first]
    together = not any(p.is_partial() for x in layouts if x is not None for p in x[0])
    for group in others:
        for x, layout in zip(group, layouts, strict=False):
            mask = op is not aten.index_put_.default or not x.ndim or x.dtype == torch.bool
            given = (x.placements, x.shape) if isinstance(x, DTensor) else None
            together &= mask and (given == layout or (given is None and not x.ndim))
    if not together and op is aten.index_put_.default:
        with torch.no_grad():
            write_full(op, args, kwargs)
        return args[0]
    if not together:
        return _original_op(op, args, kwargs)
    own, named = pytree.tree_map_only(DTensor, lambda x: x.to_local(), (args, kwargs))
    op(*own, **named)
    return args[0] if isinstance(args[0], torch.Tensor) else None


def _foreach_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A ``foreach`` op; plain tensors in its lists count as replicated."""
    with replicate_plain_tensors(args):
        return _original_op(op, args, kwargs)


def _cat_or_stack(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``cat`` and ``stack`` with plain tensors, which count as replicated.

    Autograd makes plain zeros for unused results of ``split``. Scalars without gradient turn plain.
    """
    numbers = not any(x.ndim or (x.requires_grad and torch.is_grad_enabled()) for x in args[0])
    if numbers and not all(isinstance(x, DTensor) for x in args[0]):
        with torch.no_grad():
            return op([x.full_tensor() if isinstance(x, DTensor) else x for x in args[0]], *args[1:], **kwargs)
    mesh = next(x for x in args[0] if isinstance(x, DTensor)).device_mesh
    given = [x if isinstance(x, DTensor) else replicated_on(mesh, with_plain_gradient(x)) for x in args[0]]
    return _original_op(op, (given, *args[1:]), kwargs)


def _view_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return record_view_copy(args[0], _original_op(op, args, kwargs), op, args[1:])


def _random_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (_original_op if is_owned(args[0]) else draw_on_full)(op, args, kwargs)


def _copy_or_fill(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[…] = y``, after the view of ``x`` was taken."""
    x = args[0]
    if write_through_view(op, args, kwargs):
        return x
    if not isinstance(args[1], DTensor) and args[1].ndim:  # plain: the full tensor
        with torch.no_grad():
            write_full(op, args, kwargs)
        return x
    if op is aten.fill_.Tensor and isinstance(x, DTensor) and not any(p.is_partial() for p in x.placements):
        op(x.to_local(), *pytree.tree_map_only(DTensor, lambda y: y.full_tensor(), args[1:]))
        return x
    return _original_op(op, args, kwargs)


def scalar_item(x: DTensor) -> Any:
    """``x.item()`` of a DTensor of a sharded module."""
    return x.item() if x.ndim else _scalar_value(aten._local_scalar_dense.default, (x,), {})


def _scalar_value(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.item()``, all-reduced: DTensor's own returns the local partial sum."""
    x = args[0]
    spec = x._spec
    summed = [(i, p) for i, p in enumerate(spec.placements) if p.is_partial()]
    plain = all(type(p) is Partial and p.reduce_op in ("sum", "avg") for _, p in summed)
    if x.ndim or is_owned(x) or not plain or x.dtype not in (torch.float32, torch.float64):
        with torch.no_grad():
            return op(x.full_tensor())
    total = x._local_tensor.clone() if summed else x._local_tensor
    for i, p in summed:
        all_reduce_sum(total, spec.mesh.get_group(i)).wait()
        if p.reduce_op == "avg":
            total /= spec.mesh.size(i)
    return total.item()


def _detach_op(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``detach`` without DTensor's sharding propagation: autograd calls it for every gradient."""
    x = args[0]
    return new_dtensor(DTensor, x._local_tensor.detach(), x._spec, requires_grad=False)


def _in_place_on_summed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An in-place op on partial sums, all-reduced first: DTensor refuses them (norms of shards)."""
    for x in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
        if any(p.is_partial() for p in x.placements):
            whole = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
            x._local_tensor, x._spec = whole._local_tensor, whole._spec
    return _original_op(op, args, kwargs)


def _fused_step_on_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fused optimizer step on local shards, if gradients and states have the parameter layouts.
    DTensor would build and compare a layout for each of them in every step."""
    specs = [_map_tensors(x, _SPEC_OF, _NDIM_OF) for x in args if isinstance(x, list | tuple) and x]
    if specs != _LAST_STEP_SPECS.get(op):
        if not _have_equal_layouts(*specs):
            return _original_op(op, args, kwargs)
        _LAST_STEP_SPECS[op] = specs
    parts = [_map_tensors(x, _LOCAL_TENSOR_OF, None) if isinstance(x, list | tuple) else x for x in args]
    binding = getattr(torch, op.overloadpacket.__name__)  # takes lists faster than ``op``
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        return binding(*parts, **kwargs)


_SPEC_OF, _LOCAL_TENSOR_OF, _NDIM_OF = map(operator.attrgetter, ("_spec", "_local_tensor", "ndim"))


def _map_tensors(
    xs: Sequence[Any], of_dtensor: Callable[[Any], Any], of_plain: Callable[[Any], Any] | None
) -> list[Any]:
    """Map every tensor (None: identity); without a Python call each if all or none are DTensors."""
    kinds = {issubclass(kind, DTensor) for kind in {*map(type, xs)}}
    if len(kinds) > 1:
        return [_map_tensors([x], of_dtensor, of_plain)[0] for x in xs]
    of = of_dtensor if True in kinds else of_plain
    return [*xs] if of is None else [*map(of, xs)]


_LAST_STEP_SPECS: dict[Any, Sequence[Sequence[Any]]] = {}
"""specs in the last fused step; they seldom change, and lists of the same objects compare fast"""


def _have_equal_layouts(first: Sequence[Any], *others: Sequence[Any]) -> bool:
    """Whether gradients and states are sharded as the parameters; scalars (step counts) replicated.

    Plain tensors are represented by their number of dims.
    """
    if any(isinstance(spec, int) or any(p.is_partial() for p in spec.placements) for spec in first):
        return False
    return all(
        own == 0 if isinstance(own, int) else own.mesh is spec.mesh and own.placements == spec.placements
        for specs in others
        for own, spec in zip(specs, first, strict=False)
    )


def _unscale_on_shards(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale shards; :func:`~autoshard.module.optimizers.patch_grad_scaler` combines findings."""
    given, found, inverse = args
    parts = [g.to_local() if isinstance(g, DTensor) else g for g in given]  # sparse ones: values
    op([x._values() if x.is_sparse else x for x in parts], found, inverse, **kwargs)
