"""Embedding look-ups, also pooled, in vocabulary-parallel tables: ranks look up their own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.runtime.operations.bags import adds_rows, bagged, bagged_each
from autoshard.runtime.operations.collectives import offset, statistic
from autoshard.runtime.operations.in_range import check_range
from autoshard.runtime.operations.stacked import as_one
from autoshard.runtime.transport.communicator import Axes
from autoshard.runtime.transport.handed_on import register


def vocab_embedding(
    weight: torch.Tensor, indices: torch.Tensor, size: int, axes: Axes, padding_idx: int = -1, sparse: bool = False
) -> torch.Tensor:
    """Vocabulary-parallel embedding: weight [size/n S, d], indices [...] → [..., d] P.

    Rows of other ranks are zeros; an index outside ``size`` raises. ``padding_idx``: global row
    without a gradient; negative: none. ``sparse``: a sparse gradient of the rows looked up here
    (the optimizer must skip others). After Megatron-LM's VocabParallelEmbedding (arXiv:1909.08053).
    """
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
    weight: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    size: int,
    axes: Axes,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
    sparse: bool = False,
    mode: str = "sum",
) -> tuple[torch.Tensor, None, None, None]:
    """Vocabulary-parallel bags: weight [size/n S, d], indices [k] → [bags, d] P.

    ``mode``: "sum", "mean" or "max". ``offsets``: where each bag starts in ``indices``. Rows
    ``padding_idx`` (global; negative: none) do not count. Returns a tuple like
    ``aten.embedding_bag`` with the first result only. Raises ``RuntimeError`` like it if bags do
    not begin at the first index or end behind the last."""
    within = (offsets[:1] == 0).all() & (offsets[-1:] <= len(indices)).all()
    torch._assert_async(within, f"offsets of bags begin with 0 and stay within the {len(indices)} indices")
    starts = offsets[:-1] if include_last_offset else offsets
    bag = torch.searchsorted(starts, torch.arange(len(indices), device=indices.device), right=True) - 1
    if mode == "max":
        return _largest(weight, indices, bag, len(starts), size, axes, padding_idx), None, None, None
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


def _largest(
    weight: torch.Tensor, indices: torch.Tensor, bag: torch.Tensor, bags: int, size: int, axes: Axes, padding_idx: int
) -> torch.Tensor:
    """Per bag and column the maximum, on the rank that has it, and zeros on others: [bags, d] P.

    Among equal elements the first of its bag gets the gradient, as in ``embedding_bag``; an empty
    bag gives zeros. ``bag`` [k]: bag of each index. Ranks agree on the maximum, then on its first
    position."""
    (many,), (rows, width) = indices.shape, weight.shape
    check_range(indices, size)
    start = offset(size, axes)
    mine = (indices >= start) & (indices < start + rows) & (indices != padding_idx)
    with torch.no_grad():
        own, places = mine.nonzero()[:, 0], bag[mine].unsqueeze(1).expand(-1, width)
        values = weight[indices[own] - start]
        top = weight.new_full((bags, width), -torch.inf).scatter_reduce(0, places, values, "amax")
        top = statistic(top, axes, "R", "max")
        at = torch.where(values == top[bag[own]], own.unsqueeze(1), many)
        first = indices.new_full((bags, width), many, dtype=torch.int64).scatter_reduce(0, places, at, "amin")
        first = statistic(first, axes, "R", "min")
        padded = torch.cat([mine, mine.new_zeros(1)])  # position ``many``: an empty bag
        here = padded[first]
        row = torch.where(here, torch.cat([indices, indices.new_zeros(1)])[first] - start, 0)
    if not rows:
        return weight.new_zeros(bags, width) + weight.sum(0)  # keeps a gradient
    return torch.where(here, weight.gather(0, row), 0)


@torch.library.custom_op("autoshard::pooled", mutates_args=())
def pooled_op(
    weight: torch.Tensor, indices: torch.Tensor, mode: str, padding_idx: int = -1, sparse: bool = False
) -> torch.Tensor:
    """Rows of a table, pooled ("sum", "mean") over the last dim of indices: [..., k] → [..., d].

    ``padding_idx``: a row without a gradient; negative: none. ``sparse``: a sparse gradient."""
    return pooled(weight, indices, mode, padding_idx, sparse)


@pooled_op.register_fake
def _(
    weight: torch.Tensor, indices: torch.Tensor, mode: str, padding_idx: int = -1, sparse: bool = False
) -> torch.Tensor:
    return weight.new_empty(*indices.shape[:-1], weight.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    weight, indices, *form = inputs
    ctx.save_for_backward(indices)
    ctx.rows, ctx.form = len(weight), form


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (indices,) = ctx.saved_tensors
    weight = grad.new_empty(()).expand(ctx.rows, grad.shape[-1]).requires_grad_()  # its values do not matter
    with torch.enable_grad():
        out = pooled(weight, indices, *ctx.form)
    return *torch.autograd.grad(out, weight, grad), None, None, None, None


register(pooled_op, _backward, _save)


def pooled(
    weight: torch.Tensor,
    indices: torch.Tensor,
    mode: str,
    padding_idx: int = -1,
    sparse: bool = False,
    size: int = 0,
    axes: Axes = (),
) -> torch.Tensor:
    """:func:`pooled_op`; with ``axes`` the weight is a shard of ``size`` rows, the result P."""
    if axes:
        found = vocab_embedding(weight, indices, size, axes, padding_idx, sparse)
    elif adds_rows(weight, indices, sparse):
        found = bagged(indices.reshape(-1, indices.shape[-1]), mode, padding_idx, weight)
        return found.view(*indices.shape[:-1], weight.shape[1])
    else:
        found = F.embedding(indices, weight, padding_idx if padding_idx >= 0 else None, sparse=sparse)
    return found.sum(-2) if mode == "sum" else found.mean(-2)


def pooled_together(
    tables: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    mode: str,
    padding: Sequence[int] = (),
    sizes: Sequence[int] = (),
    axes: Axes = (),
) -> tuple[torch.Tensor, ...]:
    """:func:`pooled` in several tables [rows, d] by indices [..., k] of one shape → [..., d] each.

    On CPUs they are one autograd node. In sharded tables (``sizes`` rows) one comparison finds
    local indices."""
    pads = list(padding) or [-1] * len(tables)
    if not all(adds_rows(t, i, sparse=False) for t, i in zip(tables, indices, strict=True)):
        each = zip(tables, indices, pads, sizes or [0] * len(tables), strict=True)
        return tuple([pooled(t, i, mode, pad, size=size, axes=axes) for t, i, pad, size in each])
    shape, mine = indices[0].shape, None
    flat: Sequence[torch.Tensor] = [i.reshape(-1, shape[-1]) for i in indices]
    if axes:
        one = as_one(flat)
        every = torch.stack(list(flat)) if one is None else one
        first, rows = [offset(size, axes) for size in sizes], [len(t) for t in tables]
        start, held, size = (every.new_tensor(x).view(-1, 1, 1) for x in (first, rows, sizes))
        check_range(every, size)
        mine = (every >= start) & (every < start + held)
        flat = torch.where(mine, every - start, 0).unbind()
        pads = [p - s if s <= p < s + n else -1 for p, s, n in zip(pads, first, rows, strict=True)]
    found = bagged_each(flat, mode, pads, tables, mine)
    return tuple([x.view(*shape[:-1], x.shape[-1]) for x in found]) if len(shape) > 2 else found
