"""Inputs under torch.distributed: local ones become DTensors, which know their whole; programs get this rank's part."""

from __future__ import annotations

import functools
import inspect
import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from autoshard.errors import CaptureError, LayoutError
from autoshard.layout import Layout
from autoshard.layout import Shard as Cut
from autoshard.mesh import Mesh
from autoshard.module.checksum import checksum
from autoshard.module.inputs import whole_shape
from autoshard.module.of_stage import OfStage


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
        return (gradient.to_local() if torch.is_grad_enabled() else gradient._local_tensor), None


new_dtensor: Any = inspect.unwrap(DTensor.__new__)
"""without what keeps torch.compile out of it, at several Python calls for each tensor and step"""


@functools.lru_cache(maxsize=1 << 8)
def _spec(mesh: DeviceMesh, placements: tuple[Any, ...], shape: torch.Size, dtype: torch.dtype) -> DTensorSpec:
    """Of a tensor whose dims lie in memory as they are numbered. Those of the layers of a cache are one."""
    steps = itertools.accumulate(reversed(shape), lambda n, length: n * max(length, 1), initial=1)
    stride = [*steps][len(shape) - 1 :: -1] if shape else ()
    return DTensorSpec(mesh, placements, tensor_meta=TensorMeta(shape, tuple(stride), dtype))


def from_part(part: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """A local input: this rank's part of one whose parts are all of one size."""
    return dtensor(part, mesh, layout, whole_shape(part.shape, layout))


def stating(x: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    """An input as a DTensor whose placements are chunks or whole: what else there is, is made whole. Plain if all is.

    Raises :class:`CaptureError` for one that lies on another mesh.
    """
    if x.device_mesh is not mesh and x.device_mesh.mesh.tolist() != mesh.mesh.tolist():
        raise CaptureError(
            f"an input of shape {list(x.shape)} is a DTensor on another mesh ({x.device_mesh}) than the module's "
            f"({mesh}). Give one on sharded.device_mesh, or its full_tensor()."
        )
    own = isinstance(x, OfStage)  # no rank can have the whole of it
    if (own or any(type(p) is Shard for p in x.placements)) and all(
        type(p) in (Shard, Replicate) for p in x.placements
    ):
        return x
    plain = [p if type(p) is Shard else Replicate() for p in x.placements]
    if isinstance(x, OfStage):
        return x.like(x.redistribute(mesh, plain))
    x = x if list(x.placements) == plain else x.redistribute(mesh, plain)
    return x if any(p.is_shard() for p in plain) else x.to_local(grad_placements=plain)


def arrived(
    leaves: Sequence[Any], layouts: Sequence[Layout | None], mesh: DeviceMesh, device: torch.device
) -> list[Any]:
    """The leaves of a call as programs know them. ``layouts``: of those that are local, by leaf; or nothing."""
    found = list(leaves)
    for i, x in enumerate(leaves):
        if isinstance(x, DTensor):
            found[i] = stating(x, mesh)
        elif layouts and (layout := layouts[i]) is not None:
            found[i] = from_part(x.to(device), mesh, layout)
    return found


def layout_of(x: Any, mesh: Mesh) -> Layout | None:
    """The layout that an input states; None: it is whole."""
    return Layout.from_torch(mesh, x.placements) if isinstance(x, DTensor) else None


def part_for(x: torch.Tensor, layout: Layout, mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """This rank's part of an input on ``device``, in the ``layout`` that a program takes it in."""
    if not isinstance(x, DTensor):
        return x.to(device)
    try:
        placements = layout.to_torch()
    except LayoutError:
        raise AssertionError(f"inputs come in mesh order, not in {layout}") from None
    if list(x.placements) != placements:
        x = x.redistribute(mesh, placements)
    if not (x._local_tensor.requires_grad or torch.is_grad_enabled()):
        return x._local_tensor
    return x.to_local(grad_placements=placements)  # whole gradients on whole axes


def joined(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those in parts made whole; each rank's gradient is, and goes back to the parts. What a stage keeps stays. Collective."""
    found = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, DTensor) and not isinstance(x, OfStage):
            whole = [Replicate()] * x.device_mesh.ndim
            found[name] = x.redistribute(x.device_mesh, whole).to_local(grad_placements=whole)
    return found


def checksums(leaves: Sequence[Any]) -> tuple[int, int]:
    """Numbers that differ where the data do: of the whole inputs, and of this rank's parts of those that are cut.

    What one stage keeps is not among them: other stages have nothing to compare it with.
    """
    numbers = [0, 0]
    for x in leaves:
        if isinstance(x, torch.Tensor) and not isinstance(x, OfStage):
            parts, local = isinstance(x, DTensor), x.to_local() if isinstance(x, DTensor) else x
            numbers[parts] = zlib.crc32(int(checksum(local)).to_bytes(8, "little", signed=True), numbers[parts])
    return numbers[0], numbers[1]


def peers(leaves: Sequence[Any], mesh: Mesh) -> tuple[int, ...]:
    """For every rank the first that brings the same parts: it differs only along axes that cut none of the inputs."""
    layouts = [x for x in (layout_of(leaf, mesh) for leaf in leaves) if x is not None]
    cut = {mesh.index(a) for layout in layouts for a in layout.axes_with(Cut)}
    rows = (mesh.coordinates(rank) for rank in range(mesh.size))
    return tuple(mesh.rank([n if i in cut else 0 for i, n in enumerate(row)]) for row in rows)
