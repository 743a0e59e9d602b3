"""Ring attention (Liu et al. 2023) and attention over gathered keys: context parallelism.
Queries, keys and values are sharded along the sequence, and queries stay. In each step a rank
computes with the keys and values it has while it sends them to the next rank. Partial results merge
by log-sum-exp. In the backward keys and values go around the ring once more, followed by their
gradients: a gradient starts at the rank after the owner of the keys, and each rank adds its
summand. Under a sliding window the visible keys go straight to the ranks that see them, and their
gradients straight back. Nothing of the full sequence's size is in memory, and masked tiles are
neither computed nor stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.attention.balanced_ring import balanced_backward, balanced_forward
from autoshard.runtime.attention.head_chunks import chunked_backward, chunked_forward
from autoshard.runtime.attention.ring_geometry import AttentionSpec, query_and_key_spans, rank_spans
from autoshard.runtime.attention.ring_task import RingTask, ring_backward, ring_forward
from autoshard.runtime.operations.random import full_dropout_noise, local_part
from autoshard.runtime.transport.communicator import current
from autoshard.runtime.transport.coroutine_autograd import CoroutinePair, apply_coroutines
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.profiling import with_module
from autoshard.runtime.transport.rank_coroutines import RankCoroutine, Tensors

OrNone = Tensor | None


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, attn_mask: OrNone = None, sinks: OrNone = None
) -> Tensor:
    """Ring attention: queries, keys, values sharded along the sequence by ``spec.axes``, S → S.
    query [..., s, e], key [..., t, e], value [..., t, d], attn_mask [..., s, full t]. Key and value
    may have fewer heads (GQA). In zigzag order (keys and values only among more than two ranks) no
    mask may have rows. ``spec.helpers`` (:mod:`~autoshard.runtime.attention.balanced_ring`) needs
    as many queries as keys, and no ALiBi, window, mask with rows, or dropout. ``sinks`` (local
    heads): as in :func:`~autoshard.runtime.attention.masked_attention.banded_op`. No second
    derivative."""
    passes = (balanced_forward, balanced_backward) if spec.helpers else (ring_forward, ring_backward)
    return _tiled_attention((query, key, value, sinks), spec, attn_mask, *passes, ring=True)


def gathered_attention(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, attn_mask: OrNone = None, sinks: OrNone = None
) -> Tensor:
    """:func:`ring_attention` with KV all-gathered in ``spec.pieces`` head chunks, each while the
    one before is computed (one chunk without a head or batch dim): S → S. In zigzag order
    queries alone are swapped; gathered keys are brought into sequence order."""
    return _tiled_attention((query, key, value, sinks), spec, attn_mask, chunked_forward, chunked_backward)


def banded_rows(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, attn_mask: OrNone = None, sinks: OrNone = None
) -> Tensor:
    """:func:`ring_attention` with replicated keys and values: only queries may be sharded, and in
    zigzag order. ``attn_mask`` is sharded by its rows if it has any."""
    return _tiled_attention((query, key, value, sinks), spec, attn_mask, ring_forward, ring_backward)


def _tiled_attention(
    operands: tuple[Tensor | None, ...],
    spec: AttentionSpec,
    mask: Tensor | None,
    forward: Callable[..., RankCoroutine],
    backward: Callable[..., RankCoroutine],
    *,
    ring: bool = False,
) -> Tensor:
    """``operands``: queries, keys, values, sinks or None. ``ring``: whether keys are sharded."""
    comm, (query, key, *_) = current(), operands
    assert query is not None
    assert key is not None
    names = comm.active(spec.axes)
    ranks, folded = tuple(comm.mesh[a] for a in names), spec.folded and bool(names)
    queries = query.shape[-2] if spec.queries is None else spec.queries
    keys = key.shape[-2] if spec.keys is None else spec.keys
    if ring:
        rows, columns = query_and_key_spans(queries, keys, ranks, folded, spec.carried)
    else:
        rows, columns = rank_spans(queries, ranks, folded or spec.carried), (((0, keys),),)
    spec = spec if spec.scale is not None else replace(spec, scale=1 / math.sqrt(query.shape[-1]))
    move = with_module(Move("S", "S", names, order=names), always=True)
    job = RingTask(move, comm.index(names), rows, columns, spec, folded)
    dropout_mask = _kept_by_dropout(job, query)

    def ahead(query: Any, key: Any, value: Any, sinks: Any) -> RankCoroutine:
        out, *needed = yield from forward(job, query, key, value, sinks, mask, dropout_mask)
        return out, *needed

    def back(gradients: Tensors, saved: Sequence[Any], _: Sequence[bool]) -> RankCoroutine:
        return backward(job, gradients[0], saved)

    where = f"({', '.join(names)}: {spec.band})"
    name = f"attention in a ring or in head chunks, with a window, slopes or rows of a causal mask {where}"
    out = apply_coroutines(comm, CoroutinePair(name, ahead, back), *operands)[0]
    return out * 0.0 if spec.dropout_p == 1.0 else out


def _kept_by_dropout(job: RingTask, query: Tensor) -> Tensor | None:
    """Which weights [..., s, t] of this rank's queries dropout keeps, over all keys: bool."""
    spec = job.spec
    if not 0.0 < spec.dropout_p < 1.0:
        return None
    dropout_mask = local_part(
        full_dropout_noise(query, spec.dropout_p, spec.shape, (), spec.batch) != 0, spec.cuts or {}
    )
    return torch.cat([dropout_mask.narrow(-2, *span) for span in job.rows[job.me]], -2)
