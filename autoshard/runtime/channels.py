"""Channels-last memory format for convolutions on CPUs."""

from __future__ import annotations

import torch


def channels_last(x: torch.Tensor) -> torch.Tensor:
    """``x`` [n, c, h, w] in channels-last memory format on CPUs (oneDNN).

    On other devices ``x`` is unchanged."""
    return x.contiguous(memory_format=torch.channels_last) if _on_onednn(x) else x


def channels_first(x: torch.Tensor) -> torch.Tensor:
    """``x`` contiguous again, where :func:`channels_last` may have changed its memory format."""
    return x.contiguous() if _on_onednn(x) else x


def _on_onednn(x: torch.Tensor) -> bool:
    """Includes meta tensors: the simulated memory of a CPU step has to count the copy."""
    return x.device.type in ("cpu", "meta") and torch.backends.mkldnn.is_available()
