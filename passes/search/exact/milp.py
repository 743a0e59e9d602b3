"""A cost network as a mixed-integer programme (MILP) for HiGHS: the core after elimination.

Source: Huangfu and Hall, Parallelizing the dual revised simplex method (2018), for HiGHS: one thread, quiet, reproducible."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import highspy
import numpy as np
from numpy.typing import NDArray

from autoshard.passes.search.exact.elimination import Scope
from autoshard.passes.search.limits import LIMITS
from autoshard.passes.search.network import Array


def highs_solver(**options: bool | int | float) -> highspy.Highs:
    highs = highspy.Highs()
    for name, value in {"output_flag": False, "random_seed": 0, "threads": 1, **options}.items():
        highs.setOptionValue(name, value)
    return highs


def run_highs(highs: highspy.Highs) -> None:
    """Solve. HiGHS has one thread count per process, set by its first run: if another library has
    set it, that count is used."""
    if highs.run() == highspy.HighsStatus.kError:
        highs.setOptionValue("threads", 0)
        highs.run()


# HiGHS has absolute tolerances of about 1e-7; scaled costs make them irrelevant for the gap.
SCALE = 1e4


Factors = Sequence[tuple[Scope, Array]]


def variable_count(factors: Iterable[tuple[Scope, Array]]) -> int:
    return sum(int(np.isfinite(array).sum()) for _, array in factors)


@dataclass(frozen=True)
class MilpLimit:
    """Σ amounts[scope][chosen] ≤ limit; excess costs ``price`` a unit. Scopes are factors."""

    amounts: Mapping[Scope, Array]
    limit: float
    price: float = math.inf

    @property
    def unit(self) -> float:
        """Largest amount: rows are scaled by it, since the tolerances of HiGHS are absolute."""
        return max((float(np.abs(a).max()) for a in self.amounts.values()), default=0.0) or 1.0


@dataclass(frozen=True)
class CoreSolution:
    """``choice``: None if not found; ``lower_bound``: ∞ if infeasible."""

    choice: dict[int, int] | None
    lower_bound: float
    exact: bool


@dataclass
class _Rows:
    """A sparse matrix by entries, with bounds of its rows."""

    row: list[NDArray[np.intp]] = field(default_factory=list)
    column: list[NDArray[np.intp]] = field(default_factory=list)
    value: list[Array] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def reserve(self, count: int, lower: float, upper: float) -> int:
        """The first of ``count`` new rows."""
        first = len(self.lower)
        self.lower += [lower] * count
        self.upper += [upper] * count
        return first

    def put(self, row: NDArray[np.intp], column: NDArray[np.intp], value: float | Array) -> None:
        self.row.append(row)
        self.column.append(column)
        self.value.append(np.broadcast_to(np.asarray(value, dtype=np.float64), row.shape))


def solve_core(
    factors: Factors,
    sizes: Sequence[int],
    *,
    upper: float = math.inf,
    limits: Sequence[MilpLimit] = (),
    time_limit: float = math.inf,
    most_nodes: int | None = None,
    most_entries: float = math.inf,
) -> CoreSolution:
    """Minimise the sum of vectors and matrices over one strategy per node. Variables: x[i, s]
    binary, y[edge, s, t] ≥ 0 with Σ_t y = x[i, s] and Σ_s y = x[j, t] (local polytope; mostly
    integral here). ``upper``: ignore costlier choices. Limits: seconds, nodes of branch and
    bound, variables."""
    if not factors:
        return CoreSolution({}, 0.0, True)
    least = {scope: float(array.min()) for scope, array in factors}
    constant = sum(least.values())
    if math.isinf(constant):
        return CoreSolution(None, math.inf, True)
    ceiling = upper - constant + 1e-9 * abs(upper) if math.isfinite(upper) else math.inf
    if ceiling < 0:
        return CoreSolution(None, math.inf, True)
    reduced = [
        (scope, np.where(array - least[scope] <= ceiling, array - least[scope], np.inf)) for scope, array in factors
    ]
    if variable_count(reduced) > min(most_entries, LIMITS.entries_per_second * time_limit):
        return CoreSolution(None, constant, False)
    largest = max((float(array[np.isfinite(array)].max()) for _, array in reduced), default=0.0)
    scale = SCALE / min(ceiling, largest) if min(ceiling, largest) > 0 else 1.0
    lp, start = _build_programme(reduced, sizes, scale, limits)
    options: dict[str, int | float] = {"mip_rel_gap": 0.0, "mip_abs_gap": 0.0}
    if limits:
        options |= {"mip_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9}
    if most_nodes is not None:
        options["mip_max_nodes"] = most_nodes
    if math.isfinite(time_limit):
        options["time_limit"] = time_limit
    highs = highs_solver(**options)
    highs.passModel(lp)
    run_highs(highs)
    status, info = highs.getModelStatus(), highs.getInfo()
    if status == highspy.HighsModelStatus.kInfeasible:
        return CoreSolution(None, math.inf, True)
    exact = status == highspy.HighsModelStatus.kOptimal
    bound = constant + (info.mip_dual_bound / scale if math.isfinite(info.mip_dual_bound) else 0.0)
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return CoreSolution(None, bound, False)
    values = np.asarray(highs.getSolution().col_value)
    choice = {node: int(np.argmax(values[first : first + sizes[node]])) for node, first in start.items()}
    return CoreSolution(choice, bound, exact)


def _build_programme(
    factors: Factors, sizes: Sequence[int], scale: float, limits: Sequence[MilpLimit]
) -> tuple[highspy.HighsLp, dict[int, int]]:
    """The programme, and every node's first column."""
    nodes = sorted({node for scope, _ in factors for node in scope})
    start = dict(zip(nodes, np.cumsum([0] + [sizes[node] for node in nodes]).tolist(), strict=False))
    binaries = sum(sizes[node] for node in nodes)
    cost = [np.zeros(binaries)]
    rows = _Rows()
    exceeding = [rows.reserve(1, -math.inf, limit.limit / limit.unit) for limit in limits]
    for node in nodes:
        columns = start[node] + np.arange(sizes[node])
        rows.put(np.full(sizes[node], rows.reserve(1, 1.0, 1.0)), columns, 1.0)
    count = binaries
    for scope, array in factors:
        if len(scope) == 1:
            cost[0][start[scope[0]] : start[scope[0]] + array.size] = array
            _add_limit_terms(
                rows, limits, exceeding, scope, start[scope[0]] + np.arange(array.size), (np.arange(array.size),)
            )
            continue
        pairs = np.nonzero(np.isfinite(array))
        columns = count + np.arange(len(pairs[0]))
        count += len(columns)
        cost.append(array[pairs])
        for node, index in zip(scope, pairs, strict=True):
            first = rows.reserve(sizes[node], 0.0, 0.0)
            rows.put(first + index, columns, 1.0)
            rows.put(first + np.arange(sizes[node]), start[node] + np.arange(sizes[node]), -1.0)
        _add_limit_terms(rows, limits, exceeding, scope, columns, pairs)
    soft = [(row, limit) for row, limit in zip(exceeding, limits, strict=True) if math.isfinite(limit.price)]
    for column, (row, limit) in enumerate(soft, count):
        rows.put(np.array([row]), np.array([column]), -1.0)
        cost.append(np.array([limit.price * limit.unit]))
    return _assemble(np.concatenate(cost) * scale, binaries, len(soft), rows), start


