"""The order of an image's dims in memory, where convolutions run on CPUs."""

from __future__ import annotations

import torch


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """``x`` [n, c, h, w] with its channels last in memory on a CPU, whose convolutions then reorder nothing.

    Elsewhere as it is.
    """
    return x.contiguous(memory_format=torch.channels_last) if _on_onednn(x) else x


def channels_first(x: torch.Tensor) -> torch.Tensor:
    """``x`` with its dims in memory as they are numbered, where :func:`channels_last` may have changed that."""
    return x.contiguous() if _on_onednn(x) else x


def _on_onednn(x: torch.Tensor) -> bool:
    """Or where only the memory of a step on CPUs is counted, which has the copy."""
    return x.device.type in ("cpu", "meta") and torch.backends.mkldnn.is_available()
