"""Outputs that stay sharded: DTensors that also work with plain tensors, such as labels."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor

from autoshard.module.dtensors.made import new_dtensor, ones_of
from autoshard.module.dtensors.missing import GATHERED
from autoshard.module.dtensors.on_parts import on_parts
from autoshard.module.dtensors.ops import item
from autoshard.module.dtensors.strided import cuts
from autoshard.module.dtensors.trusted import lacks_gradient
from autoshard.module.dtensors.views import (
    drawing_alike,
    draws,
    in_order,
    is_alias,
    is_view,
    seen_from,
    set_whole,
    shows,
    up_to_date,
    was_written,
    whole_on,
    writes,
)
from autoshard.runtime.transport.handed_on import is_batched, refuse_batched

log = logging.getLogger("autoshard")

ABOUT = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "layout",
        "is_meta",
        "requires_grad",
        "grad_fn",
        "is_leaf",
        "is_cuda",
    )
) | {
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.is_floating_point),
    *(torch.Tensor.is_complex, torch.Tensor.element_size, torch.Tensor.__len__, torch.Tensor.is_inference),
    *(torch.Tensor.stride, torch.Tensor.is_contiguous, torch.is_floating_point, torch.is_complex, torch.numel),
}
"""functions that need no data"""


def form_of(x: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Global shape and dtype of a tensor, without ``__torch_function__`` of our subclasses."""
    if type(x) is torch.Tensor:
        return x.shape, x.dtype
    if isinstance(x, DTensor):
        return x._spec.tensor_meta[:3:2]  # type: ignore[index]
    with torch._C.DisableTorchFunctionSubclass():
        return x.shape, x.dtype


_ON_WHOLE = (
    *(torch.Tensor.numpy, torch.Tensor.tolist, torch.Tensor.__array__, torch.Tensor.__iter__),  # leave torch
    torch.Tensor.__setitem__,  # DTensor's own writes into a copy if the dim is sharded
)
_BACKWARD = frozenset((torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad))
"""they record gathers also in no-grad mode, as in the backward of a reentrant checkpoint"""


_IN_PLACE_OR_VIEW = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
"""dispatch key that makes autograd replay views, by operations that DTensor lacks"""


def _backward(
    x: DTensor, gradient: Any = None, retain_graph: Any = None, create_graph: Any = False, inputs: Any = None
) -> None:
    """``x.backward()``; the initial gradient of a scalar is made without DTensor dispatch."""
    if type(gradient) is torch.Tensor:  # the full gradient: every rank takes its shard
        with torch.enable_grad():
            x = x.full_tensor()  # type: ignore[assignment]
    if gradient is not None or inputs is not None or x.ndim or not x.is_floating_point() or not x.requires_grad:
        x.backward(gradient, retain_graph, create_graph, inputs)
        return
    keep = create_graph if retain_graph is None else retain_graph
    torch.autograd.graph._engine_run_backward(
        (x,), (ones_of(x),), keep, create_graph, (), allow_unreachable=True, accumulate_grad=True
    )


def _differentiated(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``torch.autograd.grad`` and ``backward`` of gathered outputs; ``inputs`` stay as they are."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    inputs = given.pop("inputs", None)
    tensors = (x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor))
    refuse_batched(given.get("is_grads_batched", False) or any(map(is_batched, tensors)))
    with torch.enable_grad():
        whole = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), given)
    return func(**whole, inputs=inputs)


class Output(DTensor):
    """A DTensor that is gathered where it meets a plain tensor.

    Ops on outputs alone run as DTensor ops where DTensor has them. Other ops, and ops that also
    read a plain tensor (labels, a mask, another model's logits), run on gathered values and return
    plain tensors, equal on every rank. In the backward every rank takes its shard of that gradient:
    nothing is summed twice.
    """

    __slots__ = ()

    @staticmethod
    def of(x: DTensor) -> DTensor:
        """The same DTensor as an output; other subclasses, such as parameters, keep their class."""
        if type(x) is DTensor:
            x.__class__ = Output
        return x

    def like(self, made: DTensor) -> DTensor:
        """``made``, computed from the shards of ``self``, as an output on the same ranks."""
        return Output.of(made)

    def to_local(self, **kwargs: Any) -> torch.Tensor:
        """This rank's shard."""
        up_to_date([self])
        return super().to_local(**kwargs)

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As :meth:`DTensor.redistribute`, after pending writes; ``full_tensor()`` calls it."""
        up_to_date([self])
        return super().redistribute(*args, **kwargs)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func in ABOUT:
                return func(*args, **(kwargs or {}))
            up_to_date(_leaves(args, kwargs or {}))
            if len(args) == 1:
                if func is torch.Tensor.backward:
                    return _backward(args[0], **(kwargs or {}))
                if func in _ALONE and "_of" not in args[0].__dict__:
                    return _ALONE[func](args[0])
            if (loss := on_parts(func, args, kwargs or {})) is not None:
                return Output.of(loss)
            args, kwargs = in_order(args, kwargs or {})
            given = tuple(args), dict(kwargs)
            if writes(func, kwargs) and isinstance(args[0], DTensor):
                return _write(func, *given)
            dim = chosen_dim(func, *given)
            if dim is not None and not any(p.is_partial() or cuts(p, dim) for p in args[0].placements):
                return _of_part(func, dim, *given)
            leaves = _leaves(*given)
            if not writes(func, kwargs) and is_dtensors(func, leaves):
                with torch._C._ExcludeDispatchKeyGuard(_IN_PLACE_OR_VIEW) if is_view(func) else nullcontext():
                    there, made = _of_dtensors(func, *given)
                if there:
                    if not isinstance(made, torch.Size | float | int | bool):
                        made = pytree.tree_map_only(DTensor, Output.of, made)
                        _follow(func, *given, made)
                    return made
            if func in _BACKWARD:
                return _differentiated(func, *given)
            own, named = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), given)
            with drawing_alike(func, next(x for x in leaves if isinstance(x, DTensor)), kwargs):
                made = func(*own, **named)
            if is_view(func) and isinstance(args[0], DTensor) and shows(args[0], func, args[1:], kwargs):
                made = pytree.tree_map_only(torch.Tensor, lambda x: Output.of(whole_on(args[0].device_mesh, x)), made)
                seen_from(args[0], made, func, args[1:], kwargs)
            return made


GATHERED.append(Output)
_ALONE: dict[Any, Callable[[Any], Any]] = {
    torch.Tensor.detach: lambda x: new_dtensor(Output, x._local_tensor.detach(), x._spec, requires_grad=False),
    torch.Tensor.item: item,
    torch.Tensor.__float__: lambda x: float(item(x)),
}
"""common operations on a loss, without torch's dispatcher"""


