"""Ring attention (Liu et al. 2023) and attention over gathered keys: context parallelism.

Queries, keys and values are sharded along the sequence, and queries stay. In each step a rank
computes with the keys and values it has while it sends them to the next rank. Partial results merge
by log-sum-exp. In the backward keys and values go around the ring once more, followed by their
gradients: a gradient starts at the rank after the owner of the keys, and each rank adds its
summand. Under a sliding window the visible keys go straight to the ranks that see them, and their
gradients straight back. Nothing of the full sequence's size is in memory, and masked tiles are
neither computed nor stored."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

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


class AttentionForm(NamedTuple):
    """What sharded attention computes, besides operands, mask, scale and dropout."""

    before: int | None = None
    """positions that a query sees before it; None: all"""
    after: int | None = None
    """positions that a query sees behind it; None: all"""
    folded: bool = False
    """whether mirrored ranks swap first halves before and after, which balances causal work; then
    no mask may have rows"""
    carried: bool = False
    """whether operands and result are in zigzag order already, and nothing is swapped"""
    sloped: bool = False
    sinks: torch.Tensor | None = None
    """of local heads"""
    soft_cap: float | None = None
    """as ``sloped`` and ``sinks``: see :func:`~autoshard.runtime.attention.masked_attention.banded_op`"""
    shape: Sequence[int] = ()
    """for dropout equal to one device's: global shape of the weights [..., s, t]"""
    cuts: Mapping[int, Axes] | None = None
    """for dropout equal to one device's: the axes that shard each dim of ``shape`` but the last two"""
    batch: int | None = None
    """see :func:`~autoshard.runtime.dropout`"""


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
    helpers: bool = False,
    **form: Any,
) -> torch.Tensor:
    """Ring attention: queries, keys and values sharded along the sequence by ``axes``, S → S.

    query [..., s, e], key [..., t, e], value [..., t, d], attn_mask [..., s, full t]. ``queries``,
    ``keys``: global lengths. Key and value may have fewer heads (GQA). ``helpers``: early ranks
    compute for late ones (:mod:`~autoshard.runtime.attention.balanced_ring`); needs as many queries
    as keys, and no ALiBi, window, mask with rows, or dropout. ``form``: :class:`AttentionForm`;
    among two ranks all operands are swapped, else keys and values only. No second derivative."""
    passes = (balanced_forward, balanced_backward) if helpers else (ring_forward, ring_backward)
    form |= {"after": 0} if is_causal else {}
    spans = functools.partial(query_and_key_spans, queries, keys)
    return _sharded_attention((query, key, value), attn_mask, scale, dropout_p, axes, spans, form, passes)


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
    **form: Any,
) -> torch.Tensor:
    """:func:`ring_attention` with KV all-gathered in ``pieces`` head chunks × ``batches``: S → S.

    While one chunk is computed, the next is gathered (:mod:`~autoshard.runtime.attention.head_chunks`).
    Operands without a head or batch dim have one chunk there. ``folded``: queries alone are
    swapped. ``carried``: nothing is swapped; each rank brings gathered keys into sequence order."""
    form |= {"after": 0} if is_causal else {}
    chunks = pieces if query.dim() > 2 else 1, batches if query.dim() > 3 else 1, form.get("carried", False)
    spans, passes = _over_all_keys(queries, keys), (chunked_forward, chunked_backward)
    return _sharded_attention((query, key, value), attn_mask, scale, dropout_p, axes, spans, form, passes, *chunks)


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
    **form: Any,
) -> torch.Tensor:
    """Attention of queries over replicated keys; ``queries``: global length if sharded by ``axes``.

    ``attn_mask`` hides more than the band, sharded by its rows if it has any. Else as
    :func:`ring_attention`, but queries alone are swapped, or in zigzag order."""
    spans = _over_all_keys(query.shape[-2] if queries is None else queries, key.shape[-2])
    passes = ring_forward, ring_backward
    return _sharded_attention((query, key, value), attn_mask, scale, dropout_p, axes, spans, form, passes)


def _over_all_keys(queries: int, keys: int) -> Callable[..., tuple[Any, Any]]:
    """The spans of sharded queries and of keys that every rank has, as :func:`query_and_key_spans`."""
    return lambda ranks, folded, carried: (rank_spans(queries, ranks, folded or carried), (((0, keys),),))


def _sharded_attention(
    operands: Tensors,
    mask: torch.Tensor | None,
    scale: float | None,
    dropout_p: float,
    axes: Axes,
    spans: Callable[..., tuple[Any, Any]],
    options: dict[str, Any],
    passes: tuple[Callable[..., RankCoroutine], Callable[..., RankCoroutine]],
    *chunks: Any,
) -> torch.Tensor:
    """``spans``: of queries and keys, given the ranks, whether these swap, and what they carry.

    ``options``: those of :class:`AttentionForm`; ``chunks``: the last fields of the task."""
    comm, form, query = current(), AttentionForm(**options), operands[0]
    names = comm.active(axes)
    folded = form.folded and bool(names)
    rows, columns = spans(tuple(comm.mesh[a] for a in names), folded, form.carried)
    move = with_module(Move("S", "S", names, order=names), always=True)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    computed = Band(form.before, form.after), scale, folded, dropout_p, form.sloped, form.soft_cap
    job = RingTask(move, comm.index(names), rows, columns, *computed, *chunks)
    dropout_mask = _kept_by_dropout(job, query, form)
    return _run_differentiable(comm, job, (*operands, form.sinks), mask, dropout_mask, *passes)


def _kept_by_dropout(job: RingTask, query: torch.Tensor, form: AttentionForm) -> torch.Tensor | None:
    """Which weights [..., s, t] of this rank's queries dropout keeps, over all keys: bool."""
    if not 0.0 < job.dropout_p < 1.0:
        return None
    noise = full_dropout_noise(query, job.dropout_p, form.shape, (), form.batch)
    kept = local_part(noise != 0, form.cuts or {})
    return torch.cat([kept.narrow(-2, *span) for span in job.rows[job.me]], -2)


def _run_differentiable(
    comm: Communicator,
    job: RingTask,
    operands: tuple[torch.Tensor | None, ...],
    mask: torch.Tensor | None,
    dropout_mask: torch.Tensor | None,
    forward: Callable[..., RankCoroutine],
    backward: Callable[..., RankCoroutine],
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
