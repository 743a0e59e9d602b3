"""All redistribution times between two sets of layouts at once, for the search over plans."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from autoshard.layout import Layout
from autoshard.mesh import Mesh
from autoshard.passes.redistribute.planner import kinds_of
from autoshard.passes.redistribute.pricing import price
from autoshard.passes.redistribute.space import Floats, space, state_of


def cost_matrix(
    sources: Sequence[Layout], targets: Sequence[Layout], shape: Sequence[int], dtype: torch.dtype, grad: bool
) -> Floats:
    """Seconds of the fastest redistribution from each source (row) to each target (column): float64.

    Forward plus, if ``grad``, backward; inf where none exists. Equals the ``seconds`` of
    ``redistribution(..., minimize="seconds")``.
    """
    if not sources or not targets:
        return np.zeros((len(sources), len(targets)))
    mesh, kinds = sources[0].mesh, kinds_of((*sources, *targets), grad)
    index = space(mesh.shape, len(shape), kinds).index
    rows, columns = ([index[state_of(x, len(shape), grad=grad)] for x in side] for side in (sources, targets))
    return _all_pairs(mesh, tuple(shape), dtype.itemsize, kinds, grad)[np.ix_(rows, columns)]


@lru_cache(maxsize=256)
def _all_pairs(mesh: Mesh, shape: tuple[int, ...], itemsize: int, kinds: tuple[str, ...], grad: bool) -> Floats:
    """Floyd-Warshall over all states."""
    prices = price(mesh, shape, itemsize, kinds, grad)
    graph = prices.space
    distance = np.full((len(graph.states), len(graph.states)), np.inf)
    np.minimum.at(distance, (graph.src, graph.dst), prices.seconds)
    np.fill_diagonal(distance, 0.0)
    through = np.empty_like(distance)
    for k in range(len(distance)):
        np.add(distance[:, k, None], distance[k], out=through)
        np.minimum(distance, through, out=distance)
    return distance
