"""Top-k, maxima and sampling along a sharded dim: each rank's ``k`` candidates per row are gathered
and ranked. Results are I, so the backward communicates nothing: each rank has its own winners'
gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.operations.collectives import all_gather, offset
from autoshard.runtime.operations.random import draw_like
from autoshard.runtime.transport.communicator import Axes, current


def topk(x: Tensor, k: int, dim: int, size: int, axes: Axes, largest: bool = True) -> tuple[Tensor, Tensor]:
    """``x.topk(k, dim, largest)``, sorted; ``dim`` (length ``size``) sharded by ``axes``: S → I. Of
    equal candidates the lower index comes first; torch promises no order."""
    values, places = x.topk(min(k, x.shape[dim]), dim, largest)
    places, order = places.sort(dim)
    values, places = _candidates(values.gather(dim, order), places, k, dim, size, axes)
    values, order = torch.sort(values, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), places.gather(dim, order.narrow(dim, 0, k))


def max_dim(x: Tensor, dim: int, size: int, axes: Axes, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``x.max(dim)``, values and first indices; ``dim`` (length ``size``) sharded: S(dim) → I."""
    return _sharded_max_or_min(torch.max, x, dim, size, axes, keepdim)


def min_dim(x: Tensor, dim: int, size: int, axes: Axes, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``x.min(dim)`` as in :func:`max_dim`."""
    return _sharded_max_or_min(torch.min, x, dim, size, axes, keepdim)


def argmax(x: Tensor, dim: int, size: int, axes: Axes, keepdim: bool = False) -> Tensor:
    """``x.argmax(dim)``; ``dim`` of length ``size`` sharded by ``axes``: S(dim) → R."""
    return max_dim(x.detach(), dim, size, axes, keepdim)[1]


def argmin(x: Tensor, dim: int, size: int, axes: Axes, keepdim: bool = False) -> Tensor:
    """``x.argmin(dim)`` as in :func:`argmax`."""
    return min_dim(x.detach(), dim, size, axes, keepdim)[1]


def multinomial(
    x: Tensor,
    count: int,
    shape: Sequence[int],
    dims: Mapping[int, Axes],
    order: Sequence[int] = (),
    batch: int | None = None,
) -> Tensor:
    """``torch.multinomial`` without replacement: ``count`` elements of each row of shard ``x``.
    ``shape``: global shape; ``dims``: the axes that shard each dim. As in eager, an element is
    ranked by its weight over an exponential draw, so only candidates are sent. Raises RuntimeError
    like eager. ``order``, ``batch``: see :func:`~autoshard.runtime.draw_like`."""
    if x.numel() and not x.is_meta and not bool((x.max() < math.inf) & (x.min() >= 0)):
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    last = len(shape) - 1
    scores = x / draw_like("exponential", x, shape, dims, order=order, batch=batch)
    if last in dims:
        scores, places = topk(scores, count, last, shape[last], dims[last])
    else:
        scores, places = scores.topk(count, last)
    if scores.numel() and not x.is_meta and not bool((scores.select(last, 0) > 0).all()):
        raise RuntimeError("invalid multinomial distribution (sum of probabilities <= 0)")
    return places


def flat_argmax(x: Tensor, shape: Sequence[int], cuts: Sequence[tuple[int, Axes]], axes: Axes) -> Tensor:
    """``x.argmax()`` of global ``shape``; ``cuts``: (dim, axes) of sharded dims; ``axes``: all. No
    shard may be empty."""
    return _sharded_flat_argmax(torch.max, x, shape, cuts, axes)


def flat_argmin(x: Tensor, shape: Sequence[int], cuts: Sequence[tuple[int, Axes]], axes: Axes) -> Tensor:
    """``x.argmin()`` as in :func:`flat_argmax`."""
    return _sharded_flat_argmax(torch.min, x, shape, cuts, axes)


def _sharded_max_or_min(best: Any, x: Tensor, dim: int, size: int, axes: Axes, keepdim: bool) -> tuple[Tensor, Tensor]:
    if x.shape[dim]:
        values, places = best(x, dim, keepdim=True)
    else:
        values, places = x, torch.zeros_like(x, dtype=torch.int64)
    values, places = _candidates(values, places, 1, dim, size, axes)
    values, first = best(values, dim, keepdim=True)
    places = places.gather(dim, first)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _candidates(values: Tensor, places: Tensor, most: int, dim: int, size: int, axes: Axes) -> tuple[Tensor, Tensor]:
    """All ranks' candidates (``most``, or all they have) in rank order, with global indices.
    Fillers of ranks with fewer are removed by position: no value could mark them."""
    comm = current()
    lengths = [n for _, n in comm.chunks(size, comm.active(axes))]
    count = min(most, max(lengths))
    shape = list(values.shape)
    shape[dim] = count - shape[dim]
    values = torch.cat([values, values.new_zeros(shape)], dim)
    places = torch.cat([places + offset(size, axes), places.new_zeros(shape)], dim)
    real = [r * count + i for r, n in enumerate(lengths) for i in range(min(n, count))]
    kept = torch.tensor(real, dtype=torch.int64, device=values.device)
    every = (all_gather(t, dim, axes) for t in (values, places))
    return tuple(t.index_select(dim, kept) for t in every)  # type: ignore[return-value]


def _sharded_flat_argmax(
    best: Any, x: Tensor, shape: Sequence[int], cuts: Sequence[tuple[int, Axes]], axes: Axes
) -> Tensor:
    """Among equal values the lowest flat index wins: ranks are not in the order of flat indices."""
    value, place = best(x.detach().flatten(), 0, keepdim=True)
    start = dict.fromkeys(range(len(shape)), 0) | {d: offset(shape[d], a) for d, a in cuts}
    at = zip(torch.unravel_index(place, x.shape), start.values(), strict=True)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    index = torch.stack([(i + s) * stride for (i, s), stride in zip(at, strides, strict=True)]).sum(0)
    values, indices = all_gather(value, 0, axes), all_gather(index, 0, axes)
    top = best(values, 0)[0]
    wins = (values == top) | (values.isnan() & top.isnan())
    return indices.masked_fill(~wins, math.prod(shape)).min()
