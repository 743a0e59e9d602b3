"""Outputs that stay sharded: DTensors that also work with plain tensors, such as labels."""

from __future__ import annotations

import functools
import inspect
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autoshard.layout import chunk
from autoshard.module.dtensors.module_dtensor import (
    ModuleDTensor,
    contiguous_spec,
    from_local_shard,
    local_gradient,
    module_dtensor,
    new_dtensor,
    replicated_dtensor,
    to_local_shard,
)
from autoshard.module.dtensors.operations import scalar_item
from autoshard.module.dtensors.segments import shards_dim
from autoshard.module.dtensors.views import (
    Viewed,
    aliases_source,
    argument_leaves,
    count_write,
    first_by_position,
    is_eager_view,
    is_in_place,
    may_be_view,
    may_draw,
    record_view_source,
    refresh_views,
    same_draws_on_ranks,
    write_each,
    write_full,
    written_arguments,
)
from autoshard.runtime.transport.autograd import NoneGradFunction, is_batched, refuse_batched
from autoshard.torch_private.autograd import run_backward
from autoshard.torch_private.dispatch import ExcludedKeys
from autoshard.torch_private.dtensor import DTensorSpec
from autoshard.torch_private.ops import nn_functions

TRUSTED_GRADIENTS = frozenset(
    "abs absolute acos acosh add addcdiv addcmul adjoint asin asinh atan atan2 atanh bmm broadcast_to "
    "cat ceil celu chunk clamp clamp_max clamp_min clip clone concat concatenate contiguous cos cosh cosine_similarity "
    "cumsum detach diagonal div divide dropout einsum elu erf erfc exp exp2 expand expand_as expm1 fix flatten flip "
    "fliplr flipud float_power floor fmax fmin frac gelu hstack index_select kl_div l1_loss leaky_relu lerp linear log "
    "log10 log1p log2 log_softmax logaddexp logsumexp masked_fill matmul max maximum mean median min minimum mish mm moveaxis "
    "movedim mul multiply nan_to_num neg negative norm normalize permute positive pow prod ravel real reciprocal relu "
    "repeat_interleave reshape reshape_as roll round rsqrt rsub select selu sigmoid sign silu sin sinh softmax softmin "
    "softplus softsign sort split sqrt square squeeze stack std sub subtract sum swapaxes swapdims t tan tanh "
    "tensor_split tile topk transpose tril triu true_divide trunc type_as unbind unflatten unsqueeze var vstack "
    "binary_cross_entropy_with_logits where".split()
)
"""function names; ``add_``, ``inplace=True`` and methods count as the function"""

_NON_DIFFERENTIABLE = re.compile(
    r"arg\w+|is\w+|logical_\w+|bitwise_\w+|\w+_like|all|allclose|any|count_nonzero|detach|eq|equal|ge|greater\w*|gt|le|"
    r"less\w*|lt|ne|not_equal|numel|result_type|zero|fill"
)
"""names of functions without a gradient for their arguments"""


@functools.lru_cache(maxsize=1 << 10)
def lacks_gradient(func: Any) -> bool:
    """Whether ``func`` is differentiable and not in :data:`TRUSTED_GRADIENTS`."""
    name = getattr(func, "__name__", "")
    name = name if name.startswith("__") else name.rstrip("_")
    if name in TRUSTED_GRADIENTS or _NON_DIFFERENTIABLE.fullmatch(name):
        return False
    known = any(callable(getattr(of, name, None)) for of in (torch, F, nn_functions))
    return known or name.startswith(("linalg_", "special_", "fft_"))


log = logging.getLogger("autoshard")

METADATA_GETTERS = frozenset(
    getattr(Tensor, name).__get__
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
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point),
    *(Tensor.is_complex, Tensor.element_size, Tensor.__len__, Tensor.is_inference),
    *(Tensor.stride, Tensor.is_contiguous, torch.is_floating_point, torch.is_complex, torch.numel),
}
"""functions that need no data"""


