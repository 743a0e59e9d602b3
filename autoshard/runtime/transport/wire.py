"""Tensors as backends send them: supported dtypes, padding, packing."""

from __future__ import annotations

from collections.abc import Sequence

import torch

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


def raw(x: torch.Tensor) -> torch.Tensor:
    """The same bits in a dtype that backends can send; supported dtypes are unchanged."""
    other = _SENT_AS.get(x.dtype)
    return x if other is None else x.view(other)


def with_length(shape: Sequence[int], dim: int, length: int) -> list[int]:
    """``shape`` with ``length`` along ``dim``."""
    return [*shape[:dim], length, *shape[dim + 1 :]]


def numel(shape: Sequence[int]) -> int:
    """Number of elements of a shape."""
    return torch.Size(shape).numel()


def outermost(shape: Sequence[int], dim: int) -> bool:
    """Whether chunks along ``dim`` are contiguous: all dims in front of it have size 1."""
    return numel(shape[:dim]) == 1


def padded(x: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """``x`` zero-padded at the end of ``dim`` to ``length``."""
    if x.shape[dim] == length:
        return x
    out = x.new_zeros(with_length(x.shape, dim, length))
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out


def behind(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """``pieces``, of one dtype, packed into a flat tensor with one copy, whatever their strides."""
    counts = [x.numel() for x in pieces]
    out = pieces[0].new_empty(sum(counts))
    for place, x in zip(out.split(counts), pieces, strict=True):
        place.view(x.shape).copy_(x)
    return out
