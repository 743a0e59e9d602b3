"""How far a tensor is from another, and how large it is, to compare that with."""

from __future__ import annotations

import torch


def scale(t: torch.Tensor) -> float:
    """The largest finite absolute value."""
    if not t.numel() or not (t.is_floating_point() or t.is_complex()):
        return 0.0
    return float(torch.nan_to_num(t.detach(), 0.0, 0.0, 0.0).abs().max())


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest; equal infinities and NaN in the same places do not differ. NaN or infinite where one alone is so."""
    if not want.numel():
        return 0.0
    same = (got == want) | (got.isnan() & want.isnan())
    return float((got - want).abs().masked_fill(same, 0.0).max())
