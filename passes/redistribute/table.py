"""All redistribution times between two sets of layouts at once, for the search over plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from autoshard.layout import Grouped, Layout, Owned
from autoshard.passes.ir.graph import Moves
from autoshard.passes.redistribute.planner import distances, kinds_of
from autoshard.passes.redistribute.pricing import (
    ALONE,
    FORBIDDEN,
    IN_BUCKETS,
    SMALL_BYTES,
    TOGETHER,
    Prices,
    Shares,
    message_latency,
    price,
    rows_in,
    width,
)
from autoshard.passes.redistribute.query import in_chunks, redistribution
from autoshard.passes.redistribute.space import EXACT_AXES, Floats, Ints, everything, state_of
from autoshard.passes.search.broadcast import added

SMALL = 500
"""states up to which all pairs are computed together"""


def cost_matrix(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Sequence[int],
    dtype: torch.dtype,
    grad: Moves,
    closed: tuple[int, ...] = (),
) -> Floats:
    """Seconds of the fastest redistribution from each source (row) to each target (column): float64; see
    :func:`link_matrices`."""
    launches, node, network = link_matrices(sources, targets, shape, dtype, grad, closed)
    return launches + node + network


def link_matrices(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Sequence[int],
    dtype: torch.dtype,
    grad: Moves,
    closed: tuple[int, ...] = (),
    share: Shares = ALONE,
) -> tuple[Floats, Floats, Floats]:
    """Seconds of the fastest redistribution from each source (row) to each target (column): of the launches of its
    collectives, of links inside a node, and of links between nodes: float64.

    Forward plus, if ``grad``, backward; inf where none exists. Equals the ``seconds`` of
    ``redistribution(..., minimize="seconds")``. ``closed``: dims that are not cut on the way. ``share``: of the latency of
    collectives that go with others (:class:`~autoshard.passes.redistribute.pricing.Shares`), what this tensor pays.
    """
    if not sources or not targets:
        none = np.zeros((len(sources), len(targets)))
        return none, none, none
    if any(x.fixed for x in (*sources, *targets)):
        return _of_fixed(sources, targets, shape, dtype, grad, closed, share)
    mesh, shape, kinds = sources[0].mesh, tuple(shape), kinds_of((*sources, *targets), bool(grad))
    if mesh.ndim > EXACT_AXES:
        return _one_by_one(sources, targets, shape, dtype, grad, closed, share)
    base, back = everything(mesh.ndim, len(shape)), width(dtype, grad)
    prices = price(mesh.unnamed, shape, dtype.itemsize, kinds, back, base, closed, rows_in(grad))
    index = prices.space.index
    rows = [index[state_of(x, len(shape), grad=bool(grad))] for x in sources]
    columns = rows if targets is sources else [index[state_of(x, len(shape), grad=bool(grad))] for x in targets]
    if len(index) <= SMALL:
        needed, each = _needed(share), [np.zeros(()) for _ in prices.shares]
        for number, table in zip(needed, _summed(prices, needed), strict=True):
            each[number] = table[rows][:, columns]
        return _apart(_all_pairs(prices)[0][rows][:, columns], each, share)
    found = np.empty((3, len(columns), len(rows)))
    for column, goal in enumerate(columns):
        seconds, shares = _to_one(prices, goal, rows)
        found[:, column] = _apart(seconds, shares, share)
    held_up, near, far = (np.ascontiguousarray(x.T) for x in found)
    return held_up, near, far


def _needed(share: Shares) -> tuple[int, ...]:
    """Which shares :func:`_apart` looks at: of what goes with no others only launches and links between nodes."""
    parts = enumerate((share.gathers, share.sums, share.joined))
    return (0, 1, *(2 + 3 * i + j for i, part in parts if part != 1.0 for j in range(3)))


def _apart(seconds: Floats, shares: Sequence[Floats] | Floats, share: Shares) -> tuple[Floats, Floats, Floats]:
    """Launches, links inside a node and links between nodes, without what others pay of each; ``shares``: see
    :attr:`~autoshard.passes.redistribute.pricing.Prices.shares`."""
    launches, between, *together = shares
    parts = (share.gathers, share.sums, share.joined)
    if parts == (1.0, 1.0, 1.0):
        return launches, seconds - launches - between, between
    each = [[(1.0 - part) * x for x in together[3 * i : 3 * i + 3]] for i, part in enumerate(parts)]
    spared = [sum(x) for x in zip(*each, strict=True)]
    return launches - spared[0], seconds - launches - between - spared[1], between - spared[2]


def _of_fixed(sources: Sequence[Layout], targets: Sequence[Layout], *what: Any) -> tuple[Floats, Floats, Floats]:
    """Nothing leads to other placements of those that stay (whichever rank owns the whole); each rank does its share."""
    axes = [
        [frozenset((a, p if isinstance(p, Grouped) else Owned()) for a, p in x.fixed.items()) for x in side]
        for side in (sources, targets)
    ]
    found = (np.zeros((len(sources), len(targets))), np.full((len(sources), len(targets)), np.inf))
    out = found[0], found[1], found[0].copy()
    for key in set(axes[0]) & set(axes[1]):
        rows, columns = ([i for i, k in enumerate(side) if k == key] for side in axes)
        given = [in_chunks(sources[i]) for i in rows], [in_chunks(targets[i]) for i in columns]
        for table, part in zip(out, link_matrices(*given, *what), strict=True):
            table[np.ix_(rows, columns)] = part
    return out


def _one_by_one(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    grad: Moves,
    closed: tuple[int, ...],
    share: Shares,
) -> tuple[Floats, Floats, Floats]:
    """On a mesh too large for one graph, every pair has its own."""

    def seconds(src: Layout, dst: Layout) -> tuple[float, ...]:
        plan = redistribution(src, dst, shape, src.mesh, dtype, grad, minimize="seconds", closed=closed)
        launch = src.mesh.hardware.kernel_latency
        launches = {s: launch * ((s.forward_bytes > 0) + (s.backward_bytes > 0)) for s in plan.steps}
        between = sum(s.seconds - launches[s] for s in plan.steps if src.mesh.crosses(s.axes))
        calls = sum(launches[s] for s in plan.steps)
        together = [0.0] * 3 * (len(IN_BUCKETS) + 1)
        for s in plan.steps:
            largest = max(math.prod(x.max_local_shape(s.shape)) for x in (s.src, s.dst)) * dtype.itemsize
            joined = s.kind in TOGETHER and largest <= SMALL_BYTES
            links = message_latency(src.mesh, s.axes, s.kind, s.backward, math.prod(shape) == 1) - launches[s]
            for i in (*(i for i, kind in enumerate(IN_BUCKETS) if s.kind == kind), *[len(IN_BUCKETS)] * joined):
                together[3 * i] += launches[s]
                together[3 * i + 1 + src.mesh.crosses(s.axes)] += links
        return plan.seconds, calls, between, *together

    found = np.array([[seconds(src, dst) for dst in targets] for src in sources])
    every, *shares = np.moveaxis(found, -1, 0)
    return _apart(every, shares, share)


def _to_one(prices: Prices, goal: int, rows: Sequence[int]) -> tuple[Floats, Floats]:
    """From some states to one: seconds [rows], and the shares of them [11, rows]; searched for once of goals that are alike."""
    at, (before, swap) = np.array(rows), prices.alike[goal]
    while swap is not None:
        at, goal = swap[at], before
        before, swap = prices.alike[goal]
    seconds, shares = _all_to_one(prices, goal)
    return seconds[at], shares[:, at]


@lru_cache(maxsize=1024)
def _all_to_one(prices: Prices, goal: int) -> tuple[Floats, Floats]:
    """From every state to one: seconds [states], and the shares of them [11, states]."""
    found = distances(prices, prices.seconds, goal)
    leads, moves = _ways(prices, found, goal)
    shares = np.zeros((len(prices.shares), len(found)))  # of the next move
    shares[:, prices.space.src[moves]] = prices.shares[:, moves]
    while not np.array_equal(leads, leads[leads]):  # twice as many moves each time
        shares, leads = shares + shares[:, leads], leads[leads]
    return np.where(found < FORBIDDEN, found, np.inf), shares


def _ways(prices: Prices, seconds: Floats, goal: int) -> tuple[Ints, Ints]:
    """The fastest ways to a goal, which take so many ``seconds`` from every state: the next state on each, itself at their
    ends, and the numbers of the moves there."""
    graph = prices.space
    through = prices.seconds + seconds[graph.dst]
    least = np.minimum.reduceat(through, graph.begins)
    moves = np.flatnonzero(through == np.repeat(least, graph.many))  # of each state's moves one at least
    moves = moves[np.flatnonzero(np.diff(graph.src[moves], prepend=-1))]
    states = graph.src[moves]
    moves = moves[(seconds[states] < FORBIDDEN) & (states != goal)]
    leads = np.arange(len(seconds))
    leads[graph.src[moves]] = graph.dst[moves]
    return leads, moves


@lru_cache(maxsize=64)
def _all_pairs(prices: Prices) -> tuple[Floats, Ints, Ints]:
    """Floyd-Warshall over all states: seconds [states, states]; by pair the move of those that one leads between, else how
    many moves there are; and the last state in the middle, or -1."""
    graph, count = prices.space, len(prices.space.states)
    distance, move = np.full((count, count), np.inf), np.full((count, count), len(graph.moves))
    cheapest_last = np.argsort(-prices.seconds, kind="stable")
    ends = graph.src[cheapest_last], graph.dst[cheapest_last]
    distance[ends], move[ends] = prices.seconds[cheapest_last], cheapest_last
    own = np.arange(count)
    distance[own, own], move[own, own] = 0.0, len(graph.moves)
    through, middle = np.empty_like(distance), np.full(count * count, -1)
    for k in range(count):
        added(distance[:, k, None], distance[k], out=through)
        # few: most pairs are as near as they get after some states
        closer = np.flatnonzero(through < distance)
        distance.reshape(-1)[closer], middle[closer] = through.reshape(-1)[closer], k
    return distance, move.reshape(-1), middle


@lru_cache(maxsize=64)
def _summed(prices: Prices, numbers: tuple[int, ...]) -> Floats:
    """Of :func:`_all_pairs` these shares [numbers, states, states]: all of them take longer than the ways did."""
    (distance, move, middle), each = _all_pairs(prices), prices.shares[list(numbers)]
    count = len(distance)
    # A pair's halves have middles before its own, so that each pair is added up once, when they are known.
    shares = np.append(each, np.zeros((len(each), 1)), axis=1).T[move]
    order = np.argsort(middle, kind="stable")
    for k, pairs in enumerate(np.split(order, np.searchsorted(middle[order], np.arange(count)))[1:]):
        src, dst = np.divmod(pairs, count)
        shares[pairs] = shares[src * count + k] + shares[k * count + dst]
    return shares.T.reshape(-1, count, count)


def on_the_way(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Sequence[int],
    dtype: torch.dtype,
    grad: Moves,
    closed: tuple[int, ...] = (),
) -> Floats:
    """Elements per rank that the fastest redistribution from each source (row) to each target (column) has at once: before and
    after its largest step; 0 where there is none to take."""
    found = np.zeros((len(sources), len(targets)))
    if not sources or not targets:
        return found
    own = [np.array([math.prod(x.max_local_shape(shape)) for x in side], float) for side in (sources, targets)]
    mesh = sources[0].mesh
    if any(x.fixed for x in (*sources, *targets)) or mesh.ndim > EXACT_AXES:
        same = np.array([[a.placements == b.placements for b in targets] for a in sources])
        return np.where(same, 0.0, own[0][:, None] + own[1])
    shape, kinds = tuple(shape), kinds_of((*sources, *targets), bool(grad))
    base = everything(mesh.ndim, len(shape))
    prices = price(mesh.unnamed, shape, dtype.itemsize, kinds, width(dtype, grad), base, closed, rows_in(grad))
    index = prices.space.index
    rows, columns = ([index[state_of(x, len(shape), grad=bool(grad))] for x in side] for side in (sources, targets))
    for goal in set(columns):
        found[:, [c == goal for c in columns]] = _largest(prices, goal)[rows][:, None]
    return found


@lru_cache(maxsize=4096)
def _largest(prices: Prices, goal: int) -> Floats:
    """Of the moves from every state to one: elements at once [states]."""
    few = len(prices.space.states) <= SMALL
    seconds = _all_pairs(prices)[0][:, goal] if few else distances(prices, prices.seconds, goal)
    graph, (leads, moves) = prices.space, _ways(prices, seconds, goal)
    most = np.zeros(len(seconds))
    most[graph.src[moves]] = prices.numel[graph.src[moves]] + prices.numel[graph.dst[moves]]
    while not np.array_equal(leads, leads[leads]):
        most, leads = np.maximum(most, most[leads]), leads[leads]
    return most
