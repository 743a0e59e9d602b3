"""Look-ups and writes along a sharded dim: each rank serves its rows; look-ups sum over the ranks.
``dim`` of the local ``x`` is sharded by ``axes`` from a global length ``size``. Indices are global,
replicated. The masked look-up of Megatron-LM's VocabParallelEmbedding (arXiv:1909.08053) for any
indexing op. ``write_slice`` and ``write_select`` write in place, into states whose old value is not
read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.aten import aten
from autoshard.runtime.operations.checks import check_range
from autoshard.runtime.operations.collectives import offset
from autoshard.runtime.transport.communicator import Axes, current

torch.library.define("autoshard::part_of_batch", "(Tensor(a) self, int dim, int count) -> Tensor(a)")


@torch.library.impl("autoshard::part_of_batch", "CompositeImplicitAutograd")
def _first_part(self: Tensor, dim: int, count: int) -> Tensor:
    """The slice of the first of ``count`` micro-batches: a graph alone has no other."""
    return self.narrow(dim, 0, self.shape[dim] // count)


PART_OF_BATCH = torch.ops.autoshard.part_of_batch.default


def part_of_batch(x: Tensor, dim: int, count: int) -> Tensor:
    """The running micro-batch's slice of ``x``, whose ``dim`` ``count`` micro-batches divide."""
    length = x.shape[dim] // count
    return x.narrow(dim, current().micro_batch[0] * length, length)


def sharded_select(x: Tensor, dim: int, index: int, size: int, axes: Axes) -> Tensor:
    """``x.select(dim, index)`` → P: the owner of the slice keeps it, others give zeros."""
    place = (index + size if index < 0 else index) - offset(size, axes)
    if 0 <= place < x.shape[dim]:
        return x.select(dim, place)
    return x.narrow(dim, 0, 0).sum(dim, dtype=x.dtype)  # zeros on the gradient path


def sharded_slice(x: Tensor, dim: int, start: int, length: int, size: int, axes: Axes) -> Tensor:
    """``length`` positions of ``x`` along ``dim`` from ``start`` → P: local ones and zeros."""
    begin = max(start + size, 0) if start < 0 else start
    first = begin - offset(size, axes)
    a, b = (min(max(n, 0), x.shape[dim]) for n in (first, first + length))
    if b - a == length:
        return x.narrow(dim, a, length)
    before = min(max(-first, 0), length - (b - a))
    padding = [0, 0] * (x.dim() - 1 - dim) + [before, length - (b - a) - before]
    return torch.nn.functional.pad(x.narrow(dim, a, b - a), padding)


def sharded_index_select(x: Tensor, dim: int, index: Tensor, size: int, axes: Axes) -> Tensor:
    """``x.index_select(dim, index)`` → P."""
    place, mine = _index_in_shard(index, x.shape[dim], size, axes)
    if x.shape[dim] == 0:
        return _zeros_with_gradient_path(x, [*x.shape[:dim], index.numel(), *x.shape[dim + 1 :]])
    found = x.index_select(dim, place)
    return found.masked_fill(~mine.view([-1] + [1] * (x.dim() - dim - 1)), 0)


def sharded_gather(x: Tensor, dim: int, index: Tensor, size: int, axes: Axes) -> Tensor:
    """``x.gather(dim, index)`` → P."""
    place, mine = _index_in_shard(index, x.shape[dim], size, axes)
    if x.shape[dim] == 0:
        return _zeros_with_gradient_path(x, index.shape)
    return x.gather(dim, place).masked_fill(~mine, 0)


def sharded_index(x: Tensor, indices: Sequence[Tensor | None], cuts: Sequence[tuple[int, int, Axes]]) -> Tensor:
    """``x[indices]``, integer indices → P. ``cuts``: (dim, size, axes) of sharded indexed dims."""
    places = list(indices)
    mine: Tensor | None = None
    for dim, size, axes in cuts:
        asked = places[dim]
        assert asked is not None  # every sharded dim listed has an index
        places[dim], held = _index_in_shard(asked, x.shape[dim], size, axes, -size)
        mine = held if mine is None else mine & held
    given = [i for i in places if i is not None]
    looked_up = [d for d, i in enumerate(places) if i is not None]
    common = torch.broadcast_shapes(*(i.shape for i in given))
    kept = [n for d, n in enumerate(x.shape) if d not in looked_up]
    at = looked_up[0] if looked_up[-1] - looked_up[0] + 1 == len(looked_up) else 0
    if 0 in x.shape:
        return _zeros_with_gradient_path(x, [*kept[:at], *common, *kept[at:]])
    assert mine is not None
    found: Tensor = aten.index.Tensor(x, places)
    return found.masked_fill(~mine.view([*mine.shape, *([1] * (len(kept) - at))]), 0)


def sharded_scatter_add(x: Tensor, dim: int, index: Tensor, source: Tensor, size: int, axes: Axes) -> Tensor:
    """``x.scatter_add(dim, index, source)`` → S(dim): every rank adds to its own rows."""
    place, mine = _index_in_shard(index, x.shape[dim], size, axes)
    if x.shape[dim] == 0:
        return x + source.narrow(dim, 0, 0).sum()
    corner = source[tuple(map(slice, index.shape))]
    return x.scatter_add(dim, place, corner.masked_fill(~mine, 0))


