"""The question that a redistribution answers: any way to give layouts and shapes, and the planner it goes to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from autoshard.errors import LayoutError
from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh, MeshLike
from autoshard.passes.ir.graph import Moves, OfRows
from autoshard.passes.redistribute.planner import LayoutLike, plan
from autoshard.passes.redistribute.reshape import plan_reshaped
from autoshard.passes.redistribute.steps import Redistribution


def redistribution(
    src: LayoutLike,
    dst: LayoutLike,
    shape: Sequence[int],
    mesh: MeshLike,
    dtype: torch.dtype = torch.float32,
    grad: Moves = False,
    *,
    dst_shape: Sequence[int] | None = None,
    peak_limit: int | None = None,
    minimize: str = "bytes",
    closed: Sequence[int] = (),
) -> Redistribution:
    """The cheapest way to bring a tensor of global ``shape`` from ``src`` to ``dst``.

    ``dst_shape``: the tensor is reshaped to it on the way, and ``dst`` is the layout afterwards; see
    :mod:`autoshard.passes.redistribute.reshape`. An axis whose chunks are not chunks of the other shape is moved or
    gathered before the reshape, and :attr:`Redistribution.gathered` names it.

    ``src`` and ``dst`` are layouts, or what :class:`Layout` takes. With ``grad`` the backward is priced too, and only
    conversions with a defined gradient are used; without it Invariant and Replicate are one. A dtype: the gradient's, where
    it is another. ``minimize="bytes"``:
    fewest ring bytes per rank; among those a sequence without a local tensor larger than both ends, then least time,
    then fewest steps. ``"seconds"``: least time on the mesh's links first, which may move more bytes over a faster
    axis. Where more than five mesh axes change at once, the way leads through layouts in between; each part of it is
    the cheapest, and :attr:`Redistribution.minimal` is False. ``peak_limit``: no local tensor of more elements on the
    way. ``closed``: dims that are not cut on the way,
    because their length depends on the data.

    Raises :class:`LayoutError` where a layout does not fit its shape, for a conversion that does not exist (into
    Partial max/min), for shapes of different sizes, and where no sequence keeps ``peak_limit``.
    """
    keys = (x if isinstance(x, Layout) else _key(x) for x in (src, dst))
    on = _key(mesh) if isinstance(mesh, Mapping) else Mesh.of(mesh)
    shapes = (tuple(shape), None if dst_shape is None else tuple(dst_shape))
    return _resolve(
        *keys,
        *shapes,
        on,
        dtype,
        grad if isinstance(grad, torch.dtype | OfRows) else bool(grad),
        peak_limit,
        minimize,
        tuple(closed),
    )


def _key(given: Any) -> tuple[Any, ...]:
    """Something to look up by; a mapping becomes its items, and what names no axis stands for the only one."""
    if not isinstance(given, Iterable):
        return (given,)
    return tuple(given.items() if isinstance(given, Mapping) else given)


@lru_cache(maxsize=16384)
def _resolve(
    src: Any, dst: Any, shape: tuple[int, ...], dst_shape: tuple[int, ...] | None, mesh: Any, *rest: Any
) -> Redistribution:
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(dict(mesh))
    a, b = (x if isinstance(x, Layout) else _layout(mesh, x) for x in (src, dst))
    if a.fixed and a.fixed == b.fixed:
        return _of_fixed(a, plan(in_chunks(a), in_chunks(b), shape, mesh, *rest))
    if a.fixed or b.fixed:
        raise LayoutError(
            f"no sequence of steps leads from {a} to {b}: along an axis one rank owns the whole tensor, or all parts of a dim "
            "are cut"
        )
    if dst_shape is None or dst_shape == shape:
        return plan(a, b, shape, mesh, *rest)
    return plan_reshaped(a, b, shape, dst_shape, mesh, *rest[:-1])


def in_chunks(layout: Layout) -> Layout:
    """``layout`` with a chunk on every rank where one owns the whole, or every rank holds chunks of all parts: what
    conversions along other axes take on average. What a rank owns is cut by other axes, so that owners come first."""
    if not layout.fixed:
        return layout
    owners = tuple(layout.owner)
    order = (*owners, *(a for a in layout.order if a not in owners))
    return layout.replace({a: Shard(p.dim) for a, p in layout.fixed.items()}, order)


def _of_fixed(src: Layout, found: Redistribution) -> Redistribution:
    """Steps along other axes than those of placements that stay."""
    steps = tuple(replace(s, src=s.src.replace(src.fixed), dst=s.dst.replace(src.fixed)) for s in found.steps)
    return replace(found, src=src, dst=found.dst.replace(src.fixed), steps=steps)


def _layout(mesh: Mesh, key: tuple[Any, ...]) -> Layout:
    return Layout(mesh, dict(key) if key and isinstance(key[0], tuple) else key)
