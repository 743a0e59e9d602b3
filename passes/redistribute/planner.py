"""The cheapest sequence of steps between two layouts: an exact shortest path."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from autoshard.errors import LayoutError
from autoshard.layout import Layout, Partial, Placement
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Moves
from autoshard.passes.ir.program import Step
from autoshard.passes.redistribute.pricing import FORBIDDEN, Prices, price, rows_in, width
from autoshard.passes.redistribute.space import FREE, MOST_AXES, Floats, Ints, frame, halfway, layout_of, state_of
from autoshard.passes.redistribute.steps import Redistribution, after_each_other

LayoutLike = Layout | Mapping[str, Placement] | Sequence[Placement]


@lru_cache(maxsize=16384)
def plan(
    src: Layout,
    dst: Layout,
    shape: tuple[int, ...],
    mesh: Mesh,
    dtype: torch.dtype,
    grad: Moves,
    peak_limit: int | None,
    minimize: str,
    closed: tuple[int, ...] = (),
) -> Redistribution:
    """:func:`redistribution` of one shape, all arguments resolved."""
    check((src, shape), (dst, shape), mesh, minimize)
    kinds, ends = kinds_of((src, dst), bool(grad)), [state_of(x, len(shape), grad=bool(grad)) for x in (src, dst)]
    common = frame(ends[0], ends[1])
    if common.kinds.count(FREE) > MOST_AXES:
        middle = layout_of(halfway(ends[0], ends[1], common), mesh)
        rest = (shape, mesh, dtype, grad, peak_limit, minimize, closed)
        legs = plan(src, middle, *rest), plan(middle, dst, *rest)
        return replace(after_each_other(legs, legs[0].steps + legs[1].steps), minimal=False)
    prices = price(mesh.unnamed, shape, dtype.itemsize, kinds, width(dtype, grad), common, closed, rows_in(grad))
    start, goal = (prices.space.index[x] for x in ends)
    path = _path(prices, start, goal, peak_limit, minimize)
    if path is None:
        raise no_way(f"{src} to {dst}, shape {list(shape)}", peak_limit)
    steps = tuple(_step(prices, move, mesh, shape, grad) for move in path)
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
        _divide(forward, ranks),
        _divide(backward, ranks),
        sum(s.seconds for s in steps),
        max(int(prices.numel[v]) for v in visited),
    )


def no_way(ends: str, peak_limit: int | None) -> LayoutError:
    """The error of a search that found nothing; ``ends``: text of both layouts."""
    limit = f" with local tensors of at most {peak_limit} elements" if peak_limit is not None else ""
    return LayoutError(f"no sequence of steps leads from {ends}{limit}")


def check(src: tuple[Layout, tuple[int, ...]], dst: tuple[Layout, tuple[int, ...]], mesh: Mesh, minimize: str) -> None:
    """Raise :class:`LayoutError` if a layout does not fit its shape or the mesh."""
    for layout, shape in (src, dst):
        layout.check(shape)
        if layout.mesh != mesh:
            raise LayoutError(f"{layout} lies on the mesh ({layout.mesh}), not on ({mesh})")
    if minimize not in ("bytes", "seconds"):
        raise LayoutError(f"minimize={minimize!r} is not 'bytes' or 'seconds'")


def kinds_of(layouts: Sequence[Layout], grad: bool) -> tuple[str, ...]:
    """Unsharded placements that can occur between ``layouts``."""
    ops = {p.op for x in layouts for p in x.placements if isinstance(p, Partial)}
    extreme = tuple(op for op in ("max", "min") if op in ops)
    if extreme and grad:
        raise LayoutError(f"Partial({extreme[0]!r}) has no gradient; it exists in the forward only")
    return ("R", "I", "P") if grad else ("R", "P", *extreme)


def _step(prices: Prices, index: int, mesh: Mesh, shape: tuple[int, ...], grad: Moves) -> Step:
    graph = prices.space
    move, (forward, backward) = graph.moves[index], _scaled_bytes(prices, index)
    back = "all_gather" if move.backward and rows_in(grad) else move.backward
    return Step(
        move.kind,
        tuple(mesh.axes[a] for a in move.group),
        layout_of(graph.states[move.src], mesh),
        layout_of(graph.states[move.dst], mesh),
        shape,
        move.dims,
        tuple(mesh.axes[a] for a in move.order),
        _divide(forward, graph.ranks),
        back if grad else None,
        _divide(backward, graph.ranks),
        float(prices.seconds[index]),
    )


def _scaled_bytes(prices: Prices, index: int) -> tuple[int, int]:
    """(forward, backward) ring bytes of a move times ranks: integers with exact sums."""
    return int(prices.bytes[index] - prices.back[index]), int(prices.back[index])


def _divide(a: int, b: int) -> float:
    """a / b, an int if exact."""
    return a // b if a % b == 0 else a / b


def _path(prices: Prices, start: int, goal: int, peak_limit: int | None, minimize: str) -> list[int] | None:
    """The best sequence of moves, None if none exists."""
    if start == goal:
        return []
    first, second = costs(prices, peak_limit, minimize)
    graph = prices.space
    if peak_limit is not None and max(prices.numel[start], prices.numel[goal]) > peak_limit:
        return None
    distance = distances(prices, first, goal)
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


def costs(prices: Prices, peak_limit: int | None, minimize: str) -> tuple[Ints | Floats, Ints | Floats]:
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


def distances(prices: Prices, cost: Any, goal: int) -> Any:
    """Least cost from every state to ``goal``."""
    distance = np.full(len(prices.space.states), FORBIDDEN, cost.dtype)
    distance[goal] = 0
    return relaxed(prices, cost, distance)


def relaxed(prices: Prices, cost: Any, distance: Any) -> Any:
    """``distance`` lowered by all moves at once until stable (Bellman-Ford; paths are short)."""
    graph = prices.space
    while True:
        best = np.minimum.reduceat(cost + distance[graph.dst], graph.begins)
        if not (best < distance[graph.leaving]).any():
            return distance
        distance[graph.leaving] = np.minimum(distance[graph.leaving], best)


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
