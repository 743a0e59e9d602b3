"""DTensors from local shards and back, differentiable."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from autoshard.layout import Layout
from autoshard.runtime.transport.groups import forgotten
from autoshard.runtime.transport.handed_on import HandingOn


def dtensor(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """This rank's shard of a tensor of global ``shape`` as a DTensor; differentiable."""
    spec = spec_of(mesh, tuple(layout.to_torch()), torch.Size(shape), local.dtype)
    if local.requires_grad and not (
        torch.is_grad_enabled() and all(p.is_shard() or p.is_replicate() for p in spec.placements)
    ):
        _, stride, _ = spec.tensor_meta  # type: ignore[misc]
        return DTensor.from_local(local, mesh, spec.placements, run_check=False, shape=spec.shape, stride=stride)
    return whole_of(local, spec)


def whole_of(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """The DTensor with local shard (or partial sum) ``local``; differentiable."""
    if local.requires_grad and torch.is_grad_enabled():
        found: DTensor = _Whole.apply(local, spec)
    else:  # nothing for autograd to record
        found = new_dtensor(DTensor, local.view_as(local), spec, requires_grad=False)
    return found


def part_of(x: DTensor) -> torch.Tensor:
    """This rank's shard of a DTensor without partial sums; differentiable."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x._local_tensor
    part: torch.Tensor = _Part.apply(x)
    return part


GIVEN = "_autoshard_given"
"""marks a local gradient that its owner keeps although autograd counts one reference to it"""


class _Whole(HandingOn):
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
            setattr(local, GIVEN, True)
        return local, None


def local_gradient(gradient: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The local gradient for a tensor of this ``spec``; for partial sums the full gradient."""
    wanted = tuple([_WHOLE if p.is_partial() else p for p in spec.placements])
    if not isinstance(gradient, DTensor):  # zeros made by autograd
        gradient = replicated(spec.mesh, gradient)
    if gradient._spec.placements != wanted:
        gradient = gradient.redistribute(spec.mesh, wanted)
    if torch.is_grad_enabled():
        return gradient.to_local(grad_placements=spec.placements)
    local: torch.Tensor = gradient._local_tensor
    return local


_WHOLE = Replicate()


def plain(x: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor; other tensors unchanged. Collective."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def replicated(mesh: DeviceMesh, x: torch.Tensor) -> DTensor:
    """``x``, equal on all ranks, as a replicated DTensor."""
    return whole_of(x, spec_of(mesh, (_WHOLE,) * mesh.ndim, x.shape, x.dtype))


def ones_of(x: DTensor) -> DTensor:
    """The initial gradient of a scalar's backward: a replicated one."""
    spec = spec_of(x._spec.mesh, (_WHOLE,) * len(x._spec.placements), torch.Size(()), x.dtype)
    found: DTensor = new_dtensor(DTensor, torch.ones_like(x._local_tensor), spec, requires_grad=False)
    return found


class _Part(HandingOn):
    """Inverse of :class:`_Whole`, for sharded and replicated placements."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.spec = x._spec
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        return whole_of(gradient, ctx.spec)


new_dtensor: Any = inspect.unwrap(DTensor.__new__)
"""``__new__`` without the torch.compile guard, which costs several Python calls per tensor"""


@forgotten
@functools.lru_cache(maxsize=1 << 8)
def spec_of(mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """The spec of a contiguous tensor. Cached: equal layers share it."""
    steps = itertools.accumulate(reversed(shape), lambda n, length: n * max(length, 1), initial=1)
    stride = [*steps][len(shape) - 1 :: -1] if shape else ()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(stride), dtype))
