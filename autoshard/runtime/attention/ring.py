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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from autoshard.runtime.attention.balanced_ring import balanced_backward, balanced_forward
from autoshard.runtime.attention.head_chunks import chunked_backward, chunked_forward
from autoshard.runtime.attention.ring_geometry import Band, query_and_key_spans, rank_spans
from autoshard.runtime.attention.ring_task import RingTask, ring_backward, ring_forward
from autoshard.runtime.operations.random import full_dropout_noise, local_part
from autoshard.runtime.transport.communicator import Axes, Communicator, current
from autoshard.runtime.transport.coroutine_autograd import CoroutinePair, apply_coroutines
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.profiling import with_module
from autoshard.runtime.transport.rank_coroutines import RankCoroutine, Tensors


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    *,
    queries: int,
    keys: int,
    axes: Axes,
    before: int | None = None,
    after: int | None = None,
    folded: bool = False,
    helpers: bool = False,
    carried: bool = False,
    sloped: bool = False,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    shape: Sequence[int] = (),
    cuts: Mapping[int, Axes] | None = None,
    batch: int | None = None,
) -> torch.Tensor:
    """Ring attention: queries, keys and values sharded along the sequence by ``axes``, S → S.

    query [..., s, e], key [..., t, e], value [..., t, d], attn_mask [..., s, full t]. ``queries``,
    ``keys``: global lengths. Key and value may have fewer heads (GQA). ``before``, ``after``:
    positions that a query sees before and behind it; none behind if ``is_causal``. ``folded``:
    mirrored ranks swap first halves before and after (keys and values only among more than two
    ranks), which balances causal work; then no mask may have rows. ``carried``: operands and result
    are in zigzag order already, and nothing is swapped. ``helpers``: early ranks compute for late
    ones instead (:mod:`~autoshard.runtime.attention.balanced_ring`); needs as many queries as keys, and no
    ALiBi, window, mask with rows, or dropout. ``sloped``, ``sinks`` (local heads), ``soft_cap``: as
    in :func:`~autoshard.runtime.attention.masked_attention.banded_op`. No second derivative.

    For dropout equal to one device's: ``shape``, the global shape of the weights [..., s, t];
    ``cuts``, the axes that shard each dim but the last two; ``batch`` as in
    :func:`~autoshard.runtime.dropout`."""
    comm = current()
    names = comm.active(axes)
    ranks = tuple(comm.mesh[a] for a in names)
    folded = folded and bool(names)
    rows, columns = query_and_key_spans(queries, keys, ranks, folded, carried)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    band = Band(before, 0 if is_causal else after)
    job = RingTask(
        _ring_move(names), comm.index(names), rows, columns, band, scale, folded, dropout_p, sloped, soft_cap
    )
    dropout_mask = _kept_by_dropout(job, query, shape, cuts, batch)
    passes = (balanced_forward, balanced_backward) if helpers else (ring_forward, ring_backward)
    return _run_differentiable(comm, job, (query, key, value, sinks), attn_mask, dropout_mask, *passes)


def gathered_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    dropout_p: float = 0.0,
    *,
    queries: int,
    keys: int,
    axes: Axes,
    pieces: int = 1,
    batches: int = 1,
    before: int | None = None,
    after: int | None = None,
    folded: bool = False,
    carried: bool = False,
    sloped: bool = False,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    shape: Sequence[int] = (),
    cuts: Mapping[int, Axes] | None = None,
    batch: int | None = None,
) -> torch.Tensor:
    """:func:`ring_attention` with KV all-gathered in ``pieces`` head chunks × ``batches``: S → S.

    While one chunk is computed, the next is gathered (:mod:`~autoshard.runtime.attention.head_chunks`).
    Operands without a head or batch dim have one chunk there. ``folded``: queries alone are
    swapped. ``carried``: nothing is swapped; each rank brings gathered keys into sequence order."""
    comm = current()
    names = comm.active(axes)
    folded, pieces, batches = (
        folded and bool(names),
        pieces if query.dim() > 2 else 1,
        batches if query.dim() > 3 else 1,
    )
    rows, columns = rank_spans(queries, tuple(comm.mesh[a] for a in names), folded or carried), (((0, keys),),)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    band = Band(before, 0 if is_causal else after)
    form = scale, folded, dropout_p, sloped, soft_cap, pieces, batches, carried
    job = RingTask(_ring_move(names), comm.index(names), rows, columns, band, *form)
    dropout_mask = _kept_by_dropout(job, query, shape, cuts, batch)
    return _run_differentiable(
        comm, job, (query, key, value, sinks), attn_mask, dropout_mask, chunked_forward, chunked_backward
    )


