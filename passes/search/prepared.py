"""Entry points of the search: unconstrained, with rows, with tied layers."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.exact.solver import solve_plain
from autoshard.passes.search.network import FULL, Array, CostNetwork, Effort, LinearRow, Solution
from autoshard.passes.search.rows.constrained import solve_alike, solve_within
from autoshard.passes.search.rows.lagrangian import ReducedProblem
from autoshard.passes.search.rows.stacked import Stacked, Stacks, stack_rows, unstacked
from autoshard.passes.search.rows.tied_layers import Tied, tie_layers


def solve(
    network: CostNetwork,
    *,
    rows: Sequence[LinearRow] = (),
    effort: float = 1.0,
    alike: Sequence[Hashable | None] | None = None,
    prices: Sequence[float] | None = None,
) -> Solution:
    """The cheapest strategy per node; ties go to the lowest index.
    ``rows``: linear constraints, see :class:`LinearRow`; cost and bound include priced excess.
    ``effort`` scales the proof's work if rows bind: equal work, and so equal choices, in every run.
    ``alike``: a label per node; equal labels mark equal layers, tied in a large network; None:
    untied. ``prices``: initial prices of the rows. Costs are rounded to 2^-50 of the sum of the
    tables' ranges, so float64 sums are exact and independent of their order: forbid by ``inf``, not
    by huge numbers. Raises PlanError with the least usage found if nothing is feasible."""
    return Prepared(network, tuple(rows), alike).solve(None, Effort(effort), prices).proven()


@dataclass(frozen=True, eq=False)
class Prepared:
    """A network to solve under several limits of its rows, with shared preparation."""

    network: CostNetwork
    rows: tuple[LinearRow, ...] = ()
    alike: Sequence[Hashable | None] | None = None
    stacks: Stacks = field(default_factory=Stacks)
    large: ClassVar[int] = 5_000_000
    """entries of all tables from which on equal layers are tied"""

    def lean(self) -> Prepared:
        """The same without source tables: network and rows become views of the problem."""
        network, rows = unstacked(self._problem)
        found = replace(self, network=network, rows=rows)
        assert found._problem.factors == self._problem.factors  # the stacks know only these tables
        return found

    def solve(
        self,
        limits: Sequence[float] | None = None,
        effort: Effort = FULL,
        prices: Sequence[float] | None = None,
    ) -> Solution:
        """See :func:`solve`; the bound may be pending. ``limits``: of the rows (infinite: none);
        None: their own."""
        if self._tied is None and not self.rows:
            return solve_plain(self.network)
        problem = self._problem if limits is None else replace(self._problem, limits=self._finite(limits))
        if self._tied is not None:
            tied = replace(self._tied, problem=replace(self._tied.problem, limits=problem.limits))
            with contextlib.suppress(PlanError):  # infeasible unless layers differ
                found = solve_alike(self._reduced_tied, problem, tied, effort, prices)
                thorough = partial(self.solve, limits, replace(effort, rough=False), prices)
                return replace(found, search_on=thorough if effort.rough else None)
        if all(math.isinf(row.price) for row in self.rows):  # slack rows change nothing
            found = solve_plain(self.network, milp=False)
            if found.exact and (problem.used(found.choice) <= problem.limits).all():
                return found
        return solve_within(self._reduced, problem, effort, prices)

    def _finite(self, limits: Sequence[float]) -> Array:
        """``limits``; an infinite one becomes what no choice exceeds."""
        given = np.array(limits)
        free = np.isinf(given)
        return np.where(free, self._problem.scale, given) if free.any() else given

    @cached_property
    def _problem(self) -> Stacked:
        return stack_rows(self.network, self.rows, self.stacks)

    @cached_property
    def _tied(self) -> Tied | None:
        """The problem of the distinct layers, if the network is large."""
        large = sum(matrix.size for *_, matrix in self.network.edges) >= self.large
        return None if self.alike is None or not large else tie_layers(self._problem, self.alike)

    @cached_property
    def _reduced(self) -> ReducedProblem:
        return ReducedProblem(self._problem)

    @cached_property
    def _reduced_tied(self) -> ReducedProblem:
        assert self._tied is not None
        return ReducedProblem(self._tied.problem)
