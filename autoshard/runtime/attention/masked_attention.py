"""Attention on one rank's shards (heads, queries or keys), and one op for masks by position.

``kv_heads``, ``causal_mask`` and ``attention`` take sharded heads, queries or keys. ``banded_op``
is the op that attention masked by position becomes: causal, sliding window, ALiBi, document masks,
attention sinks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.aten import aten
from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.attention.zigzag import from_zigzag_op, to_zigzag_op
from autoshard.runtime.operations.collectives import all_gather, offset, size
from autoshard.runtime.operations.random import dropout
from autoshard.runtime.operations.reductions import safe_softmax, upcast
from autoshard.runtime.transport.autograd import register_recomputed_backward
from autoshard.runtime.transport.communicator import Axes, current


def kv_heads(x: torch.Tensor, heads: int, axes: Axes, groups: int, group_axes: Axes = ()) -> torch.Tensor:
    """The KV head of each local query head: [..., local groups, t, d] → [..., local heads, t, d].

    Grouped-query attention: ``heads`` query heads, sharded by ``axes``, share ``groups`` KV heads,
    sharded by ``group_axes``. If ``group_axes`` are not the outer ones of ``axes``, KV heads are
    gathered first."""
    comm = current()
    outer, cut = comm.active(group_axes), comm.active(axes)
    start = offset(groups, group_axes)
    if cut[: len(outer)] != outer:
        x, start = all_gather(x, x.dim() - 3, group_axes, to="R", size=groups), 0
    head = offset(heads, axes) + torch.arange(size(heads, axes), device=x.device)
    return x.index_select(-3, head // (heads // groups) - start)


def causal_mask(
    query: torch.Tensor, key: torch.Tensor, queries: int = 0, query_axes: Axes = (), keys: int = 0, key_axes: Axes = ()
) -> torch.Tensor:
    """This rank's shard of the causal mask: query [..., s, e], key [..., t, e] → [s, t] bool.

    ``queries`` and ``keys``: global lengths if sharded, by ``query_axes`` and ``key_axes``."""
    row = offset(queries, query_axes) + torch.arange(query.shape[-2], device=query.device)
    column = offset(keys, key_axes) + torch.arange(key.shape[-2], device=query.device)
    return column <= row.unsqueeze(-1)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    *,
    shape: Sequence[int],
    cuts: Mapping[int, Axes],
    batch: int | None = None,
) -> torch.Tensor:
    """Unfused attention: for sharded keys, or for dropout that equals one device's.

    query [..., s, e], key [..., t, e], value [..., t, d]. ``shape``: global shape of the weights
    [..., s, t]; ``cuts``: the axes that shard each of its dims. With sharded keys the result is P,
    and the softmax all-reduces maxima and sums. Follows ATen's math path, so that a seed drops the
    same weights. ``batch``: see :func:`~autoshard.runtime.dropout`."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    root = math.sqrt(abs(scale))
    scores = (query * root) @ (key.transpose(-2, -1) * math.copysign(root, scale))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill_(~attn_mask, -torch.inf)
        scores = scores + attn_mask
    last = len(shape) - 1
    weights = safe_softmax(scores, last, cuts[last]) if last in cuts else aten._safe_softmax(scores, -1)
    if dropout_p:
        weights = dropout(weights, dropout_p, shape, cuts, batch=batch)
    return weights @ value


def is_document_mask(mask: torch.Tensor) -> bool:
    """Whether ``mask`` is a document mask: integers, the document number of every position."""
    return not mask.dtype.is_floating_point and mask.dtype != torch.bool


@torch.library.custom_op("autoshard::banded_attention", mutates_args=())
def banded_op(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    before: int | None = None,
    after: int | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    sloped: bool = False,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    dropout_p: float = 0.0,
    folded: int = 0,
) -> torch.Tensor:
    """``scaled_dot_product_attention``: query i sees keys i - ``before`` to i + ``after``.

    query [..., s, e], key [..., t, e], value [..., t, d] → [..., s, d]; None: no limit.
    ``attn_mask`` [..., s, t] hides more: bool, or added to the scores without a gradient. An
    integer mask [..., 1, t] is a document mask (s = t). ``sloped``: the mask has ALiBi slopes [...,
    h, 1, 1]; slope · (key position - query position) is added (Press et al. 2022). ``sinks`` [h]:
    attention sink, the score of one more key whose value is zero (Xiao et al. 2023, GPT-OSS); it
    gets a gradient. ``soft_cap``: scaled scores x become cap · tanh(x / cap) before the mask (Gemma
    2). ``dropout_p``: of weights; then the op has no backward, which would draw again, but
    :func:`~autoshard.runtime.attention.ring.banded_rows` has one. ``folded``: 0, or how many ranks
    the zigzag order has in which operands and result lie; the mask is in sequence order."""
    form = before, after, scale, enable_gqa, sloped, sinks, soft_cap, dropout_p
    return _in_sequence_order(query, key, value, attn_mask, *form, folded=folded)


def _in_sequence_order(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *form: Any, folded: int
) -> torch.Tensor:
    *rest, dropout_p = form
    if not folded:
        return _masked_attention(query, key, value, mask, *rest, dropout_p=dropout_p)
    plain = (from_zigzag_op(x, x.dim() - 2, folded) for x in (query, key, value))
    out = _masked_attention(*plain, mask, *rest, dropout_p=dropout_p)
    reordered: torch.Tensor = to_zigzag_op(out, out.dim() - 2, folded)
    return reordered


def alibi_bias(slopes: torch.Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
    """ALiBi bias [..., h, s, t] of slopes [..., h, 1, 1]; rows and columns: (start, length)."""
    row, column = (torch.arange(a, a + n, device=slopes.device) for a, n in (rows, columns))
    return upcast(slopes) * (column - row.unsqueeze(-1))


@banded_op.register_fake
def _fake_banded_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def soft_capped(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Soft-capped scores: cap · tanh(scores / cap); None: unchanged."""
    return scores if cap is None else (scores / cap).tanh() * cap


def _masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *form: Any,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    before, after, scale, grouped, sloped, sinks, cap = form
    row = torch.arange(query.shape[-2], device=query.device).unsqueeze(-1)
    column = torch.arange(key.shape[-2], device=query.device)
    shown = torch.ones_like(column - row, dtype=torch.bool)
    if before is not None:
        shown &= column >= row - before
    if after is not None:
        shown &= column <= row + after
    if mask is not None and sloped:
        mask = alibi_bias(mask, (0, query.shape[-2]), (0, key.shape[-2])).to(query.dtype)
    if mask is not None:
        if is_document_mask(mask):
            mask = mask.mT == mask
        shown = shown & mask if mask.dtype == torch.bool else mask.masked_fill(~shown, -torch.inf)
    if sinks is None and cap is None:
        return F.scaled_dot_product_attention(query, key, value, shown, dropout_p, scale=scale, enable_gqa=grouped)
    if grouped:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = soft_capped(upcast(query @ key.mT) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale), cap)
    scores = scores.masked_fill(~shown, -torch.inf) if shown.dtype == torch.bool else scores + shown
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return F.dropout(scores.softmax(-1)[..., : key.shape[-2]].to(value.dtype), dropout_p) @ value


def _recomputed_banded(*given: Any) -> torch.Tensor:
    *form, dropout_p, folded = given
    if dropout_p:
        raise RuntimeMismatchError("autoshard::banded_attention draws when it runs: with dropout it has no backward")
    return _in_sequence_order(*form, 0.0, folded=folded)


register_recomputed_backward(banded_op, _recomputed_banded, of=(0, 1, 2, 9))
