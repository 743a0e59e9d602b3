"""Range check of indices along a sharded dim: an index that no rank holds raises."""

from __future__ import annotations

import torch


def check_range(index: torch.Tensor, size: int | torch.Tensor, *, least: int = 0, ignored: int | None = None) -> None:
    """Raise unless ``least`` ≤ ``index`` < ``size`` (broadcast), or the index is ``ignored``.

    On CPUs a ``RuntimeError``; on other devices torch's asynchronous assertion (no host sync)."""
    inside = (index >= least) & (index < size)
    if ignored is not None:
        inside = inside | (index == ignored)
    torch._assert_async(
        inside.all(), "index out of range" if isinstance(size, torch.Tensor) else f"index out of range of {size}"
    )
