"""Patches of torch's DTensor: ops that it computes wrongly, refuses, or is slow at.

DTensors on meshes without a sharded module are not affected. Users' DTensors on an equal mesh
cannot be distinguished: results may have either mesh. So only what torch refuses or computes
wrongly is patched.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor
from torch.optim import _muon

from autoshard.aten import aten
from autoshard.errors import LayoutError
from autoshard.module.dtensors.chunks import mend_checkpoints
from autoshard.module.dtensors.draws import DRAWS, drawn
from autoshard.module.dtensors.files import mend_files
from autoshard.module.dtensors.made import new_dtensor
from autoshard.module.dtensors.missing import FACTORIES, lists, mend_missing, of_elements, of_whole, plain_is_whole
from autoshard.module.dtensors.mixed import Handler, mend_mixed, take_plain_gradient
from autoshard.module.dtensors.owned import is_owned
from autoshard.module.dtensors.strided import mend_strided
from autoshard.module.dtensors.views import VIEWS, indexed, set_through, set_whole, whole_on
from autoshard.runtime.transport.work import all_reduce_sum

_FUSED = (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_)


_MESHES: set[DeviceMesh] = set()
"""meshes of sharded modules: torch handles DTensors on other meshes"""


_OF_STAGES: set[DeviceMesh] = set()
"""the subset that has the ranks of one pipeline stage"""


def mend(mesh: DeviceMesh, of_stage: bool = False) -> None:
    """Install the patches for DTensors on ``mesh``; ``of_stage``: it has one stage's ranks only."""
    _MESHES.add(mesh)
    if of_stage:
        _OF_STAGES.add(mesh)
    _mend()


def is_ours(x: object) -> TypeGuard[DTensor]:
    """Whether ``x`` is a DTensor on the mesh of a sharded module."""
    return isinstance(x, DTensor) and (x._spec.mesh in _MESHES or is_owned(x))


def _is_whole(x: DTensor) -> bool:
    """Whether every rank of the module holds the full ``x``, a DTensor of ours."""
    whole = all(p.is_replicate() for p in x.placements)
    return whole and not is_owned(x) and x._spec.mesh not in _OF_STAGES


@functools.cache
def _mend() -> None:
    for op in (aten._local_scalar_dense.default, aten._is_any_true.default):  # the latter: anomaly mode
        _handle(op, _number)
    _handle(aten.detach.default, _detach)
    for op in (aten.pow_.Scalar, aten._foreach_mul_.List):  # Adafactor
        _handle(op, _on_whole)
    for packet in _FUSED:
        for name in packet.overloads():
            _handle(getattr(packet, name), _step_on_parts)
    for op in (aten.index_put_.default, aten._foreach_copy_.default):
        _handle(op, _on_parts)
    for op in (aten.cat.default, aten.stack.default):
        _handle(op, _with_zeros)
    for op in VIEWS:
        _handle(op, _view)
    for op in DRAWS:
        _handle(op, _draw)
    for op in (aten.copy_.default, aten.fill_.Tensor):
        _handle(op, _set)
    for op in (aten.set_.source_Tensor, aten.set_.default):
        _handle(op, _set_storage)
    _handle(aten._amp_foreach_non_finite_check_and_unscale_.default, _unscale)
    for op in FACTORIES:
        _handle(op, of_whole)
    for op in lists() - _BEFORE.keys():
        _handle(op, _each_alone)
    mend_checkpoints()
    mend_strided()
    mend_missing(lambda x: is_ours(x) and not is_owned(x))
    mend_mixed(of_elements(), is_ours, _handle, _as_it_was)
    mend_files(is_ours, _is_whole)
    DTensor.__format__ = _format  # type: ignore[assignment, method-assign]
    DTensor.data = property(torch.Tensor.data.__get__, _set_data)  # type: ignore[assignment, attr-defined]
    _muon._zeropower_via_newtonschulz = _whole_matrix(_muon._zeropower_via_newtonschulz)


_BEFORE: dict[Any, Handler | None] = {}
"""torch's own op handlers"""


