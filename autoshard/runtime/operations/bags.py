"""Sums and means of rows of tables whose gradient is added up as it comes, where that is faster than torch's own.

On CPUs the backward of ``embedding_bag`` sorts the numbers of the rows first, and that of ``embedding`` adds rows one by one
through the dispatcher: both take two to three times what ``index_add_`` takes. On GPUs ``index_add_`` adds in any order.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.runtime.operations.stacked import one_after_another
from autoshard.runtime.transport.handed_on import HandingOn

ADDED = ("sum", "mean")
"""modes in which rows are added"""


def adds_rows(table: torch.Tensor, indices: torch.Tensor, sparse: bool) -> bool:
    """Whether :func:`bagged` is for look-ups of these ``indices``. In less than single precision torch adds up in single."""
    accurate = table.dtype in (torch.float32, torch.float64)
    return accurate and table.device.type == "cpu" and not sparse and indices.numel() > 0 and table.is_contiguous()


def bagged(indices: torch.Tensor, mode: str, padding: int, *tables: torch.Tensor) -> torch.Tensor:
    """The "sum" or "mean" of the rows of every bag: indices [b, k], tables [rows, d], one after another → [b, d].

    ``padding``: a row that gets no gradient; negative for none.
    """
    found: torch.Tensor = _Bagged.apply(indices, mode, padding, *tables)
    return found


class _Bagged(HandingOn):
    @staticmethod
    def forward(ctx: Any, indices: torch.Tensor, mode: str, padding: int, *tables: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.mode, ctx.padding, ctx.sizes = mode, padding, [len(t) for t in tables]
        return F.embedding_bag(indices, one_after_another(tables), mode=mode)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        bags, length = indices.shape
        added = gradient / length if ctx.mode == "mean" else gradient
        total = gradient.new_zeros(sum(ctx.sizes), gradient.shape[1])
        if length > bags:  # few calls
            total.index_add_(0, indices.reshape(-1), added.repeat_interleave(length, 0))
        else:
            for column in indices.unbind(1):
                total.index_add_(0, column, added)
        if ctx.padding >= 0:
            total[ctx.padding].zero_()
        starts = itertools.accumulate(ctx.sizes, initial=0)
        return None, None, None, *(total.narrow(0, s, n) for s, n in zip(starts, ctx.sizes, strict=False))
