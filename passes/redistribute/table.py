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
    """Seconds of the fastest redistribution from each source (row) to each target (column): float64.

    Forward plus, if ``grad``, backward; inf where none exists. Equals the ``seconds`` of
    ``redistribution(..., minimize="seconds")``. ``closed``: dims that are not cut on the way.
    """
    if not sources or not targets:
        return np.zeros((len(sources), len(targets)))
    mesh, shape, kinds = sources[0].mesh, tuple(shape), kinds_of((*sources, *targets), grad)
    if mesh.ndim > EXACT_AXES:
        return _one_by_one(sources, targets, shape, dtype, grad, closed)
    prices = price(mesh, shape, dtype.itemsize, kinds, grad, everything(mesh.ndim, len(shape)), closed)
    index = prices.space.index
    rows, columns = ([index[state_of(x, len(shape), grad=grad)] for x in side] for side in (sources, targets))
    if len(index) <= SMALL:
        return _all_pairs(prices)[np.ix_(rows, columns)]
    return np.stack([_to_one(prices, goal)[rows] for goal in columns], axis=1)


def _one_by_one(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    grad: bool,
    closed: tuple[int, ...],
) -> Floats:
    """On a mesh too large for one graph, every pair has its own."""

    def seconds(src: Layout, dst: Layout) -> float:
        plan = redistribution(src, dst, shape, src.mesh, dtype, grad, minimize="seconds", closed=closed)
        return plan.seconds

    return np.array([[seconds(src, dst) for dst in targets] for src in sources])


@lru_cache(maxsize=1024)
def _to_one(prices: Prices, goal: int) -> Floats:
    """From every state to one."""
    found = distances(prices, prices.seconds, goal)
    return np.where(found < FORBIDDEN, found, np.inf)


@lru_cache(maxsize=64)
def _all_pairs(prices: Prices) -> Floats:
    """Floyd-Warshall over all states."""
    graph = prices.space
    distance = np.full((len(graph.states), len(graph.states)), np.inf)
    np.minimum.at(distance, (graph.src, graph.dst), prices.seconds)
    np.fill_diagonal(distance, 0.0)
    through = np.empty_like(distance)
    for k in range(len(distance)):
        np.add(distance[:, k, None], distance[k], out=through)
        np.minimum(distance, through, out=distance)
    return distance
