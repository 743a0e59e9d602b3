"""Ring attention (Liu et al. 2023): queries stay, keys and values go round, results merge by log-sum-exp.

Queries, keys and values are cut along the sequence. In every step a rank computes with the keys and values that it has,
while it sends them to the next one. In the backward they go round once more, and their gradients behind them: a
gradient starts at the rank after the keys' owner, and every rank adds its part. Of a window the keys that it shows go
straight to the ranks that see them, and their gradients straight back. Nothing of the size of the whole sequence is ever
held, and what positions hide is neither computed nor stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.attention.journey import Job, backward, forward
from autoshard.runtime.attention.order import Band, spans
from autoshard.runtime.operations.random import noise_like, part
from autoshard.runtime.transport.communicator import Axes, Communicator, current
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.profiling import named
from autoshard.runtime.transport.relay import Tensors, travel


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
    are mirrored in the ring swap second halves before and after, so that a causal mask leaves all ranks the same work;
    then no mask has rows. ``sloped``, ``sinks`` (of the heads that are here),
    ``soft_cap``: as in :func:`~autoshard.runtime.attention.banded.banded_op`. No second derivative.

    For dropout, which hits what it hits on one device: ``shape``, the global one of the weights [..., s, t]; ``cuts``, the
    axes that cut each of its dims but the last two; ``batch`` as in :func:`~autoshard.runtime.dropout`.
    """
    comm = current()
    names = comm.active(axes)
    ranks = tuple(comm.mesh[a] for a in names)
    folded = folded and bool(names)
    rows, columns = (spans(n, ranks, folded) for n in (queries, keys))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    move = named(Move("S", "S", names, order=names), always=True)
    band = Band(before, 0 if is_causal else after)
    job = Job(move, comm.index(names), rows, columns, band, scale, folded, dropout_p, sloped, soft_cap)
    out = _run(comm, job, (query, key, value, sinks), attn_mask, _kept(job, query, shape, cuts, batch))
    return out * 0.0 if dropout_p == 1.0 else out


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
    sloped: bool = False,
    sinks: torch.Tensor | None = None,
    soft_cap: float | None = None,
    shape: Sequence[int] = (),
    cuts: Mapping[int, Axes] | None = None,
    batch: int | None = None,
) -> torch.Tensor:
    """Attention of queries over whole keys and values; ``queries``: their global length, where ``axes`` cut them.

    A query sees the keys from ``before`` positions before it to ``after`` behind it; None: all. ``attn_mask`` hides more,
    cut by its rows where it has any. Others as in :func:`ring_attention`; under ``folded`` queries alone are swapped.
    """
    comm = current()
    names = comm.active(axes)
    folded = folded and bool(names)
    rows = spans(query.shape[-2] if queries is None else queries, tuple(comm.mesh[a] for a in names), folded)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    move = named(Move("S", "S", names, order=names), always=True)
    job = Job(
        move,
        comm.index(names),
        rows,
        (((0, key.shape[-2]),),),
        Band(before, after),
        scale,
        folded,
        dropout_p,
        sloped,
        soft_cap,
    )
    out = _run(comm, job, (query, key, value, sinks), attn_mask, _kept(job, query, shape, cuts, batch))
    return out * 0.0 if dropout_p == 1.0 else out


# --- the backward needs all ranks at once: one node for those of this process, and one on each that holds what it needs ---


Operands = tuple[Any, ...]
"""queries, keys, values, and sinks or None"""


class _Visit(NamedTuple):
    """A rank that comes with its part."""

    job: Job
    operands: Operands
    masks: tuple[torch.Tensor | None, torch.Tensor | None]
    """the mask, and which weights dropout keeps"""
    held: dict[str, Any]
    """where its node leaves what the backward needs"""


def _run(
    comm: Communicator, job: Job, given: Operands, mask: torch.Tensor | None, kept: torch.Tensor | None
) -> torch.Tensor:
    held: dict[str, Any] = {}
    what = f"ring attention along {', '.join(job.move.axes)}, {job.band}"
    visit = _Visit(job, given, (mask, kept), held)
    made: Tensors = comm.meet(what, visit, lambda visits: _joint(comm, visits))
    out, sums, *operands = made
    if not out.requires_grad:
        return out
    needed = (*(None if x is None else x.detach() for x in operands), mask, kept, sums)
    result: torch.Tensor = _Hold.apply(out, held, *needed)  # type: ignore[no-untyped-call]
    return result


def _joint(comm: Communicator, visits: Sequence[_Visit]) -> list[Tensors]:
    """Of every rank: the result, its log-sum-exp, and the queries, keys and values in the order of the ring."""
    phase, made = comm.phase, list[Tensors]()
    xs = tuple(x for visit in visits for x in visit.operands)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in xs):
        outs: Tensors = _Ring.apply(comm, visits, phase, made, *xs)  # type: ignore[no-untyped-call]
        return [(out, *rest[1:]) for out, rest in zip(outs, made, strict=True)]
    return _ahead(comm, visits, phase, xs)


def _ahead(comm: Communicator, visits: Sequence[_Visit], phase: str, xs: Operands) -> list[Tensors]:
    operands = zip(xs[::4], xs[1::4], xs[2::4], xs[3::4], strict=True)
    journeys = [forward(visit.job, *given, *visit.masks) for visit, given in zip(visits, operands, strict=True)]
    return travel(journeys, lambda hops: comm.exchange(hops, phase))


class _Ring(torch.autograd.Function):
    """The attention of all ranks of this process; the results are those of :class:`_Hold` where a gradient flows."""

    @staticmethod
    def forward(
        ctx: Any,
        comm: Communicator,
        visits: Sequence[_Visit],
        phase: str,
        made: list[Tensors],
        *xs: torch.Tensor | None,
    ) -> Tensors:
        ctx.comm, ctx.jobs = comm, [(visit.job, visit.held) for visit in visits]
        made += _ahead(comm, visits, phase, xs)
        return tuple(out for out, *_ in made)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        # once_differentiable leaves no path to what `torch.autograd.grad` is asked for, which then takes it for constant.
        if torch.is_grad_enabled():
            raise RuntimeMismatchError(
                "create_graph=True: attention in a ring, with a window, slopes or rows of a causal mask has no second "
                "derivative. Leave create_graph out, or differentiate the model that is not sharded"
            )
        if not all(held for _, held in ctx.jobs):
            raise RuntimeMismatchError(
                "ring attention: a rank's result has no gradient, though that of another has one"
            )
        saved = [held.pop("saved") for _, held in ctx.jobs]
        journeys = [backward(job, g, s) for (job, _), g, s in zip(ctx.jobs, gradients, saved, strict=True)]
        found = travel(journeys, lambda hops: ctx.comm.exchange(hops, "backward"))
        return None, None, None, None, *(x for xs in found for x in xs)


class _Hold(torch.autograd.Function):
    """One rank's result: holds what the backward needs, where autograd asks this rank's hooks, and hands it over there."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, held: dict[str, Any], *saved: torch.Tensor | None) -> torch.Tensor:
        *operands, sums = saved
        ctx.save_for_backward(*operands, out, sums)
        ctx.held = held
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        ctx.held["saved"] = ctx.saved_tensors
        return gradient, None, *(None,) * 7
