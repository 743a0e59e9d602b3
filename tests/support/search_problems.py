"""Random problems of the search under a limit over time."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np

from autoshard.passes.search import CostNetwork

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from contest.liveness import Memory


def problem(seed: int, nodes: int, limit: float, alive: int = 3, never: float = 0.15) -> tuple[CostNetwork, Memory]:
    """A chain with short cuts; every strategy of a node holds twice as much as the one before, and some pairs are forbidden."""
    generator = np.random.default_rng(seed)
    sizes = generator.integers(2, 5, nodes)
    vectors = tuple(generator.integers(0, 20, n).astype(np.float64) for n in sizes)
    pairs = [(i, i + 1) for i in range(nodes - 1)] + [(i, i + 3) for i in range(0, nodes - 3, 2)]
    edges = []
    for i, j in pairs:
        matrix = generator.integers(0, 9, (sizes[i], sizes[j])).astype(np.float64)
        matrix[generator.random(matrix.shape) < never] = math.inf
        edges.append((i, j, matrix))
    usage = tuple(2.0 ** np.arange(n) * generator.integers(1, 4) for n in sizes)
    lives = tuple((i, i + int(generator.integers(1, alive + 1))) for i in range(nodes))
    return CostNetwork(vectors, tuple(edges)), Memory(usage, limit, lives)
