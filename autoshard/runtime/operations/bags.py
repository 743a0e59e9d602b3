"""Embedding bags with a fast gradient on CPUs, where ``index_add_`` accumulates the rows.

On CPUs the backward of ``embedding_bag`` sorts the indices first, and that of ``embedding`` adds
rows one by one through the dispatcher. Both take two to three times as long as ``index_add_``. On
GPUs the order in which ``index_add_`` adds is not deterministic."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.runtime.operations.stacked import one_after_another
from autoshard.runtime.transport.handed_on import HandingOn
from autoshard.runtime.transport.node import Node

ADDED = ("sum", "mean")
"""modes that add rows"""


def adds_rows(table: torch.Tensor, indices: torch.Tensor, sparse: bool) -> bool:
    """Whether :func:`bagged` serves ``indices``. torch adds half precision in float32 itself."""
    accurate = table.dtype in (torch.float32, torch.float64)
    return accurate and table.device.type == "cpu" and not sparse and indices.numel() > 0 and table.is_contiguous()


def bagged(indices: torch.Tensor, mode: str, padding: int, *tables: torch.Tensor) -> torch.Tensor:
    """Sum or mean of each bag's rows: indices [b, k], tables [rows, d] in a row → [b, d].

    ``padding``: a row that gets no gradient; negative: none."""
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
        total = gradient.new_zeros(sum(ctx.sizes), gradient.shape[1])
        _add_rows(total, indices, gradient, ctx.mode, ctx.padding)
        starts = itertools.accumulate(ctx.sizes, initial=0)
        return None, None, None, *(total.narrow(0, s, n) for s, n in zip(starts, ctx.sizes, strict=False))


def _add_rows(
    total: torch.Tensor,
    indices: torch.Tensor,
    gradient: torch.Tensor,
    mode: str,
    padding: int,
    mine: torch.Tensor | None = None,
) -> None:
    """Add gradients [b, d] of bags to rows ``indices`` [b, k] of ``total``; only where ``mine``."""
    bags, length = indices.shape
    added = gradient / length if mode == "mean" else gradient
    if length > bags:  # one call instead of ``length``
        rows = added.repeat_interleave(length, 0)
        total.index_add_(0, indices.reshape(-1), rows if mine is None else rows * mine.reshape(-1, 1))
    else:
        for k, column in enumerate(indices.unbind(1)):
            total.index_add_(0, column, added if mine is None else added * mine[:, k, None])
    if padding >= 0:
        total[padding].zero_()


def bagged_each(
    indices: Sequence[torch.Tensor],
    mode: str,
    padding: Sequence[int],
    tables: Sequence[torch.Tensor],
    mine: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """:func:`bagged` of several tables [rows, d], each with its own indices [b, k], in one node.

    ``mine`` [tables, b, k]: indices that count; others give zeros, whatever their rows hold."""
    found: tuple[torch.Tensor, ...] = _BaggedEach.apply(list(indices), mode, list(padding), mine, *tables)
    return found


class _BaggedEach(Node):
    @staticmethod
    def forward(
        ctx: Any,
        indices: list[torch.Tensor],
        mode: str,
        padding: list[int],
        mine: torch.Tensor | None,
        *tables: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(mine, *indices)
        ctx.mode, ctx.padding, ctx.sizes = mode, padding, [len(t) for t in tables]
        bags, length = indices[0].shape
        found = tables[0].new_empty(len(tables), bags, tables[0].shape[1])
        for i, (out, own, table) in enumerate(zip(found, indices, tables, strict=True)):
            if not len(table):
                out.zero_()
            elif length == 1:
                torch.index_select(table, 0, own[:, 0], out=out)
            else:
                weights = None if mine is None else mine[i].to(table.dtype)
                out.copy_(F.embedding_bag(own, table, mode="sum", per_sample_weights=weights))
        if mine is not None and length == 1:
            found.masked_fill_(~mine, 0)
        if mode == "mean":
            found /= length
        return found.unbind()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        mine, *indices = ctx.saved_tensors
        wanted = [
            (i, g)
            for i, (g, needed) in enumerate(zip(gradients, ctx.needs_input_grad[4:], strict=True))
            if g is not None and needed
        ]
        found: list[torch.Tensor | None] = [None] * len(gradients)
        if wanted:
            ends = list(itertools.accumulate((ctx.sizes[i] for i, _ in wanted), initial=0))
            total = wanted[0][1].new_zeros(ends[-1], wanted[0][1].shape[1])
            for (i, g), start in zip(wanted, ends, strict=False):
                found[i] = own = total.narrow(0, start, ctx.sizes[i])
                if len(own):
                    _add_rows(own, indices[i], g, ctx.mode, ctx.padding[i], None if mine is None else mine[i])
        return None, None, None, None, *found