def shape_and_dtype(x: Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Global shape and dtype of a tensor, without ``__torch_function__`` of our subclasses."""
    if type(x) is Tensor:
        return x.shape, x.dtype
    if isinstance(x, DTensor):
        return x._spec.tensor_meta[:3:2]  # type: ignore[index]
    with torch.DisableTorchFunctionSubclass():
        return x.shape, x.dtype


_FULL_ONLY = (
    *(Tensor.numpy, Tensor.tolist, Tensor.__array__, Tensor.__iter__),  # leave torch
    Tensor.__setitem__,  # DTensor's own writes into a copy if the dim is sharded
)
_AUTOGRAD_FUNCTIONS = frozenset((Tensor.backward, torch.autograd.backward, torch.autograd.grad))
"""they record gathers also in no-grad mode, as in the backward of a reentrant checkpoint"""


_IN_PLACE_OR_VIEW = torch.DispatchKeySet(torch.DispatchKey.ADInplaceOrView)
"""dispatch key that makes autograd replay views, by operations that DTensor lacks"""


def _output_backward(
    x: DTensor, gradient: Any = None, retain_graph: Any = None, create_graph: Any = False, inputs: Any = None
) -> None:
    """``x.backward()``; the initial gradient of a scalar is made without DTensor dispatch."""
    if type(gradient) is Tensor:  # the full gradient: every rank takes its shard
        with torch.enable_grad():
            x = x.full_tensor()  # type: ignore[assignment]
    if gradient is not None or inputs is not None or x.ndim or not x.is_floating_point() or not x.requires_grad:
        x.backward(gradient, retain_graph, create_graph, inputs)
        return
    keep = create_graph if retain_graph is None else retain_graph
    run_backward((x,), (unit_gradient(x),), keep, create_graph, (), allow_unreachable=True, accumulate_grad=True)


def _autograd_on_full(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``torch.autograd.grad`` and ``backward`` of gathered outputs; ``inputs`` stay as they are."""
    given = inspect.signature(func).bind(*args, **kwargs).arguments
    inputs = given.pop("inputs", None)
    tensors = (x for x in pytree.tree_leaves(given) if isinstance(x, Tensor))
    refuse_batched(given.get("is_grads_batched", False) or any(map(is_batched, tensors)))
    with torch.enable_grad():
        whole = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), given)
    return func(**whole, inputs=inputs)


class ShardedOutput(Viewed):
    """A DTensor that is gathered where it meets a plain tensor. Ops on outputs alone run as DTensor
    ops where DTensor has them; others, and those that read a plain tensor (labels, another
    model's logits), run on gathered values and return plain tensors, equal on every rank. In
    their backward every rank takes its shard of the gradient."""

    gathers = True

    @staticmethod
    def of(x: DTensor) -> ModuleDTensor:
        """The same DTensor as an output; other subclasses, such as parameters, keep their class."""
        if type(x) is not ShardedOutput and type(ModuleDTensor.of(x)) is ModuleDTensor:
            x.__class__ = ShardedOutput
        return x  # type: ignore[return-value]

    def like(self, made: DTensor) -> DTensor:
        """``made``, computed from the shards of ``self``, as an output on the same ranks."""
        return ShardedOutput.of(made)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch.DisableTorchFunctionSubclass():
            if func in METADATA_GETTERS:
                return func(*args, **(kwargs or {}))
            refresh_views(argument_leaves(args, kwargs or {}))
            if len(args) == 1:
                if func is Tensor.backward:
                    return _output_backward(args[0], **(kwargs or {}))
                if func in _SCALAR_SHORTCUTS and "_of" not in args[0].__dict__:
                    return _SCALAR_SHORTCUTS[func](args[0])
            if (loss := loss_on_shards(func, args, kwargs or {})) is not None:
                return ShardedOutput.of(loss)
            args, kwargs = first_by_position(args, kwargs or {})
            given = tuple(args), dict(kwargs)
            written = written_arguments(func, *given)
            if args and isinstance(args[0], DTensor) and is_in_place(func, kwargs):
                return _write_output(func, *given)
            if any(isinstance(x, DTensor) for x in written):
                made = write_each(func, *given, written)
                return kwargs["out"] if kwargs.get("out") is not None else made
            dim = selection_dim(func, *given)
            if dim is not None and not any(p.is_partial() or shards_dim(p, dim) for p in args[0].placements):
                return _select_on_shard(func, dim, *given)
            leaves = argument_leaves(*given)
            if not written and runs_as_dtensor(func, leaves):
                with ExcludedKeys(_IN_PLACE_OR_VIEW) if may_be_view(func) else nullcontext():
                    there, made = _try_dtensor_op(func, *given)
                if there:
                    if not isinstance(made, torch.Size | float | int | bool):
                        made = pytree.tree_map_only(DTensor, ShardedOutput.of, made)
                        _record_views(func, *given, made)
                    return made
            if func in _AUTOGRAD_FUNCTIONS:
                return _autograd_on_full(func, *given)
            own, named = pytree.tree_map_only(DTensor, lambda x: x.full_tensor(), given)
            with same_draws_on_ranks(func, next(x for x in leaves if isinstance(x, DTensor)), kwargs):
                made = func(*own, **named)
            if may_be_view(func) and isinstance(args[0], DTensor) and is_eager_view(args[0], func, args[1:], kwargs):
                made = pytree.tree_map_only(
                    Tensor, lambda x: ShardedOutput.of(replicated_dtensor(args[0].device_mesh, x)), made
                )
                record_view_source(args[0], made, func, args[1:], kwargs)
            return made


