"""Inputs under torch.distributed: local ones become DTensors, which know their whole; programs get this rank's part."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard.errors import CaptureError, LayoutError
from autoshard.layout import Layout
from autoshard.layout import Shard as Cut
from autoshard.mesh import Mesh
from autoshard.module.checksum import checksum
from autoshard.module.inputs import whole_shape


def dtensor(local: torch.Tensor, mesh: DeviceMesh, layout: Layout, shape: Sequence[int]) -> DTensor:
    """This rank's part of a tensor of global ``shape`` as a DTensor; differentiable."""
    stride = torch.empty(tuple(shape), device="meta").stride()
    return DTensor.from_local(local, mesh, layout.to_torch(), run_check=False, shape=torch.Size(shape), stride=stride)


def from_part(part: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """A local input: this rank's part of one whose parts are all of one size."""
    return dtensor(part, mesh, layout, whole_shape(part.shape, layout))


def stating(x: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    """An input as a DTensor whose placements are chunks or whole: what else there is, is made whole. Plain if all is.

    Raises :class:`CaptureError` for one that lies on another mesh.
    """
    if x.device_mesh.mesh.tolist() != mesh.mesh.tolist():
        raise CaptureError(
            f"an input of shape {list(x.shape)} is a DTensor on another mesh ({x.device_mesh}) than the module's "
            f"({mesh}). Give one on sharded.device_mesh, or its full_tensor()."
        )
    plain = [p if type(p) is Shard else Replicate() for p in x.placements]
    x = x if list(x.placements) == plain else x.redistribute(mesh, plain)
    return x if any(p.is_shard() for p in plain) else x.to_local(grad_placements=plain)


def layout_of(x: Any, mesh: Mesh) -> Layout | None:
    """The layout that an input states; None: it is whole."""
    return Layout.from_torch(mesh, x.placements) if isinstance(x, DTensor) else None


def part_for(x: torch.Tensor, layout: Layout, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's part of an input, in the ``layout`` that a program takes it in."""
    if not isinstance(x, DTensor):
        return x
    try:
        placements = layout.to_torch()
    except LayoutError:
        raise AssertionError(f"inputs come in mesh order, not in {layout}") from None
    if list(x.placements) != placements:
        x = x.redistribute(mesh, placements)
    return x.to_local(grad_placements=placements)  # whole gradients on whole axes


def checksums(leaves: Sequence[Any]) -> tuple[int, int]:
    """Numbers that differ where the data do: of the whole inputs, and of this rank's parts of those that are cut."""
    numbers = [0, 0]
    for x in leaves:
        if isinstance(x, torch.Tensor):
            parts, local = isinstance(x, DTensor), x.to_local() if isinstance(x, DTensor) else x
            numbers[parts] = zlib.crc32(int(checksum(local)).to_bytes(8, "little", signed=True), numbers[parts])
    return numbers[0], numbers[1]


def peers(leaves: Sequence[Any], mesh: Mesh) -> tuple[int, ...]:
    """For every rank the first that brings the same parts: it differs only along axes that cut none of the inputs."""
    layouts = [x for x in (layout_of(leaf, mesh) for leaf in leaves) if x is not None]
    cut = {mesh.index(a) for layout in layouts for a in layout.axes_with(Cut)}
    rows = (mesh.coordinates(rank) for rank in range(mesh.size))
    return tuple(mesh.rank([n if i in cut else 0 for i, n in enumerate(row)]) for row in rows)
