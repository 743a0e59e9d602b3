"""Floats as integers in the same order, for max and min reductions; NaN is the extreme."""

from __future__ import annotations

import torch


def ordered(x: torch.Tensor, op: str) -> torch.Tensor:
    """Order-preserving integers of ``x``: float reductions of backends may lose a NaN."""
    x = x.to(_wide(x.dtype))
    integer = torch.int64 if x.dtype == torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    return _flipped(x.view(integer)).masked_fill(x.isnan(), limits.max if op == "max" else limits.min)


def floats(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of :func:`ordered`, in ``dtype``."""
    return _flipped(keys).view(_wide(dtype)).to(dtype)


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """Make negative floats' bits increase with their value. Its own inverse."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Float32 or wider: dtypes with integers of their size on every backend."""
    return torch.promote_types(dtype, torch.float32)
