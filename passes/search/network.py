"""The cost network and its solution: a vector of costs per node, a matrix per edge, one strategy to choose per node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import PlanError
from autoshard.passes.search.folded import Matrix, whole

Choice = tuple[int, ...]
"""a strategy of every node"""

Array = NDArray[np.float64]

GAP = 1e-9
"""between the cost and its bound, as a part of the cost: what counts as none"""
ROUNDING = 1e-6
"""by which a bound may come out above the cost, as a part of it"""


class NotFoundError(PlanError):
    """The time was up: whether there is a choice is not known."""


@dataclass(frozen=True)
class CostNetwork:
    """``nodes[i]``: float64 [n_i], the costs of node i's strategies; ``edges``: (i, j, float64 [n_i, n_j], maybe folded).

    ``inf`` forbids a choice. Several edges between one pair add up. Equal layers should share array objects: equal
    sub-problems are recognised by identity first, by content after that.
    """

    nodes: tuple[Array, ...]
    edges: tuple[tuple[int, int, Matrix], ...]

    def __post_init__(self) -> None:
        for i, vector in enumerate(self.nodes):
            if vector.ndim != 1 or vector.size == 0:
                raise PlanError(f"cost network: node {i} needs a non-empty vector of costs, got shape {vector.shape}")
        for i, j, matrix in self.edges:
            if not (0 <= i < len(self.nodes) and 0 <= j < len(self.nodes)) or i == j:
                raise PlanError(f"cost network: an edge joins two of {len(self.nodes)} nodes, got {i} and {j}")
            if matrix.shape != (self.nodes[i].size, self.nodes[j].size):
                raise PlanError(
                    f"cost network: edge {i}–{j} has shape {matrix.shape}, "
                    f"its nodes have {self.nodes[i].size} and {self.nodes[j].size} strategies"
                )

    @cached_property
    def matrices(self) -> tuple[tuple[int, int, Array], ...]:
        """The edges, none of them folded."""
        return tuple((i, j, whole(matrix)) for i, j, matrix in self.edges)

    def cost(self, choice: tuple[int, ...]) -> float:
        """The total cost of one strategy per node."""
        total = sum(float(vector[s]) for vector, s in zip(self.nodes, choice, strict=True))
        return total + sum(float(matrix[choice[i], choice[j]]) for i, j, matrix in self.edges)


@dataclass(frozen=True)
class Row:
    """A sum over the choices: Σ nodes[i][s_i] + Σ edges[e][s_i, s_j]. What exceeds ``limit`` costs ``price`` a unit.

    ``nodes``: float64 [n_i] per node of the network; ``edges``: float64 [n_i, n_j] per edge, in its order,
    folded where the network's is, and as it is; None: zeros.
    ``price`` inf: the limit must not be exceeded. Amounts are finite and may be negative. Share arrays where the network
    shares its own.
    """

    nodes: tuple[Array | None, ...]
    edges: tuple[Matrix | None, ...]
    limit: float
    price: float = math.inf

    def used(self, network: CostNetwork, choice: tuple[int, ...]) -> float:
        """The sum for one strategy per node."""
        total = sum(float(vector[s]) for vector, s in zip(self.nodes, choice, strict=True) if vector is not None)
        pairs = zip(self.edges, network.edges, strict=True)
        return total + sum(float(m[choice[i], choice[j]]) for m, (i, j, _) in pairs if m is not None)


@dataclass(frozen=True)
class Solution:
    """One strategy per node. ``exact``: proven optimal; otherwise the optimum lies in [lower_bound, cost]."""

    choice: tuple[int, ...]
    cost: float
    lower_bound: float
    exact: bool
    stats: dict[str, Any] = field(default_factory=dict)
    prices: tuple[float, ...] = ()
    """of the rows, where there are some: those that gave the bound"""
    prove: Callable[[], float] | None = None
    """finds the bound, which takes a while, where ``lower_bound`` is none yet: see :meth:`proven`"""

    search_on: Callable[[], Solution] | None = None
    """finds what is as good or better, where the search was a rough one: see :attr:`Effort.rough`"""

    def proven(self) -> Solution:
        """With its bound."""
        if self.prove is None:
            return self
        return self.bounded(self.prove())

    def bounded(self, bound: float) -> Solution:
        """With ``bound`` as its bound, and none where that lies above its cost: it is one of other choices."""
        size, gap = abs(self.cost), self.cost - bound
        below = gap >= -ROUNDING * size
        lower = min(bound, self.cost) if below else -math.inf
        return replace(self, lower_bound=lower, exact=below and gap <= GAP * size, prove=None, search_on=None)


@dataclass(frozen=True)
class Effort:
    """What a search under rows may take: the same work, and so the same choice, in every run."""

    part: float = 1.0
    """of the work that proofs take"""
    branches: bool = True
    """whether a gap that prices leave is branched on"""

    rough: bool = False
    """whether equal layers choose alike even where that costs: then :attr:`Solution.search_on` finds the rest"""

    def of(self, count: float) -> int:
        """So many of ``count``, at least one."""
        return math.ceil(count * self.part)


FULL = Effort()


@dataclass(frozen=True)
class Memory:
    """A limit on what the choices hold: ``usage[i]``: float64 [n_i], what node i's strategies hold; ``limit``: bytes.

    ``intervals[i]`` = [start, end) is node i's life, and the limit holds at every time; None: all live at once.
    """

    usage: tuple[Array, ...]
    limit: float
    intervals: tuple[tuple[int, int], ...] | None = None
