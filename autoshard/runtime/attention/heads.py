"""Attention with heads, queries or keys sharded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from autoshard.aten import aten
from autoshard.runtime.operations.collectives import all_gather, offset, size
from autoshard.runtime.operations.random import dropout
from autoshard.runtime.operations.softmax import safe_softmax
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
    root = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = (query * root) @ (key.transpose(-2, -1) * root)
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=scores.dtype).masked_fill_(~attn_mask, -torch.inf)
        scores = scores + attn_mask
    last = len(shape) - 1
    weights = safe_softmax(scores, last, cuts[last]) if last in cuts else aten._safe_softmax(scores, -1)
    if dropout_p:
        weights = dropout(weights, dropout_p, shape, cuts, batch=batch)
    return weights @ value
