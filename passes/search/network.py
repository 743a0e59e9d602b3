"""The cost network (weighted constraint network): node costs, edge costs, one strategy per node."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import PlanError
from autoshard.passes.search.arrays import Matrix, dense_matrix
from autoshard.passes.search.limits import LIMITS

Choice = tuple[int, ...]
"""a strategy of every node"""

Array = NDArray[np.float64]

CLOSED_GAP = 1e-9
"""relative gap between cost and bound that counts as none"""
ROUNDING = 1e-6
"""relative excess of a bound over the cost that is rounding"""


class NotFoundError(PlanError):
    """Out of time: whether a feasible choice exists is unknown."""


@dataclass(frozen=True)
class CostNetwork:
    """``nodes[i]``: float64 [n_i], costs; ``edges``: (i, j, float64 [n_i, n_j] or compact), which
    add up. ``inf`` forbids a choice. Equal layers should share arrays: equal subproblems are
    recognised by identity first."""

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
        return tuple((i, j, dense_matrix(matrix)) for i, j, matrix in self.edges)

    def cost(self, choice: tuple[int, ...]) -> float:
        """Total cost of one strategy per node."""
        total = sum(float(vector[s]) for vector, s in zip(self.nodes, choice, strict=True))
        return total + sum(float(matrix[choice[i], choice[j]]) for i, j, matrix in self.edges)


@dataclass(frozen=True)
class LinearRow:
    """A linear side constraint: Σ nodes[i][s_i] + Σ edges[e][s_i, s_j] ≤ limit; excess costs
    ``price`` a unit.
    ``nodes``: float64 [n_i] per node; ``edges``: float64 [n_i, n_j] per edge, in the network's
    order, compact where the network's is, with the same classes; None: zeros. Infinite ``price``: a
    hard limit. Amounts are finite and may be negative. Share arrays where the network does."""

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
    """One strategy per node. Optimal if ``exact``, else the optimum is in [lower_bound, cost]."""

    choice: tuple[int, ...]
    cost: float
    lower_bound: float
    exact: bool
    stats: dict[str, Any] = field(default_factory=dict)
    prices: tuple[float, ...] = ()
    """Lagrangian prices of the rows that gave the bound"""
    prove: Callable[[], float] | None = None
    """computes the bound, which takes a while, if ``lower_bound`` is not set: see :meth:`proven`"""

    search_on: Callable[[], Solution] | None = None
    """refines a rough search, see :attr:`Effort.rough`: as good or better"""

    def proven(self) -> Solution:
        if self.prove is None:
            return self
        return self.bounded(self.prove())

    def bounded(self, bound: float) -> Solution:
        """With ``bound``; if it exceeds the cost it is for other choices, and dropped."""
        size, gap = abs(self.cost), self.cost - bound
        below = gap >= -ROUNDING * size
        lower = min(bound, self.cost) if below else -math.inf
        return replace(self, lower_bound=lower, exact=below and gap <= CLOSED_GAP * size, prove=None, search_on=None)


@dataclass(frozen=True)
class Effort:
    """Work limits of a constrained search: equal work in every run, and so equal choices."""

    part: float = 1.0
    """share of the work that proofs take"""
    branches: bool = True
    """whether to branch on a duality gap"""

    rough: bool = False
    """whether equal layers must choose alike even at a cost; :attr:`Solution.search_on` refines"""
    enough: float = LIMITS.enough
    """sufficient relative gap between cost and bound"""

    def of(self, count: float) -> int:
        """This share of ``count``, at least one."""
        return math.ceil(count * self.part)


FULL = Effort()
QUICK = Effort(0.1, branches=False, enough=0.01)
"""of an estimate, and of each stage of a long pipeline"""
