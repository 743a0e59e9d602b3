"""Cumulative scans along a sharded dim: earlier ranks' totals come before a rank's elements.

Every rank's total is gathered (one slice each), and the op itself runs on totals and elements. So
special values and gradients are those of the op. Backward: reduce-scatter of the totals' gradients.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from autoshard.runtime.operations.collectives import all_gather
from autoshard.runtime.operations.softmax import wide
from autoshard.runtime.transport.communicator import Axes, current


def cumsum(x: torch.Tensor, dim: int, axes: Axes, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x.cumsum(dim)`` with ``dim`` sharded by ``axes``: S(dim) → S(dim)."""
    x = x if dtype is None else x.to(dtype)
    values = wide(x)
    return _after(torch.cumsum, values, values.sum(dim, keepdim=True), dim, axes).to(x.dtype)


def cumprod(x: torch.Tensor, dim: int, axes: Axes, dtype: torch.dtype | None = None) -> torch.Tensor:
    """``x.cumprod(dim)`` with ``dim`` sharded by ``axes``: S(dim) → S(dim)."""
    x = x if dtype is None else x.to(dtype)
    values = wide(x)
    return _after(torch.cumprod, values, values.prod(dim, keepdim=True), dim, axes).to(x.dtype)


def logcumsumexp(x: torch.Tensor, dim: int, axes: Axes) -> torch.Tensor:
    """``x.logcumsumexp(dim)`` with ``dim`` sharded by ``axes``: S(dim) → S(dim)."""
    values = wide(x)
    return _after(torch.logcumsumexp, values, values.logsumexp(dim, keepdim=True), dim, axes).to(x.dtype)


def cummax(x: torch.Tensor, dim: int, size: int, axes: Axes) -> tuple[torch.Tensor, torch.Tensor]:
    """``x.cummax(dim)``, values and indices; ``dim`` (length ``size``) sharded: S(dim) → S(dim)."""
    return _extremes(torch.cummax, x, dim, size, axes)


def cummin(x: torch.Tensor, dim: int, size: int, axes: Axes) -> tuple[torch.Tensor, torch.Tensor]:
    """``x.cummin(dim)`` as in :func:`cummax`."""
    return _extremes(torch.cummin, x, dim, size, axes)


def _after(
    scan: Callable[[torch.Tensor, int], torch.Tensor], x: torch.Tensor, total: torch.Tensor, dim: int, axes: Axes
) -> torch.Tensor:
    """``scan`` of ``x`` [n along dim] after the totals [1 along dim] of the ranks before this one."""
    comm = current()
    earlier = comm.index(comm.active(axes))
    totals = all_gather(total, dim, axes, to="R").narrow(dim, 0, earlier)
    return scan(torch.cat([totals, x], dim), dim).narrow(dim, earlier, x.shape[dim])


def _extremes(
    scan: Callable[[torch.Tensor, int], tuple[torch.Tensor, torch.Tensor]],
    x: torch.Tensor,
    dim: int,
    size: int,
    axes: Axes,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The total of a rank is its last value, with its global index; empty shards have none."""
    comm = current()
    names = comm.active(axes)
    start, length = comm.chunk(size, names)
    steps = torch.arange(start, start + length, device=x.device)
    places = steps.view([-1 if d == dim else 1 for d in range(x.dim())]).expand(x.shape)
    earlier = [r for r in range(comm.index(names)) if comm.chunks(size, names)[r][1]]

    def before(last: torch.Tensor) -> torch.Tensor:
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
