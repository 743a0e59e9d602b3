"""Attention on one rank's shards (heads, queries or keys), and ``banded_op``: attention masked by
position (causal, sliding window, ALiBi, document masks, attention sinks)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.aten import aten
from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.attention.ring_geometry import AttentionSpec, Band
from autoshard.runtime.attention.zigzag import from_zigzag_op, to_zigzag_op
from autoshard.runtime.operations.collectives import all_gather, offset, size
from autoshard.runtime.operations.random import dropout, own_stream, shard_seed
from autoshard.runtime.operations.reductions import safe_softmax, upcast
from autoshard.runtime.transport.autograd import register_recomputed_backward
from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.window import Interval


def kv_heads(x: Tensor, heads: int, axes: Axes, groups: int, group_axes: Axes = ()) -> Tensor:
    """The KV head of each local query head: [..., local groups, t, d] → [..., local heads, t, d].
    ``heads`` query heads, sharded by ``axes``, share ``groups`` KV heads, sharded by
    ``group_axes`` and gathered first if these are not the outer ones of ``axes``."""
    comm = current()
    outer, cut = comm.active(group_axes), comm.active(axes)
    start = offset(groups, group_axes)
    if cut[: len(outer)] != outer:
        x, start = all_gather(x, x.dim() - 3, group_axes, to="R", size=groups), 0
    head = offset(heads, axes) + torch.arange(size(heads, axes), device=x.device)
    return x.index_select(-3, head // (heads // groups) - start)


def causal_mask(
    query: Tensor, key: Tensor, queries: int = 0, query_axes: Axes = (), keys: int = 0, key_axes: Axes = ()
) -> Tensor:
    """This rank's shard of the causal mask: query [..., s, e], key [..., t, e] → [s, t] bool.
    ``queries`` and ``keys``: global lengths if sharded, by ``query_axes`` and ``key_axes``."""
    row = offset(queries, query_axes) + torch.arange(query.shape[-2], device=query.device)
    column = offset(keys, key_axes) + torch.arange(key.shape[-2], device=query.device)
    return column <= row.unsqueeze(-1)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    scale: float | None = None,
    *,
    shape: Sequence[int],
    cuts: Mapping[int, Axes],
    batch: int | None = None,
) -> Tensor:
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


def dropout_attention(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, axes: Axes, **given: Any) -> Tensor:
    """``F.scaled_dot_product_attention`` with dropout from a random stream of this rank's shard.
    ``axes``: those that shard batch, heads or queries; ``given``: its other arguments."""
    with own_stream(query.device, shard_seed([axes])):
        return F.scaled_dot_product_attention(query, key, value, dropout_p=dropout_p, **given)


def is_document_mask(mask: Tensor) -> bool:
    """Whether ``mask`` is a document mask: integers, the document number of every position."""
    return not mask.dtype.is_floating_point and mask.dtype != torch.bool


def banded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    folded: int = 0,
    enable_gqa: bool = False,
    **form: Any,
) -> Tensor:
    """``scaled_dot_product_attention``: query i sees keys i - ``before`` to i + ``after``.
    query [..., s, e], key [..., t, e], value [..., t, d] → [..., s, d]; None: no limit.
    ``attn_mask`` [..., s, t] hides more: bool, or added to the scores without a gradient. An
    integer mask [..., 1, t] is a document mask (s = t). ``sinks`` [h]: attention sink, the score of
    one more key whose value is zero (Xiao et al. 2023, GPT-OSS); it gets a gradient. ``folded``: 0,
    or how many ranks the zigzag order has in which operands and result lie; the mask is in sequence
    order. ``form``: fields of :class:`~autoshard.runtime.attention.ring_geometry.AttentionSpec`.
    With ``dropout_p`` the op has no backward, which would draw again, but
    :func:`~autoshard.runtime.attention.ring.banded_rows` has one."""
    operands = [query, key, value]
    if folded:
        operands = [from_zigzag_op(x, x.dim() - 2, folded) for x in operands]
    out = _masked_attention(operands, attn_mask, sinks, AttentionSpec(**form), enable_gqa)
    return to_zigzag_op(out, out.dim() - 2, folded) if folded else out


banded_op = torch.library.custom_op(
    "autoshard::banded_attention",
    banded_attention,
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, Tensor? sinks=None, *, "
    "int? before=None, int? after=None, float? scale=None, bool enable_gqa=False, "
    "bool sloped=False, float? soft_cap=None, float dropout_p=0.0, int folded=0) -> Tensor",
)


def alibi_bias(slopes: Tensor, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
    """ALiBi bias [..., h, s, t] of slopes [..., h, 1, 1]; rows and columns: (start, length)."""
    row, column = (torch.arange(a, a + n, device=slopes.device) for a, n in (rows, columns))
    return upcast(slopes) * (column - row.unsqueeze(-1))


@banded_op.register_fake
def _fake_banded_attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def soft_capped(scores: Tensor, cap: float | None) -> Tensor:
    """Soft-capped scores: cap · tanh(scores / cap); None: unchanged."""
    return scores if cap is None else (scores / cap).tanh() * cap


def visible_pairs(rows: Interval, columns: Interval, band: Band, device: torch.device) -> Tensor:
    """Which pairs of a tile the band shows: [rows, columns] bool, or [1 or rows, columns]."""
    row = torch.arange(rows[0], sum(rows), device=device).unsqueeze(-1)
    column = torch.arange(columns[0], sum(columns), device=device)
    shown = torch.ones_like(column, dtype=torch.bool) if band.after is None else column <= row + band.after
    return shown if band.before is None else shown & (column >= row - band.before)


def _masked_attention(
    operands: Sequence[Tensor],
    mask: Tensor | None,
    sinks: Tensor | None,
    spec: AttentionSpec,
    grouped: bool,
) -> Tensor:
    (query, key, value), cap = operands, spec.soft_cap
    lengths = query.shape[-2], key.shape[-2]
    shown = visible_pairs((0, lengths[0]), (0, lengths[1]), spec.band, query.device).expand(lengths)
    if mask is not None and spec.sloped:
        mask = alibi_bias(mask, (0, query.shape[-2]), (0, key.shape[-2])).to(query.dtype)
    if mask is not None:
        if is_document_mask(mask):
            mask = mask.mT == mask
        shown = shown & mask if mask.dtype == torch.bool else mask.masked_fill(~shown, -torch.inf)
    if sinks is None and cap is None:
        return F.scaled_dot_product_attention(
            query, key, value, shown, spec.dropout_p, scale=spec.scale, enable_gqa=grouped
        )
    if grouped:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if spec.scale is None else spec.scale
    scores = soft_capped(upcast(query @ key.mT) * scale, cap)
    scores = scores.masked_fill(~shown, -torch.inf) if shown.dtype == torch.bool else scores + shown
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return F.dropout(scores.softmax(-1)[..., : key.shape[-2]].to(value.dtype), spec.dropout_p) @ value


def _recomputed_banded(*operands: Any, dropout_p: float = 0.0, **form: Any) -> Tensor:
    if dropout_p:
        raise RuntimeMismatchError("autoshard::banded_attention draws dropout when it runs: no backward with dropout")
    return banded_attention(*operands, **form)


register_recomputed_backward(banded_op, _recomputed_banded, of=(0, 1, 2, 4))
