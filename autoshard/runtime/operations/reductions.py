"""Reductions, softmax, cumulative scans and normalisation over sharded dims.
``dims``: the reduced dims; ``axes``: all mesh axes that shard any of them. Sums are all-reduced. An
op whose result follows from the ranks' own results (a norm of norms) gathers those, one per rank,
and its backward communicates nothing. A scan gathers each rank's total, one slice each, and runs on
the earlier totals followed by the rank's own elements, so special values and gradients are those of
the op."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from autoshard.runtime.operations.collectives import all_gather, enter, reduce_statistic
from autoshard.runtime.transport.autograd import NoneGradFunction
from autoshard.runtime.transport.communicator import Axes, current


def softmax(x: Tensor, dim: int, axes: Axes, dtype: torch.dtype | None = None) -> Tensor:
    """``x.softmax(dim)`` with ``dim`` sharded by ``axes``: S(dim) → S(dim). All-reduces maxima and
    sums, in the backward the sums' gradient."""
    exponentials, sums = _exponentials(x if dtype is None else x.to(dtype), dim, axes)[1:]
    return (exponentials / sums).to(x.dtype if dtype is None else dtype)


def log_softmax(x: Tensor, dim: int, axes: Axes, dtype: torch.dtype | None = None) -> Tensor:
    """``x.log_softmax(dim)`` with ``dim`` sharded by ``axes``; messages as in :func:`softmax`."""
    shifted, _, sums = _exponentials(x if dtype is None else x.to(dtype), dim, axes)
    return (shifted - sums.log()).to(x.dtype if dtype is None else dtype)


def safe_softmax(x: Tensor, dim: int, axes: Axes, dtype: torch.dtype | None = None) -> Tensor:
    """:func:`softmax` with zeros for rows of -inf only (attention with every key masked)."""
    _, exponentials, sums = _exponentials(x if dtype is None else x.to(dtype), dim, axes, safe=True)
    return (exponentials / sums.masked_fill(sums == 0, 1)).to(x.dtype if dtype is None else dtype)


def sharded_maximum(x: Tensor, dims: int | list[int], axes: Axes) -> Tensor:
    """Maxima over sharded dims, kept as dims of length 1; no gradient. Empty shards are -inf."""
    x = x.detach()
    dims = [dims] if isinstance(dims, int) else dims
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    top = x.amax(dims, keepdim=True) if x.numel() else x.new_full(shape, -torch.inf)
    return reduce_statistic(top, axes, op="max")


