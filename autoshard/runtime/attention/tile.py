"""Attention block: some queries over some keys, forward and backward; results merge by log-sum-exp.
Given that over all keys, a tile's backward is its summand of the full one (FlashAttention-2, Dao
2023)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoshard.aten import aten
from autoshard.runtime.attention.masked_attention import soft_capped
from autoshard.runtime.operations.reductions import upcast

LEVEL_THRESHOLD = 1000.0
"""how far below zero a row's additive mask may lie before its log-sum-exp loses digits"""
UNFUSED_BLOCK_ROWS = 1024
"""rows of the attention matrix in memory at once where no fused kernel computes a tile"""


class Masking(NamedTuple):
    """Masks and dropout of one tile. Tensors broadcast to [..., s, t]."""

    causal: bool = False
    """row i sees columns 0…i"""
    bias: Tensor | None = None
    """bool (False: hidden) or added to the scores; no gradient"""
    dropout_scale: Tensor | None = None
    """factor of the weights: 0 where dropped, else 1 / (1 - p)"""
    level: Tensor | None = None
    """[..., s, 1], subtracted from the scores: see :func:`score_level`"""
    soft_cap: float | None = None
    """see :func:`~autoshard.runtime.attention.masked_attention.banded_op`"""


def score_level(mask: Tensor | None) -> Tensor | None:
    """Maximum [..., s, 1] of an additive mask [..., s, t] where below -:data:`LEVEL_THRESHOLD`,
    else 0; None: no such row. Rows that see nothing (padding) would lose the number of keys in
    their log-sum-exp."""
    if mask is None or not mask.dtype.is_floating_point or mask.device.type == "meta":
        return None
    top = upcast(mask).amax(-1, keepdim=True)
    deep = (top < -LEVEL_THRESHOLD) & (top > -torch.inf)
    if mask.device.type == "cpu" and not bool(deep.any()):
        return None
    return top.masked_fill(~deep, 0.0)


def tile_forward(query: Tensor, key: Tensor, value: Tensor, masking: Masking, scale: float) -> tuple[Tensor, Tensor]:
    """query [..., s, e], key [..., t, e], value [..., t, d] → [..., s, d], log-sum-exp [..., s], in
    float32 or wider; -inf if no key is seen. Key and value may have fewer heads (GQA)."""
    if _is_fused(query, key, value, masking):
        bias = _additive_bias(masking.bias, query)
        out, sums = _kernel(query, key, value, masking.causal, bias, scale)[:2]
        return upcast(out), sums if bias is None else sums.masked_fill((bias == -torch.inf).all(-1), -torch.inf)
    key, value = (_repeated_kv_heads(query, x) for x in (key, value))
    parts = [_forward_rows(query, key, value, masking, scale, *rows) for rows in _unfused_row_blocks(query)]
    if query.device.type == "meta" and parts:  # one block was run, all have a shape
        (out, sums), rows = parts[0], query.shape[-2]
        parts = [(out.new_empty((*out.shape[:-2], rows, out.shape[-1])), sums.new_empty((*sums.shape[:-1], rows)))]
    return torch.cat([out for out, _ in parts], -2), torch.cat([sums for _, sums in parts], -1)


def tile_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    masking: Masking,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The tile's summand of the gradients of query, key, value; ``out``, ``sums``: of all keys."""
    sums = sums.masked_fill(sums == -torch.inf, 0.0)
    if _is_fused(query, key, value, masking):
        bias = _additive_bias(masking.bias, query)
        return _kernel_backward(gradient, query, key, value, out, sums, masking.causal, bias, scale)
    key, value, shapes = _repeated_kv_heads(query, key), _repeated_kv_heads(query, value), (key.shape, value.shape)
    found = [torch.zeros_like(upcast(x)) for x in (query, key, value)]
    whole = query, key, value, out, gradient
    for rows in _unfused_row_blocks(query):
        for total, part in zip(found, _backward_rows(*whole, sums, masking, scale, *rows), strict=True):
            at = total.narrow(-2, *rows) if total is found[0] else total
            at.add_(part.sum_to_size(at.shape))
    return found[0], _sum_over_query_groups(found[1], shapes[0]), _sum_over_query_groups(found[2], shapes[1])


def merge_by_log_sum_exp(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Merge results over disjoint keys by their log-sum-exps; ``out`` is overwritten."""
    share = (more_sums - sums).sigmoid().nan_to_num(0.0)  # NaN: the row sees no key of either
    return out.lerp_(more, share.unsqueeze(-1)), torch.logaddexp(sums, more_sums)


# --- kernels ---


def _is_fused(query: Tensor, key: Tensor, value: Tensor, masking: Masking) -> bool:
    """Whether a fused kernel computes the tile, without its matrix of weights."""
    if (
        masking.dropout_scale is not None
        or masking.level is not None
        or masking.soft_cap is not None
        or query.dim() != 4
        or not query.shape[0] == key.shape[0] == value.shape[0]
    ):
        return False
    if (
        not key.shape[1]
        or query.shape[1] % key.shape[1]
        or (masking.bias is not None and masking.bias.dim() not in (2, 4))
    ):
        return False
    if not query.shape[-1] == key.shape[-1] == value.shape[-1] or key.shape[1] != value.shape[1]:
        return False
    if query.device.type == "cuda":  # its kernel aligns a causal mask to the last row
        if masking.bias is not None or (masking.causal and query.shape[-2] != key.shape[-2]):
            return False
        return query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] in range(8, 257, 8)
    return query.device.type in ("cpu", "meta")


def _kernel(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Any, ...]:
    """The result, its log-sum-exp, and what else the kernel's backward takes."""
    if query.device.type != "cuda":
        flash = aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)
    return aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=scale)


