"""Flat communication buffers: dtypes backends can send, packing, a pool on CPUs, whose allocator
returns large buffers to the system. Clearing new pages takes longer than the copies, so buffers
are reused in the next step."""

from __future__ import annotations

import math
import operator
import sys
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autoshard.torch_private.dispatch import storage_use_count, tensor_use_count

_SENT_AS = {
    torch.int16: torch.bfloat16,
    torch.uint16: torch.bfloat16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
    torch.bool: torch.uint8,
    **{
        x: torch.uint8
        for x in vars(torch).values()
        if isinstance(x, torch.dtype) and x.itemsize == 1 and x.is_floating_point
    },
}


def raw(x: Tensor) -> Tensor:
    """The same bits in a dtype that backends can send; supported dtypes are unchanged."""
    other = _SENT_AS.get(x.dtype)
    return x if other is None else x.view(other)


def with_length(shape: Sequence[int], dim: int, length: int) -> list[int]:
    return [*shape[:dim], length, *shape[dim + 1 :]]


def numel(shape: Sequence[int]) -> int:
    """Number of elements of a shape."""
    return torch.Size(shape).numel()


def is_outermost(shape: Sequence[int], dim: int) -> bool:
    """Whether chunks along ``dim`` are contiguous: all dims in front of it have size 1."""
    return numel(shape[:dim]) == 1


def zero_padded(x: Tensor, dim: int, length: int) -> Tensor:
    if x.shape[dim] == length:
        return x
    out = x.new_zeros(with_length(x.shape, dim, length))
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


def packed_flat(pieces: Sequence[Tensor]) -> Tensor:
    """``pieces``, of one dtype, packed into a flat tensor with one copy, whatever their strides."""
    counts = [x.numel() for x in pieces]
    out = pieces[0].new_empty(sum(counts))
    for place, x in zip(out.split(counts), pieces, strict=True):
        place.view(x.shape).copy_(x)
    return out


def float_order_keys(x: Tensor, op: str) -> Tensor:
    """Order-preserving integers of ``x``: float reductions of backends may lose a NaN."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    integer = torch.int64 if x.dtype == torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    return _flip_negative_bits(x.view(integer)).masked_fill(x.isnan(), limits.max if op == "max" else limits.min)


def floats_of_keys(keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`float_order_keys`, in ``dtype``."""
    return _flip_negative_bits(keys).view(torch.promote_types(dtype, torch.float32)).to(dtype)


def _flip_negative_bits(bits: Tensor) -> Tensor:
    """Make negative floats' bits increase with their value. Its own inverse."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


MIN_POOLED_BYTES = 1 << 20
"""bytes from which a buffer is pooled; smaller ones stay with the allocator"""

IDLE_CALLS = 2
"""calls after which an unused buffer is freed"""

BufferShapes = tuple[torch.Size, ...]


class PooledBuffer(NamedTuple):
    """A pooled buffer, its consecutive views, and the call that took it last."""

    buffer: Tensor
    parts: list[Tensor]
    call: int

    @property
    def is_free(self) -> bool:
        """Whether nothing else uses it or a view of it; gradients of parameters are views."""
        storage, parts = self.buffer.untyped_storage(), self.parts
        users: int = storage_use_count(storage._cdata)
        if users != 2 + len(parts):  # the buffer, ``storage``, the parts
            return False
        if sys.getrefcount(storage) != 3:  # the local name, C++, this call
            return False
        if {*map(sys.getrefcount, parts)} != {2} or {*map(tensor_use_count, parts)} != {1}:
            return False
        return not any(map(_IN_GRAPH, parts))


_IN_GRAPH = operator.attrgetter("requires_grad")


class BufferPool:
    """Buffers by shapes and dtype. One is free as soon as no view of it is in use."""

    def __init__(self) -> None:
        self._kept: dict[tuple[BufferShapes, torch.dtype], deque[PooledBuffer]] = {}
        """(shapes, dtype) → buffers, least recently taken first"""

    def take(self, like: Tensor, shapes: BufferShapes, dtype: torch.dtype, call: int) -> tuple[Tensor, list[Tensor]]:
        """An uninitialised flat buffer on the device of ``like``, and views of ``shapes`` in it.
        ``call``: the current call's number."""
        if not is_pooled(like, shapes, dtype):
            buffer = like.new_empty(sum(map(torch.Size.numel, shapes)), dtype=dtype)
            return buffer, buffer_views(buffer, shapes)
        kept = self._kept.setdefault((shapes, dtype), deque())
        found = next((i for i, x in enumerate(kept) if x.is_free), None)
        if found is None:
            self._forget(call, *self._kept.values())
            buffer = like.new_empty(sum(map(torch.Size.numel, shapes)), dtype=dtype)
            parts = buffer_views(buffer, shapes)
        else:
            buffer, parts, _ = kept[found]
            del kept[found]
            self._forget(call, kept)
        kept.append(PooledBuffer(buffer, parts, call))
        return buffer.view(-1), [*parts]  # new objects: while they live, the buffer is in use

    def _forget(self, call: int, *rows: deque[PooledBuffer]) -> None:
        for kept in rows:
            while kept and kept[0].call < call - IDLE_CALLS:
                kept.popleft()

    def clear(self) -> None:
        """Free all buffers."""
        self._kept.clear()


def is_pooled(like: Tensor, shapes: Sequence[torch.Size], dtype: torch.dtype) -> bool:
    """Whether a buffer for ``shapes`` on the device of ``like`` is pooled."""
    return like.device.type == "cpu" and sum(map(torch.Size.numel, shapes)) * dtype.itemsize >= MIN_POOLED_BYTES


def buffer_views(buffer: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Consecutive views of ``shapes`` in ``buffer``, which may be longer."""
    sizes = [math.prod(shape) for shape in shapes]
    rest = buffer.numel() - sum(sizes)
    parts = torch.split(buffer, [*sizes, rest] if rest else sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]
