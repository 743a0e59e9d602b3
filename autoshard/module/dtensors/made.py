"""DTensors of parts that a rank has."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from autoshard.layout import Layout


def dtensor(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """This rank's part of a tensor of global ``shape`` as a DTensor; differentiable."""
    spec = _spec(mesh, tuple(layout.to_torch()), torch.Size(shape), local.dtype)
    found: DTensor
    if not local.requires_grad:  # there is nothing for autograd to record
        found = new_dtensor(DTensor, local.view_as(local), spec, requires_grad=False)
    elif not (torch.is_grad_enabled() and all(p.is_shard() or p.is_replicate() for p in spec.placements)):
        _, stride, _ = spec.tensor_meta  # type: ignore[misc]
        found = DTensor.from_local(local, mesh, spec.placements, run_check=False, shape=spec.shape, stride=stride)
    else:
        found = _Whole.apply(local, spec)  # type: ignore[no-untyped-call]
    return found


GIVEN = "_autoshard_given"
"""marks the part of a gradient that came from outside, which stays its owner's: autograd's count of references to it is 1"""


class _Whole(torch.autograd.Function):
    """``DTensor.from_local`` of a part whose whole is known, without what it finds out and checks in every call."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, spec: DTensorSpec) -> DTensor:
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        found: DTensor = new_dtensor(DTensor, local.view_as(local), spec, requires_grad=True)
        return found

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> Any:
        if gradient is None:
            return None, None
        spec = ctx.spec
        if gradient.placements != spec.placements:
            gradient = gradient.redistribute(spec.mesh, spec.placements)
        if torch.is_grad_enabled():
            return gradient.to_local(), None
        local = gradient._local_tensor
        setattr(local, GIVEN, True)
        return local, None


new_dtensor: Any = inspect.unwrap(DTensor.__new__)
"""without what keeps torch.compile out of it, at several Python calls for each tensor and step"""


@functools.lru_cache(maxsize=1 << 8)
def _spec(mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """Of a tensor whose dims lie in memory as they are numbered. Those of the layers of a cache are one."""
    steps = itertools.accumulate(reversed(shape), lambda n, length: n * max(length, 1), initial=1)
    stride = [*steps][len(shape) - 1 :: -1] if shape else ()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(stride), dtype))
