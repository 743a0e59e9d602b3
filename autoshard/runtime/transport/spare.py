"""Flat buffers on CPUs, and the tensors that lie in them, which are used again in the next step.

An allocator of main memory gives large pieces back to the system when they are freed, and the system clears every page
of the next one: that takes longer than the copies into it. Devices have allocators that keep what they have.
"""

from __future__ import annotations

import math
import operator
import sys
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch

LEAST = 1 << 20
"""bytes of a buffer that is kept: smaller ones stay with the allocator"""

CALLS = 2
"""calls after which a buffer that nobody used is freed"""

Shapes = tuple[torch.Size, ...]


class Kept(NamedTuple):
    """A buffer, the tensors that lie one after another in it, and the call that took it last."""

    buffer: torch.Tensor
    parts: list[torch.Tensor]
    call: int

    @property
    def is_free(self) -> bool:
        """Whether nobody else has it, a part, or a view of one: gradients of parameters are such parts."""
        storage, parts = self.buffer.untyped_storage(), self.parts
        users: int = torch._C._storage_Use_Count(storage._cdata)
        if users != 2 + len(parts):  # the buffer, ``storage``, the parts
            return False
        if sys.getrefcount(storage) != 3:  # the name, C++, this call
            return False
        if {*map(sys.getrefcount, parts)} != {2} or {*map(torch.Tensor._use_count, parts)} != {1}:  # type: ignore[attr-defined]
            return False
        return not any(map(_IN_GRAPH, parts))


_IN_GRAPH = operator.attrgetter("requires_grad")


class Spare:
    """Buffers by what lies in them. One is free again as soon as nobody holds a view of it."""

    def __init__(self) -> None:
        self._kept: dict[tuple[Shapes, torch.dtype], deque[Kept]] = {}
        """those of one form, the one that was taken longest ago first"""

    def take(
        self, like: torch.Tensor, shapes: Shapes, dtype: torch.dtype, call: int
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """A flat buffer where ``like`` is, of any content, and what lies in it: tensors of these ``shapes``.

        ``call``: the number of the present call.
        """
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
        return buffer.view(-1), [*parts]  # another tensor and another list: as long as they live the buffer is in use

    def _forget(self, call: int, *rows: deque[Kept]) -> None:
        for kept in rows:
            while kept and kept[0].call < call - CALLS:
                kept.popleft()

    def clear(self) -> None:
        """Keep none."""
        self._kept.clear()


def is_kept(like: torch.Tensor, shapes: Sequence[torch.Size], dtype: torch.dtype) -> bool:
    """Whether a buffer for tensors of these ``shapes`` where ``like`` is serves again."""
    return like.device.type == "cpu" and _size(shapes) * dtype.itemsize >= LEAST


def parts_of(buffer: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Tensors of these ``shapes``, one after another in ``buffer``, which may be longer."""
    sizes = [math.prod(shape) for shape in shapes]
    rest = buffer.numel() - sum(sizes)
    parts = torch.split(buffer, [*sizes, rest] if rest else sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]


def _size(shapes: Sequence[torch.Size]) -> int:
    return sum(map(torch.Size.numel, shapes))
