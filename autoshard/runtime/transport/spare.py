"""Flat buffers on CPUs that are used again in the next step.

An allocator of main memory gives large pieces back to the system when they are freed, and the system clears every page
of the next one: that takes longer than the copies into it. Devices have allocators that keep what they have.
"""

from __future__ import annotations

from collections import deque

import torch

LEAST = 1 << 20
"""bytes of a buffer that is kept: smaller ones stay with the allocator"""

CALLS = 2
"""calls after which a buffer that nobody used is freed"""


class Spare:
    """Buffers by size. One is free again as soon as nobody holds a view of it, gradients of parameters included."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, torch.dtype], deque[tuple[int, torch.Tensor]]] = {}
        """those of one size, the one that was taken longest ago first, each with the call that took it"""

    def take(self, like: torch.Tensor, size: int, dtype: torch.dtype, call: int) -> torch.Tensor:
        """A buffer of ``size`` elements where ``like`` is, of any content. ``call``: the number of the present call."""
        if not is_kept(like, size, dtype):
            return like.new_empty(size, dtype=dtype)
        kept = self._kept.setdefault((size, dtype), deque())
        found = next((i for i, (_, x) in enumerate(kept) if _is_free(x)), None)
        if found is None:
            buffer = like.new_empty(size, dtype=dtype)
        else:
            buffer = kept[found][1]
            del kept[found]
        while kept and kept[0][0] < call - CALLS:
            kept.popleft()
        kept.append((call, buffer))
        return buffer.view(-1)  # another tensor: as long as it lives the buffer is in use

    def clear(self) -> None:
        """Keep none."""
        self._kept.clear()


def is_kept(like: torch.Tensor, size: int, dtype: torch.dtype) -> bool:
    """Whether a buffer of ``size`` elements where ``like`` is serves again."""
    return size * dtype.itemsize >= LEAST and like.device.type == "cpu"


def _is_free(x: torch.Tensor) -> bool:
    storage = x.untyped_storage()
    users: int = torch._C._storage_Use_Count(storage._cdata)
    return users == 2  # the tensor and ``storage``
