"""Buffer pool: flat CPU buffers, and the views in them, are reused in the next step.

A CPU allocator returns large buffers to the system when they are freed, and the system clears every
page of the next one, which takes longer than the copies. Devices have caching allocators."""

from __future__ import annotations

import math
import operator
import sys
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

LEAST = 1 << 20
"""bytes from which a buffer is pooled; smaller ones stay with the allocator"""

CALLS = 2
"""calls after which an unused buffer is freed"""

Shapes = tuple[torch.Size, ...]


class Kept(NamedTuple):
    """A pooled buffer, its consecutive views, and the call that took it last."""

    buffer: torch.Tensor
    parts: list[torch.Tensor]
    call: int

    @property
    def is_free(self) -> bool:
        """Whether nothing else uses it or a view of it; gradients of parameters are views."""
        storage, parts = self.buffer.untyped_storage(), self.parts
        users: int = torch._C._storage_Use_Count(storage._cdata)
        if users != 2 + len(parts):  # the buffer, ``storage``, the parts
            return False
        if sys.getrefcount(storage) != 3:  # the local name, C++, this call
            return False
        if {*map(sys.getrefcount, parts)} != {2} or {*map(torch.Tensor._use_count, parts)} != {1}:  # type: ignore[attr-defined]
            return False
        return not any(map(_IN_GRAPH, parts))


_IN_GRAPH = operator.attrgetter("requires_grad")


class Spare:
    """Buffers by shapes and dtype. One is free as soon as no view of it is in use."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Shapes, torch.dtype], deque[Kept]] = {}
        """(shapes, dtype) → buffers, least recently taken first"""

    def take(
        self, like: torch.Tensor, shapes: Shapes, dtype: torch.dtype, call: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A flat buffer on the device of ``like``, uninitialised, and views of ``shapes`` in it.

        ``call``: the number of the current call."""
        if not is_kept(like, shapes, dtype):
            buffer = like.new_empty(_size(shapes), dtype=dtype)
            return buffer, parts_of(buffer, shapes)
        kept = self._kept.setdefault((shapes, dtype), deque())
        found = next((i for i, x in enumerate(kept) if x.is_free), None)
        if found is None:
            self._forget(call, *self._kept.values())
            buffer = like.new_empty(_size(shapes), dtype=dtype)
            parts = parts_of(buffer, shapes)
        else:
            buffer, parts, _ = kept[found]
            del kept[found]
            self._forget(call, kept)
        kept.append(Kept(buffer, parts, call))
        return buffer.view(-1), [*parts]  # new objects: while they live, the buffer is in use

    def _forget(self, call: int, *rows: deque[Kept]) -> None:
        for kept in rows:
            while kept and kept[0].call < call - CALLS:
                kept.popleft()

    def clear(self) -> None:
        """Free all buffers."""
        self._kept.clear()


def is_kept(like: torch.Tensor, shapes: Sequence[torch.Size], dtype: torch.dtype) -> bool:
    """Whether a buffer for ``shapes`` on the device of ``like`` is pooled."""
    return like.device.type == "cpu" and _size(shapes) * dtype.itemsize >= LEAST


def parts_of(buffer: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Consecutive views of ``shapes`` in ``buffer``, which may be longer."""
    sizes = [math.prod(shape) for shape in shapes]
    rest = buffer.numel() - sum(sizes)
    parts = torch.split(buffer, [*sizes, rest] if rest else sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]


def _size(shapes: Sequence[torch.Size]) -> int:
    return sum(map(torch.Size.numel, shapes))
