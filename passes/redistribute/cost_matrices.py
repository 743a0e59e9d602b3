"""Cost matrices: seconds of redistributions between two sets of layouts, for the plan search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from autoshard.layout import Grouped, Layout, Owned
from autoshard.passes.ir.graph import GradientTransfer
from autoshard.passes.redistribute.layout_graph import EXACT_AXES, Floats, Ints, free_frame, state_of
from autoshard.passes.redistribute.pricing import (
    BUCKETED_KINDS,
    COALESCED_KINDS,
    FORBIDDEN,
    SMALL_BYTES,
    UNSHARED_MESSAGES,
    MessageShares,
    Prices,
    message_latency,
    prices_of,
)
from autoshard.passes.redistribute.resharding import redistribution, without_fixed
from autoshard.passes.redistribute.shortest_path import distances_to, unsharded_kinds
from autoshard.passes.search.arrays import broadcast_sum

ALL_PAIRS_STATES = 500
"""most states for which all pairs are computed at once"""


def link_matrices(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Sequence[int],
    dtype: torch.dtype,
    grad: GradientTransfer,
    closed: tuple[int, ...] = (),
    share: MessageShares = UNSHARED_MESSAGES,
) -> tuple[Floats, Floats, Floats]:
    """(launches, links in a node, links between nodes) seconds from each source to each target.
    float64 [sources, targets] of the fastest redistribution, ``minimize="seconds"``, forward and,
    if ``grad``, backward; inf if none exists. ``closed``: dims not to shard on the way. ``share``:
    latency shares of coalesced messages
    (:class:`~autoshard.passes.redistribute.pricing.MessageShares`)."""
    if not sources or not targets:
        none = np.zeros((len(sources), len(targets)))
        return none, none, none
    if any(x.fixed for x in (*sources, *targets)):
        return _fixed_matrices(sources, targets, shape, dtype, grad, closed, share)
    if sources[0].mesh.ndim > EXACT_AXES:
        return _pairwise_matrices(sources, targets, tuple(shape), dtype, grad, closed, share)
    prices, rows, columns = _states_between(sources, targets, tuple(shape), dtype, grad, closed)
    if len(prices.space.index) <= ALL_PAIRS_STATES:
        needed, each = _needed_shares(share), [np.zeros(()) for _ in prices.shares]
        for number, table in zip(needed, _path_shares(prices, needed), strict=True):
            each[number] = table[rows][:, columns]
        return _split_by_link(_all_pairs(prices)[0][rows][:, columns], each, share)
    found = np.empty((3, len(columns), len(rows)))
    for column, goal in enumerate(columns):
        seconds, shares = _seconds_to_goal(prices, goal, rows)
        found[:, column] = _split_by_link(seconds, shares, share)
    exposed_part, near, far = (np.ascontiguousarray(x.T) for x in found)
    return exposed_part, near, far


def _states_between(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    grad: GradientTransfer,
    closed: tuple[int, ...],
) -> tuple[Prices, list[int], list[int]]:
    """(prices of all moves, states of ``sources``, states of ``targets``)."""
    mesh, kinds = sources[0].mesh, unsharded_kinds((*sources, *targets), bool(grad))
    prices = prices_of(mesh, shape, dtype, grad, kinds, free_frame(mesh.ndim, len(shape)), closed)
    rows = [prices.space.index[state_of(x, len(shape), grad=bool(grad))] for x in sources]
    if targets is sources:
        return prices, rows, rows
    return prices, rows, [prices.space.index[state_of(x, len(shape), grad=bool(grad))] for x in targets]


def _needed_shares(share: MessageShares) -> tuple[int, ...]:
    """Numbers of the shares that :func:`_split_by_link` reads; uncoalesced: only the first two."""
    parts = enumerate((share.gathers, share.sums, share.joined))
    return (0, 1, *(2 + 3 * i + j for i, part in parts if part != 1.0 for j in range(3)))


def _split_by_link(
    seconds: Floats, shares: Sequence[Floats] | Floats, share: MessageShares
) -> tuple[Floats, Floats, Floats]:
    """Launches, links in a node and between nodes, less what others pay. ``shares``: see
    :attr:`~autoshard.passes.redistribute.pricing.Prices.shares`."""
    launches, between, *together = shares
    parts = (share.gathers, share.sums, share.joined)
    if parts == (1.0, 1.0, 1.0):
        return launches, seconds - launches - between, between
    each = [[(1.0 - part) * x for x in together[3 * i : 3 * i + 3]] for i, part in enumerate(parts)]
    spared = [sum(x) for x in zip(*each, strict=True)]
    return launches - spared[0], seconds - launches - between - spared[1], between - spared[2]


def _fixed_matrices(sources: Sequence[Layout], targets: Sequence[Layout], *what: Any) -> tuple[Floats, Floats, Floats]:
    """Owned and grouped placements never change (whichever rank owns); other axes convert."""
    axes = [
        [frozenset((a, p if isinstance(p, Grouped) else Owned()) for a, p in x.fixed.items()) for x in side]
        for side in (sources, targets)
    ]
    found = (np.zeros((len(sources), len(targets))), np.full((len(sources), len(targets)), np.inf))
    out = found[0], found[1], found[0].copy()
    for key in set(axes[0]) & set(axes[1]):
        rows, columns = ([i for i, k in enumerate(side) if k == key] for side in axes)
        given = [without_fixed(sources[i]) for i in rows], [without_fixed(targets[i]) for i in columns]
        for table, part in zip(out, link_matrices(*given, *what), strict=True):
            table[np.ix_(rows, columns)] = part
    return out


def _pairwise_matrices(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    grad: GradientTransfer,
    closed: tuple[int, ...],
    share: MessageShares,
) -> tuple[Floats, Floats, Floats]:
    """Meshes too large for one graph: one search per pair."""

    def seconds(src: Layout, dst: Layout) -> tuple[float, ...]:
        plan = redistribution(src, dst, shape, src.mesh, dtype, grad, minimize="seconds", closed=closed)
        launch = src.mesh.hardware.kernel_latency
        launches = {s: launch * ((s.forward_bytes > 0) + (s.backward_bytes > 0)) for s in plan.steps}
        between = sum(s.seconds - launches[s] for s in plan.steps if src.mesh.crosses(s.axes))
        calls = sum(launches[s] for s in plan.steps)
        together = [0.0] * 3 * (len(BUCKETED_KINDS) + 1)
        for s in plan.steps:
            largest = max(math.prod(x.max_local_shape(s.shape)) for x in (s.src, s.dst)) * dtype.itemsize
            joined = s.kind in COALESCED_KINDS and largest <= SMALL_BYTES
            links = message_latency(src.mesh, s.axes, s.kind, s.backward, math.prod(shape) == 1) - launches[s]
            for i in (*(i for i, kind in enumerate(BUCKETED_KINDS) if s.kind == kind), *[len(BUCKETED_KINDS)] * joined):
                together[3 * i] += launches[s]
                together[3 * i + 1 + src.mesh.crosses(s.axes)] += links
        return plan.seconds, calls, between, *together

    found = np.array([[seconds(src, dst) for dst in targets] for src in sources])
    every, *shares = np.moveaxis(found, -1, 0)
    return _split_by_link(every, shares, share)


def _seconds_to_goal(prices: Prices, goal: int, rows: Sequence[int]) -> tuple[Floats, Floats]:
    """(seconds [rows], shares [11, rows]) from some states to one, cached by symmetry."""
    at, (before, swap) = np.array(rows), prices.symmetric_state[goal]
    while swap is not None:
        at, goal = swap[at], before
        before, swap = prices.symmetric_state[goal]
    seconds, shares = _all_seconds_to_goal(prices, goal)
    return seconds[at], shares[:, at]


@lru_cache(maxsize=1024)
def _all_seconds_to_goal(prices: Prices, goal: int) -> tuple[Floats, Floats]:
    """(seconds [states], shares [11, states]) from every state to one."""
    found = distances_to(prices, prices.seconds, goal)
    next_state, moves = _next_moves(prices, found, goal)
    shares = np.zeros((len(prices.shares), len(found)))  # of the next move
    shares[:, prices.space.src[moves]] = prices.shares[:, moves]
    while not np.array_equal(next_state, next_state[next_state]):  # doubles the moves each time
        shares, next_state = shares + shares[:, next_state], next_state[next_state]
    return np.where(found < FORBIDDEN, found, np.inf), shares


def _next_moves(prices: Prices, seconds: Floats, goal: int) -> tuple[Ints, Ints]:
    """(next state, itself at the end; move numbers) on the fastest paths to a goal."""
    graph = prices.space
    through = prices.seconds + seconds[graph.dst]
    least = np.minimum.reduceat(through, graph.begins)
    moves = np.flatnonzero(through == np.repeat(least, graph.move_counts))  # at least one per state
    moves = moves[np.flatnonzero(np.diff(graph.src[moves], prepend=-1))]
    states = graph.src[moves]
    moves = moves[(seconds[states] < FORBIDDEN) & (states != goal)]
    next_state = np.arange(len(seconds))
    next_state[graph.src[moves]] = graph.dst[moves]
    return next_state, moves


@lru_cache(maxsize=64)
def _all_pairs(prices: Prices) -> tuple[Floats, Ints, Ints]:
    """Floyd-Warshall over states: seconds, direct move or number of moves, last middle or -1."""
    graph, count = prices.space, len(prices.space.states)
    distance, move = np.full((count, count), np.inf), np.full((count, count), len(graph.moves))
    cheapest_last = np.argsort(-prices.seconds, kind="stable")
    ends = graph.src[cheapest_last], graph.dst[cheapest_last]
    distance[ends], move[ends] = prices.seconds[cheapest_last], cheapest_last
    own = np.arange(count)
    distance[own, own], move[own, own] = 0.0, len(graph.moves)
    through, middle = np.empty_like(distance), np.full(count * count, -1)
    for k in range(count):
        broadcast_sum(distance[:, k, None], distance[k], out=through)
        # few: most pairs reach their minimum after some states
        closer = np.flatnonzero(through < distance)
        distance.reshape(-1)[closer], middle[closer] = through.reshape(-1)[closer], k
    return distance, move.reshape(-1), middle


@lru_cache(maxsize=64)
def _path_shares(prices: Prices, numbers: tuple[int, ...]) -> Floats:
    """Shares [numbers, states, states] along the paths of :func:`_all_pairs`."""
    (distance, move, middle), each = _all_pairs(prices), prices.shares[list(numbers)]
    count = len(distance)
    # Both halves of a pair have earlier middles, so each pair is summed once they are known.
    shares = np.append(each, np.zeros((len(each), 1)), axis=1).T[move]
    order = np.argsort(middle, kind="stable")
    for k, pairs in enumerate(np.split(order, np.searchsorted(middle[order], np.arange(count)))[1:]):
        src, dst = np.divmod(pairs, count)
        shares[pairs] = shares[src * count + k] + shares[k * count + dst]
    return shares.T.reshape(-1, count, count)


def peak_move_elements(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Sequence[int],
    dtype: torch.dtype,
    grad: GradientTransfer,
    closed: tuple[int, ...] = (),
) -> Floats:
    """Peak elements per rank on the fastest redistribution: before plus after its largest step.
    Float64 from each source (row) to each target (column); 0 without steps."""
    found = np.zeros((len(sources), len(targets)))
    if not sources or not targets:
        return found
    own = [np.array([math.prod(x.max_local_shape(shape)) for x in side], float) for side in (sources, targets)]
    if any(x.fixed for x in (*sources, *targets)) or sources[0].mesh.ndim > EXACT_AXES:
        same = np.array([[a.placements == b.placements for b in targets] for a in sources])
        return np.where(same, 0.0, own[0][:, None] + own[1])
    prices, rows, columns = _states_between(sources, targets, tuple(shape), dtype, grad, closed)
    for goal in set(columns):
        found[:, [c == goal for c in columns]] = _largest_move_elements(prices, goal)[rows][:, None]
    return found


@lru_cache(maxsize=4096)
def _largest_move_elements(prices: Prices, goal: int) -> Floats:
    """Elements of the largest move from every state to one [states]."""
    few = len(prices.space.states) <= ALL_PAIRS_STATES
    seconds = _all_pairs(prices)[0][:, goal] if few else distances_to(prices, prices.seconds, goal)
    graph, (next_state, moves) = prices.space, _next_moves(prices, seconds, goal)
    most = np.zeros(len(seconds))
    most[graph.src[moves]] = prices.numel[graph.src[moves]] + prices.numel[graph.dst[moves]]
    while not np.array_equal(next_state, next_state[next_state]):
        most, next_state = np.maximum(most, most[next_state]), next_state[next_state]
    return most
