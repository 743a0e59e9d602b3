"""Normalisation with statistics over a sharded dim: two all-reduces, means, then variances."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autoshard.runtime.operations.collectives import statistic
from autoshard.runtime.operations.softmax import wide
from autoshard.runtime.transport.communicator import Axes


def layer_norm(
    x: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    axes: Axes,
) -> torch.Tensor:
    """``F.layer_norm`` over last dims of global ``shape``, sharded like weight and bias."""
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    normal, _, _ = _normalise(wide(x), dims, math.prod(shape), eps, axes)
    return _affine(normal, weight, bias).to(x.dtype)


def rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None, axes: Axes
) -> torch.Tensor:
    """``F.rms_norm`` over the last dims of global ``shape``, sharded like weight by ``axes``."""
    values = wide(x)
    dims = tuple(range(x.dim() - len(shape), x.dim()))
    squares = statistic(values.square().sum(dims, keepdim=True), axes, to="R") / math.prod(shape)
    eps = torch.finfo(values.dtype).eps if eps is None else eps
    return _affine(values * (squares + eps).rsqrt(), weight, None).to(x.dtype)


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    count: int,
    axes: Axes,
) -> torch.Tensor:
    """``F.group_norm`` of x [n, c, ...], positions sharded; ``count``: elements of a group."""
    grouped = wide(x).reshape(x.shape[0], groups, x.shape[1] // groups, *x.shape[2:])
    normal, _, _ = _normalise(grouped, tuple(range(2, grouped.dim())), count, eps, axes)
    return _affine(normal.flatten(1, 2), _channels(weight, x), _channels(bias, x)).to(x.dtype)


def batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    momentum: float,
    eps: float,
    count: int,
    axes: Axes,
) -> tuple[torch.Tensor, ...]:
    """Training BatchNorm of x [n, c, ...] by global statistics; all dims but c may be sharded.

    ``count``: elements of a channel, globally. Returns (output, mean, rstd, new running mean, new
    running variance) like ``aten._native_batch_norm_legit_functional``."""
    output, mean, rstd, var = _batch_norm(x, weight, bias, eps, count, axes)
    unbiased = var * (count / max(count - 1, 1))
    new_mean = torch.lerp(running_mean, mean.to(running_mean.dtype), momentum)
    new_var = torch.lerp(running_var, unbiased.to(running_var.dtype), momentum)
    return output, mean, rstd, new_mean, new_var


def batch_norm_no_stats(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, count: int, axes: Axes
) -> tuple[torch.Tensor, ...]:
    """:func:`batch_norm` without running statistics: (output, mean, rstd)."""
    return _batch_norm(x, weight, bias, eps, count, axes)[:3]


def _batch_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float, count: int, axes: Axes
) -> tuple[torch.Tensor, ...]:
    dims = (0, *range(2, x.dim()))
    normal, mean, var = _normalise(wide(x), dims, count, eps, axes)
    output = _affine(normal, _channels(weight, x), _channels(bias, x)).to(x.dtype)
    mean, var = mean.detach().flatten(), var.detach().flatten()
    return output, mean, (var + eps).rsqrt(), var


def _normalise(
    x: torch.Tensor, dims: tuple[int, ...], count: int, eps: float, axes: Axes
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``(x - mean) / std`` by global mean and variance over ``dims`` (R: all ranks use them)."""
    mean = statistic(x.sum(dims, keepdim=True), axes, to="R") / count
    centred = x - mean
    var = statistic(centred.square().sum(dims, keepdim=True), axes, to="R") / count
    return centred * (var + eps).rsqrt(), mean, var


def _affine(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _channels(vector: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor | None:
    """A per-channel vector, reshaped to broadcast with x [n, c, ...]."""
    return None if vector is None else vector.view(-1, *(1,) * (x.dim() - 2))
