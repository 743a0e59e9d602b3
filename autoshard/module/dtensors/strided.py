"""Dims sharded segment by segment (fused q, k, v) as torch's strided shards.

torch's own know equal segments on one axis. Ours encode a ratio of segments in a negative split
factor (:func:`autoshard.layout.parts_of`). Splitting, gathering and printing are patched here.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._redistribute import DTensorRedistributePlanner, _TransformInfo
from torch.distributed.tensor.placement_types import _StridedShard

from autoshard.layout import parts_of


def mend_strided() -> None:
    """Have torch split, gather and print strided shards by ratio."""
    of: Any = _StridedShard
    planner: Any = DTensorRedistributePlanner
    cut, shown, named, steps = of._split_tensor, of.__str__, of.__repr__, planner.generate_greedy_transform_infos

    def split_tensor(p: Any, whole: torch.Tensor, ranks: int, *, with_padding: bool = True, **how: Any) -> Any:
        if not says_ratio(p):
            return cut(p, whole, ranks, with_padding=with_padding, **how)
        parts = parts_of(p.split_factor)
        unit = whole.shape[p.dim] // sum(parts)
        chunks = [part.chunk(ranks, p.dim) for part in whole.split([n * unit for n in parts], p.dim)]
        return [torch.cat(mine, p.dim) for mine in zip(*chunks, strict=True)], [0] * ranks if with_padding else []

    def gathered_first(planner: Any, src: DTensorSpec, dst: DTensorSpec) -> Any:
        """Gather inner axes before outer ones: torch handles one axis per dim only."""
        pairs = zip(src.placements, dst.placements, strict=True)
        changed = {p.dim for p, q in pairs if isinstance(p, _StridedShard) and says_ratio(p) and p != q}
        placements, found = list(src.placements), []
        for i, p in reversed([*enumerate(src.placements)]):
            if isinstance(p, _StridedShard) and p.dim in changed:
                outer = math.prod(src.mesh.size(j) for j in range(i) if src.placements[j] == p)
                shape = [n // outer if d == p.dim else n for d, n in enumerate(src.shape)]
                found.append(_TransformInfo(i, (p, Replicate()), shape))
                placements[i] = Replicate()
        src = DTensorSpec(src.mesh, tuple(placements), src.tensor_meta) if found else src
        return [*found, *steps(planner, src, dst)]

    of._split_tensor = split_tensor
    of.__str__, of.__repr__ = (lambda p, f=f: text(p) if says_ratio(p) else f(p) for f in (shown, named))
    planner.generate_greedy_transform_infos = gathered_first


def cuts(placement: Any, dim: int) -> bool:
    """Whether ``dim`` (non-negative) is sharded; ``is_shard()`` is False for strided shards."""
    return bool(placement.is_shard(dim)) or (isinstance(placement, _StridedShard) and placement.dim == dim)


def says_ratio(placement: _StridedShard) -> bool:
    """Whether the split factor encodes a ratio of segments."""
    return int(placement.split_factor) < 0


def text(placement: _StridedShard) -> str:
    """Text such as ``_S(0, 4:1:1)``."""
    return f"_S({placement.dim}, {':'.join(map(str, parts_of(int(placement.split_factor))))})"
