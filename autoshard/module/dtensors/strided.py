"""DTensors of whose dim every part is cut: torch's strided shards know equal parts on one axis alone.

Others are strided shards whose split factor says a ratio (:func:`autoshard.layout.parts_of`). Torch's operations carry it;
what cuts and gathers by it is here.
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
    """Have torch cut and gather by ratios, and print them."""
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
        """Inner axes before outer ones: of several on a dim torch takes each for the only one."""
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
    """Whether tensor dim ``dim``, counted from the front, is cut: torch's strided shards say no to ``is_shard()``."""
    return bool(placement.is_shard(dim)) or (isinstance(placement, _StridedShard) and placement.dim == dim)


def says_ratio(placement: _StridedShard) -> bool:
    """Whether its split factor is no number of equal parts."""
    return int(placement.split_factor) < 0


def text(placement: _StridedShard) -> str:
    """``_S(0, 4:1:1)``."""
    return f"_S({placement.dim}, {':'.join(map(str, parts_of(int(placement.split_factor))))})"
