"""Full tensors ↔ shards of all simulated ranks, differentiable; replicas are compared."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import RuntimeMismatchError
from autoshard.layout import Layout, Partial, Shard
from autoshard.module.dtensors.segments import shard_of
from autoshard.runtime.transport import sparse_gradients
from autoshard.runtime.transport.autograd import LeanFunction, NoneGradFunction


def writable_shards(full: Tensor, layout: Layout) -> tuple[Tensor, ...]:
    """Shards of ``full`` for in-place writes: views, and copies for further replicas."""
    whole = [i for i, p in enumerate(layout.placements) if not isinstance(p, Shard)]
    found = []
    for rank in range(layout.mesh.size):
        part = shard_of(full, layout, rank)
        found.append(part if _first_replica(layout, rank, whole) == rank else part.clone())
    return tuple(found)


def _first_replica(layout: Layout, rank: int, whole: Collection[int]) -> int:
    """The first rank with the coordinates of ``rank`` on axes outside ``whole``."""
    coordinates = enumerate(layout.mesh.coordinates(rank))
    return layout.mesh.rank([0 if i in whole else n for i, n in coordinates])


def join_shards(
    shards: Sequence[Tensor],
    layout: Layout,
    shape: Sequence[int] | None,
    what: str,
    computed: torch.dtype | None = None,
) -> Tensor:
    """The full tensor from ``shards`` by rank. ``shape``: global; None if data-dependent, where
    every rank has the full tensor. ``computed``: the dtype by whose rounding replicas may differ
    (default: their own), else :class:`RuntimeMismatchError`, which names ``what``."""
    shape = shards[0].shape if shape is None else shape
    full = shards[0].new_zeros(tuple(shape))
    whole = [i for i, p in enumerate(layout.placements) if not isinstance(p, Partial | Shard)]
    summed = layout.axes_with(Partial)
    for rank, shard in enumerate(shards):
        if (first := _first_replica(layout, rank, whole)) != rank:
            _check_equal(shard, shards[first], what, rank, layout, computed)
            continue
        for block, part in _shard_blocks(full, shard, layout, rank):
            if summed and not full.dtype.is_floating_point and full.dtype == torch.bool:
                block.logical_or_(part)
            elif summed:
                block.add_(part)
            else:
                block.copy_(part)
    return full


def _shard_blocks(full: Tensor, shard: Tensor, layout: Layout, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Pairs (block of ``full``, its data in ``shard``) on this rank."""
    blocks = [(full, shard)]
    for dim, size in enumerate(full.shape):
        chunks = layout.chunks_of(dim, size, rank)
        lengths = [n for _, n in chunks]
        blocks = [
            (block.narrow(dim, start, n), part)
            for block, held in blocks
            for (start, n), part in zip(chunks, held.split(lengths, dim) if len(chunks) > 1 else (held,), strict=True)
        ]
    return blocks


def _check_equal(a: Tensor, b: Tensor, what: str, rank: int, layout: Layout, computed: torch.dtype | None) -> None:
    """Compare replicas with a tolerance: gradients that cancel out are rounding only."""
    if a.shape != b.shape:
        same = False
    elif a.dtype.is_floating_point or a.dtype.is_complex:
        eps = max(torch.finfo(dtype).eps for dtype in (a.dtype, computed or a.dtype))
        finite = b.abs()[b.isfinite()]
        scale = float(finite.max()) if finite.numel() else 0.0
        rtol = min(eps**0.5, 2e-2)  # in a low precision what ``verify`` allows
        same = torch.allclose(a, b, rtol=rtol, atol=max(rtol * scale, 4 * eps), equal_nan=True)
    else:
        same = torch.equal(a, b)
    if not same:
        raise RuntimeMismatchError(
            f"{what}: rank {rank} disagrees with the ranks that hold the same data ({layout.without_gradient()})"
        )


def shard_for_ranks(full: Tensor, layout: Layout, name: str, computed: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """Shards of ``full`` by rank; the backward joins gradients. See :func:`join_shards`."""
    return _ShardForRanks.apply(full, layout, name, computed)


def join_differentiably(
    shards: Sequence[Tensor],
    layout: Layout,
    shape: tuple[int, ...] | None,
    name: str,
    computed: torch.dtype | None = None,
) -> Tensor:
    """:func:`join_shards`, differentiable: the backward shards the gradient."""
    return _JoinShards.apply(layout, shape, name, computed, *shards)


class _ShardForRanks(LeanFunction):
    @staticmethod
    def forward(ctx: Any, full: Tensor, layout: Layout, name: str, computed: torch.dtype | None) -> tuple[Tensor, ...]:
        ctx.layout, ctx.shape, ctx.name, ctx.computed = layout, full.shape, name, computed
        ctx.set_materialize_grads(False)
        return tuple(shard_of(full, layout, rank).clone() for rank in range(layout.mesh.size))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        given = [g for g in gradients if g is not None]
        if not given:
            return None, None, None, None
        if any(g.is_sparse for g in given):
            return _join_sparse_shards(gradients, ctx.layout, ctx.shape, ctx.name, ctx.computed), None, None, None
        if len(given) < len(gradients):  # ranks with empty shards may be outside the graph
            shapes = [ctx.layout.local_shape(ctx.shape, r) for r in range(len(gradients))]
            given = [given[0].new_zeros(s) if g is None else g for g, s in zip(gradients, shapes, strict=True)]
        # Differentiable again, for a gradient penalty.
        what = f"the gradient of {ctx.name}"
        joined = _JoinShards.apply(ctx.layout.gradient(), ctx.shape, what, ctx.computed, *given)
        return joined, None, None, None


def _join_sparse_shards(
    parts: Sequence[Tensor | None],
    layout: Layout,
    shape: Sequence[int],
    name: str,
    computed: torch.dtype | None,
) -> Tensor:
    """:func:`join_shards` of sparse gradients; ranks without rows have None."""
    whole = [i for i, p in enumerate(layout.placements) if not isinstance(p, Shard)]
    found = []
    for rank, part in enumerate(parts):
        if part is None or not part.is_sparse:
            continue
        if (first := _first_replica(layout, rank, whole)) != rank:
            other = parts[first]
            for mine, theirs in zip(sparse_gradients.rows_of(part), sparse_gradients.rows_of(other), strict=True):  # type: ignore[arg-type]
                _check_equal(mine, theirs, f"the gradient of {name}", rank, layout, computed)
            continue
        for dim, size in enumerate(shape):
            if part.shape[dim] != size:
                part = sparse_gradients.pad_sparse(part, dim, layout.chunk_of(dim, size, rank)[0], size)
        found.append(part)
    return sparse_gradients.sum_sparse(found)


class _JoinShards(NoneGradFunction):
    @staticmethod
    def forward(
        ctx: Any,
        layout: Layout,
        shape: tuple[int, ...] | None,
        name: str,
        computed: torch.dtype | None,
        *shards: Tensor,
    ) -> Tensor:
        ctx.layout, ctx.name, ctx.computed = layout, name, computed
        return join_shards(shards, layout, shape, name, computed)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        parts = _ShardForRanks.apply(gradient, ctx.layout.gradient(), ctx.name, ctx.computed)
        return None, None, None, None, *parts
