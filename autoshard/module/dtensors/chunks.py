"""Checkpoint chunks of segment-wise sharded DTensors (fused q, k, v): several per rank."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.module.dtensors.owned import is_owned, part_of_owned


class Chunk(NamedTuple):
    """A block of the global tensor, and the view of this rank's shard that holds it."""

    metadata: ChunkStorageMetadata
    local: torch.Tensor


def chunks(x: DTensor) -> list[Chunk]:
    """The chunks of ``x`` on this rank, as views of its local shard."""
    mesh = Mesh.of(x.device_mesh)
    rank = mesh.rank(list(x.device_mesh.get_coordinate() or ()))
    layout, whole = Layout.from_torch(mesh, x.placements), x.to_local()
    found = []
    for block in itertools.product(*(_spans(layout, d, n, rank) for d, n in enumerate(x.shape))):
        local = whole
        for dim, (_, held, length) in enumerate(block):
            local = local.narrow(dim, held, length)
        offsets = torch.Size([start for start, _, _ in block])
        found.append(Chunk(ChunkStorageMetadata(offsets=offsets, sizes=local.shape), local))
    return found


def _spans(layout: Layout, dim: int, size: int, rank: int) -> list[tuple[int, int, int]]:
    """(global offset, local offset, length) of each chunk of a dim on ``rank``."""
    parts = layout.chunks_of(dim, size, rank)
    begin = itertools.accumulate((n for _, n in parts), initial=0)
    return [(start, held, n) for (start, n), held in zip(parts, begin, strict=False)]


def in_order(gathered: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The full tensor from concatenated shards: chunks are grouped by segment."""
    for placed in set(layout.grouped.values()):
        ranks, dim, parts = layout.mesh.size_of(layout.cutting(placed.dim)), placed.dim, placed.parts
        unit = gathered.shape[dim] // sum(parts) // ranks
        chunks = gathered.split([n * unit for n in parts] * ranks, dim)
        gathered = torch.cat([chunk for i in range(len(parts)) for chunk in chunks[i :: len(parts)]], dim)
    return gathered


def mend_checkpoints() -> None:
    """Have torch.distributed.checkpoint handle each chunk of segment-wise sharded DTensors."""
    of: Any = DTensor
    written, listed, shard = of.__create_write_items__, of.__create_chunk_list__, of.__get_tensor_shard__

    def create_write_items(self: DTensor, fqn: str, given: Any) -> Any:
        return [_item(fqn, self, c) for c in chunks(self)] if holds_several(self) else written(self, fqn, given)

    def create_chunk_list(self: DTensor) -> Any:
        return [c.metadata for c in chunks(self)] if holds_several(self) else listed(self)

    def get_tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
        if not holds_several(self):
            found: torch.Tensor = shard(self, index)
            return found
        return next(c.local for c in chunks(self) if c.metadata.offsets == index.offset)

    of.__create_write_items__, of.__create_chunk_list__ = create_write_items, create_chunk_list
    of.__get_tensor_shard__ = get_tensor_shard

    utils: Any = _state_dict_utils
    distribute = utils._distribute_tensors

    def distribute_tensors(states: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None) -> None:
        """Also for ``broadcast_from_rank0``: states are pairs (DTensor, full tensor)."""
        for key in keys:
            pair = states.get(key)
            if isinstance(pair, tuple) and is_owned(pair[0]):  # locally: ranks without a shard take no part
                states[key] = part_of_owned(pair[1], pair[0])
            elif isinstance(pair, tuple) and holds_several(pair[0]):
                states[key] = _filled(*pair)
        distribute(states, keys, device, pg)

    utils._distribute_tensors = distribute_tensors


def holds_several(x: Any) -> bool:
    """Whether one placement gives a rank several chunks of a dim that no other axis shards."""
    cut = {p.dim for p in x.placements if hasattr(p, "split_factor")}
    return bool(cut) and not any(p.is_shard() and p.dim in cut for p in x.placements)


def _filled(x: DTensor, whole: torch.Tensor) -> DTensor:
    """``x`` filled with its shard of ``whole``; a new DTensor if ``x`` is on the meta device."""
    if x.is_meta:
        local = torch.empty_like(x.to_local(), device=whole.device)
        x = DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    for block, part in chunks(x):
        part.detach().copy_(
            whole[tuple(map(slice, block.offsets, map(sum, zip(block.offsets, block.sizes, strict=True))))]
        )
    return x


def _item(fqn: str, x: DTensor, chunk: Chunk) -> WriteItem:
    data = TensorWriteData(
        chunk=chunk.metadata, properties=TensorProperties.create_from_tensor(chunk.local), size=x.size()
    )
    return WriteItem(index=MetadataIndex(fqn, chunk.metadata.offsets), type=WriteItemType.SHARD, tensor_data=data)
