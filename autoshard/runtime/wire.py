"""Tensors as backends send them."""

from __future__ import annotations

import torch

_SENT_AS = {
    torch.int16: torch.bfloat16,
    torch.uint16: torch.bfloat16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
}


def raw(x: torch.Tensor) -> torch.Tensor:
    """The same bits in a dtype of the same size that backends send; tensors that they can send are unchanged."""
    if (other := _SENT_AS.get(x.dtype)) is not None:
        return x.view(other)
    if x.dtype == torch.bool or (x.dtype.is_floating_point and x.element_size() == 1):
        return x.view(torch.uint8)
    return x
