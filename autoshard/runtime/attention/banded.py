"""Attention masked by position (causal, sliding window, ALiBi, document mask) as one custom op."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.attention.fold import folded_op, unfolded_op
from autoshard.runtime.operations.softmax import wide
from autoshard.runtime.operations.whole_op import differentiate


def is_documents(mask: torch.Tensor) -> bool:
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
    return _in_order(query, key, value, attn_mask, *form, folded=folded)


def _in_order(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, *form: Any, folded: int
) -> torch.Tensor:
    *rest, dropout_p = form
    if not folded:
        return _attention(query, key, value, mask, *rest, dropout_p=dropout_p)
    plain = (unfolded_op(x, x.dim() - 2, folded) for x in (query, key, value))
    out = _attention(*plain, mask, *rest, dropout_p=dropout_p)
    reordered: torch.Tensor = folded_op(out, out.dim() - 2, folded)
    return reordered


def by_distance(slopes: torch.Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> torch.Tensor:
    """ALiBi bias [..., h, s, t] of slopes [..., h, 1, 1]; rows and columns: (start, length)."""
    row, column = (torch.arange(a, a + n, device=slopes.device) for a, n in (rows, columns))
    return wide(slopes) * (column - row.unsqueeze(-1))


@banded_op.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def capped(scores: torch.Tensor, cap: float | None) -> torch.Tensor:
    """Soft-capped scores: cap · tanh(scores / cap); None: unchanged."""
    return scores if cap is None else (scores / cap).tanh() * cap


def _attention(
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
        mask = by_distance(mask, (0, query.shape[-2]), (0, key.shape[-2])).to(query.dtype)
    if mask is not None:
        if is_documents(mask):
            mask = mask.mT == mask
        shown = shown & mask if mask.dtype == torch.bool else mask.masked_fill(~shown, -torch.inf)
    if sinks is None and cap is None:
        return F.scaled_dot_product_attention(query, key, value, shown, dropout_p, scale=scale, enable_gqa=grouped)
    if grouped:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = capped(wide(query @ key.mT) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale), cap)
    scores = scores.masked_fill(~shown, -torch.inf) if shown.dtype == torch.bool else scores + shown
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return F.dropout(scores.softmax(-1)[..., : key.shape[-2]].to(value.dtype), dropout_p) @ value


def _again(*given: Any) -> torch.Tensor:
    *form, dropout_p, folded = given
    if dropout_p:
        raise RuntimeMismatchError("autoshard::banded_attention draws when it runs: with dropout it has no backward")
    return _in_order(*form, 0.0, folded=folded)


differentiate(banded_op, _again, of=(0, 1, 2, 9))