def chosen_dim(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The dim from which ``func`` selects slices of a non-plain tensor (cached requests).

    None for other functions. If that dim is unsharded, the selection runs per shard.
    """
    place = _CHOOSES.get(func)
    if place is None or not args or sum(isinstance(x, torch.Tensor) and type(x) is not torch.Tensor for x in args) != 1:
        return None
    dim = args[place] if place < len(args) else kwargs.get("dim")
    return dim % args[0].ndim if isinstance(dim, int) and type(args[0]) is not torch.Tensor else None


_CHOOSES = {
    **dict.fromkeys((torch.Tensor.index_select, torch.index_select), 1),
    **dict.fromkeys((torch.Tensor.repeat_interleave, torch.repeat_interleave), 2),
}
"""position of their argument ``dim``"""


def _of_part(func: Any, dim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    x = args[0]
    part = func(x.to_local(), *args[1:], **kwargs)
    shape = torch.Size([*x.shape[:dim], part.shape[dim], *x.shape[dim + 1 :]])
    stride = torch.empty(shape, device="meta").stride()
    made = DTensor.from_local(part, x.device_mesh, x.placements, run_check=False, shape=shape, stride=stride)
    return Output.of(made)


def _leaves(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
    """The leaves of the arguments of a call; most calls contain no containers."""
    given = [*args, *kwargs.values()]
    return given if _NO_CONTAINERS.issuperset(map(type, given)) else pytree.tree_leaves(given)


_NO_CONTAINERS = frozenset((Output, DTensor, torch.Tensor, torch.dtype, bool, int, float, str, type(None)))


def _is_plain(x: Any) -> bool:
    """Whether ``x`` forces a gather: not a scalar, unless its gradient would become a DTensor."""
    return isinstance(x, torch.Tensor) and not isinstance(x, DTensor) and (x.ndim > 0 or x.requires_grad)


def _follow(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
    """Record the sources of views: DTensor may copy, with an autograd history of its own."""
    source = args[0] if args else None
    if not isinstance(source, DTensor) or not is_view(func) or made is source:
        return
    if shows(source, func, args[1:], kwargs):
        seen_from(source, made, func, args[1:], kwargs)


def _write(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An in-place op on an output: per shard if DTensor has it, else on the full tensor.

    With gradients, a write into a view joins the autograd history of view and source.
    """
    x, leaves = args[0], _leaves(args, kwargs)
    recorded = is_recorded(leaves)
    on_part = "_of" not in x.__dict__ or (not recorded and is_alias(x))
    if on_part and not draws(func) and is_dtensors(func, leaves) and _of_dtensors(func, args, kwargs)[0]:
        was_written(x)
        return x
    with torch.set_grad_enabled(recorded):
        set_whole(func, args, kwargs)
    return None if func is torch.Tensor.__setitem__ else x


def is_dtensors(func: Any, leaves: Sequence[Any]) -> bool:
    """Whether ``func`` with these argument leaves may run as a DTensor op."""
    return not (func in _ON_WHOLE or any(map(_is_plain, leaves)) or (is_recorded(leaves) and lacks_gradient(func)))


def _of_dtensors(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """(whether DTensor has ``func`` for these arguments, its result)"""
    try:
        return True, func(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        log.info("%s of an output in its layout: %s. It is gathered", func, error)
        return False, None


def is_recorded(leaves: Sequence[Any]) -> bool:
    """Whether autograd records an operation on these leaves."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in leaves)