def upcast(x: Tensor) -> Tensor:
    """``x`` upcast to float32 if it is half precision, which is too narrow to sum in."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _exponentials(x: Tensor, dim: int, axes: Axes, safe: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """``x - max``, its exponentials, and their global sums (R: every rank's values use them)."""
    x = upcast(x)
    top = sharded_maximum(x, dim, axes)
    if safe:
        top = top.masked_fill(top == -torch.inf, 0)
    shifted = x - top
    exponentials = shifted.exp()
    return shifted, exponentials, reduce_statistic(exponentials.sum(dim, keepdim=True), axes, to="R")


ReducedDims = list[int]


def logsumexp(
    x: Tensor, dims: ReducedDims, axes: Axes, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """``x.logsumexp(dims)``: maxima, then shifted sums; a rank may hold -inf alone."""
    x = x if dtype is None else x.to(dtype)
    values = upcast(x)
    top = sharded_maximum(values, dims, axes)
    top = top.masked_fill(top.isinf(), 0)
    result = reduce_statistic((values - top).exp().sum(dims, keepdim=True), axes).log() + top
    return (result if keepdim else result.squeeze(dims)).to(x.dtype)


def prod(x: Tensor, dims: ReducedDims, axes: Axes, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    """``x.prod(dim)``, or over all dims."""
    x = x if dtype is None else x.to(dtype)
    values = upcast(x)
    mine = values.prod(dims[0], keepdim=keepdim) if len(dims) == 1 else values.prod()
    return _gathered_results(mine, axes).prod(0).to(x.dtype)


def any(x: Tensor, dims: ReducedDims, axes: Axes, keepdim: bool = False) -> Tensor:  # noqa: A001
    """``x.any(dims)``."""
    return _gathered_results(torch.any(x, dims, keepdim), axes).any(0)


def all(x: Tensor, dims: ReducedDims, axes: Axes, keepdim: bool = False) -> Tensor:  # noqa: A001
    """``x.all(dims)``."""
    return _gathered_results(torch.all(x, dims, keepdim), axes).all(0)


def vector_norm(
    x: Tensor,
    order: float,
    dims: ReducedDims,
    axes: Axes,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``torch.linalg.vector_norm(x, order, dims)``. No empty shards if ``order`` is inf or < 0."""
    x = x if dtype is None else x.to(dtype)
    if math.isinf(order):
        return _sharded_amax_or_amin(x.abs(), dims, axes, keepdim, "amax" if order > 0 else "amin", True)
    every = _gathered_results(torch.linalg.vector_norm(upcast(x), order, dims, keepdim), axes)
    return (every.sum(0) if order in (0, 1) else torch.linalg.vector_norm(every, order, 0)).to(x.dtype.to_real())


def amax(x: Tensor, dims: ReducedDims, axes: Axes, keepdim: bool = False, nan: bool = False) -> Tensor:
    """``x.amax(dims)``; equal maxima share the gradient. No shard may be empty. If the maximum is
    NaN, all elements have gradient NaN; with ``nan`` NaN elements share it (``x.max()``)."""
    return _sharded_amax_or_amin(x, dims, axes, keepdim, "amax", nan)


def amin(x: Tensor, dims: ReducedDims, axes: Axes, keepdim: bool = False, nan: bool = False) -> Tensor:
    """``x.amin(dims)`` as in :func:`amax`."""
    return _sharded_amax_or_amin(x, dims, axes, keepdim, "amin", nan)


def aminmax(x: Tensor, dims: ReducedDims, axes: Axes, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """``x.aminmax()``: :func:`amin` and :func:`amax`."""
    return amin(x, dims, axes, keepdim), amax(x, dims, axes, keepdim)


def var_mean(
    x: Tensor, dims: ReducedDims, count: int, axes: Axes, correction: float = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """``torch.var_mean(x, dims)`` over ``count`` global elements: means first, then squares."""
    values = upcast(x)
    mean = reduce_statistic(values.sum(dims, keepdim=True), axes) / count
    squares = (values - enter(mean, axes)).square().sum(dims, keepdim=True)
    var = reduce_statistic(squares, axes) / (count - correction)
    return tuple((t if keepdim else t.squeeze(dims)).to(x.dtype) for t in (var, mean))  # type: ignore[return-value]


def var(x: Tensor, dims: ReducedDims, count: int, axes: Axes, correction: float = 1, keepdim: bool = False) -> Tensor:
    """``x.var(dims)`` as in :func:`var_mean`."""
    return var_mean(x, dims, count, axes, correction, keepdim)[0]


def std_mean(
    x: Tensor, dims: ReducedDims, count: int, axes: Axes, correction: float = 1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """``torch.std_mean(x, dims)`` as in :func:`var_mean`; a deviation of 0 has gradient 0."""
    var, mean = var_mean(upcast(x), dims, count, axes, correction, keepdim)
    moves = var != 0
    return torch.where(moves, var.where(moves, 1).sqrt(), 0).to(x.dtype), mean.to(x.dtype)


def std(x: Tensor, dims: ReducedDims, count: int, axes: Axes, correction: float = 1, keepdim: bool = False) -> Tensor:
    """``x.std(dims)`` as in :func:`std_mean`."""
    return std_mean(x, dims, count, axes, correction, keepdim)[0]


def bincount(x: Tensor, weights: Tensor | None, minlength: int, axes: Axes) -> Tensor:
    """``x.bincount(weights, minlength)`` of shards → P, as long as the global maximum needs."""
    longest = x.max().to(torch.int64) + 1 if x.numel() else torch.zeros((), dtype=torch.int64, device=x.device)
    longest = reduce_statistic(longest, axes, op="max")
    counts = x.new_empty(minlength) if x.is_meta else torch.bincount(x, weights, max(minlength, int(longest)))
    if weights is None:
        return counts
    return counts.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)  # ints if empty


def _gathered_results(mine: Tensor, axes: Axes) -> Tensor:
    """All ranks' tensors, stacked along a new first dim."""
    return all_gather(mine.unsqueeze(0), 0, axes)


def _sharded_amax_or_amin(x: Tensor, dims: ReducedDims, axes: Axes, keepdim: bool, op: str, nan: bool) -> Tensor:
    """Gathered, since an all-reduced maximum may lose NaN. Equal elements share the gradient."""
    reduce = torch.amax if op == "amax" else torch.amin
    best = reduce(_gathered_results(reduce(x.detach(), dims, keepdim=True), axes), 0)
    if x.requires_grad and torch.is_grad_enabled():
        same = x.detach() == best
        equal = upcast((same | (x.detach().isnan() & best.isnan()) if nan else same).to(x.dtype))
        share = equal / reduce_statistic(equal.sum(dims, keepdim=True), axes)
        best = cast(Tensor, _SharedGradient.apply(x, best, share.to(x.dtype)))
    return best if keepdim else best.squeeze(dims)


class _SharedGradient(NoneGradFunction):
    """``best`` as a function of ``x``, whose elements have ``share`` of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, best: Tensor, share: Tensor) -> Tensor:
        ctx.save_for_backward(share)
        return best.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (share,) = ctx.saved_tensors
        return gradient * share, None, None


def cumsum(x: Tensor, dim: int, axes: Axes, dtype: torch.dtype | None = None) -> Tensor:
    """``x.cumsum(dim)`` with ``dim`` sharded by ``axes``: S(dim) → S(dim)."""
    x = x if dtype is None else x.to(dtype)
    values = upcast(x)
    return _scan_after_totals(torch.cumsum, values, values.sum(dim, keepdim=True), dim, axes).to(x.dtype)


def cumprod(x: Tensor, dim: int, axes: Axes, dtype: torch.dtype | None = None) -> Tensor:
    """``x.cumprod(dim)`` with ``dim`` sharded by ``axes``: S(dim) → S(dim)."""
    x = x if dtype is None else x.to(dtype)
    values = upcast(x)
    return _scan_after_totals(torch.cumprod, values, values.prod(dim, keepdim=True), dim, axes).to(x.dtype)


def logcumsumexp(x: Tensor, dim: int, axes: Axes) -> Tensor:
    """``x.logcumsumexp(dim)`` with ``dim`` sharded by ``axes``: S(dim) → S(dim)."""
    values = upcast(x)
    return _scan_after_totals(torch.logcumsumexp, values, values.logsumexp(dim, keepdim=True), dim, axes).to(x.dtype)


def cummax(x: Tensor, dim: int, size: int, axes: Axes) -> tuple[Tensor, Tensor]:
    """``x.cummax(dim)``, values and indices; ``dim`` (length ``size``) sharded: S(dim) → S(dim)."""
    return _sharded_cummax_or_cummin(torch.cummax, x, dim, size, axes)


def cummin(x: Tensor, dim: int, size: int, axes: Axes) -> tuple[Tensor, Tensor]:
    """``x.cummin(dim)`` as in :func:`cummax`."""
    return _sharded_cummax_or_cummin(torch.cummin, x, dim, size, axes)


def _scan_after_totals(scan: Callable[[Tensor, int], Tensor], x: Tensor, total: Tensor, dim: int, axes: Axes) -> Tensor:
    """``scan`` of ``x`` [n along dim] after the totals [1 along dim] of earlier ranks."""
    comm = current()
    earlier = comm.index(comm.active(axes))
    totals = all_gather(total, dim, axes, to="R").narrow(dim, 0, earlier)
    return scan(torch.cat([totals, x], dim), dim).narrow(dim, earlier, x.shape[dim])


def _sharded_cummax_or_cummin(
    scan: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    x: Tensor,
    dim: int,
    size: int,
    axes: Axes,
) -> tuple[Tensor, Tensor]:
    """The total of a rank is its last value, with its global index; empty shards have none."""
    comm = current()
    names = comm.active(axes)
    start, length = comm.chunk(size, names)
    steps = torch.arange(start, start + length, device=x.device)
    places = steps.view([-1 if d == dim else 1 for d in range(x.dim())]).expand(x.shape)
    earlier = [r for r in range(comm.index(names)) if comm.chunks(size, names)[r][1]]

    def before(last: Tensor) -> Tensor:
        gathered = all_gather(last, dim, axes, to="R")
        return gathered.index_select(dim, torch.tensor(earlier, dtype=torch.int64, device=x.device))

    if length:
        values, found = scan(x, dim)
        last, last_place = values.narrow(dim, length - 1, 1), found.narrow(dim, length - 1, 1) + start
    else:  # an unused value on the gradient path
        last, last_place = (t.sum(dim, keepdim=True, dtype=t.dtype) for t in (x, places))
    joined, found = scan(torch.cat([before(last), x], dim), dim)
    indices = torch.cat([before(last_place), places], dim).gather(dim, found)
    return tuple(t.narrow(dim, len(earlier), length) for t in (joined, indices))  # type: ignore[return-value]


def layer_norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    axes: Axes,
) -> Tensor:
    """``F.layer_norm`` over last dims of global ``shape``, sharded like weight and bias."""
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    normal, _, _ = _normalise(upcast(x), dims, math.prod(shape), eps, axes)
    return _affine(normal, weight, bias).to(x.dtype)


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None, axes: Axes) -> Tensor:
    """``F.rms_norm`` over the last dims of global ``shape``, sharded like weight by ``axes``."""
    values = upcast(x)
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    squares = reduce_statistic(values.square().sum(dims, keepdim=True), axes, to="R") / math.prod(shape)
    eps = torch.finfo(values.dtype).eps if eps is None else eps
    return _affine(values * (squares + eps).rsqrt(), weight, None).to(x.dtype)


def group_norm(
    x: Tensor,
    groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    count: int,
    axes: Axes,
) -> Tensor:
    """``F.group_norm`` of x [n, c, ...], positions sharded; ``count``: elements of a group."""
    grouped = upcast(x).reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    normal, _, _ = _normalise(grouped, tuple(range(2, grouped.dim())), count, eps, axes)
    return _affine(normal.flatten(1, 2), _channels(weight, x), _channels(bias, x)).to(x.dtype)


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    count: int,
    axes: Axes,
) -> tuple[Tensor, ...]:
    """Training BatchNorm of x [n, c, ...] by global statistics; all dims but c may be sharded.
    ``count``: global elements of a channel. Returns (output, mean, rstd, new running mean and
    variance), as ``aten._native_batch_norm_legit_functional``."""
    output, mean, rstd, var = _batch_normalised(x, weight, bias, eps, count, axes)
    unbiased = var * (count / max(count - 1, 1))
    new_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
    new_var = torch.lerp(running_var, unbiased.to(running_var.dtype), momentum)
    return output, mean, rstd, new_mean, new_var


def batch_norm_no_stats(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, count: int, axes: Axes
) -> tuple[Tensor, ...]:
    """:func:`batch_norm` without running statistics: (output, mean, rstd)."""
    return _batch_normalised(x, weight, bias, eps, count, axes)[:3]


def _batch_normalised(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, count: int, axes: Axes
) -> tuple[Tensor, ...]:
    dims = (0, *range(2, x.dim()))
    normal, mean, var = _normalise(upcast(x), dims, count, eps, axes)
    output = _affine(normal, _channels(weight, x), _channels(bias, x)).to(x.dtype)
    mean, var = mean.detach().flatten(), var.detach().flatten()
    return output, mean, (var + eps).rsqrt(), var


def _normalise(x: Tensor, dims: tuple[int, ...], count: int, eps: float, axes: Axes) -> tuple[Tensor, Tensor, Tensor]:
    """``(x - mean) / std`` by global mean and variance over ``dims`` (R: all ranks use them)."""
    mean = reduce_statistic(x.sum(dims, keepdim=True), axes, to="R") / count
    centred = x - mean
    var = reduce_statistic(centred.square().sum(dims, keepdim=True), axes, to="R") / count
    return centred * (var + eps).rsqrt(), mean, var


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _channels(vector: Tensor | None, x: Tensor) -> Tensor | None:
    """A per-channel vector, reshaped to broadcast with x [n, c, ...]."""
    return None if vector is None else vector.view(-1, *(1,) * (x.dim() - 2))
