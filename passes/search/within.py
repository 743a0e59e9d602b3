"""The cheapest choice with rows: Lagrangian prices for the bound, mixtures of the choices seen, the MILP for the rest."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.bound import Dual
from autoshard.passes.search.eliminate import Eliminator
from autoshard.passes.search.milp import Limit, solve_core
from autoshard.passes.search.network import Solution
from autoshard.passes.search.prices import GAP, Relaxed, Search, maximise_bound
from autoshard.passes.search.prune import NO_CHOICE
from autoshard.passes.search.stacked import Choice, Stacked
from autoshard.passes.search.tables import Classes, Tables

# Iterations of the bound at effort 1, and of the search for a choice within the limits.
ITERATIONS = 60
# Sweeps of message passing before the MILP; entries and nodes of its tree beyond which it is not tried, or ends.
SWEEPS = 30
MILP_ENTRIES = 40_000
MILP_NODES = 20_000
# The MILP first looks only this far above the bound, as a part of it; each failure looks four times as far.
FIRST_LOOK = 0.002
MAX_LOOKS = 6


def solve_within(problem: Stacked, relaxed: Relaxed, limit: float, effort: float) -> Solution:
    """The cheapest choice of ``problem``; ``relaxed`` solves a network without rows; ``limit``: seconds."""
    begin = time.perf_counter()
    search = Search(problem, relaxed, begin + limit, prices=np.zeros(len(problem.limits)))
    maximise_bound(search, 1)
    if search.choice is None:
        fit(search, effort)
    maximise_bound(search, math.ceil(ITERATIONS * effort))
    bounded = time.perf_counter()
    looks = 0 if search.closed else close_gap(search, effort)
    if search.choice is None:
        raise PlanError("no choice within the limits of all rows was found")
    stats = {
        "rows": len(problem.limits),
        "solved": search.solved,
        "looks": looks,
        "seconds": {"bound": round(bounded - begin, 3), "rest": round(time.perf_counter() - bounded, 3)},
    }
    lower = search.total if search.closed else min(search.bound, search.total)
    return Solution(search.choice, search.total, lower, search.closed, stats)


def fit(search: Search, effort: float) -> None:
    """A choice within the hard limits, whatever it costs. Raises PlanError with the least usage found if there is none."""
    problem = search.problem
    hard = np.flatnonzero(np.isinf(problem.prices))
    if problem.live is None and len(hard) == 1:
        weights = np.zeros(len(problem.limits))
        weights[hard] = 1.0
        found = search.relaxed(problem.priced(weights, unit=0.0), search.deadline)
        search.offer(found.choice)
        if search.choice is None:
            proven = "" if found.exact else " found"
            raise PlanError(_unfit(problem, found.choice, hard, proven))
        return
    free = [np.concatenate([np.where(np.isinf(s[:1]), np.inf, 0.0), s[1:]]) for s in problem.stacks]
    scale = np.maximum(np.abs(problem.limits), 1e-300)
    prices = np.where(np.isinf(problem.prices), 1 / scale, 0.0)
    only = Search(replace(problem, stacks=free, prices=prices), search.relaxed, search.deadline)
    only.prices = np.zeros(len(prices))
    maximise_bound(only, math.ceil(ITERATIONS * effort))
    if only.total > 0 and not only.closed:
        close_gap(only, effort)
    if only.choice is None:
        raise PlanError(NO_CHOICE)
    search.offer(only.choice)
    if search.choice is None:
        raise PlanError(_unfit(problem, only.choice, hard, "" if only.closed else " found"))


def _unfit(problem: Stacked, choice: Choice, hard: np.ndarray, found: str) -> str:
    used, limits = problem.used(choice)[hard], problem.limits[hard]
    k = int(np.argmax(used - limits))
    return f"no choice fits the limit of {limits[k]:.6g}: the least{found} that any choice uses is {used[k]:.6g}"


def close_gap(search: Search, effort: float) -> int:
    """Prune by the Lagrangian bound and solve what is left as a MILP, looking further and further above the bound."""
    looks, reach = 0, FIRST_LOOK * abs(search.bound)
    while not search.closed and not search.late:
        last = looks == MAX_LOOKS or not 0 < reach < math.inf
        target = search.total if last else min(search.total, search.bound + reach)
        looks += 1
        completed = _look(search, target, effort)
        if last or not completed or target == search.total:
            break
        reach *= 4
    return looks


def _look(search: Search, target: float, effort: float) -> bool:
    """Search all choices that cost at most ``target``; returns whether this was completed (then the bound is known)."""
    try:
        kept = _within_reach(search, target + GAP * abs(target))
    except PlanError:
        kept = {0: np.zeros(0, dtype=np.intp)}
    if not all(map(len, kept.values())):  # nothing costs that little
        search.bound = max(search.bound, target)
        return True
    lower, completed = solve_programme(search, kept, target, effort)
    search.bound = max(search.bound, min(lower, target, search.total))
    return completed


def _within_reach(search: Search, upper: float) -> dict[int, Classes]:
    """Per node the strategies that some choice of cost up to ``upper`` may contain, by message passing."""
    network = Eliminator.of(search.problem.priced(search.prices), Tables())
    dual = Dual(network, constant=-float(search.prices @ search.problem.limits))
    for _ in range(SWEEPS):
        dual.sweep(upper)
    return dual.kept


def solve_programme(search: Search, kept: dict[int, Classes], target: float, effort: float) -> tuple[float, bool]:
    """Offers what the MILP finds among the ``kept``; returns (lower bound of these, whether it was solved to the end)."""
    problem = search.problem.restricted(kept)
    core = [(scope, problem.stacks[number][0]) for scope, number in sorted(problem.factors.items())]
    limits = []
    for r, (limit, price) in enumerate(zip(problem.limits, problem.prices, strict=True)):
        stacks = ((scope, problem.stacks[number]) for scope, number in problem.factors.items())
        if problem.live is None:
            amounts = {scope: stack[1 + r] for scope, stack in stacks if len(stack) > 1 + r}
        else:
            alive = problem.live[r]
            amounts = {scope: stack[1] for scope, stack in stacks if len(stack) > 1 and alive[scope[0]]}
        limits.append(Limit(amounts, float(limit), float(price)))
    left = max(search.deadline - time.perf_counter(), 1.0)
    found = solve_core(
        core,
        problem.sizes,
        upper=target,
        limits=limits,
        time_limit=left,
        most_nodes=math.ceil(MILP_NODES * effort),
        most_entries=math.ceil(MILP_ENTRIES * effort),
    )
    if found.choice is not None:
        search.offer(tuple(int(kept[i][found.choice[i]]) for i in range(len(problem.sizes))))
    return found.lower_bound, found.exact
