"""Ring attention (Liu et al. 2023): queries stay, keys and values go round, results merge by log-sum-exp.

Queries, keys and values are cut along the sequence. In every step a rank computes with the keys and values that it has,
while it sends them to the next one. In the backward they go round once more, and their gradients behind them: a
gradient starts at the rank after the keys' owner, and every rank adds its part. Of a window the keys that it shows go
straight to the ranks that see them, and their gradients straight back. Nothing of the size of the whole sequence is ever
held, and what positions hide is neither computed nor stored.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from autoshard.runtime.attention import helped, journey
from autoshard.runtime.attention import pieces as in_pieces
from autoshard.runtime.attention.job import Job
from autoshard.runtime.attention.order import Band, held, spans
from autoshard.runtime.operations.random import noise_like, part
from autoshard.runtime.transport.communicator import Axes, Communicator, current
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.profiling import named
from autoshard.runtime.transport.relay import Arrival, Hop, Journey, Tensors
from autoshard.runtime.transport.round_trip import Trip, round_trip


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
    """Attention with queries, keys and values cut along the sequence by ``axes``: S → S.

    query [..., s, e], key [..., t, e], value [..., t, d], attn_mask [..., s, whole t]; ``queries`` and ``keys``: the
    global lengths. Key and value may have fewer heads, each of which several query heads share. ``before``, ``after``:
    how many positions before and behind it a query sees; with ``is_causal`` none behind it. ``folded``: ranks that
    are mirrored in the ring swap first halves before and after (of more than two ranks those of keys and values, too), so
    that a causal mask leaves all ranks the same work; then no mask has rows. ``carried``: queries, keys and values come in
    folded order, and so the result goes: nothing is swapped. ``helpers``: so it does where early ranks
    compute for late ones (:mod:`~autoshard.runtime.attention.helped`), of as many queries as keys, without slopes, windows, a
    mask with rows, and dropout. ``sloped``, ``sinks`` (of the heads that are
    here), ``soft_cap``: as in :func:`~autoshard.runtime.attention.banded.banded_op`. No second derivative.

    For dropout, which hits what it hits on one device: ``shape``, the global one of the weights [..., s, t]; ``cuts``, the
    axes that cut each of its dims but the last two; ``batch`` as in :func:`~autoshard.runtime.dropout`.
    """
    comm = current()
    names = comm.active(axes)
    ranks = tuple(comm.mesh[a] for a in names)
    folded = folded and bool(names)
    rows, columns = held(queries, keys, ranks, folded, carried)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    band = Band(before, 0 if is_causal else after)
    job = Job(_move(names), comm.index(names), rows, columns, band, scale, folded, dropout_p, sloped, soft_cap)
    kept = _kept(job, query, shape, cuts, batch)
    return _run(comm, job, (query, key, value, sinks), attn_mask, kept, helped if helpers else journey)


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
    """:func:`ring_attention` in which keys and values are gathered in so many ``pieces`` of their heads, each of them in
    so many parts of the batch: S → S.

    While one piece is computed, the next one comes (:mod:`~autoshard.runtime.attention.pieces`). Operands without a dim of
    heads, or of a batch, are not cut there. ``folded``: queries alone are swapped. ``carried``: nothing is; a rank puts the
    keys that come into the order of the sequence.
    """
    comm = current()
    names = comm.active(axes)
    folded, pieces, batches = (
        folded and bool(names),
        pieces if query.dim() > 2 else 1,
        batches if query.dim() > 3 else 1,
    )
    rows, columns = spans(queries, tuple(comm.mesh[a] for a in names), folded or carried), (((0, keys),),)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    band = Band(before, 0 if is_causal else after)
    form = scale, folded, dropout_p, sloped, soft_cap, pieces, batches, carried
    job = Job(_move(names), comm.index(names), rows, columns, band, *form)
    kept = _kept(job, query, shape, cuts, batch)
    return _run(comm, job, (query, key, value, sinks), attn_mask, kept, in_pieces)


def _move(names: tuple[str, ...]) -> Move:
    return named(Move("S", "S", names, order=names), always=True)


def _kept(
    job: Job, query: torch.Tensor, shape: Sequence[int], cuts: Mapping[int, Axes] | None, batch: int | None
) -> torch.Tensor | None:
    """Which weights of this rank's queries dropout keeps, over all keys."""
    if not 0.0 < job.dropout_p < 1.0:
        return None
    kept = part(noise_like(query, job.dropout_p, shape, (), batch) != 0, cuts or {})
    return torch.cat([kept.narrow(-2, *span) for span in job.rows[job.me]], -2)


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
    """Attention of queries over whole keys and values; ``queries``: their global length, where ``axes`` cut them.

    A query sees the keys from ``before`` positions before it to ``after`` behind it; None: all. ``attn_mask`` hides more,
    cut by its rows where it has any. Others as in :func:`ring_attention`; under ``folded`` queries alone are swapped, and under
    ``carried`` they alone are in folded order.
    """
    comm = current()
    names = comm.active(axes)
    folded = folded and bool(names)
    rows = spans(query.shape[-2] if queries is None else queries, tuple(comm.mesh[a] for a in names), folded or carried)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    columns, band = (((0, key.shape[-2]),),), Band(before, after)
    job = Job(_move(names), comm.index(names), rows, columns, band, scale, folded, dropout_p, sloped, soft_cap)
    return _run(comm, job, (query, key, value, sinks), attn_mask, _kept(job, query, shape, cuts, batch))


def _run(
    comm: Communicator,
    job: Job,
    operands: tuple[torch.Tensor | None, ...],
    mask: torch.Tensor | None,
    kept: torch.Tensor | None,
    way: ModuleType = journey,
) -> torch.Tensor:
    """``operands``: queries, keys, values, and sinks or None; ``kept``: which weights dropout keeps."""

    def ahead(query: Any, key: Any, value: Any, sinks: Any) -> Generator[Hop, Arrival, Any]:
        out, *needed = yield from way.forward(job, query, key, value, sinks, mask, kept)
        return out, *needed

    def back(gradients: Tensors, saved: Sequence[Any], _: Sequence[bool]) -> Journey:
        found: Journey = way.backward(job, gradients[0], saved)
        return found

    where = f"({', '.join(job.move.axes)}: {job.band})"
    name = f"attention in a ring or in pieces, with a window, slopes or rows of a causal mask {where}"
    out = round_trip(comm, Trip(name, ahead, back), *operands)[0]
    return out * 0.0 if job.dropout_p == 1.0 else out
