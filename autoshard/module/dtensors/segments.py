"""Dims sharded segment by segment (fused q, k, v): shards, and several chunks per rank for
torch.distributed.checkpoint. A negative split factor of ``_StridedShard`` encodes their ratio
(:func:`autoshard.layout.parts_of_split_factor`)."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from autoshard.layout import Layout, Partial
from autoshard.mesh import Mesh
from autoshard.torch_private.dtensor import StridedShard


def shards_dim(placement: Any, dim: int) -> bool:
    """Whether ``dim`` (non-negative) is sharded; ``is_shard()`` is False for strided shards."""
    return bool(placement.is_shard(dim)) or (isinstance(placement, StridedShard) and placement.dim == dim)


def shard_of(full: Tensor, layout: Layout, rank: int) -> Tensor:
    """The rank's shard of ``full``; of Partial axes the first rank holds all, others zeros."""
    local = full
    for dim, size in enumerate(full.shape):
        (start, length), *others = layout.chunks_of(dim, size, rank)
        if others:
            local = torch.cat([local.narrow(dim, at, n) for at, n in ((start, length), *others)], dim)
        elif length != size:
            local = local.narrow(dim, start, length)
    coordinates = layout.mesh.coordinates(rank)
    partial = (i for i, p in enumerate(layout.placements) if isinstance(p, Partial))
    return torch.zeros_like(local) if any(coordinates[i] for i in partial) else local


class LocalChunk(NamedTuple):
    """A block of the global tensor, and the view of this rank's shard that holds it."""

    metadata: ChunkStorageMetadata
    local: Tensor


def local_chunks(x: DTensor) -> list[LocalChunk]:
    """The chunks of ``x`` on this rank, as views of its local shard."""
    mesh = Mesh.of(x.device_mesh)
    rank = mesh.rank(list(x.device_mesh.get_coordinate() or ()))
    layout, whole = Layout.from_torch(mesh, x.placements), x.to_local()
    found = []
    for block in itertools.product(*(_chunk_spans(layout, d, n, rank) for d, n in enumerate(x.shape))):
        local = whole
        for dim, (_, held, length) in enumerate(block):
            local = local.narrow(dim, held, length)
        offsets = torch.Size([start for start, _, _ in block])
        found.append(LocalChunk(ChunkStorageMetadata(offsets=offsets, sizes=local.shape), local))
    return found


def _chunk_spans(layout: Layout, dim: int, size: int, rank: int) -> list[tuple[int, int, int]]:
    """(global offset, local offset, length) of each chunk of a dim on ``rank``."""
    parts = layout.chunks_of(dim, size, rank)
    begin = itertools.accumulate((n for _, n in parts), initial=0)
    return [(start, held, n) for (start, n), held in zip(parts, begin, strict=False)]


def reorder_segments(gathered: Tensor, layout: Layout) -> Tensor:
    """The full tensor from concatenated shards: chunks are grouped by segment."""
    for placed in set(layout.grouped.values()):
        ranks, dim, parts = layout.mesh.size_of(layout.cutting(placed.dim)), placed.dim, placed.parts
        unit = gathered.shape[dim] // sum(parts) // ranks
        chunks = gathered.split([n * unit for n in parts] * ranks, dim)
        gathered = torch.cat([chunk for i in range(len(parts)) for chunk in chunks[i :: len(parts)]], dim)
    return gathered


def has_several_chunks(x: Any) -> bool:
    """Whether one placement gives a rank several chunks of a dim that no other axis shards."""
    cut = {p.dim for p in x.placements if hasattr(p, "split_factor")}
    return bool(cut) and not any(p.is_shard() and p.dim in cut for p in x.placements)


def chunk_write_item(fqn: str, x: DTensor, chunk: LocalChunk) -> WriteItem:
    """What torch.distributed.checkpoint writes of a chunk."""
    data = TensorWriteData(
        chunk=chunk.metadata, properties=TensorProperties.create_from_tensor(chunk.local), size=x.size()
    )
    return WriteItem(index=MetadataIndex(fqn, chunk.metadata.offsets), type=WriteItemType.SHARD, tensor_data=data)