def _kernel_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    sums: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if query.device.type != "cuda":
        flash = aten._scaled_dot_product_flash_attention_for_cpu_backward
        a, b, c = flash(gradient, query, key, value, out, sums, 0.0, causal, attn_mask=bias, scale=scale)
        return a, b, c
    seed = torch.empty((), dtype=torch.int64, device=query.device)  # unused: there is no dropout
    lengths = None, None, query.shape[-2], key.shape[-2]
    given = (gradient, query, key, value, out, sums, *lengths, 0.0, causal, seed, seed)
    a, b, c = aten._scaled_dot_product_flash_attention_backward(*given, scale=scale)
    return a, b, c


# --- unfused, in blocks of rows ---


def _unfused_row_blocks(query: Tensor) -> list[tuple[int, int]]:
    """(start, length) of blocks of rows; on meta tensors the first, whose memory is that of all."""
    rows = query.shape[-2]
    found = [(start, min(UNFUSED_BLOCK_ROWS, rows - start)) for start in range(0, rows, UNFUSED_BLOCK_ROWS)]
    return found[:1] if query.device.type == "meta" else found


def _tile_scores(
    query: Tensor, key: Tensor, masking: Masking, scale: float, start: int, length: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Scores [..., length, t] of some rows, their dropout factor, derivative of the soft cap."""
    scores, slope = upcast(query.narrow(-2, start, length) @ key.transpose(-2, -1)) * scale, None
    if masking.soft_cap is not None:
        scores = soft_capped(scores, masking.soft_cap)
        slope = 1 - (scores / masking.soft_cap).square()
    if masking.causal:
        rows = torch.arange(start, start + length, device=query.device).unsqueeze(-1)
        scores = scores.masked_fill(torch.arange(key.shape[-2], device=query.device) > rows, -torch.inf)
    if masking.bias is not None:
        bias = _additive_bias(masking.bias, scores)
        scores = scores + narrowed_rows(bias, start, length)
    if masking.level is not None:  # after the mask is added, so that it rounds as in eager
        scores = scores - narrowed_rows(masking.level.to(scores.dtype), start, length)
    return scores, None if masking.dropout_scale is None else masking.dropout_scale.narrow(-2, start, length), slope


def narrowed_rows(x: Tensor, start: int, length: int) -> Tensor:
    """Some rows of ``x``, or ``x`` where all rows share it."""
    return x if x.dim() < 2 or x.shape[-2] == 1 else x.narrow(-2, start, length)


def _forward_rows(
    query: Tensor, key: Tensor, value: Tensor, masking: Masking, scale: float, start: int, length: int
) -> tuple[Tensor, Tensor]:
    scores, dropout_scale, _ = _tile_scores(query, key, masking, scale, start, length)
    sums = scores.logsumexp(-1)
    weights = (scores - sums.masked_fill(sums == -torch.inf, 0.0).unsqueeze(-1)).exp()
    weights = weights if dropout_scale is None else weights * dropout_scale
    return upcast(weights.to(value.dtype) @ value), sums


def _backward_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    gradient: Tensor,
    sums: Tensor,
    masking: Masking,
    scale: float,
    start: int,
    length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    scores, dropout_scale, slope = _tile_scores(query, key, masking, scale, start, length)
    q, g, o = (upcast(x.narrow(-2, start, length)) for x in (query, gradient, out))
    weights = (scores - sums.narrow(-1, start, length).unsqueeze(-1)).exp()
    inner = g @ upcast(value).transpose(-2, -1)
    dropped, inner = (weights, inner) if dropout_scale is None else (weights * dropout_scale, inner * dropout_scale)
    moved = weights * (inner - (g * o).sum(-1, keepdim=True)) * scale
    moved = moved if slope is None else moved * slope
    return moved @ upcast(key), moved.transpose(-2, -1) @ q, dropped.transpose(-2, -1) @ g


def _additive_bias(bias: Tensor | None, like: Tensor) -> Any:
    if bias is None:
        return None
    if bias.dtype == torch.bool:
        return torch.zeros_like(bias, dtype=like.dtype).masked_fill_(~bias, -torch.inf)
    narrow = like.dtype.itemsize < bias.dtype.itemsize == 4  # kernels for half precision add float32, too
    return bias if narrow else bias.to(like.dtype)


def _repeated_kv_heads(query: Tensor, x: Tensor) -> Tensor:
    """Keys or values repeated to one head per query head."""
    if query.dim() < 3 or x.dim() < 3 or x.shape[-3] in (1, query.shape[-3]):
        return x
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)


def _sum_over_query_groups(gradient: Tensor, shape: torch.Size) -> Tensor:
    """The gradient of :func:`_repeated_kv_heads`."""
    if gradient.shape == shape:
        return gradient
    return gradient.unflatten(-3, (shape[-3], -1)).sum(-3)
