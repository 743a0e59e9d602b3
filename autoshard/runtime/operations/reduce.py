"""Reductions over sharded dims that are no plain sums. Results are I.

If the op of the ranks' own results is the result (a norm of norms), those are gathered, one per
rank, and the backward communicates nothing. ``dims``: the reduced dims; ``axes``: all axes that
shard them."""

from __future__ import annotations

import math
from typing import Any, cast

import torch

from autoshard.runtime.operations.collectives import all_gather, enter, statistic
from autoshard.runtime.operations.softmax import maximum, wide
from autoshard.runtime.transport.communicator import Axes
from autoshard.runtime.transport.handed_on import HandingOn

Dims = list[int]


def logsumexp(
    x: torch.Tensor, dims: Dims, axes: Axes, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x.logsumexp(dims)``: maxima, then shifted sums; a rank may hold -inf alone."""
    x = x if dtype is None else x.to(dtype)
    values = wide(x)
    top = maximum(values, dims, axes)
    top = top.masked_fill(top.isinf(), 0)
    result = statistic((values - top).exp().sum(dims, keepdim=True), axes).log() + top
    return (result if keepdim else result.squeeze(dims)).to(x.dtype)


def prod(
    x: torch.Tensor, dims: Dims, axes: Axes, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``x.prod(dim)``, or over all dims."""
    x = x if dtype is None else x.to(dtype)
    values = wide(x)
    mine = values.prod(dims[0], keepdim=keepdim) if len(dims) == 1 else values.prod()
    return _every(mine, axes).prod(0).to(x.dtype)


def any(x: torch.Tensor, dims: Dims, axes: Axes, keepdim: bool = False) -> torch.Tensor:  # noqa: A001
    """``x.any(dims)``."""
    return _every(torch.any(x, dims, keepdim), axes).any(0)


def all(x: torch.Tensor, dims: Dims, axes: Axes, keepdim: bool = False) -> torch.Tensor:  # noqa: A001
    """``x.all(dims)``."""
    return _every(torch.all(x, dims, keepdim), axes).all(0)


def vector_norm(
    x: torch.Tensor, order: float, dims: Dims, axes: Axes, keepdim: bool = False, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """``torch.linalg.vector_norm(x, order, dims)``. No empty shards if ``order`` is inf or < 0."""
    x = x if dtype is None else x.to(dtype)
    if math.isinf(order):
        return _extreme(x.abs(), dims, axes, keepdim, "amax" if order > 0 else "amin", True)
    every = _every(torch.linalg.vector_norm(wide(x), order, dims, keepdim), axes)
    return (every.sum(0) if order in (0, 1) else torch.linalg.vector_norm(every, order, 0)).to(x.dtype.to_real())


def amax(x: torch.Tensor, dims: Dims, axes: Axes, keepdim: bool = False, nan: bool = False) -> torch.Tensor:
    """``x.amax(dims)``; equal maxima share the gradient. No shard may be empty.

    If the maximum is NaN, all elements have gradient NaN; with ``nan`` NaN elements share it
    (``x.max()``)."""
    return _extreme(x, dims, axes, keepdim, "amax", nan)


def amin(x: torch.Tensor, dims: Dims, axes: Axes, keepdim: bool = False, nan: bool = False) -> torch.Tensor:
    """``x.amin(dims)`` as in :func:`amax`."""
    return _extreme(x, dims, axes, keepdim, "amin", nan)


def aminmax(x: torch.Tensor, dims: Dims, axes: Axes, keepdim: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """``x.aminmax()``: :func:`amin` and :func:`amax`."""
    return amin(x, dims, axes, keepdim), amax(x, dims, axes, keepdim)


def var_mean(
    x: torch.Tensor, dims: Dims, count: int, axes: Axes, correction: float = 1, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch.var_mean(x, dims)`` over ``count`` global elements: means first, then squares."""
    values = wide(x)
    mean = statistic(values.sum(dims, keepdim=True), axes) / count
    squares = (values - enter(mean, axes)).square().sum(dims, keepdim=True)
    var = statistic(squares, axes) / (count - correction)
    return tuple((t if keepdim else t.squeeze(dims)).to(x.dtype) for t in (var, mean))  # type: ignore[return-value]


def var(
    x: torch.Tensor, dims: Dims, count: int, axes: Axes, correction: float = 1, keepdim: bool = False
) -> torch.Tensor:
    """``x.var(dims)`` as in :func:`var_mean`."""
    return var_mean(x, dims, count, axes, correction, keepdim)[0]


def std_mean(
    x: torch.Tensor, dims: Dims, count: int, axes: Axes, correction: float = 1, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """``torch.std_mean(x, dims)`` as in :func:`var_mean`. The gradient of a deviation of zero is zero."""
    var, mean = var_mean(wide(x), dims, count, axes, correction, keepdim)
    moves = var != 0
    return torch.where(moves, var.where(moves, 1).sqrt(), 0).to(x.dtype), mean.to(x.dtype)


def std(
    x: torch.Tensor, dims: Dims, count: int, axes: Axes, correction: float = 1, keepdim: bool = False
) -> torch.Tensor:
    """``x.std(dims)`` as in :func:`std_mean`."""
    return std_mean(x, dims, count, axes, correction, keepdim)[0]


def bincount(x: torch.Tensor, weights: torch.Tensor | None, minlength: int, axes: Axes) -> torch.Tensor:
    """``x.bincount(weights, minlength)`` of shards → P, as long as the global maximum needs."""
    longest = x.max().to(torch.int64) + 1 if x.numel() else torch.zeros((), dtype=torch.int64, device=x.device)
    counts = torch.bincount(x, weights, max(minlength, int(statistic(longest, axes, op="max"))))
    if weights is None:
        return counts
    return counts.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)  # ints if empty


def _every(mine: torch.Tensor, axes: Axes) -> torch.Tensor:
    """All ranks' tensors, stacked along a new first dim."""
    return all_gather(mine.unsqueeze(0), 0, axes)


def _extreme(x: torch.Tensor, dims: Dims, axes: Axes, keepdim: bool, op: str, nan: bool) -> torch.Tensor:
    """Gathered, since an all-reduced maximum may lose NaN. Equal elements share the gradient."""
    reduce = torch.amax if op == "amax" else torch.amin
    best = reduce(_every(reduce(x.detach(), dims, keepdim=True), axes), 0)
    if x.requires_grad and torch.is_grad_enabled():
        same = x.detach() == best
        equal = wide((same | (x.detach().isnan() & best.isnan()) if nan else same).to(x.dtype))
        share = equal / statistic(equal.sum(dims, keepdim=True), axes)
        best = cast(torch.Tensor, _Shared.apply(x, best, share.to(x.dtype)))
    return best if keepdim else best.squeeze(dims)


class _Shared(HandingOn):
    """``best`` as a function of ``x``, whose elements have ``share`` of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, best: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(share)
        return best.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (share,) = ctx.saved_tensors
        return gradient * share, None, None
