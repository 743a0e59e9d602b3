"""How large a tensor is, to compare errors with."""

from __future__ import annotations

import torch


def scale(t: torch.Tensor) -> float:
    """The largest finite absolute value."""
    if not t.numel() or not t.is_floating_point():
        return 0.0
    return float(torch.nan_to_num(t.detach(), 0.0, 0.0, 0.0).abs().max())
