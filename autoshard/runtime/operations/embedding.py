"""Embedding look-ups and bags. In a table sharded by rows every rank looks up the rows that it
holds, and results are summed (vocabulary-parallel). On CPUs the backward is ``index_add_``, two
to three times as fast as ``embedding_bag``'s and ``embedding``'s; on GPUs it would add in any
order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.runtime.operations.checks import check_range
from autoshard.runtime.operations.collectives import offset, reduce_statistic
from autoshard.runtime.operations.stacked import concatenated_view, stacked_view
from autoshard.runtime.transport.autograd import LeanFunction, NoneGradFunction, register_backward
from autoshard.runtime.transport.communicator import Axes
from autoshard.torch_private.ops import assert_async

ADDITIVE_MODES = ("sum", "mean")
"""modes that add rows"""


def has_fast_bag_gradient(table: Tensor, indices: Tensor, sparse: bool) -> bool:
    """Whether :func:`embedding_bag_of_tables` serves ``indices``; not half precision."""
    accurate = table.dtype in (torch.float32, torch.float64)
    return accurate and table.device.type == "cpu" and not sparse and indices.numel() > 0 and table.is_contiguous()


def embedding_bag_of_tables(indices: Tensor, mode: str, padding: int, *tables: Tensor) -> Tensor:
    """Sum or mean of each bag's rows: indices [b, k], tables [rows, d] in a row → [b, d].
    ``padding``: a row without a gradient; negative: none."""
    return _EmbeddingBagOfTables.apply(indices, mode, padding, *tables)


class _EmbeddingBagOfTables(NoneGradFunction):
    @staticmethod
    def forward(ctx: Any, indices: Tensor, mode: str, padding: int, *tables: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.mode, ctx.padding, ctx.sizes = mode, padding, [len(t) for t in tables]
        return F.embedding_bag(indices, concatenated_view(tables), mode=mode)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (indices,) = ctx.saved_tensors
        total = gradient.new_zeros(sum(ctx.sizes), gradient.shape[1])
        _accumulate_bag_gradient(total, indices, gradient, ctx.mode, ctx.padding)
        starts = itertools.accumulate(ctx.sizes, initial=0)
        return None, None, None, *(total.narrow(0, s, n) for s, n in zip(starts, ctx.sizes, strict=False))


def _accumulate_bag_gradient(
    total: Tensor,
    indices: Tensor,
    gradient: Tensor,
    mode: str,
    padding: int,
    mine: Tensor | None = None,
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


def embedding_bags(
    indices: Sequence[Tensor],
    mode: str,
    padding: Sequence[int],
    tables: Sequence[Tensor],
    mine: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """:func:`embedding_bag_of_tables` of several tables [rows, d], each with its own indices [b,
    k], in one node. ``mine`` [tables, b, k]: indices that count; others give zeros, whatever
    their rows hold."""
    return _EmbeddingBags.apply(list(indices), mode, list(padding), mine, *tables)


class _EmbeddingBags(LeanFunction):
    @staticmethod
    def forward(
        ctx: Any,
        indices: list[Tensor],
        mode: str,
        padding: list[int],
        mine: Tensor | None,
        *tables: Tensor,
    ) -> tuple[Tensor, ...]:
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
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        mine, *indices = ctx.saved_tensors
        wanted = [
            (i, g)
            for i, (g, needed) in enumerate(zip(gradients, ctx.needs_input_grad[4:], strict=True))
            if g is not None and needed
        ]
        found: list[Tensor | None] = [None] * len(gradients)
        if wanted:
            ends = list(itertools.accumulate((ctx.sizes[i] for i, _ in wanted), initial=0))
            total = wanted[0][1].new_zeros(ends[-1], wanted[0][1].shape[1])
            for (i, g), start in zip(wanted, ends, strict=False):
                found[i] = own = total.narrow(0, start, ctx.sizes[i])
                if len(own):
                    _accumulate_bag_gradient(
                        own, indices[i], g, ctx.mode, ctx.padding[i], None if mine is None else mine[i]
                    )
        return None, None, None, None, *found


def vocab_embedding(
    weight: Tensor, indices: Tensor, size: int, axes: Axes, padding_idx: int = -1, sparse: bool = False
) -> Tensor:
    """Vocabulary-parallel embedding: weight [size/n S, d], indices [...] → [..., d] P.
    Rows of other ranks are zeros; an index outside ``size`` raises. ``padding_idx``: global row
    without a gradient; negative: none. ``sparse``: a sparse gradient of the rows looked up here
    (the optimizer must skip others). After Megatron-LM's VocabParallelEmbedding
    (arXiv:1909.08053)."""
    rows = weight.shape[0]
    check_range(indices, size)
    if rows == 0:
        return weight.new_zeros(*indices.shape, weight.shape[1]) + weight.sum(0)  # keeps a gradient
    start = offset(size, axes)
    mine = (indices >= start) & (indices < start + rows)
    padding = padding_idx - start if start <= padding_idx < start + rows else None
    if sparse:
        own = F.embedding(indices[mine] - start, weight, padding, sparse=True)
        return own.new_zeros(*indices.shape, own.shape[1]).index_put((mine,), own)
    found = F.embedding(torch.where(mine, indices - start, 0), weight, padding)
    return found.masked_fill(~mine.unsqueeze(-1), 0)


def vocab_embedding_bag(
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    size: int,
    axes: Axes,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    sparse: bool = False,
    mode: str = "sum",
) -> tuple[Tensor, None, None, None]:
    """Vocabulary-parallel bags: weight [size/n S, d], indices [k] → [bags, d] P.
    ``mode``: "sum", "mean" or "max". ``offsets``: where each bag starts in ``indices``. Rows
    ``padding_idx`` (global; negative: none) do not count. Returns a tuple like
    ``aten.embedding_bag`` with the first result only. Raises ``RuntimeError`` like it if bags do
    not begin at the first index or end behind the last."""
    within = (offsets[:1] == 0).all() & (offsets[-1:] <= len(indices)).all()
    assert_async(within, f"offsets of bags begin with 0 and stay within the {len(indices)} indices")
    starts = offsets[:-1] if include_last_offset else offsets
    bag = torch.searchsorted(starts, torch.arange(len(indices), device=indices.device), right=True) - 1
    if mode == "max":
        return _vocabulary_bag_maxima(weight, indices, bag, len(starts), size, axes, padding_idx), None, None, None
    rows = vocab_embedding(weight, indices, size, axes, padding_idx, sparse)
    counts = indices != padding_idx
    if padding_idx >= 0:
        rows = rows.masked_fill(~counts.unsqueeze(-1), 0)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    found = rows.new_zeros(len(starts), rows.shape[1]).index_add(0, bag, rows)
    if mode == "mean":
        found = found / found.new_zeros(len(starts), 1).index_add(
            0, bag, counts.unsqueeze(-1).to(found.dtype)
        ).clamp_min(1)
    return found, None, None, None


def _vocabulary_bag_maxima(
    weight: Tensor, indices: Tensor, bag: Tensor, bags: int, size: int, axes: Axes, padding_idx: int
) -> Tensor:
    """Per bag and column the maximum, on the rank that has it, zeros on others: [bags, d] P. Of
    equal elements the bag's first gets the gradient, as in ``embedding_bag``; empty bags give
    zeros. ``bag`` [k]: bag of each index."""
    (many,), (rows, width) = indices.shape, weight.shape
    check_range(indices, size)
    start = offset(size, axes)
    mine = (indices >= start) & (indices < start + rows) & (indices != padding_idx)
    with torch.no_grad():
        own = torch.arange(many, device=mine.device) if mine.is_meta else mine.nonzero()[:, 0]
        places = bag[own].unsqueeze(1).expand(-1, width)
        values = weight[indices[own] - start]
        top = weight.new_full((bags, width), -torch.inf).scatter_reduce(0, places, values, "amax")
        top = reduce_statistic(top, axes, "R", "max")
        at = torch.where(values == top[bag[own]], own.unsqueeze(1), many)
        first = indices.new_full((bags, width), many, dtype=torch.int64).scatter_reduce(0, places, at, "amin")
        first = reduce_statistic(first, axes, "R", "min")
        padded = torch.cat([mine, mine.new_zeros(1)])  # position ``many``: an empty bag
        here = padded[first]
        row = torch.where(here, torch.cat([indices, indices.new_zeros(1)])[first] - start, 0)
    if not rows:
        return weight.new_zeros(bags, width) + weight.sum(0)  # keeps a gradient
    return torch.where(here, weight.gather(0, row), 0)


@torch.library.custom_op("autoshard::pooled", mutates_args=())
def pooled_op(weight: Tensor, indices: Tensor, mode: str, padding_idx: int = -1, sparse: bool = False) -> Tensor:
    """Rows of a table, pooled ("sum", "mean") over the last dim of indices: [..., k] → [..., d].
    ``padding_idx``: a row without a gradient; negative: none. ``sparse``: a sparse gradient."""
    return pooled(weight, indices, mode, padding_idx, sparse)


@pooled_op.register_fake
def _fake_pooled(weight: Tensor, indices: Tensor, mode: str, padding_idx: int = -1, sparse: bool = False) -> Tensor:
    return weight.new_empty(*indices.shape[:-1], weight.shape[1])


def _save_pooled(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weight, indices, *form = inputs
    ctx.save_for_backward(indices)
    ctx.rows, ctx.form = len(weight), form


def _pooled_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    weight = grad.new_empty(()).expand(ctx.rows, grad.shape[-1]).requires_grad_()  # its values do not matter
    with torch.enable_grad():
        out = pooled(weight, indices, *ctx.form)
    return *torch.autograd.grad(out, weight, grad), None, None, None, None


register_backward(pooled_op, _pooled_backward, _save_pooled)


def pooled(
    weight: Tensor,
    indices: Tensor,
    mode: str,
    padding_idx: int = -1,
    sparse: bool = False,
    size: int = 0,
    axes: Axes = (),
) -> Tensor:
    """:func:`pooled_op`; with ``axes`` the weight is a shard of ``size`` rows, the result P."""
    if axes:
        found = vocab_embedding(weight, indices, size, axes, padding_idx, sparse)
    elif has_fast_bag_gradient(weight, indices, sparse):
        found = embedding_bag_of_tables(indices.reshape(-1, indices.shape[-1]), mode, padding_idx, weight)
        return found.view(*indices.shape[:-1], weight.shape[1])
    else:
        found = F.embedding(indices, weight, padding_idx if padding_idx >= 0 else None, sparse=sparse)
    return found.sum(-2) if mode == "sum" else found.mean(-2)


def pooled_together(
    tables: Sequence[Tensor],
    indices: Sequence[Tensor],
    mode: str,
    padding: Sequence[int] = (),
    sizes: Sequence[int] = (),
    axes: Axes = (),
) -> tuple[Tensor, ...]:
    """:func:`pooled` in several tables [rows, d] by indices [..., k] of one shape → [..., d] each;
    on CPUs one autograd node. In sharded tables (``sizes`` rows) one comparison finds local
    indices."""
    pads = list(padding) or [-1] * len(tables)
    if not all(has_fast_bag_gradient(t, i, sparse=False) for t, i in zip(tables, indices, strict=True)):
        each = zip(tables, indices, pads, sizes or [0] * len(tables), strict=True)
        return tuple([pooled(t, i, mode, pad, size=size, axes=axes) for t, i, pad, size in each])
    shape, mine = indices[0].shape, None
    flat: Sequence[Tensor] = [i.reshape(-1, shape[-1]) for i in indices]
    if axes:
        one = stacked_view(flat)
        every = torch.stack(list(flat)) if one is None else one
        first, rows = [offset(size, axes) for size in sizes], [len(t) for t in tables]
        start, held, size = (every.new_tensor(x).view(-1, 1, 1) for x in (first, rows, sizes))
        check_range(every, size)
        mine = (every >= start) & (every < start + held)
        flat = torch.where(mine, every - start, 0).unbind()
        pads = [p - s if s <= p < s + n else -1 for p, s, n in zip(pads, first, rows, strict=True)]
    found = embedding_bags(flat, mode, pads, tables, mine)
    return tuple([x.view(*shape[:-1], x.shape[-1]) for x in found]) if len(shape) > 2 else found
