"""In-place writes of generated inference code into states whose old value is not read again."""

from __future__ import annotations

import torch

from autoshard.aten import aten


def write_slice(
    x: torch.Tensor,
    source: torch.Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> torch.Tensor:
    """``x.slice_scatter(source, dim, start, end, step)`` in place; returns ``x``."""
    aten.slice.Tensor(x, dim, start, end, step).copy_(source)
    return x


def write_select(x: torch.Tensor, source: torch.Tensor, dim: int, index: int) -> torch.Tensor:
    """``x.select_scatter(source, dim, index)`` in place; returns ``x``."""
    x.select(dim, index).copy_(source)
    return x
