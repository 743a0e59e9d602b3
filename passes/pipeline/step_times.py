"""Step times of many stage cuts at once, and a lower bound for all; no shared processors. An action
ends its own seconds after the last of what it waits for: a step is the longest path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import highspy
import numpy as np

from autoshard.passes.pipeline.schedules import Action, Orders, StageSeconds, numbered_actions
from autoshard.passes.search.exact.milp import highs_solver, run_highs

Array = np.ndarray

SOLVER_TOLERANCE = 1e-6
"""constraint tolerance of the bound, as a share of all work; the solver's is 1e-7"""


def cut_step_seconds(orders: Orders, cuts: Sequence[Sequence[StageSeconds]]) -> Array:
    """float64 [cuts]: seconds of each cut's step; :class:`ValueError` for a deadlock."""
    last = len(cuts[0]) - 1
    kinds = sorted({a.kind for order in orders for a in order})
    adds = {
        (kind, s): np.array([_action_seconds(cut, kind, s) for cut in cuts]) for kind in kinds for s in range(last + 1)
    }
    ends, made = [np.zeros(len(cuts))] * len(orders), dict[int, Array]()
    for rank, action, needs, number in _in_turn(orders, last):
        end = ends[rank] if needs < 0 else np.maximum(ends[rank], made.pop(needs))
        ends[rank] = end = end + adds[action]
        if number >= 0:
            made[number] = end
    once = np.array([[cut[s].once for cut in cuts] for s in range(last + 1)])
    return np.max([end + once[rank :: len(orders)].sum(axis=0) for rank, end in enumerate(ends)], axis=0)


def _action_seconds(cut: Sequence[StageSeconds], kind: str, stage: int) -> float:
    """Seconds of an action and of the message it waits for."""
    source = stage - {"F": 1, "W": 0}.get(kind, -1)
    if kind == "W" or not 0 <= source < len(cut):
        return cut[stage].of(kind)
    return cut[stage].of(kind) + (cut[source].send if kind == "F" else cut[source].send_back)


@lru_cache(maxsize=4)
def _in_turn(orders: Orders, last: int) -> tuple[tuple[int, tuple[str, int], int, int], ...]:
    """All actions in a feasible order, as (rank, (kind, stage), needed action, own number); -1
    without a message to wait for, or without a receiver."""
    steps, _ = numbered_actions(orders, last)
    found, done, made = list[tuple[int, tuple[str, int], int, int]](), [0] * len(orders), set[int]()
    waiting: dict[int, int] = {}
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        for action, number, needs, target in steps[rank][done[rank] :]:
            if needs >= 0 and needs not in made:
                waiting[needs] = rank
                break
            found.append((rank, (action.kind, action.stage), needs, number if target >= 0 else -1))
            done[rank] += 1
            if target >= 0:
                made.add(number)
                if number in waiting:
                    ready.append(waiting.pop(number))
    if len(found) < sum(map(len, orders)):
        raise ValueError("the orders of a schedule wait for each other")
    return tuple(found)


def step_lower_bound(orders: Orders, stages: int, work: Mapping[str, float]) -> float:
    """Lower bound in seconds of the step of any cut; ``work``: by kind, of one micro-batch. A step
    is at least a rank's actions from a first to a last one, plus other stages' parts of these
    two micro-batches. A linear program spreads the work such that the largest sum is least."""
    kinds = sorted({a.kind for order in orders for a in order})
    column = {(kind, s): i * stages + s for i, kind in enumerate(kinds) for s in range(stages)}
    rows = np.array(
        [_path_coefficients(column, pair, within) for order in orders for pair, within in _action_spans(order)]
    )
    dealt = np.repeat(np.eye(len(kinds)), stages, axis=1)
    # The last column is the step. Work is scaled to sum to 1.
    whole = sum(work[kind] for kind in kinds) or 1.0
    table = np.block([[rows, np.full((len(rows), 1), -1.0)], [dealt, np.zeros((len(kinds), 1))]])
    parts = np.array([work[kind] / whole for kind in kinds])
    low = np.concatenate([np.full(len(rows), -np.inf), parts])
    return whole * _minimum_of_last(table, low, np.concatenate([np.zeros(len(rows)), parts]))


def _action_spans(order: Sequence[Action]) -> Iterator[tuple[tuple[Action, Action], Mapping[tuple[str, int], int]]]:
    """First and last actions of each (kind, stage) of a rank in pairs, with the work between."""
    first, last = dict[tuple[str, int], int](), dict[tuple[str, int], int]()
    for place, action in enumerate(order):
        first.setdefault(action[:2], place)
        last[action[:2]] = place
    count, before, until = Counter[tuple[str, int]](), dict[int, Counter[tuple[str, int]]](), {}
    begins, ends = set(first.values()), set(last.values())
    for place, action in enumerate(order):
        if place in begins:
            before[place] = count.copy()
        count[action[:2]] += 1
        if place in ends:
            until[place] = count.copy()
    for begin in sorted(begins):
        for end in sorted(ends):
            if begin <= end:
                yield (order[begin], order[end]), until[end] - before[begin]


def _path_coefficients(
    column: Mapping[tuple[str, int], int], pair: tuple[Action, Action], within: Mapping[tuple[str, int], int]
) -> Array:
    """float64 [columns]: multiplicity of each (kind, stage) on the path."""
    found = np.zeros(len(column))
    for what, times in within.items():
        found[column[what]] += times
    (begin, end), back = pair, "I" if ("I", 0) in column else "B"
    for (kind, stage), i in column.items():
        # A micro-batch runs forward through all stages, then back; W leads to no other stage.
        if begin.kind == "F":
            found[i] += kind == "F" and stage < begin.stage
        else:
            found[i] += kind == "F" or (kind == back and stage >= begin.stage + (begin.kind == back))
        if end.kind == "F":
            found[i] += (kind == "F" and stage > end.stage) or kind == back
        elif end.kind == back:
            found[i] += kind == back and stage < end.stage
    return found


def _minimum_of_last(table: Array, low: Array, high: Array) -> float:
    """Least last of variables x ≥ 0 with low ≤ ``table`` x ≤ high, less SOLVER_TOLERANCE."""
    programme, columns = highspy.HighsLp(), table.shape[1]
    programme.num_row_, programme.num_col_ = table.shape
    programme.col_cost_ = np.eye(columns)[-1]
    programme.col_lower_, programme.col_upper_ = np.zeros(columns), np.full(columns, np.inf)
    programme.row_lower_, programme.row_upper_ = low, high
    row, at = np.nonzero(table)
    programme.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    programme.a_matrix_.start_ = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=len(table)))])
    programme.a_matrix_.index_, programme.a_matrix_.value_ = at, table[row, at]
    highs = highs_solver()
    highs.passModel(programme)
    run_highs(highs)
    return float(highs.getInfo().objective_function_value) * (1 - SOLVER_TOLERANCE)
