"""All redistribution times between two sets of layouts at once, for the search over plans."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from autoshard.layout import Layout
from autoshard.passes.redistribute.planner import distances, kinds_of
from autoshard.passes.redistribute.pricing import FORBIDDEN, Prices, price
from autoshard.passes.redistribute.query import redistribution
from autoshard.passes.redistribute.space import EXACT_AXES, Floats, everything, state_of

SMALL = 500
"""states up to which all pairs are computed together"""


def cost_matrix(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Sequence[int],
    dtype: torch.dtype,
    grad: bool,
    closed: tuple[int, ...] = (),
) -> Floats:
    """Seconds of the fastest redistribution from each source (row) to each target (column): float64; see
    :func:`link_matrices`."""
    node, network = link_matrices(sources, targets, shape, dtype, grad, closed)
    return node + network


def link_matrices(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: Sequence[int],
    dtype: torch.dtype,
    grad: bool,
    closed: tuple[int, ...] = (),
) -> tuple[Floats, Floats]:
    """Seconds of the fastest redistribution from each source (row) to each target (column), of its steps inside a node
    and of those between nodes: float64.

    Forward plus, if ``grad``, backward; inf where none exists. Equals the ``seconds`` of
    ``redistribution(..., minimize="seconds")``. ``closed``: dims that are not cut on the way.
    """
    if not sources or not targets:
        none = np.zeros((len(sources), len(targets)))
        return none, none
    mesh, shape, kinds = sources[0].mesh, tuple(shape), kinds_of((*sources, *targets), grad)
    if mesh.ndim > EXACT_AXES:
        return _one_by_one(sources, targets, shape, dtype, grad, closed)
    prices = price(mesh, shape, dtype.itemsize, kinds, grad, everything(mesh.ndim, len(shape)), closed)
    index = prices.space.index
    rows, columns = ([index[state_of(x, len(shape), grad=grad)] for x in side] for side in (sources, targets))
    if len(index) <= SMALL:
        seconds, between = (table[np.ix_(rows, columns)] for table in _all_pairs(prices))
    else:
        found = [_to_one(prices, goal) for goal in columns]
        seconds, between = (np.stack([pair[i][rows] for pair in found], axis=1) for i in (0, 1))
    return seconds - between, between


def _one_by_one(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    grad: bool,
    closed: tuple[int, ...],
) -> tuple[Floats, Floats]:
    """On a mesh too large for one graph, every pair has its own."""

    def seconds(src: Layout, dst: Layout) -> tuple[float, float]:
        plan = redistribution(src, dst, shape, src.mesh, dtype, grad, minimize="seconds", closed=closed)
        between = sum(s.seconds for s in plan.steps if src.mesh.crosses(s.axes))
        return plan.seconds - between, between

    found = np.array([[seconds(src, dst) for dst in targets] for src in sources])
    return found[..., 0], found[..., 1]


@lru_cache(maxsize=1024)
def _to_one(prices: Prices, goal: int) -> tuple[Floats, Floats]:
    """From every state to one: seconds, and the part of them between nodes."""
    found = distances(prices, prices.seconds, goal)
    if not prices.crossing.any():
        return np.where(found < FORBIDDEN, found, np.inf), np.zeros(len(found))
    graph = prices.space
    order = np.lexsort((prices.seconds + found[graph.dst], graph.src))
    states, begin = np.unique(graph.src[order], return_index=True)
    leads, own = np.arange(len(found)), np.zeros(len(found))  # the next state on the way, and the move there
    leads[states] = graph.dst[order[begin]]
    own[states] = _between(prices)[order[begin]]
    ends = found >= FORBIDDEN
    ends[goal] = True
    leads, between = np.where(ends, np.arange(len(found)), leads), np.where(ends, 0.0, own)
    while not np.array_equal(leads, leads[leads]):  # twice as many moves each time
        between, leads = between + between[leads], leads[leads]
    return np.where(found < FORBIDDEN, found, np.inf), between


def _between(prices: Prices) -> Floats:
    """Per move: its seconds where it spans several nodes, else 0."""
    return np.where(prices.crossing & np.isfinite(prices.seconds), prices.seconds, 0.0)


@lru_cache(maxsize=64)
def _all_pairs(prices: Prices) -> tuple[Floats, Floats]:
    """Floyd-Warshall over all states: seconds, and the part of them between nodes."""
    graph = prices.space
    distance, between = (np.full((len(graph.states),) * 2, start) for start in (np.inf, 0.0))
    cheapest_last = np.argsort(-prices.seconds, kind="stable")
    ends = graph.src[cheapest_last], graph.dst[cheapest_last]
    distance[ends], between[ends] = prices.seconds[cheapest_last], _between(prices)[cheapest_last]
    np.fill_diagonal(distance, 0.0)
    np.fill_diagonal(between, 0.0)
    mixed = prices.crossing.any()
    for k in range(len(distance)):
        through = distance[:, k, None] + distance[k]
        closer = through < distance
        np.copyto(distance, through, where=closer)
        if mixed:
            np.copyto(between, between[:, k, None] + between[k], where=closer)
    return distance, between
