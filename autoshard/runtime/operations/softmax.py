"""Softmax over a sharded dim, composed of collectives that carry the gradient."""

from __future__ import annotations

import torch

from autoshard.runtime.operations.collectives import statistic
from autoshard.runtime.transport.communicator import Axes


def softmax(x: torch.Tensor, dim: int, axes: Axes, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x.softmax(dim)`` with ``dim`` sharded by ``axes``: S(dim) → S(dim).

    Forward: all-reduce of maxima and of sums; backward: one all-reduce of the sums' gradient."""
    exponentials, sums = _exponentials(x if dtype is None else x.to(dtype), dim, axes)[1:]
    return (exponentials / sums).to(x.dtype if dtype is None else dtype)


def log_softmax(x: torch.Tensor, dim: int, axes: Axes, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x.log_softmax(dim)`` with ``dim`` sharded by ``axes``; messages as in :func:`softmax`."""
    shifted, _, sums = _exponentials(x if dtype is None else x.to(dtype), dim, axes)
    return (shifted - sums.log()).to(x.dtype if dtype is None else dtype)


def safe_softmax(x: torch.Tensor, dim: int, axes: Axes, dtype: torch.dtype | None = None) -> torch.Tensor:
    """:func:`softmax` with zeros for rows of -inf only (attention with every key masked)."""
    _, exponentials, sums = _exponentials(x if dtype is None else x.to(dtype), dim, axes, safe=True)
    return (exponentials / sums.masked_fill(sums == 0, 1)).to(x.dtype if dtype is None else dtype)


def maximum(x: torch.Tensor, dims: int | list[int], axes: Axes) -> torch.Tensor:
    """Maxima over sharded dims, kept as dims of length 1; no gradient. Empty shards are -inf."""
    x = x.detach()
    dims = [dims] if isinstance(dims, int) else dims
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    top = x.amax(dims, keepdim=True) if x.numel() else x.new_full(shape, -torch.inf)
    return statistic(top, axes, op="max")


def wide(x: torch.Tensor) -> torch.Tensor:
    """``x`` upcast to float32 if it is half precision, which is too narrow to sum in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _exponentials(
    x: torch.Tensor, dim: int, axes: Axes, safe: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``x - max``, its exponentials, and their global sums (R: every rank's values use them)."""
    x = wide(x)
    top = maximum(x, dim, axes)
    if safe:
        top = top.masked_fill(top == -torch.inf, 0)
    shifted = x - top
    exponentials = shifted.exp()
    return shifted, exponentials, statistic(exponentials.sum(dim, keepdim=True), axes, to="R")
