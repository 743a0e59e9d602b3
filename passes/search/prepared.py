"""The way into the search: without rows, under rows, over time, and with equal layers as one."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import ClassVar

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.exact.solver import cheaper, plainly, relaxed
from autoshard.passes.search.network import FULL, Array, CostNetwork, Effort, Memory, Row, Solution
from autoshard.passes.search.over_time.lives import Lives
from autoshard.passes.search.over_time.search import Better, quietly, solve_over_time
from autoshard.passes.search.rows.alike import Tied, tie
from autoshard.passes.search.rows.prices import Reduced
from autoshard.passes.search.rows.stacked import Stacked, Stacks, stack_rows, unstacked
from autoshard.passes.search.rows.within import solve_alike, solve_within


def solve(
    network: CostNetwork,
    *,
    rows: Sequence[Row] = (),
    memory: Memory | None = None,
    effort: float = 1.0,
    time_limit: float | None = None,
    alike: Sequence[Hashable | None] | None = None,
    prices: Sequence[float] | None = None,
    better: Better = quietly,
) -> Solution:
    """The cheapest strategy per node; ties go to the lowest index.

    ``rows``: sums that cost, or must not, exceed a limit, see :class:`Row`; cost and bound then include what the excess
    costs. ``memory``: see :class:`Memory` (instead of rows). ``effort`` scales the work that is spent on the proof where
    rows bind: the same work, and so the same choice, in every run. ``time_limit``: seconds after which the best choice so
    far is returned, with ``exact=False`` and a valid lower bound. ``alike``: a label per node, equal for those of equal
    layers that should choose alike where the network is large; None: unlike all others. ``prices``: of the rows, where the
    search for the best begins. ``better``: told of every better choice under a ``memory`` with lives.
    Costs are rounded to 2^-50 of the sum of the tables'
    ranges, so that float64 sums are exact and do not depend on their order: forbid with ``inf``, not with a huge number.
    Raises PlanError when no choice is feasible, with the least usage found.
    """
    begin, limit = time.perf_counter(), math.inf if time_limit is None else time_limit
    if memory is not None and memory.intervals is not None:
        lives = Lives.of(network, memory)
        if lives.count:
            return solve_over_time(lives, cheaper, limit - (time.perf_counter() - begin), effort, better)
        return plainly(network, time.perf_counter() + limit)
    if memory is not None:
        rows = [*rows, Row(memory.usage, (None,) * len(network.edges), memory.limit)]
    return Prepared(network, tuple(rows), alike).solve(None, Effort(effort), limit, prices).proven()


@dataclass(frozen=True, eq=False)
class Prepared:
    """A network to be solved under several limits of its rows: what these searches have in common is made once."""

    network: CostNetwork
    rows: tuple[Row, ...] = ()
    alike: Sequence[Hashable | None] | None = None
    stacks: Stacks = field(default_factory=Stacks)
    large: ClassVar[int] = 5_000_000
    """entries of all tables from which on equal layers are searched as one"""

    def restricted(self, nodes: tuple[Array, ...]) -> Prepared:
        """With other vectors of the nodes."""
        return replace(self, network=replace(self.network, nodes=nodes))

    def lean(self) -> Prepared:
        """The same, without the tables that it was made of: its network and rows are views of what is solved."""
        network, rows = unstacked(self._problem)
        found = replace(self, network=network, rows=rows)
        assert found._problem.factors == self._problem.factors  # while the stacks know these tables and no others
        return found

    def solve(
        self,
        limits: Sequence[float] | None = None,
        effort: Effort = FULL,
        time_limit: float = math.inf,
        prices: Sequence[float] | None = None,
    ) -> Solution:
        """See :func:`solve`; ``limits``: of the rows, None: their own. The bound may be still to be found."""
        if self._tied is None and not self.rows:
            return plainly(self.network, time.perf_counter() + time_limit)
        problem = self._problem if limits is None else replace(self._problem, limits=np.array(limits))
        if self._tied is not None:
            tied = replace(self._tied, problem=replace(self._tied.problem, limits=problem.limits))
            with contextlib.suppress(PlanError):  # then layers must differ, if there is a choice at all
                found = solve_alike(self._reduced_tied, problem, tied, relaxed, time_limit, effort, prices)
                thorough = partial(self.solve, limits, replace(effort, rough=False), time_limit, prices)
                return replace(found, search_on=thorough if effort.rough else None)
        if all(math.isinf(row.price) for row in self.rows):  # where there is room to spare nothing changes
            found = plainly(self.network, time.perf_counter() + time_limit, milp=False)
            if found.exact and (problem.used(found.choice) <= problem.limits).all():
                return found
        return solve_within(self._reduced, problem, relaxed, time_limit, effort, prices)

    @cached_property
    def _problem(self) -> Stacked:
        return stack_rows(self.network, self.rows, self.stacks)

    @cached_property
    def _tied(self) -> Tied | None:
        """The problem in terms of its distinct layers, where it is large."""
        large = sum(matrix.size for *_, matrix in self.network.edges) >= self.large
        return None if self.alike is None or not large else tie(self._problem, self.alike)

    @cached_property
    def _reduced(self) -> Reduced:
        return Reduced(self._problem)

    @cached_property
    def _reduced_tied(self) -> Reduced:
        assert self._tied is not None
        return Reduced(self._tied.problem)
