"""Dims sharded segment by segment (fused q, k, v) as torch's strided shards, also in checkpoints.

Torch's ``_StridedShard`` knows equal segments on one axis only. A negative split factor encodes a
ratio of segments (:func:`autoshard.layout.parts_of`). Torch's operations pass it on; splitting,
gathering and torch.distributed.checkpoint, which expects one chunk per rank, are patched here.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Replicate

from autoshard.layout import Layout, parts_of_split_factor
from autoshard.mesh import Mesh
from autoshard.module.dtensors.table_wise import is_owned, owned_shard_of
from autoshard.torch_private.dtensor import (
    DTensorRedistributePlanner,
    DTensorSpec,
    StridedShard,
    TransformInfo,
    state_dict_utils,
)


def patch_strided_shard() -> None:
    """Have torch split, gather and print strided shards by ratio."""
    of: Any = StridedShard
    planner: Any = DTensorRedistributePlanner
    cut, shown, named, steps = of._split_tensor, of.__str__, of.__repr__, planner.generate_greedy_transform_infos

    def split_tensor(p: Any, whole: torch.Tensor, ranks: int, *, with_padding: bool = True, **how: Any) -> Any:
        if not has_ratio(p):
            return cut(p, whole, ranks, with_padding=with_padding, **how)
        parts = parts_of_split_factor(p.split_factor)
        unit = whole.shape[p.dim] // sum(parts)
        chunks = [part.chunk(ranks, p.dim) for part in whole.split([n * unit for n in parts], p.dim)]
        return [torch.cat(mine, p.dim) for mine in zip(*chunks, strict=True)], [0] * ranks if with_padding else []

    def gathered_first(planner: Any, src: DTensorSpec, dst: DTensorSpec) -> Any:
        """Gather inner axes before outer ones: torch handles one axis per dim only."""
        pairs = zip(src.placements, dst.placements, strict=True)
        changed = {p.dim for p, q in pairs if isinstance(p, StridedShard) and has_ratio(p) and p != q}
        placements, found = list(src.placements), []
        for i, p in reversed([*enumerate(src.placements)]):
            if isinstance(p, StridedShard) and p.dim in changed:
                outer = math.prod(src.mesh.size(j) for j in range(i) if src.placements[j] == p)
                shape = [n // outer if d == p.dim else n for d, n in enumerate(src.shape)]
                found.append(TransformInfo(i, (p, Replicate()), shape))
                placements[i] = Replicate()
        src = DTensorSpec(src.mesh, tuple(placements), src.tensor_meta) if found else src
        return [*found, *steps(planner, src, dst)]

    of._split_tensor = split_tensor
    of.__str__, of.__repr__ = (lambda p, f=f: ratio_text(p) if has_ratio(p) else f(p) for f in (shown, named))
    planner.generate_greedy_transform_infos = gathered_first


def shards_dim(placement: Any, dim: int) -> bool:
    """Whether ``dim`` (non-negative) is sharded; ``is_shard()`` is False for strided shards."""
    return bool(placement.is_shard(dim)) or (isinstance(placement, StridedShard) and placement.dim == dim)


def has_ratio(placement: StridedShard) -> bool:
    """Whether the split factor encodes a ratio of segments."""
    return int(placement.split_factor) < 0


def ratio_text(placement: StridedShard) -> str:
    """Text such as ``_S(0, 4:1:1)``."""
    return f"_S({placement.dim}, {':'.join(map(str, parts_of_split_factor(int(placement.split_factor))))})"


class LocalChunk(NamedTuple):
    """A block of the global tensor, and the view of this rank's shard that holds it."""

    metadata: ChunkStorageMetadata
    local: torch.Tensor


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


def reorder_segments(gathered: torch.Tensor, layout: Layout) -> torch.Tensor:
    """The full tensor from concatenated shards: chunks are grouped by segment."""
    for placed in set(layout.grouped.values()):
        ranks, dim, parts = layout.mesh.size_of(layout.cutting(placed.dim)), placed.dim, placed.parts
        unit = gathered.shape[dim] // sum(parts) // ranks
        chunks = gathered.split([n * unit for n in parts] * ranks, dim)
        gathered = torch.cat([chunk for i in range(len(parts)) for chunk in chunks[i :: len(parts)]], dim)
    return gathered


def patch_checkpoint_chunks() -> None:
    """Have torch.distributed.checkpoint handle each chunk of segment-wise sharded DTensors."""
    of: Any = DTensor
    written, listed, shard = of.__create_write_items__, of.__create_chunk_list__, of.__get_tensor_shard__

    def create_write_items(self: DTensor, fqn: str, given: Any) -> Any:
        return (
            [_write_item(fqn, self, c) for c in local_chunks(self)]
            if has_several_chunks(self)
            else written(self, fqn, given)
        )

    def create_chunk_list(self: DTensor) -> Any:
        return [c.metadata for c in local_chunks(self)] if has_several_chunks(self) else listed(self)

    def get_tensor_shard(self: DTensor, index: MetadataIndex) -> torch.Tensor:
        if not has_several_chunks(self):
            found: torch.Tensor = shard(self, index)
            return found
        return next(c.local for c in local_chunks(self) if c.metadata.offsets == index.offset)

    of.__create_write_items__, of.__create_chunk_list__ = create_write_items, create_chunk_list
    of.__get_tensor_shard__ = get_tensor_shard

    utils: Any = state_dict_utils
    distribute = utils._distribute_tensors

    def distribute_tensors(states: dict[str, Any], keys: list[str], device: torch.device, pg: Any = None) -> None:
        """Also for ``broadcast_from_rank0``: states are pairs (DTensor, full tensor)."""
        for key in keys:
            pair = states.get(key)
            if isinstance(pair, tuple) and is_owned(pair[0]):  # locally: ranks without a shard take no part
                states[key] = owned_shard_of(pair[1], pair[0])
            elif isinstance(pair, tuple) and has_several_chunks(pair[0]):
                states[key] = _load_full_tensor(*pair)
        distribute(states, keys, device, pg)

    utils._distribute_tensors = distribute_tensors


def has_several_chunks(x: Any) -> bool:
    """Whether one placement gives a rank several chunks of a dim that no other axis shards."""
    cut = {p.dim for p in x.placements if hasattr(p, "split_factor")}
    return bool(cut) and not any(p.is_shard() and p.dim in cut for p in x.placements)


def _load_full_tensor(x: DTensor, whole: torch.Tensor) -> DTensor:
    """``x`` filled with its shard of ``whole``; a new DTensor if ``x`` is on the meta device."""
    if x.is_meta:
        local = torch.empty_like(x.to_local(), device=whole.device)
        x = DTensor.from_local(local, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=x.stride())
    for block, part in local_chunks(x):
        part.detach().copy_(
            whole[tuple(map(slice, block.offsets, map(sum, zip(block.offsets, block.sizes, strict=True))))]
        )
    return x


def _write_item(fqn: str, x: DTensor, chunk: LocalChunk) -> WriteItem:
    data = TensorWriteData(
        chunk=chunk.metadata, properties=TensorProperties.create_from_tensor(chunk.local), size=x.size()
    )
    return WriteItem(index=MetadataIndex(fqn, chunk.metadata.offsets), type=WriteItemType.SHARD, tensor_data=data)
