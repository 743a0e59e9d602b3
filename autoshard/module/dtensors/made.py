"""DTensors of parts that a rank has."""

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
    """This rank's part of a tensor of global ``shape`` as a DTensor; differentiable."""
    spec = spec_of(mesh, tuple(layout.to_torch()), torch.Size(shape), local.dtype)
    if local.requires_grad and not (
        torch.is_grad_enabled() and all(p.is_shard() or p.is_replicate() for p in spec.placements)
    ):
        _, stride, _ = spec.tensor_meta  # type: ignore[misc]
        return DTensor.from_local(local, mesh, spec.placements, run_check=False, shape=spec.shape, stride=stride)
    return whole_of(local, spec)


def whole_of(local: torch.Tensor, spec: DTensorSpec) -> DTensor:
    """The tensor of which ``local`` is this rank's part, or summand; differentiable."""
    if local.requires_grad and torch.is_grad_enabled():
        found: DTensor = _Whole.apply(local, spec)
    else:  # there is nothing for autograd to record
        found = new_dtensor(DTensor, local.view_as(local), spec, requires_grad=False)
    return found


def part_of(x: DTensor) -> torch.Tensor:
    """This rank's part of a tensor in chunks, for what every rank does with its own; differentiable."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x._local_tensor
    part: torch.Tensor = _Part.apply(x)
    return part


GIVEN = "_autoshard_given"
"""marks the part of a gradient that came from outside, which stays its owner's: autograd's count of references to it is 1"""


class _Whole(HandingOn):
    """``DTensor.from_local`` of a part whose whole is known, without what it finds out and checks in every call."""

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
    """This rank's part of the gradient of a tensor that lies as ``spec`` says; of a sum every summand has the whole."""
    wanted = tuple([_WHOLE if p.is_partial() else p for p in spec.placements])
    if not isinstance(gradient, DTensor):  # zeros that autograd made
        gradient = replicated(spec.mesh, gradient)
    if gradient._spec.placements != wanted:
        gradient = gradient.redistribute(spec.mesh, wanted)
    if torch.is_grad_enabled():
        return gradient.to_local(grad_placements=spec.placements)
    local: torch.Tensor = gradient._local_tensor
    return local


_WHOLE = Replicate()


def plain(x: torch.Tensor) -> torch.Tensor:
    """The whole of a DTensor; other tensors as they are."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def replicated(mesh: DeviceMesh, x: torch.Tensor) -> DTensor:
    """``x``, which is the same on all ranks, as a DTensor that is whole on each."""
    return whole_of(x, spec_of(mesh, (_WHOLE,) * mesh.ndim, x.shape, x.dtype))


def ones_of(x: DTensor) -> DTensor:
    """What the backward of a number begins with: a one that is whole on every rank."""
    spec = spec_of(x._spec.mesh, (_WHOLE,) * len(x._spec.placements), torch.Size(()), x.dtype)
    found: DTensor = new_dtensor(DTensor, torch.ones_like(x._local_tensor), spec, requires_grad=False)
    return found


class _Part(HandingOn):
    """The inverse of :class:`_Whole`, for placements that are chunks or whole."""

    @staticmethod
    def forward(ctx: Any, x: DTensor) -> torch.Tensor:
        ctx.spec = x._spec
        return x._local_tensor.view_as(x._local_tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> DTensor:
        return whole_of(gradient, ctx.spec)


new_dtensor: Any = inspect.unwrap(DTensor.__new__)
"""without what keeps torch.compile out of it, at several Python calls for each tensor and step"""


@forgotten
@functools.lru_cache(maxsize=1 << 8)
def spec_of(mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """Of a tensor whose dims lie in memory as they are numbered. Those of the layers of a cache are one."""
    steps = itertools.accumulate(reversed(shape), lambda n, length: n * max(length, 1), initial=1)
    stride = [*steps][len(shape) - 1 :: -1] if shape else ()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(stride), dtype))
