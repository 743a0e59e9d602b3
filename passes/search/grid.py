"""Costs as multiples of a power of two, so that float64 sums are exact and do not depend on their order."""

from __future__ import annotations

import math

import numpy as np

from autoshard.passes.search.network import CostNetwork

# Bits kept for the sum of all costs: float64 has 53, messages and sums need no more than the rest.
GRID_BITS = 50


def grid(network: CostNetwork) -> int:
    """The exponent of the power of two whose multiples add up exactly, whatever the choice."""
    arrays = {id(a): a for a in (*network.nodes, *(edge[2] for edge in network.edges))}
    largest = {key: _largest(array) for key, array in arrays.items()}
    total = sum(largest[id(a)] for a in network.nodes) + sum(largest[id(edge[2])] for edge in network.edges)
    return math.frexp(total)[1] - GRID_BITS


def on_grid(network: CostNetwork) -> CostNetwork:
    """The network with costs rounded to such multiples. Shared arrays stay shared."""
    exponent = grid(network)
    arrays = {id(a): a for a in (*network.nodes, *(edge[2] for edge in network.edges))}
    rounded = {key: np.ldexp(np.rint(np.ldexp(array, -exponent)), exponent) for key, array in arrays.items()}
    return CostNetwork(
        tuple(rounded[id(a)] for a in network.nodes), tuple((i, j, rounded[id(a)]) for i, j, a in network.edges)
    )


def _largest(array: np.ndarray) -> float:
    finite = array[np.isfinite(array)]
    return float(np.abs(finite).max()) if finite.size else 0.0
