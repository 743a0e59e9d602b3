"""Inputs on a rank: local ones become DTensors of global shape; programs get local shards."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from autoshard.errors import CaptureError, LayoutError
from autoshard.layout import Layout
from autoshard.layout import Shard as Cut
from autoshard.mesh import Mesh
from autoshard.module.dtensors.made import dtensor
from autoshard.module.dtensors.of_stage import OfStage
from autoshard.module.dtensors.views import up_to_date
from autoshard.module.inputs import whole_shape
from autoshard.module.ranks.checksum import checksum


def from_part(part: torch.Tensor, mesh: DeviceMesh, layout: Layout) -> DTensor:
    """A local input as a DTensor; all ranks have shards of one size."""
    return dtensor(part, mesh, layout, whole_shape(part.shape, layout))


def stating(x: DTensor, mesh: DeviceMesh) -> torch.Tensor:
    """A DTensor input with sharded and replicated placements only; plain if replicated.

    Other placements are gathered. Raises :class:`CaptureError` for a DTensor on another mesh.
    """
    if x.device_mesh is not mesh and x.device_mesh.mesh.tolist() != mesh.mesh.tolist():
        raise CaptureError(
            f"an input of shape {list(x.shape)} is a DTensor on another mesh ({x.device_mesh}) than the module's "
            f"({mesh}). Give one on sharded.device_mesh, or its full_tensor()."
        )
    own = isinstance(x, OfStage)  # no rank may have all of it
    if (own or any(type(p) is Shard for p in x.placements)) and all(
        type(p) in (Shard, Replicate) for p in x.placements
    ):
        return x
    plain = [p if type(p) is Shard else Replicate() for p in x.placements]
    if isinstance(x, OfStage):
        return x.like(x.redistribute(mesh, plain))
    x = x if list(x.placements) == plain else x.redistribute(mesh, plain)
    return x if any(p.is_shard() for p in plain) else x.to_local()


def arrived(
    leaves: Sequence[Any], layouts: Sequence[Layout | None], mesh: DeviceMesh, device: torch.device
) -> list[Any]:
    """The argument leaves as programs know them. ``layouts``: of local ones, by leaf; or empty."""
    found = list(leaves)
    for i, x in enumerate(leaves):
        if isinstance(x, DTensor):
            up_to_date([x])
            found[i] = stating(x, mesh)
        elif layouts and (layout := layouts[i]) is not None:
            found[i] = from_part(x.to(device), mesh, layout)
    return found


def layout_of(x: Any, mesh: Mesh) -> Layout | None:
    """The layout of a DTensor input; None: global."""
    return Layout.from_torch(mesh, x.placements) if isinstance(x, DTensor) else None


def part_for(x: torch.Tensor, layout: Layout, mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """This rank's shard of an input on ``device``, in the ``layout`` of the program."""
    if not isinstance(x, DTensor):
        return x.to(device)
    try:
        placements = layout.to_torch()
    except LayoutError:
        raise AssertionError(f"inputs come in mesh order, not in {layout}") from None
    if list(x.placements) != placements:
        x = x.redistribute(mesh, placements)
    if not (x._local_tensor.requires_grad or (x.requires_grad and torch.is_grad_enabled())):
        return x._local_tensor
    return x.to_local()


def joined(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gather sharded inputs but those of one stage; gradients return to the shards. Collective."""
    found = dict(inputs)
    for name, x in inputs.items():
        if isinstance(x, DTensor) and not isinstance(x, OfStage):
            whole = [Replicate()] * x.device_mesh.ndim
            found[name] = x.redistribute(x.device_mesh, whole).to_local()
    return found


def checksums(leaves: Sequence[Any], most: int | None) -> tuple[int, int]:
    """Two checksums of the inputs: of global ones, and of this rank's local shards.

    ``most``: sampled elements per input; None: all. Skips state on one stage: others cannot
    compare.
    """
    numbers = [0, 0]
    for x in leaves:
        if isinstance(x, torch.Tensor) and not isinstance(x, OfStage):
            parts, local = isinstance(x, DTensor), x.to_local() if isinstance(x, DTensor) else x
            numbers[parts] = zlib.crc32(int(checksum(local, most)).to_bytes(8, "little", signed=True), numbers[parts])
    return numbers[0], numbers[1]


def peers(leaves: Sequence[Any], mesh: Mesh) -> tuple[int, ...]:
    """Per rank the first rank with the same shards: other coordinates on unsharded axes only."""
    layouts = [x for x in (layout_of(leaf, mesh) for leaf in leaves) if x is not None]
    cut = {mesh.index(a) for layout in layouts for a in layout.axes_with(Cut)}
    rows = (mesh.coordinates(rank) for rank in range(mesh.size))
    return tuple(mesh.rank([n if i in cut else 0 for i, n in enumerate(row)]) for row in rows)