def sharded_index_add(
    x: Tensor, dim: int, index: Tensor, source: Tensor, alpha: float, size: int, axes: Axes
) -> Tensor:
    """``x.index_add(dim, index, source, alpha=alpha)`` → S(dim)."""
    place, mine = _index_in_shard(index, x.shape[dim], size, axes)
    if x.shape[dim] == 0:
        return x + source.narrow(dim, 0, 0).sum()
    kept = source.masked_fill(~mine.view([-1] + [1] * (x.dim() - dim - 1)), 0)
    return x.index_add(dim, place, kept, alpha=alpha)


def sharded_scatter(x: Tensor, dim: int, index: Tensor, value: Tensor | float, size: int, axes: Axes) -> Tensor:
    """``x.scatter(dim, index, value)`` → S(dim): every rank writes its own rows."""
    return _write_local(torch.scatter, x, dim, index, value, size, axes)


def sharded_index_copy(x: Tensor, dim: int, index: Tensor, source: Tensor, size: int, axes: Axes) -> Tensor:
    """``x.index_copy(dim, index, source)`` → S(dim)."""
    return _write_local(torch.index_copy, x, dim, index, source, size, axes)


def sharded_index_fill(x: Tensor, dim: int, index: Tensor, value: Tensor | float, size: int, axes: Axes) -> Tensor:
    """``x.index_fill(dim, index, value)`` → S(dim)."""
    return _write_local(torch.index_fill, x, dim, index, value, size, axes, -size)


def _write_local(
    write: Callable[..., Tensor],
    x: Tensor,
    dim: int,
    index: Tensor,
    what: Any,
    size: int,
    axes: Axes,
    least: int = 0,
) -> Tensor:
    """``write(x, dim, index, what)`` → S(dim), on this rank's rows."""
    place = _index_in_shard_or_spare(index, x.shape[dim], size, axes, least)
    return write(_with_spare(x, dim), dim, place, what).narrow(dim, 0, x.shape[dim])


def sharded_index_put(
    x: Tensor,
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool,
    cuts: Sequence[tuple[int, int, Axes]],
) -> Tensor:
    """``x.index_put(indices, values, accumulate)``. ``cuts``: see :func:`sharded_index`."""
    places, whole = list(indices), x
    for dim, size, axes in cuts:
        asked = places[dim]
        assert asked is not None  # every sharded dim listed has an index
        places[dim] = _index_in_shard_or_spare(asked, x.shape[dim], size, axes, -size)
        whole = _with_spare(whole, dim)
    written: Tensor = aten.index_put.default(whole, places, values, accumulate)
    for dim, _, _ in cuts:
        written = written.narrow(dim, 0, x.shape[dim])
    return written


def sharded_grouped_mm(x: Tensor, weight: Tensor, ends: Tensor, groups: int, axes: Axes) -> Tensor:
    """Grouped GEMM, rows [s, k] times matrices [k, n] sharded by ``axes`` → [s, n] P. ``ends``:
    where each of ``groups`` groups ends; rows after the last are zero."""
    first = offset(groups, axes)
    bounds = [0, *ends.tolist()][first : first + weight.shape[0] + 1] or [0]
    parts = [x[a:b] @ w for a, b, w in zip(bounds, bounds[1:], weight, strict=False)]
    before = x.new_zeros(bounds[0], weight.shape[2])
    after = x.new_zeros(x.shape[0] - bounds[-1], weight.shape[2])
    out = torch.cat([before, *parts, after])
    return out if parts else out + x[:0].sum() + weight.sum()  # zeros on the gradient path


def _index_in_shard(index: Tensor, rows: int, size: int, axes: Axes, least: int = 0) -> tuple[Tensor, Tensor]:
    """(local position of global indices, 0 if another rank has the row; whether it is local)."""
    check_range(index, size, least=least)
    start = offset(size, axes)
    place = torch.where(index < 0, index + size, index) - start
    mine = (place >= 0) & (place < rows)
    return torch.where(mine, place, 0), mine


def _index_in_shard_or_spare(index: Tensor, rows: int, size: int, axes: Axes, least: int = 0) -> Tensor:
    """Local position of global indices; a spare row after the last for other ranks' rows."""
    place, mine = _index_in_shard(index, rows, size, axes, least)
    return torch.where(mine, place, rows)


def _with_spare(x: Tensor, dim: int) -> Tensor:
    """``x`` with a spare row; writes to it and their gradients are dropped."""
    return torch.cat([x, x.new_zeros([*x.shape[:dim], 1, *x.shape[dim + 1 :]])], dim)


def _zeros_with_gradient_path(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Zeros that keep an empty ``x`` on the gradient path."""
    return x.new_zeros(list(shape)) + x.sum(dtype=x.dtype)


def write_slice(
    x: Tensor,
    source: Tensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Tensor:
    """``x.slice_scatter(source, dim, start, end, step)`` in place; returns ``x``."""
    aten.slice.Tensor(x, dim, start, end, step).copy_(source)
    return x


def write_select(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """``x.select_scatter(source, dim, index)`` in place; returns ``x``."""
    x.select(dim, index).copy_(source)
    return x
