"""Largest difference of two tensors, and their scale to relate it to."""

from __future__ import annotations

import torch


def scale(t: torch.Tensor) -> float:
    """Largest finite absolute value; 0 for integers and empty tensors."""
    if not t.numel() or not (t.is_floating_point() or t.is_complex()):
        return 0.0
    return float(torch.nan_to_num(t.detach(), 0.0, 0.0, 0.0).abs().max())


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest absolute difference; equal infinities and NaN in the same place count as 0."""
    if not want.numel():
        return 0.0
    same = (got == want) | (got.isnan() & want.isnan())
    return float((got - want).abs().masked_fill(same, 0.0).max())