_SCALAR_SHORTCUTS: dict[Any, Callable[[Any], Any]] = {
    Tensor.detach: lambda x: new_dtensor(ShardedOutput, x._local_tensor.detach(), x._spec, requires_grad=False),
    Tensor.item: scalar_item,
    Tensor.__float__: lambda x: float(scalar_item(x)),
}
"""common operations on a loss, without torch's dispatcher"""


class GatheredOnUse(Tensor):
    """A tensor that is held in parts. What has no rule for parts runs on the full tensor."""

    def whole(self) -> Tensor:
        """The plain tensor. Collective."""
        raise NotImplementedError

    @staticmethod
    def on_parts(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """``func`` by a rule for parts; None without one."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch.DisableTorchFunctionSubclass():
            if func in METADATA_GETTERS:
                return func(*args, **(kwargs or {}))
            made = cls.on_parts(func, args, kwargs or {})
            return cls._on_whole(func, args, kwargs) if made is None else made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return cls._on_whole(func, args, kwargs)

    @classmethod
    def _on_whole(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
        own, named = pytree.tree_map_only(cls, lambda x: x.whole(), (tuple(args), dict(kwargs or {})))
        return func(*own, **named)


def selection_dim(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int | None:
    """The dim from which ``func`` selects slices of a non-plain tensor (cached requests), or None.
    If that dim is unsharded, the selection runs per shard."""
    place = _SELECTION_DIM_POSITION.get(func)
    if place is None or not args or sum(isinstance(x, Tensor) and type(x) is not Tensor for x in args) != 1:
        return None
    dim = args[place] if place < len(args) else kwargs.get("dim")
    return dim % args[0].ndim if isinstance(dim, int) and type(args[0]) is not Tensor else None


_SELECTION_DIM_POSITION = {
    **dict.fromkeys((Tensor.index_select, torch.index_select), 1),
    **dict.fromkeys((Tensor.repeat_interleave, torch.repeat_interleave), 2),
}
"""position of their argument ``dim``"""


def _select_on_shard(func: Any, dim: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor:
    x = args[0]
    part = func(x.to_local(), *args[1:], **kwargs)
    shape = torch.Size([*x.shape[:dim], part.shape[dim], *x.shape[dim + 1 :]])
    return ShardedOutput.of(from_local_shard(part, contiguous_spec(x.device_mesh, x.placements, shape, part.dtype)))


def _is_plain_operand(x: Any) -> bool:
    """Whether ``x`` forces a gather: not a scalar, unless its gradient would become a DTensor."""
    return isinstance(x, Tensor) and not isinstance(x, DTensor) and (x.ndim > 0 or x.requires_grad)


def _record_views(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> None:
    """Record the sources of views: DTensor may copy, with an autograd history of its own."""
    source = args[0] if args else None
    if not isinstance(source, DTensor) or not may_be_view(func) or made is source:
        return
    if is_eager_view(source, func, args[1:], kwargs):
        record_view_source(source, made, func, args[1:], kwargs)


def _write_output(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An in-place op on an output: per shard if DTensor has it, else on the full tensor. With
    gradients, a write into a view joins the autograd history of view and source."""
    x, leaves = args[0], argument_leaves(args, kwargs)
    recorded = is_recorded(leaves)
    on_part = "_of" not in x.__dict__ or (not recorded and aliases_source(x))
    if on_part and not may_draw(func) and runs_as_dtensor(func, leaves) and _try_dtensor_op(func, args, kwargs)[0]:
        count_write(x)
        return x
    with torch.set_grad_enabled(recorded):
        write_full(func, args, kwargs)
    return None if func is Tensor.__setitem__ else x


def runs_as_dtensor(func: Any, leaves: Sequence[Any]) -> bool:
    """Whether ``func`` with these argument leaves may run as a DTensor op: alike on every rank."""
    return not (
        func in _FULL_ONLY
        or any(map(_is_plain_operand, leaves))
        or (is_recorded(leaves) and lacks_gradient(func))
        or any(isinstance(x, DTensor) and _has_empty_shards(x._spec) for x in leaves)
    )


@functools.lru_cache(maxsize=1 << 10)
def _has_empty_shards(spec: DTensorSpec) -> bool:
    """Whether a rank holds nothing of a tensor: kernels may raise there, on some ranks."""
    sizes = {d: {n} for d, n in enumerate(spec.shape)}
    for axis, p in enumerate(spec.placements):
        if (d := getattr(p, "dim", None)) is not None:
            ranks = spec.mesh.size(axis)
            sizes[d] = {chunk(n, ranks, i)[1] for n in sizes[d] for i in range(ranks)}
    return bool(spec.shape.numel()) and any(0 in each for each in sizes.values())


def _try_dtensor_op(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[bool, Any]:
    """(whether DTensor has ``func`` for these arguments, its result)"""
    try:
        return True, func(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        log.info("%s of an output in its layout: %s. The output is gathered", func, error)
        return False, None


def is_recorded(leaves: Sequence[Any]) -> bool:
    """Whether autograd records an operation on these leaves."""
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in leaves)


# --- losses on local shards: DTensor's backward takes several times the host time ---


def unit_gradient(x: DTensor) -> DTensor:
    """The initial gradient of a scalar's backward: a replicated one."""
    return replicated_dtensor(x._spec.mesh, torch.ones_like(x._local_tensor, dtype=x.dtype))


def _function_and_method(*names: str) -> frozenset[Any]:
    return frozenset(getattr(of, name) for name in names for of in (torch, Tensor))


_ELEMENTWISE_LOSSES = _function_and_method("abs", "exp", "log", "neg", "relu", "sigmoid", "sqrt", "square", "tanh")
_SUM_FUNCTIONS, _MEAN_FUNCTIONS = _function_and_method("sum"), _function_and_method("mean")
_SHARD_FUNCTIONS = _ELEMENTWISE_LOSSES | _SUM_FUNCTIONS | _MEAN_FUNCTIONS


def loss_on_shards(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor | None:
    """``func`` on local shards (totals: Partial); None if unsupported or if the argument has
    partial sums."""
    if func not in _SHARD_FUNCTIONS or len(args) != 1 or kwargs:
        return None
    x = args[0]
    spec = x._spec
    whole = spec.shape.numel()
    if not (whole and x.dtype.is_floating_point and all(type(p) in (Shard, Replicate) for p in spec.placements)):
        return None
    if func in _ELEMENTWISE_LOSSES:
        return from_local_shard(func(to_local_shard(x)), spec)
    return _SumOfShards.apply(x, whole if func in _MEAN_FUNCTIONS else 1)


class _SumOfShards(NoneGradFunction):
    """The sum of all elements divided by ``count``, as one autograd node."""

    @staticmethod
    def forward(ctx: Any, x: DTensor, count: int) -> DTensor:
        part, spec = x._local_tensor, x._spec
        mean = count > 1 and part.numel()  # the mean of an empty shard is NaN
        made = part.mean() * (part.numel() / count) if mean else part.sum()
        placements = tuple([_PARTIAL_SUM if type(p) is Shard else p for p in spec.placements])
        ctx.spec, ctx.shape, ctx.count = spec, part.shape, count
        ctx.made = contiguous_spec(spec.mesh, placements, torch.Size(()), made.dtype)
        return module_dtensor(made, ctx.made)

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:
        each = local_gradient(gradient, ctx.made).expand(ctx.shape)
        return from_local_shard(each / ctx.count if ctx.count > 1 else each, ctx.spec), None


_PARTIAL_SUM = Partial()
