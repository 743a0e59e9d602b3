"""The core that elimination leaves, as a mixed-integer programme for HiGHS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import highspy
import numpy as np

from ...errors import PlanError
from .network import Array


@dataclass(frozen=True)
class CoreSolution:
    choice: dict[int, int]
    lower_bound: float
    exact: bool


def solve_core(
    factors: Sequence[tuple[tuple[int, ...], Array]],
    sizes: Sequence[int],
    *,
    time_limit: float | None = None,
) -> CoreSolution:
    """Minimise the sum of vectors and matrices over one strategy per node.

    Variables: x[i, s] binary, y[edge, s, t] ≥ 0 with Σ_t y = x[i, s] and Σ_s y = x[j, t] (the local polytope, whose
    LP is mostly integral on these networks).
    """
    nodes = sorted({node for scope, _ in factors for node in scope})
    start: dict[int, int] = {}
    cost: list[Array] = []
    count = 0
    for node in nodes:
        start[node] = count
        count += sizes[node]
    unary = {scope[0]: array for scope, array in factors if len(scope) == 1}
    cost += [unary.get(node, np.zeros(sizes[node])) for node in nodes]
    rows: list[tuple[Array, Array, float]] = []
    columns: list[tuple[np.ndarray, np.ndarray]] = []
    row_of = []
    number = len(nodes)
    for scope, array in factors:
        if len(scope) == 2:
            row_of.append((number, scope, array))
            number += sum(array.shape)
    matrix_rows, matrix_columns, matrix_values = [], [], []
    for k, node in enumerate(nodes):
        matrix_rows.append(np.full(sizes[node], k))
        matrix_columns.append(np.arange(start[node], start[node] + sizes[node]))
        matrix_values.append(np.ones(sizes[node]))
    total = count
    for first, (i, j), array in row_of:
        s, t = np.nonzero(np.isfinite(array))
        y = total + np.arange(len(s))
        total += len(s)
        cost.append(array[s, t])
        for base, node, index in ((first, i, s), (first + array.shape[0], j, t)):
            n = sizes[node]
            matrix_rows += [base + index, base + np.arange(n)]
            matrix_columns += [y, start[node] + np.arange(n)]
            matrix_values += [np.ones(len(s)), -np.ones(n)]
    costs = np.concatenate(cost)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = total, number
    finite = np.isfinite(costs)
    lp.col_cost_ = np.where(finite, costs, 0.0)
    lp.col_lower_ = np.zeros(total)
    lp.col_upper_ = np.where(finite, 1.0, 0.0)
    lp.row_lower_ = lp.row_upper_ = np.concatenate([np.ones(len(nodes)), np.zeros(number - len(nodes))])
    r, c, v = map(np.concatenate, (matrix_rows, matrix_columns, matrix_values))
    order = np.lexsort((r, c))
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.bincount(c, minlength=total))])
    lp.a_matrix_.index_ = r[order]
    lp.a_matrix_.value_ = v[order]
    lp.integrality_ = [highspy.HighsVarType.kInteger] * count + [highspy.HighsVarType.kContinuous] * (total - count)
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("random_seed", 0)
    highs.setOptionValue("mip_rel_gap", 0.0)
    highs.setOptionValue("mip_abs_gap", 0.0)
    if time_limit is not None:
        highs.setOptionValue("time_limit", float(time_limit))
    highs.passModel(lp)
    highs.run()
    status, info = highs.getModelStatus(), highs.getInfo()
    if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        reason = "has no solution" if status == highspy.HighsModelStatus.kInfeasible else "was not solved in time"
        raise PlanError(f"the core of the cost network ({len(nodes)} nodes) {reason}")
    values = np.asarray(highs.getSolution().col_value)
    choice = {node: int(np.argmax(values[start[node] : start[node] + sizes[node]])) for node in nodes}
    return CoreSolution(choice, info.mip_dual_bound, status == highspy.HighsModelStatus.kOptimal)