def _add_limit_terms(
    rows: _Rows,
    limits: Sequence[MilpLimit],
    exceeding: Sequence[int],
    scope: Scope,
    columns: NDArray[np.intp],
    pairs: tuple[NDArray[np.intp], ...],
) -> None:
    """Add the terms of one factor, its ``pairs``, to the limits."""
    for row, limit in zip(exceeding, limits, strict=True):
        if scope in limit.amounts:
            amounts = limit.amounts[scope][pairs] / limit.unit
            used = np.flatnonzero(amounts)
            rows.put(np.full(len(used), row), columns[used], amounts[used])


def _assemble(cost: Array, binaries: int, excesses: int, rows: _Rows) -> highspy.HighsLp:
    row, column, value = np.concatenate(rows.row), np.concatenate(rows.column), np.concatenate(rows.value)
    order = np.lexsort((row, column))
    allowed = np.isfinite(cost)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cost), len(rows.lower)
    lp.col_cost_ = np.where(allowed, cost, 0.0)
    most = np.where(allowed, 1.0, 0.0)
    most[len(cost) - excesses :] = highspy.kHighsInf
    lp.col_lower_, lp.col_upper_ = np.zeros(len(cost)), most
    lp.row_lower_, lp.row_upper_ = np.array(rows.lower), np.array(rows.upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.bincount(column, minlength=len(cost)))])
    lp.a_matrix_.index_, lp.a_matrix_.value_ = row[order], value[order]
    kinds = highspy.HighsVarType
    lp.integrality_ = [kinds.kInteger] * binaries + [kinds.kContinuous] * (len(cost) - binaries)
    return lp
