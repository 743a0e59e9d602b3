"""The cheapest sequence of steps between two layouts: an exact shortest path, and runtime calls."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from autoshard.errors import LayoutError
from autoshard.layout import Layout, Partial, Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import GradientTransfer
from autoshard.passes.ir.program import Local, RedistributionStep, axes_argument, binary_bytes
from autoshard.passes.redistribute.layout_graph import (
    FREE_AXIS,
    MAX_FREE_AXES,
    Floats,
    Ints,
    common_frame,
    intermediate_state,
    layout_of,
    state_of,
)
from autoshard.passes.redistribute.pricing import (
    FORBIDDEN,
    Prices,
    prices_of,
    sparse_gradient_rows,
)


@dataclass(frozen=True)
class Redistribution:
    """The cheapest sequence of steps from ``src`` to ``dst``. Bytes are ring bytes per rank."""

    src: Layout
    dst: Layout
    shape: tuple[int, ...]
    dtype: torch.dtype
    grad: bool
    steps: tuple[RedistributionStep, ...]
    forward_bytes: float
    backward_bytes: float
    seconds: float
    """predicted seconds of all steps, with the backward if ``grad``"""
    peak_numel: int
    """elements of the largest local tensor, both ends included"""
    dst_shape: tuple[int, ...] | None = None
    """the global shape at the end, if reshaped"""
    minimal: bool = True
    """whether no cheaper sequence exists; unknown if more than five mesh axes change"""

    @property
    def gathered(self) -> tuple[str, ...]:
        """Axes sharded at both ends that no reshape can keep: gather, reshape, slice."""
        cut = [s.src for s in self.steps if s.kind == "reshape"]
        ends = [a for a in self.src.mesh.axes if isinstance(self.src[a], Shard) and isinstance(self.dst[a], Shard)]
        return tuple(a for a in ends if any(not isinstance(layout[a], Shard) for layout in cut))

    @property
    def bytes(self) -> float:
        """Ring bytes per rank, forward and, if ``grad``, backward."""
        return self.forward_bytes + self.backward_bytes

    def __str__(self) -> str:
        ends = [x if self.grad else x.without_gradient() for x in (self.src, self.dst)]
        head = f"{ends[0]} → {ends[1]}  {str(self.dtype).removeprefix('torch.')}{list(self.shape)}"
        head += f" → {list(self.dst_shape)}" if self.dst_shape is not None else ""
        if not self.steps:
            return f"{head}: nothing to do"
        total = f"{binary_bytes(self.forward_bytes)} forward"
        total += f", {binary_bytes(self.backward_bytes)} backward" if self.grad else ""
        lines = [f"{head}: {total}, {self.seconds * 1e6:.3g} µs, peak {self.peak_numel} elements"]
        lines += [f"  {i}. {step}" for i, step in enumerate(self.steps, 1)]
        if not self.minimal:
            lines.append(
                "  too many axes change for one search, so they were planned one after another, "
                "perhaps not at least cost"
            )
        if self.gathered:
            lines.append(
                "  gathered for the reshape, because the shapes have no common factor to "
                f"shard: {', '.join(self.gathered)}"
            )
        return "\n".join(lines)


def concatenate_legs(legs: Sequence[Redistribution], steps: tuple[RedistributionStep, ...]) -> Redistribution:
    """Legs joined to one redistribution with these steps."""
    return replace(
        legs[0],
        dst=legs[-1].dst,
        steps=steps,
        forward_bytes=sum(leg.forward_bytes for leg in legs),
        backward_bytes=sum(leg.backward_bytes for leg in legs),
        seconds=sum(leg.seconds for leg in legs),
        peak_numel=max(leg.peak_numel for leg in legs),
    )


def runtime_call(step: RedistributionStep) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
    """(function name, positional arguments after the tensor, keyword arguments) of a runtime call.
    ``size`` is given for uneven shards: an int if no axis is left on the dim, else
    :class:`Local`."""
    if step.kind == "reshape":
        cuts = [(n, step.dst.axes_of(d)) for d, n in enumerate(step.to_shape)]
        return step.kind, ([Local(n, cut) if cut else n for n, cut in cuts],), {}
    axes: Any = axes_argument(step.axes)
    if step.kind in ("enter", "leave"):
        return step.kind, (axes,), {}
    if step.kind == "permute":
        # Uneven chunks: only one dim is renumbered, with its full nest.
        dims = [d for d in range(len(step.shape)) if step.src.axes_of(d) == step.axes]
        uneven = dims and step.shape[dims[0]] % step.src.mesh.size_of(step.axes)
        return step.kind, (axes, step.order), {"dim": dims[0], "size": step.shape[dims[0]]} if uneven else {}
    if step.kind == "reduce_scatter":
        return step.kind, (*step.dims, axes), {}
    if step.kind == "slice":
        return step.kind, (*step.dims, axes), {"of": _letter(step.src[step.axes[0]])}
    if step.kind == "partial":
        return step.kind, (axes,), {"of": _letter(step.src[step.axes[0]])}
    if step.kind == "all_reduce":
        source = step.src[step.axes[0]]
        op = source.op if isinstance(source, Partial) else "sum"
        extra = {} if op == "sum" else {"op": op}
        return step.kind, (axes,), {"to": _letter(step.dst[step.axes[0]]), **extra}
    kwargs: dict[str, Any] = {}
    if step.kind == "all_gather":
        kwargs["to"] = _letter(step.dst[step.axes[0]])
    dim = step.dims[0]
    if step.shape[dim] % step.src.mesh.size_of(step.src.axes_of(dim)):
        left = step.dst.axes_of(dim)
        kwargs["size"] = Local(step.shape[dim], left) if left else step.shape[dim]
    return step.kind, (*step.dims, axes), kwargs


def _letter(placement: Placement) -> str:
    return "R" if placement == R else "I"


LayoutLike = Layout | Mapping[str, Placement] | Sequence[Placement]


@lru_cache(maxsize=16384)
def plan_redistribution(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    mesh: Mesh,
    dtype: torch.dtype,
    grad: GradientTransfer,
    peak_limit: int | None,
    minimize: str,
    closed: tuple[int, ...] = (),
) -> Redistribution:
    """:func:`redistribution` of one shape, all arguments resolved."""
    check_layouts((src, shape), (dst, shape), mesh, minimize)
    kinds, ends = (
        unsharded_kinds((src, dst), bool(grad)),
        [state_of(x, len(shape), grad=bool(grad)) for x in (src, dst)],
    )
    common = common_frame(ends[0], ends[1])
    if common.kinds.count(FREE_AXIS) > MAX_FREE_AXES:
        middle = layout_of(intermediate_state(ends[0], ends[1], common), mesh)
        rest = (shape, mesh, dtype, grad, peak_limit, minimize, closed)
        legs = plan_redistribution(src, middle, *rest), plan_redistribution(middle, dst, *rest)
        return replace(concatenate_legs(legs, legs[0].steps + legs[1].steps), minimal=False)
    prices = prices_of(mesh, shape, dtype, grad, kinds, common, closed)
    start, goal = (prices.space.index[x] for x in ends)
    path = _cheapest_moves(prices, start, goal, peak_limit, minimize)
    if path is None:
        raise no_path_error(f"{src} to {dst}, shape {list(shape)}", peak_limit)
    steps = tuple(_move_step(prices, move, mesh, shape, grad) for move in path)
    visited = [start, *(int(prices.space.dst[m]) for m in path)]
    forward, backward = (sum(_scaled_bytes(prices, m)[i] for m in path) for i in (0, 1))
    ranks = prices.space.ranks
    return Redistribution(
        src,
        dst,
        shape,
        dtype,
        bool(grad),
        steps,
        _exact_ratio(forward, ranks),
        _exact_ratio(backward, ranks),
        sum(s.seconds for s in steps),
        max(int(prices.numel[v]) for v in visited),
    )


def no_path_error(ends: str, peak_limit: int | None) -> LayoutError:
    """The error of a search that found nothing; ``ends``: text of both layouts."""
    limit = f" with local tensors of at most {peak_limit} elements" if peak_limit is not None else ""
    return LayoutError(f"no sequence of steps leads from {ends}{limit}")


def check_layouts(
    src: tuple[Layout, tuple[int, ...]], dst: tuple[Layout, tuple[int, ...]], mesh: Mesh, minimize: str
) -> None:
    """Raise :class:`LayoutError` if a layout does not fit its shape or the mesh."""
    for layout, shape in (src, dst):
        layout.check(shape)
        if layout.mesh != mesh:
            raise LayoutError(f"{layout} is on the mesh ({layout.mesh}), not on ({mesh})")
    if minimize not in ("bytes", "seconds"):
        raise LayoutError(f"minimize={minimize!r} is not 'bytes' or 'seconds'")


def unsharded_kinds(layouts: Sequence[Layout], grad: bool) -> tuple[str, ...]:
    """Unsharded placements that can occur between ``layouts``."""
    ops = {p.op for x in layouts for p in x.placements if isinstance(p, Partial)}
    extreme = tuple(op for op in ("max", "min") if op in ops)
    if extreme and grad:
        raise LayoutError(f"Partial({extreme[0]!r}) has no gradient and exists in the forward only")
    return ("R", "I", "P") if grad else ("R", "P", *extreme)


def _move_step(
    prices: Prices, index: int, mesh: Mesh, shape: tuple[int, ...], grad: GradientTransfer
) -> RedistributionStep:
    graph = prices.space
    move, (forward, backward) = graph.moves[index], _scaled_bytes(prices, index)
    back = "all_gather" if move.backward and sparse_gradient_rows(grad) else move.backward
    return RedistributionStep(
        move.kind,
        tuple(mesh.axes[a] for a in move.group),
        layout_of(graph.states[move.src], mesh),
        layout_of(graph.states[move.dst], mesh),
        shape,
        move.dims,
        tuple(mesh.axes[a] for a in move.order),
        _exact_ratio(forward, graph.ranks),
        back if grad else None,
        _exact_ratio(backward, graph.ranks),
        float(prices.seconds[index]),
    )


def _scaled_bytes(prices: Prices, index: int) -> tuple[int, int]:
    """(forward, backward) ring bytes of a move times ranks: integers with exact sums."""
    return int(prices.bytes[index] - prices.back[index]), int(prices.back[index])


def _exact_ratio(a: int, b: int) -> float:
    return a // b if a % b == 0 else a / b


def _cheapest_moves(prices: Prices, start: int, goal: int, peak_limit: int | None, minimize: str) -> list[int] | None:
    """The best sequence of moves, None if none exists."""
    if start == goal:
        return []
    first, second = move_costs(prices, peak_limit, minimize)
    graph = prices.space
    if peak_limit is not None and max(prices.numel[start], prices.numel[goal]) > peak_limit:
        return None
    distance = distances_to(prices, first, goal)
    if distance[start] >= FORBIDDEN:
        return None
    slack = 0 if minimize == "bytes" else 1e-12 * distance[start]
    tight = first + distance[graph.dst] <= distance[graph.src] + slack
    ends = max(int(prices.numel[start]), int(prices.numel[goal]))
    # The smallest bound on local tensors, from the ends upwards, that some cheapest sequence keeps.
    for bound in (ends, *np.unique(prices.numel[prices.numel > ends]).tolist()):
        path = _tie_break(prices, start, goal, tight, second, bound)
        if path is not None:
            return path
    return None


def move_costs(prices: Prices, peak_limit: int | None, minimize: str) -> tuple[Ints | Floats, Ints | Floats]:
    """(primary, secondary) cost per move; moves into states above ``peak_limit`` are forbidden."""
    if minimize == "bytes":
        first: Ints | Floats = prices.bytes
        second: Ints | Floats = prices.seconds
    else:
        first, second = prices.seconds, prices.bytes
    if peak_limit is not None:
        over = (prices.numel > peak_limit)[prices.space.dst]
        first = np.where(over, FORBIDDEN if minimize == "bytes" else np.inf, first)
    return first, second


def distances_to(prices: Prices, cost: Any, goal: int) -> Any:
    """Least cost from every state to ``goal``."""
    distance = np.full(len(prices.space.states), FORBIDDEN, cost.dtype)
    distance[goal] = 0
    return relax_distances(prices, cost, distance)


def relax_distances(prices: Prices, cost: Any, distance: Any) -> Any:
    """``distance`` lowered by all moves at once until stable (Bellman-Ford; paths are short)."""
    graph = prices.space
    while True:
        best = np.minimum.reduceat(cost + distance[graph.dst], graph.begins)
        if not (best < distance[graph.states_with_moves]).any():
            return distance
        distance[graph.states_with_moves] = np.minimum(distance[graph.states_with_moves], best)


def _tie_break(prices: Prices, start: int, goal: int, tight: Any, cost: Any, bound: int) -> list[int] | None:
    """Among ``tight`` moves within ``bound`` elements: least cost, then steps, then peak."""
    graph, numel = prices.space, prices.numel
    queue: list[tuple[float, int, int, int, int | None]] = [(0, 0, int(numel[start]), start, None)]
    parent: dict[int, int | None] = {}
    while queue:
        spent, steps, peak, state, via = heapq.heappop(queue)
        if state in parent:
            continue
        parent[state] = via
        if state == goal:
            break
        low, high = graph.first[state], graph.first[state + 1]
        for move in (np.flatnonzero(tight[low:high]) + low).tolist():
            end = int(graph.dst[move])
            if end not in parent and numel[end] <= bound:
                item = (spent + cost[move].item(), steps + 1, max(peak, int(numel[end])), end, move)
                heapq.heappush(queue, item)
    if goal not in parent:
        return None
    path: list[int] = []
    via = parent[goal]
    while via is not None:
        path.append(via)
        via = parent[int(graph.src[via])]
    return path[::-1]
