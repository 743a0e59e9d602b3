"""DTensors from local shards and back, differentiable; elementwise losses and sums on local shards.

DTensor gives the same losses, but each backward operation is a DTensor operation, and the
replicated gradient of a mean is sharded on the way: several times the host time.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from autoshard.layout import Layout
from autoshard.runtime.transport.autograd import NoneGradFunction
from autoshard.runtime.transport.groups import cleared_with_groups
from autoshard.torch_private.dtensor import DTensorSpec, TensorMeta


def dtensor_from_shard(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """This rank's shard of a tensor of global ``shape`` as a DTensor; differentiable."""
    spec = contiguous_spec(mesh, tuple(layout.to_torch()), torch.Size(shape), local.dtype)
    if local.requires_grad and not (
        torch.is_grad_enabled() and all(p.is_shard() or p.is_replicate() for p in spec.placements)
    ):
        _, stride, _ = spec.tensor_meta  # type: ignore[misc]
        return DTensor.from_local(local, mesh, spec.placements, run_check=False, shape=spec.shape, stride=stride)
    return from_local_shard(local, spec)


def from_local_shard(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor with local shard (or partial sum) ``local``; differentiable."""
    if local.requires_grad and torch.is_grad_enabled():
        found: DTensor = _FromLocalShard.apply(local, spec)
    else:  # nothing for autograd to record
        found = new_dtensor(DTensor, local.view_as(local), spec, requires_grad=False)
    return found


def to_local_shard(x: DTensor) -> torch.Tensor:
    """This rank's shard of a DTensor without partial sums; differentiable."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x._local_tensor
    part: torch.Tensor = _ToLocalShard.apply(x)
    return part


EXTERNAL_GRADIENT = "_autoshard_given"
"""marks a local gradient that its owner keeps although autograd counts one reference to it"""


class _FromLocalShard(NoneGradFunction):
    """``DTensor.from_local`` for a known global shape, without its checks in every call."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = spec
        found: DTensor = new_dtensor(DTensor, local.view_as(local), spec, requires_grad=True)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:
        local = local_gradient(gradient, ctx.spec)
        if not torch.is_grad_enabled():
            setattr(local, EXTERNAL_GRADIENT, True)
        return local, None


def local_gradient(gradient: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The local gradient for a tensor of this ``spec``; for partial sums the full gradient."""
    wanted = tuple([_REPLICATED if p.is_partial() else p for p in spec.placements])
    if not isinstance(gradient, DTensor):  # zeros made by autograd
        gradient = replicated_dtensor(spec.mesh, gradient)
    if gradient._spec.placements != wanted:
        gradient = gradient.redistribute(spec.mesh, wanted)
    if torch.is_grad_enabled():
        return gradient.to_local(grad_placements=spec.placements)
    local: torch.Tensor = gradient._local_tensor
    return local


_REPLICATED = Replicate()


def full_if_dtensor(x: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor; other tensors unchanged. Collective."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def replicated_dtensor(mesh: DeviceMesh, x: torch.Tensor) -> DTensor:
    """``x``, equal on all ranks, as a replicated DTensor."""
    return from_local_shard(x, contiguous_spec(mesh, (_REPLICATED,) * mesh.ndim, x.shape, x.dtype))


def unit_gradient(x: DTensor) -> DTensor:
    """The initial gradient of a scalar's backward: a replicated one."""
    spec = contiguous_spec(x._spec.mesh, (_REPLICATED,) * len(x._spec.placements), torch.Size(()), x.dtype)
    found: DTensor = new_dtensor(DTensor, torch.ones_like(x._local_tensor), spec, requires_grad=False)
    return found


class _ToLocalShard(NoneGradFunction):
    """Inverse of :class:`_FromLocalShard`, for sharded and replicated placements."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.spec = x._spec
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        return from_local_shard(gradient, ctx.spec)


new_dtensor: Any = inspect.unwrap(DTensor.__new__)
"""``__new__`` without the torch.compile guard, which costs several Python calls per tensor"""


@cleared_with_groups
@functools.lru_cache(maxsize=1 << 8)
def contiguous_spec(
    mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype
) -> DTensorSpec:
    """The spec of a contiguous tensor. Cached: equal layers share it."""
    steps = itertools.accumulate(reversed(shape), lambda n, length: n * max(length, 1), initial=1)
    stride = [*steps][len(shape) - 1 :: -1] if shape else ()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(stride), dtype))


def _function_and_method(*names: str) -> frozenset[Any]:
    return frozenset(getattr(of, name) for name in names for of in (torch, torch.Tensor))


_ELEMENTWISE_LOSSES = _function_and_method("abs", "exp", "log", "neg", "relu", "sigmoid", "sqrt", "square", "tanh")
_SUM_FUNCTIONS, _MEAN_FUNCTIONS = _function_and_method("sum"), _function_and_method("mean")
_SHARD_FUNCTIONS = _ELEMENTWISE_LOSSES | _SUM_FUNCTIONS | _MEAN_FUNCTIONS


def loss_on_shards(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> DTensor | None:
    """``func`` on local shards; None if unsupported or if the argument has partial sums.

    A total is Partial over the sharding axes.
    """
    if func not in _SHARD_FUNCTIONS or len(args) != 1 or kwargs:
        return None
    x = args[0]
    spec = x._spec
    whole = spec.shape.numel()
    if not (whole and x.dtype.is_floating_point and all(type(p) in (Shard, Replicate) for p in spec.placements)):
        return None
    if func in _ELEMENTWISE_LOSSES:
        return from_local_shard(func(to_local_shard(x)), spec)
    found: DTensor = _SumOfShards.apply(x, whole if func in _MEAN_FUNCTIONS else 1)
    return found


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
        found: DTensor = new_dtensor(DTensor, made, ctx.made, requires_grad=False)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: DTensor) -> Any:
        each = local_gradient(gradient, ctx.made).expand(ctx.shape)
        return from_local_shard(each / ctx.count if ctx.count > 1 else each, ctx.spec), None


_PARTIAL_SUM = Partial()
