"""The entry :func:`redistribution`: layouts and shapes in any form, cached by value."""

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
    """The cheapest sequence of steps that converts a tensor from ``src`` to ``dst``.

    ``src``, ``dst``: layouts of global ``shape``, or arguments of :class:`Layout`. ``dst_shape``:
    reshape on the way; ``dst`` is a layout of it (:mod:`autoshard.passes.redistribute.reshape`).
    Axes without common chunks are moved or gathered first; :attr:`Redistribution.gathered` names
    them. ``grad``: price the backward, too, and use only conversions with a gradient; a dtype is
    that of the gradient. Without ``grad``, Invariant equals Replicate. ``minimize="bytes"``: fewest
    ring bytes per rank, then no local tensor above both ends, then least time, then fewest steps.
    ``"seconds"``: least time, perhaps more bytes over a faster axis. ``peak_limit``: most elements
    of a local tensor. ``closed``: dims not to shard, as their length depends on data. If more than
    five mesh axes change, the search goes through intermediate layouts, each leg is optimal, and
    :attr:`Redistribution.minimal` is False.

    Raises :class:`LayoutError` if a layout does not fit its shape, for conversions into Partial
    max/min, for shapes of different sizes, and if no sequence keeps ``peak_limit``.
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
    """A hashable key; a mapping becomes its items."""
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
    """``layout`` with shards in place of owned and grouped placements, outermost in owners' order.
    Conversions along other axes cost as much on average."""
    if not layout.fixed:
        return layout
    owners = tuple(layout.owner)
    order = (*owners, *(a for a in layout.order if a not in owners))
    return layout.replace({a: Shard(p.dim) for a, p in layout.fixed.items()}, order)


def _of_fixed(src: Layout, found: Redistribution) -> Redistribution:
    """``found`` with the owned or grouped placements of ``src`` put back."""
    steps = tuple(replace(s, src=s.src.replace(src.fixed), dst=s.dst.replace(src.fixed)) for s in found.steps)
    return replace(found, src=src, dst=found.dst.replace(src.fixed), steps=steps)


def _layout(mesh: Mesh, key: tuple[Any, ...]) -> Layout:
    return Layout(mesh, dict(key) if key and isinstance(key[0], tuple) else key)
