"""What is loaded when it is called: the store of processes, and the placement of strided shards."""

from __future__ import annotations

from typing import Any

from autoshard.torch_private import by_name


def default_store() -> Any:
    """The store by which the default process group came up."""
    with by_name:
        from torch.distributed.distributed_c10d import _get_default_store
    return _get_default_store()


def strided_shard(dim: int, split_factor: int, parts: tuple[int, ...]) -> Any:
    """The placement of a dim of which each rank holds several chunks: torch's, if they are equal."""
    from autoshard.torch_private.dtensor import SegmentShard, StridedShard

    return SegmentShard(dim, split_factor, parts) if split_factor < 0 else StridedShard(dim, split_factor=split_factor)