def _handle(op: Any, handler: Handler) -> None:
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    _BEFORE[op] = handlers.get(op)

    def handle(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = (*args, *kwargs.values()) if kwargs else args
        ours = any(any(map(is_ours, x)) if isinstance(x, list | tuple) else is_ours(x) for x in given)
        return (handler if ours else _as_it_was)(op, args, kwargs)

    handlers[op] = handle


def _as_it_was(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``op`` by DTensor's own handler."""
    before, handlers = _BEFORE[op], DTensor._op_dispatcher._custom_op_handlers
    if before is not None:
        return before(op, args, kwargs)
    ours = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = ours


def _format(x: DTensor, spec: str) -> str:
    """``f"{loss:.3f}"`` of a scalar DTensor, which Tensor's own refuses. No communication."""
    if not spec or x.ndim or not is_ours(x):
        return object.__format__(x, spec)
    if any(p.is_partial() for p in x.placements):
        raise LayoutError(
            f"a number whose summands lie on the ranks ({x.placements}) is formatted: take its .item() on every rank before"
        )
    return format(x.detach().item(), spec)


def _set_data(x: DTensor, new: torch.Tensor) -> None:
    """``x.data = new``: torch sets the data of the outer tensor only, and the write is lost."""
    if not is_ours(x):
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


def _whole_matrix(orthogonal: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Run Muon's iteration on full matrices: on shards bfloat16 would round differently."""

    def wrapped(gradient: torch.Tensor, *args: Any) -> torch.Tensor:
        if not is_ours(gradient):
            return orthogonal(gradient, *args)
        made = orthogonal(gradient.full_tensor(), *args)
        return distribute_tensor(made, gradient.device_mesh, gradient.placements, src_data_rank=None)

    return wrapped


def _on_parts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
            set_whole(op, args, kwargs)
        return args[0]
    if not together:
        return _as_it_was(op, args, kwargs)
    own, named = pytree.tree_map_only(DTensor, lambda x: x.to_local(), (args, kwargs))
    op(*own, **named)
    return args[0] if isinstance(args[0], torch.Tensor) else None


def _each_alone(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A ``foreach`` op; plain tensors in its lists count as replicated."""
    with plain_is_whole(args):
        return _as_it_was(op, args, kwargs)


def _with_zeros(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``cat`` and ``stack`` with plain tensors, which count as replicated.

    Autograd makes plain zeros for unused results of ``split``. Scalars without gradient turn plain.
    """
    numbers = not any(x.ndim or (x.requires_grad and torch.is_grad_enabled()) for x in args[0])
    if numbers and not all(isinstance(x, DTensor) for x in args[0]):
        with torch.no_grad():
            return op([x.full_tensor() if isinstance(x, DTensor) else x for x in args[0]], *args[1:], **kwargs)
    mesh = next(x for x in args[0] if isinstance(x, DTensor)).device_mesh
    given = [x if isinstance(x, DTensor) else whole_on(mesh, take_plain_gradient(x)) for x in args[0]]
    return _as_it_was(op, (given, *args[1:]), kwargs)


def _view(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return indexed(args[0], _as_it_was(op, args, kwargs), op, args[1:])


def _draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return (_as_it_was if is_owned(args[0]) else drawn)(op, args, kwargs)


def _set(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x[…] = y``, after the view of ``x`` was taken."""
    x = args[0]
    if set_through(op, args, kwargs):
        return x
    if not isinstance(args[1], DTensor) and args[1].ndim:  # plain: the full tensor
        with torch.no_grad():
            set_whole(op, args, kwargs)
        return x
    if op is aten.fill_.Tensor and isinstance(x, DTensor) and not any(p.is_partial() for p in x.placements):
        op(x.to_local(), *pytree.tree_map_only(DTensor, lambda y: y.full_tensor(), args[1:]))
        return x
    return _as_it_was(op, args, kwargs)


def item(x: DTensor) -> Any:
    """``x.item()`` of a DTensor of a sharded module."""
    return x.item() if x.ndim else _number(aten._local_scalar_dense.default, (x,), {})


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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


def _detach(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``detach`` without DTensor's sharding propagation: autograd calls it for every gradient."""
    x = args[0]
    return new_dtensor(DTensor, x._local_tensor.detach(), x._spec, requires_grad=False)


def _on_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An in-place op on partial sums, all-reduced first: DTensor refuses them (norms of shards)."""
    for x in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
        if any(p.is_partial() for p in x.placements):
            whole = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
            x._local_tensor, x._spec = whole._local_tensor, whole._spec
    return _as_it_was(op, args, kwargs)


def _step_on_parts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A fused optimizer step on local shards, if gradients and states have the parameter layouts.
    DTensor would build and compare a layout for each of them in every step."""
    specs = [_each(x, _SPEC, _NDIM) for x in args if isinstance(x, list | tuple) and x]
    if specs != _STEPPED.get(op):
        if not _alike(*specs):
            return _as_it_was(op, args, kwargs)
        _STEPPED[op] = specs
    parts = [_each(x, _LOCAL, None) if isinstance(x, list | tuple) else x for x in args]
    binding = getattr(torch, op.overloadpacket.__name__)  # takes lists faster than ``op``
    with torch.no_grad() if torch.is_grad_enabled() else contextlib.nullcontext():
        return binding(*parts, **kwargs)


_SPEC, _LOCAL, _NDIM = map(operator.attrgetter, ("_spec", "_local_tensor", "ndim"))


def _each(xs: Sequence[Any], of_dtensor: Callable[[Any], Any], of_plain: Callable[[Any], Any] | None) -> list[Any]:
    """Map every tensor (None: identity); without a Python call each if all or none are DTensors."""
    kinds = {issubclass(kind, DTensor) for kind in {*map(type, xs)}}
    if len(kinds) > 1:
        return [_each([x], of_dtensor, of_plain)[0] for x in xs]
    of = of_dtensor if True in kinds else of_plain
    return [*xs] if of is None else [*map(of, xs)]


_STEPPED: dict[Any, Sequence[Sequence[Any]]] = {}
"""specs in the last fused step; they seldom change, and lists of the same objects compare fast"""


def _alike(first: Sequence[Any], *others: Sequence[Any]) -> bool:
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


def _unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale shards; :func:`~autoshard.module.gradients.one_verdict` combines findings."""
    given, found, inverse = args
    parts = [g.to_local() if isinstance(g, DTensor) else g for g in given]  # sparse ones: values
    op([x._values() if x.is_sparse else x for x in parts], found, inverse, **kwargs)
