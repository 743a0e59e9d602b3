"""What is loaded when it is called: the store of processes, and the placement of strided shards."""

from __future__ import annotations

import functools
from typing import Any

from autoshard.torch_private import by_name


def default_store() -> Any:
    """The store by which the default process group came up."""
    with by_name:
        from torch.distributed.distributed_c10d import _get_default_store
    return _get_default_store()


def strided_shard(dim: int, split_factor: int, parts: tuple[int, ...] = ()) -> Any:
    """The placement of a dim of which each rank holds several chunks: torch's, if equal."""
    kind = _segment_shard()
    return kind(dim, split_factor, parts) if split_factor < 0 else kind.__base__(dim, split_factor=split_factor)


@functools.cache
def _segment_shard() -> Any:
    with by_name:
        import torch
        from torch.distributed.tensor.placement_types import _StridedShard

    class SegmentShard(_StridedShard):
        """A dim sharded segment by segment, in the ratio ``parts``; its split factor is negative."""

        parts: tuple[int, ...]

        def __init__(self, dim: int, split_factor: int, parts: tuple[int, ...]) -> None:
            super().__init__(dim, split_factor=split_factor)
            self.parts = parts

        def _split_tensor(  # type: ignore[override]
            self, full: Any, ranks: int, *, with_padding: bool = True, **_: Any
        ) -> Any:
            unit = full.shape[self.dim] // sum(self.parts)
            chunks = [part.chunk(ranks, self.dim) for part in full.split([n * unit for n in self.parts], self.dim)]
            return [torch.cat(mine, self.dim) for mine in zip(*chunks, strict=True)], [
                0
            ] * ranks if with_padding else []

        def __repr__(self) -> str:
            return f"_S({self.dim}, {':'.join(map(str, self.parts))})"

        __str__ = __repr__

    return SegmentShard
