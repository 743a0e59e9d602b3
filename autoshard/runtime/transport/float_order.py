"""Floats as integers in the same order, for reductions to a maximum or minimum: NaN is beyond all."""

from __future__ import annotations

import torch


def ordered(x: torch.Tensor, op: str) -> torch.Tensor:
    """``x`` as integers; reduced as floats, backends lose a NaN that is not on the first rank. :func:`floats` undoes it."""
    x = x.to(_wide(x.dtype))
    integer = torch.int64 if x.dtype == torch.float64 else torch.int32
    limits = torch.iinfo(integer)
    return _flipped(x.view(integer)).masked_fill(x.isnan(), limits.max if op == "max" else limits.min)


def floats(keys: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What :func:`ordered` made integers of, in ``dtype``."""
    return _flipped(keys).view(_wide(dtype)).to(dtype)


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """A negative float's bits below the sign grow with its size: between them and their order. Its own inverse."""
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What has integers of its size on every backend."""
    return torch.promote_types(dtype, torch.float32)
