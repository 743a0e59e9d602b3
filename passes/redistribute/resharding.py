"""The entry :func:`redistribution`, also through a reshape (after MindSpore's unification).
A reshape is planned on the common refinement of both shapes. ``[b, s, h·d]`` and ``[b, s, h, d]``
share the factors ``[b, s, h, d]``: a layout of either shape is a layout of the factors wherever
chunks are whole factors. The plan is a shortest path through three graphs of layouts (source
shape, factors, target shape), joined where a layout exists in both. What no factors express (a
dim of 12 sharded in 2 where the target has 3·4) is moved or gathered before the reshape."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from autoshard.errors import LayoutError
from autoshard.layout import Layout, Shard
from autoshard.mesh import Mesh, MeshLike
from autoshard.passes.ir.graph import GradientTransfer, SparseRows
from autoshard.passes.ir.program import RedistributionStep
from autoshard.passes.redistribute.layout_graph import EXACT_AXES, Ints, LayoutState, free_frame, layout_of, state_of
from autoshard.passes.redistribute.pricing import FORBIDDEN, Prices, gradient_itemsize, price_moves
from autoshard.passes.redistribute.shortest_path import (
    LayoutLike,
    Redistribution,
    check_layouts,
    concatenate_legs,
    distances_to,
    move_costs,
    no_path_error,
    plan_redistribution,
    relax_distances,
    unsharded_kinds,
)

Shape = tuple[int, ...]
FactorsPerDim = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Refinement:
    """Factors that two shapes of one tensor share, in row-major order."""

    shape: Shape
    src: FactorsPerDim
    """per source dim: factors, outermost first, whose chunks are chunks of the dim"""
    dst: FactorsPerDim
    """the same per target dim"""


def refine(src: Sequence[int], dst: Sequence[int]) -> Refinement:
    """The common refinement of two shapes of equally many elements.

    >>> refine((2, 12), (2, 3, 4))
    Refinement(shape=(2, 3, 4), src=((0,), (1, 2)), dst=((0,), (1,), (2,)))

    Where neither boundary divides the other, the rest of both dims is one factor that neither shape can cut. Raises
    :class:`LayoutError` where the numbers of elements differ.
    """
    if math.prod(src) != math.prod(dst):
        raise LayoutError(f"cannot reshape {list(src)} to {list(dst)}: {math.prod(src)} elements to {math.prod(dst)}")
    shape: list[int] = [0] if 0 in src else []
    parts: tuple[list[list[int]], list[list[int]]] = ([[] for _ in src], [[] for _ in dst])
    left, right = ([(d, n) for d, n in enumerate(side) if n != 1] for side in (src, dst))
    while left and 0 not in src and right:
        (i, m), (j, n) = left.pop(0), right.pop(0)
        common = math.gcd(m, n)
        if common > 1:
            parts[0][i].append(len(shape))
            parts[1][j].append(len(shape))
            shape.append(common)
        m, n = m // common, n // common
        if m > 1 and n > 1:
            while m != n:
                if m < n:
                    m *= left.pop(0)[1]
                else:
                    n *= right.pop(0)[1]
            shape.append(m)
        elif m > 1:
            left.insert(0, (i, m))
        elif n > 1:
            right.insert(0, (j, n))
    return Refinement(tuple(shape), *(tuple(map(tuple, p)) for p in parts))


def plan_reshaped(
    src: Layout,
    dst: Layout,
    shape: Shape,
    dst_shape: Shape,
    mesh: Mesh,
    dtype: torch.dtype,
    grad: GradientTransfer,
    peak_limit: int | None,
    minimize: str,
) -> Redistribution:
    """:func:`redistribution` with a reshape on the way, all arguments resolved."""
    check_layouts((src, shape), (dst, dst_shape), mesh, minimize)
    if mesh.ndim > EXACT_AXES:
        raise LayoutError(f"a redistribution through a reshape is planned on at most {EXACT_AXES} mesh axes")
    shared = refine(shape, dst_shape)
    kinds = unsharded_kinds((src, dst), bool(grad))
    layers = [
        price_moves(
            mesh.unnamed, s, dtype.itemsize, kinds, gradient_itemsize(dtype, grad), free_frame(mesh.ndim, len(s))
        )
        for s in (shape, shared.shape, dst_shape)
    ]
    joins = (
        _factor_states(layers[0], layers[1], shape, shared.src, shared.shape),
        _factor_states(layers[2], layers[1], dst_shape, shared.dst, shared.shape),
    )
    start = layers[0].space.index[state_of(src, len(shape), grad=bool(grad))]
    goal = layers[2].space.index[state_of(dst, len(dst_shape), grad=bool(grad))]
    way = _reshape_ends(layers, joins, start, goal, peak_limit, minimize)
    if way is None:
        raise no_path_error(f"{src}, shape {list(shape)}, to {dst}, {list(dst_shape)}", peak_limit)
    before, after = way
    inner = [layout_of(layers[1].space.states[j[s]], mesh) for j, s in zip(joins, (before, after), strict=True)]
    outer = [layout_of(layers[i].space.states[s], mesh) for i, s in ((0, before), (2, after))]
    legs = (
        plan_redistribution(src, outer[0], shape, mesh, dtype, grad, peak_limit, minimize),
        plan_redistribution(inner[0], inner[1], shared.shape, mesh, dtype, grad, peak_limit, minimize),
        plan_redistribution(outer[1], dst, dst_shape, mesh, dtype, grad, peak_limit, minimize),
    )
    if legs[1].steps:
        middle = (
            *_reshape_steps(outer[0], inner[0], shape, shared.shape),
            *legs[1].steps,
            *_reshape_steps(inner[1], outer[1], shared.shape, dst_shape),
        )
    else:
        middle = _reshape_steps(outer[0], outer[1], shape, dst_shape)
    steps = (*legs[0].steps, *middle, *legs[2].steps)
    return replace(concatenate_legs(legs, steps), dst_shape=dst_shape)


def _reshape_steps(src: Layout, dst: Layout, shape: Shape, to_shape: Shape) -> tuple[RedistributionStep, ...]:
    """The local reshape step; none if the shapes are equal."""
    return (RedistributionStep("reshape", (), src, dst, shape, to_shape=to_shape),) if shape != to_shape else ()


@lru_cache(maxsize=64)
def _factor_states(outer: Prices, inner: Prices, shape: Shape, parts: FactorsPerDim, factors: Shape) -> Ints:
    """State of ``outer`` → the state of the factors with the same chunks, or -1."""
    found = (_as_factor_state(s, outer.space.sizes, shape, parts, factors) for s in outer.space.states)
    return np.array([-1 if s is None else inner.space.index[s] for s in found], np.int64)


def _as_factor_state(
    state: LayoutState, sizes: Shape, shape: Shape, parts: FactorsPerDim, factors: Shape
) -> LayoutState | None:
    """``state`` of a tensor of ``shape`` as a state of the factors. In a dim of several, outer axes
    must use up one factor before the next is sharded: only then chunks of the dim are chunks of
    each."""
    nests: list[tuple[int, ...]] = [()] * len(factors)
    for nest, n, mine in zip(state.nests, shape, parts, strict=True):
        if len(mine) == 1 and factors[mine[0]] == n:
            nests[mine[0]] = nest
            continue
        left = list(nest)
        for k in mine:
            cut = 1
            while left and factors[k] % (cut * sizes[left[0]]) == 0:
                cut *= sizes[left[0]]
                nests[k] = (*nests[k], left.pop(0))
            if cut != factors[k]:
                break
        if left:
            return None
    return LayoutState(state.kinds, tuple(nests))


def _reshape_ends(
    layers: Sequence[Prices], joins: tuple[Ints, Ints], start: int, goal: int, peak_limit: int | None, minimize: str
) -> tuple[int, int] | None:
    """(source, target state) between which the tensor is reshaped, or None: least primary, then
    secondary cost, from the goal."""
    numel = max(layers[0].numel[start], layers[2].numel[goal])
    if peak_limit is not None and numel > peak_limit:
        return None
    first, second = zip(*(move_costs(layer, peak_limit, minimize) for layer in layers), strict=True)
    ways = _layer_distances(layers, first, joins, goal)
    best = ways[0].distance[start]
    if best >= FORBIDDEN:
        return None
    slack = 0 if minimize == "bytes" else 1e-12 * best
    tight = [
        np.where(c + w.distance[x.space.dst] <= w.distance[x.space.src] + slack, other.astype(np.float64), np.inf)
        for x, c, other, w in zip(layers, first, second, ways, strict=True)
    ]
    source, factors, target = (w.distance for w in ways)
    keeps = (factors[joins[0]] <= source + slack, target <= factors[joins[1]] + slack)
    ways = _layer_distances(layers, tight, (np.where(keeps[0], joins[0], -1), np.where(keeps[1], joins[1], -1)), goal)
    before = ways[0].walk(layers[0], start)
    middle = ways[1].walk(layers[1], int(joins[0][before]))
    candidates = np.flatnonzero((joins[1] == middle) & keeps[1])
    return before, int(candidates[ways[2].distance[candidates].argmin()])


@dataclass(frozen=True)
class _LayerDistances:
    """One layout graph: cost per move; per state cost to the goal, and if it leaves here."""

    cost: Any
    distance: Any
    leave: Any

    def walk(self, prices: Prices, state: int) -> int:
        """The state in which a cheapest path from ``state`` leaves the graph."""
        graph = prices.space
        while self.distance[state] < self.leave[state]:
            low, high = graph.first[state], graph.first[state + 1]
            state = int(graph.dst[low + (self.cost[low:high] + self.distance[graph.dst[low:high]]).argmin()])
        return state


def _layer_distances(
    layers: Sequence[Prices], cost: Sequence[Any], joins: tuple[Ints, Ints], goal: int
) -> list[_LayerDistances]:
    """Distances backwards from the goal: target shape, factors, source shape."""
    target = distances_to(layers[2], cost[2], goal)
    at_factors = np.full(len(layers[1].space.states), FORBIDDEN, target.dtype)
    joined = joins[1] >= 0
    np.minimum.at(at_factors, joins[1][joined], target[joined])
    factors = relax_distances(layers[1], cost[1], at_factors.copy())
    at_source = np.where(joins[0] >= 0, factors[joins[0]], FORBIDDEN)
    source = relax_distances(layers[0], cost[0], at_source.copy())
    return [
        _LayerDistances(cost[0], source, at_source),
        _LayerDistances(cost[1], factors, at_factors),
        _LayerDistances(cost[2], target, target),
    ]


def redistribution(
    src: LayoutLike,
    dst: LayoutLike,
    shape: Sequence[int],
    mesh: MeshLike,
    dtype: torch.dtype = torch.float32,
    grad: GradientTransfer = False,
    *,
    dst_shape: Sequence[int] | None = None,
    peak_limit: int | None = None,
    minimize: str = "bytes",
    closed: Sequence[int] = (),
) -> Redistribution:
    """The cheapest sequence of steps that converts a tensor from ``src`` to ``dst``.

    ``src``, ``dst``: layouts of global ``shape``, or arguments of :class:`Layout`. ``dst_shape``:
    reshape on the way; ``dst`` is a layout of it (:mod:`autoshard.passes.redistribute.resharding`).
    Axes without common chunks are moved or gathered first; :attr:`Redistribution.gathered` names
    them. ``grad``: price the backward, too, and use only conversions with a gradient; a dtype is
    that of the gradient. Without ``grad``, Invariant equals Replicate. ``minimize="bytes"``: fewest
    ring bytes per rank, then no local tensor above both ends, then least time, then fewest steps.
    ``"seconds"``: least time, perhaps more bytes over a faster axis. ``peak_limit``: most elements
    of a local tensor. ``closed``: dims not to shard, as their length depends on data; the shape stays. If more than
    five mesh axes change, the search goes through intermediate layouts, each leg is optimal, and
    :attr:`Redistribution.minimal` is False.

    Raises :class:`LayoutError` if a layout does not fit its shape, shapes differ in size, or no steps
    keep ``peak_limit``; also for conversions into Partial max/min.
    """
    keys = (x if isinstance(x, Layout) else _hashable(x) for x in (src, dst))
    on = _hashable(mesh) if isinstance(mesh, Mapping) else Mesh.of(mesh)
    shapes = (tuple(shape), None if dst_shape is None else tuple(dst_shape))
    return _cached_redistribution(
        *keys,
        *shapes,
        on,
        dtype,
        grad if isinstance(grad, torch.dtype | SparseRows) else bool(grad),
        peak_limit,
        minimize,
        tuple(closed),
    )


def _hashable(given: Any) -> tuple[Any, ...]:
    """A hashable key; a mapping becomes its items."""
    if not isinstance(given, Iterable):
        return (given,)
    return tuple(given.items() if isinstance(given, Mapping) else given)


@lru_cache(maxsize=16384)
def _cached_redistribution(
    src: Any, dst: Any, shape: tuple[int, ...], dst_shape: tuple[int, ...] | None, mesh: Any, *rest: Any
) -> Redistribution:
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(dict(mesh))
    a, b = (x if isinstance(x, Layout) else _layout_from_key(mesh, x) for x in (src, dst))
    reshaped = None if dst_shape == shape else dst_shape
    if reshaped is not None and (a.fixed or rest[-1]):
        what = f"of {a}" if a.fixed else "with closed="
        raise LayoutError(f"dst_shape={list(reshaped)}: a redistribution {what} keeps the shape {list(shape)}")
    if a.fixed and a.fixed == b.fixed:
        return _restore_fixed(a, plan_redistribution(without_fixed(a), without_fixed(b), shape, mesh, *rest))
    if a.fixed or b.fixed:
        raise LayoutError(
            f"no sequence of steps leads from {a} to {b}. Along an axis, one rank owns the full "
            "tensor, or all segments of a dim are sharded"
        )
    if reshaped is not None:
        return plan_reshaped(a, b, shape, reshaped, mesh, *rest[:-1])
    return plan_redistribution(a, b, shape, mesh, *rest)


def without_fixed(layout: Layout) -> Layout:
    """``layout`` with shards in place of owned and grouped placements, outermost in owners' order.
    Conversions along other axes cost as much on average."""
    if not layout.fixed:
        return layout
    owners = tuple(layout.owner)
    order = (*owners, *(a for a in layout.order if a not in owners))
    return layout.replace({a: Shard(p.dim) for a, p in layout.fixed.items()}, order)


def _restore_fixed(src: Layout, found: Redistribution) -> Redistribution:
    """``found`` with the owned or grouped placements of ``src`` put back."""
    steps = tuple(replace(s, src=s.src.replace(src.fixed), dst=s.dst.replace(src.fixed)) for s in found.steps)
    return replace(found, src=src, dst=found.dst.replace(src.fixed), steps=steps)


def _layout_from_key(mesh: Mesh, key: tuple[Any, ...]) -> Layout:
    return Layout(mesh, dict(key) if key and isinstance(key[0], tuple) else key)