def _ring_move(names: tuple[str, ...]) -> Move:
    return with_module(Move("S", "S", names, order=names), always=True)


def _kept_by_dropout(
    job: RingTask, query: torch.Tensor, shape: Sequence[int], cuts: Mapping[int, Axes] | None, batch: int | None
) -> torch.Tensor | None:
    """Which weights [..., s, t] of this rank's queries dropout keeps, over all keys: bool."""
    if not 0.0 < job.dropout_p < 1.0:
        return None
    dropout_mask = local_part(full_dropout_noise(query, job.dropout_p, shape, (), batch) != 0, cuts or {})
    return torch.cat([dropout_mask.narrow(-2, *span) for span in job.rows[job.me]], -2)


def banded_rows(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
    dropout_p: float = 0.0,
    *,
    queries: int | None = None,
    axes: Axes = (),
    before: int | None = None,
    after: int | None = None,
    folded: bool = False,
    carried: bool = False,
    sloped: bool = False,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    shape: Sequence[int] = (),
    cuts: Mapping[int, Axes] | None = None,
    batch: int | None = None,
) -> torch.Tensor:
    """Attention of queries over replicated keys; ``queries``: global length if sharded by ``axes``.

    A query sees keys from ``before`` positions before it to ``after`` behind it; None: no limit.
    ``attn_mask`` hides more, sharded by its rows if it has any. Else as :func:`ring_attention`.
    ``folded``: queries alone are swapped. ``carried``: queries alone are in zigzag order."""
    comm = current()
    names = comm.active(axes)
    folded = folded and bool(names)
    rows = rank_spans(
        query.shape[-2] if queries is None else queries, tuple(comm.mesh[a] for a in names), folded or carried
    )
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    columns, band = (((0, key.shape[-2]),),), Band(before, after)
    job = RingTask(
        _ring_move(names), comm.index(names), rows, columns, band, scale, folded, dropout_p, sloped, soft_cap
    )
    return _run_differentiable(
        comm, job, (query, key, value, sinks), attn_mask, _kept_by_dropout(job, query, shape, cuts, batch)
    )


def _run_differentiable(
    comm: Communicator,
    job: RingTask,
    operands: tuple[torch.Tensor | None, ...],
    mask: torch.Tensor | None,
    dropout_mask: torch.Tensor | None,
    forward: Callable[..., RankCoroutine] = ring_forward,
    backward: Callable[..., RankCoroutine] = ring_backward,
) -> torch.Tensor:
    """``operands``: queries, keys, values, sinks or None; ``dropout_mask``: weights that dropout keeps."""

    def ahead(query: Any, key: Any, value: Any, sinks: Any) -> RankCoroutine:
        out, *needed = yield from forward(job, query, key, value, sinks, mask, dropout_mask)
        return out, *needed

    def back(gradients: Tensors, saved: Sequence[Any], _: Sequence[bool]) -> RankCoroutine:
        return backward(job, gradients[0], saved)

    where = f"({', '.join(job.move.axes)}: {job.band})"
    name = f"attention in a ring or in pieces, with a window, slopes or rows of a causal mask {where}"
    out = apply_coroutines(comm, CoroutinePair(name, ahead, back), *operands)[0]
    return out * 0.0 if job.dropout_p == 1.0 else out
