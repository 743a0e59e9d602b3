"""Indices along a cut dim: one that no rank holds is an error, as on one device, and no zero."""

from __future__ import annotations

import torch


def check_range(index: torch.Tensor, size: int | torch.Tensor, *, least: int = 0, ignored: int | None = None) -> None:
    """Raise where an index is below ``least`` or not below ``size`` (which it broadcasts with), and not the ``ignored`` one.

    On the CPU a ``RuntimeError``; on other devices torch's assertion there, for which no host waits.
    """
    inside = (index >= least) & (index < size)
    if ignored is not None:
        inside = inside | (index == ignored)
    torch._assert_async(
        inside.all(), "index out of range" if isinstance(size, torch.Tensor) else f"index out of range of {size}"
    )
