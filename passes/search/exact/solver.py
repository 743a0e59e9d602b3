"""The unconstrained search: prune, eliminate, bound and prune again; guess that the bound is nearly
met; then eliminate the rest or solve it as a MILP."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from autoshard.errors import PlanError
from autoshard.passes.search.arrays import grid_exponent, map_entries, on_grid, stored_values
from autoshard.passes.search.exact.elimination import ORDERS, EliminationStep, Eliminator, Tables
from autoshard.passes.search.exact.milp import solve_core, variable_count
from autoshard.passes.search.exact.pruning import NO_CHOICE, Dual, Pruner, restrict
from autoshard.passes.search.limits import LIMITS
from autoshard.passes.search.network import Choice, CostNetwork, NotFoundError, Solution

# Rounding noise of message passing, relative to the cost.
TOLERANCE = 1e-11
# Guesses of the optimum, one after another: bound + share × gap.
GUESSES = (1e-3, 1e-2, 1e-1)


Result = TypeVar("Result")


@dataclass
class ExactSearch:
    """State and statistics of one search."""

    network: Eliminator
    pruner: Pruner
    deadline: float
    milp: bool = True
    incumbent: dict[int, int] = field(default_factory=dict)
    mark: int = 0  # the incumbent covers the nodes left after this many steps
    upper: float = math.inf
    bound: float = -math.inf
    pruned: int = 0
    sweeps: int = 0
    core: tuple[int, int] = (0, 0)
    most_sweeps: int = sys.maxsize
    most_joined: float = math.inf  # entries of all remaining joins, without the MILP
    seconds: dict[str, float] = field(default_factory=dict)


def solve_plain(
    network: CostNetwork, milp: bool = True, start: Choice | None = None, deadline: float = math.inf
) -> Solution:
    """The cheapest choice. Without ``milp``, quick methods only, but no worse than ``start``."""
    rounded, pruner = network_on_grid(network), Pruner(Tables())
    work = Eliminator.of(rounded, pruner.tables)
    run = ExactSearch(work, pruner, deadline, milp)
    if start is not None:
        known = rounded.cost(start)
        run.upper = known + LIMITS.start_margin * abs(known)
    exact = _search(run)
    if start is None or run.incumbent or exact:
        choice = work.back_substitute(dict(run.incumbent), run.mark)
        chosen = tuple(choice[node] for node in range(len(network.nodes)))
    else:
        chosen = start
    cost = network.cost(chosen)
    stats = {
        "pruned": run.pruned,
        "eliminated": sum(isinstance(step, EliminationStep) for step in work.steps),
        "core": {"nodes": run.core[0], "strategies": run.core[1]},
        "sweeps": run.sweeps,
        "tables": len(pruner.tables.arrays),
        "seconds": run.seconds,
    }
    return Solution(chosen, cost, cost if exact else min(run.bound, cost), exact, stats)


def _search(run: ExactSearch) -> bool:
    """The cheapest choice below ``run.upper``; returns whether it is proven optimal."""
    work = run.network
    hard = not is_eliminable(work, LIMITS.easy_join)
    work.run(max_degree=2, max_weight=LIMITS.quick_join, deadline=run.deadline)  # fewer nodes to prune
    if hard:  # sweeps spare many comparisons
        _timed(run, "bound", tighten)
    return finish_reduced(run)


def finish_reduced(run: ExactSearch) -> bool:
    """The same, after what is cheap was eliminated."""
    work = run.network
    if not _is_closed(run) and not _is_too_dear(run):
        _timed(run, "reduce", quickly_reduce)
        if not is_eliminable(work, LIMITS.easy_join):
            _timed(run, "bound", tighten)
    if not _is_closed(run) and not _is_too_dear(run):
        _timed(run, "reduce", reduce)
    left = math.inf
    while (
        not (_is_closed(run) or _is_too_dear(run) or is_eliminable(work, LIMITS.easy_join))
        and work.strategies < 0.9 * left
    ):
        left = work.strategies
        _timed(run, "bound", tighten)
    return not _is_too_dear(run) and _timed(run, "core", finish_search)


def network_on_grid(network: CostNetwork) -> CostNetwork:
    """The network with costs that add up exactly, for every choice. Shared arrays stay shared."""
    used = (*network.nodes, *(edge[2] for edge in network.edges))
    arrays, times = {id(a): a for a in used}, Counter(map(id, used))
    exponent = grid_exponent((stored_values(a), times[key]) for key, a in arrays.items())
    rounded = {key: map_entries(partial(on_grid, exponent), array) for key, array in arrays.items()}
    nodes = tuple(stored_values(rounded[id(a)]) for a in network.nodes)
    return CostNetwork(nodes, tuple((i, j, rounded[id(a)]) for i, j, a in network.edges))


def quickly_reduce(run: ExactSearch) -> None:
    """Reduce while that is cheaper than the bounds."""
    reduce(run, LIMITS.easy_comparisons, LIMITS.quick_join)


def reduce(run: ExactSearch, comparisons: int = LIMITS.max_comparisons, join: int = LIMITS.max_join) -> None:
    """Prune, and eliminate nodes of up to two neighbours, to a fixed point."""
    run.pruned += run.pruner.run(run.network, comparisons)
    while True:
        run.network.run(max_degree=2, max_weight=join, deadline=run.deadline)
        removed = run.pruner.run(run.network, comparisons)
        run.pruned += removed
        if not removed or time.perf_counter() > run.deadline:
            return


def tighten(run: ExactSearch) -> None:
    """Message passing on the core: a lower bound, an incumbent, removal of what cannot beat it,
    until the gap is closed, the rest is easily eliminated, or progress stalls."""
    dual = Dual(run.network)
    tolerance = 0.0
    tried = dual.strategies
    marks = [(dual.bound, run.upper, tried)]
    for _ in range(min(LIMITS.max_sweeps, run.most_sweeps)):
        dual.sweep(run.upper + tolerance, run.deadline)
        run.sweeps += 1
        choice = dual.decode()
        cost = run.network.cost(choice)
        if cost < run.upper:
            run.incumbent, run.upper, run.mark = choice, cost, len(run.network.steps)
            tolerance = TOLERANCE * (abs(cost) + abs(dual.bound))
        marks.append((dual.bound, run.upper, dual.strategies))
        if run.upper - dual.bound <= tolerance or _stalled(marks) or time.perf_counter() > run.deadline:
            break
        if dual.strategies < 0.8 * tried:
            tried = dual.strategies
            if is_eliminable(run.network, LIMITS.easy_join, {node: len(kept) for node, kept in dual.kept.items()}):
                break
    dual.sweep(run.upper + tolerance, run.deadline)
    run.bound = max(run.bound, dual.bound)
    run.pruned += sum(run.network.sizes[node] for node in dual.order) - dual.strategies
    for node, kept in dual.kept.items():
        if len(kept) < run.network.sizes[node]:
            restrict(run.network, node, kept)
    if tolerance < run.upper - run.bound < math.inf and not is_eliminable(run.network, LIMITS.easy_join):
        try_guesses(run, dual)
    quickly_reduce(run)


def try_guesses(run: ExactSearch, dual: Dual) -> None:
    """Guess that the optimum hardly exceeds the bound: little remains without strategies and pairs
    above the guess, and a choice found that cheap is optimal. ``dual`` is of the current
    network."""
    gap = run.upper - dual.bound
    for part in GUESSES:
        supposed = dual.bound + part * gap
        trial = run.network.copy()
        for scope, dear in dual.too_dear(supposed):
            trial.forbid(scope, dear)
        try:
            reduce(replace(run, network=trial))
            found = _solve_trial(run, trial, supposed)
        except PlanError:  # no choice is that cheap
            continue
        if found is None:
            return
        if trial.cost(found) <= supposed:
            run.upper = run.bound = trial.cost(found)
            run.incumbent, run.mark = trial.back_substitute(found, len(trial.steps)), len(run.network.steps)
            return


def _solve_trial(run: ExactSearch, trial: Eliminator, upper: float) -> dict[int, int] | None:
    """The best choice of remaining nodes, if it costs up to ``upper``; None if that takes long."""
    joined, order = trial.cheapest_order(LIMITS.trial_join)
    if joined < math.inf:
        trial.run(len(trial.sizes), sys.maxsize, order)
        return {}
    if not run.milp or trial.strategies > LIMITS.trial_strategies:
        return None
    left = max(run.deadline - time.perf_counter(), 1.0)
    found = solve_core(list(trial.core()), trial.sizes, upper=upper - trial.constant, time_limit=left)
    if found.choice is None and found.exact:
        raise PlanError(NO_CHOICE)
    return found.choice if found.exact else None


def _stalled(marks: list[tuple[float, float, int]]) -> bool:
    """Whether the last sweeps found no better choice, removed nothing and hardly closed the gap."""
    if len(marks) <= LIMITS.stalled_sweeps:
        return False
    (bound, upper, strategies), (bound_now, upper_now, strategies_now) = marks[-LIMITS.stalled_sweeps - 1], marks[-1]
    if upper_now < upper or strategies_now < strategies:
        return False
    gap = upper_now - bound_now if math.isfinite(upper_now) else abs(bound_now)
    return bound_now - bound < LIMITS.least_progress * gap


def is_eliminable(network: Eliminator, max_join: int, sizes: Mapping[int, int] | None = None) -> bool:
    """Whether all can be eliminated by joins of up to ``max_join`` entries, given ``sizes``."""
    return any(network.joined(order, max_join, sizes) < math.inf for order in ORDERS)


def finish_search(run: ExactSearch) -> bool:
    """Choices for the core; returns whether they are proven optimal."""
    work = run.network
    run.core = len(work.alive), work.strategies
    joined, order = work.cheapest_order(LIMITS.easy_join if _is_closed(run) else LIMITS.max_join)
    variables = variable_count(work.core())
    if joined < (max(LIMITS.easy_total, variables * LIMITS.joined_per_variable) if run.milp else run.most_joined):
        work.run(len(work.sizes), sys.maxsize, order)  # ties may fall otherwise than in trials
        run.incumbent, run.mark = {}, len(work.steps)
        if math.isinf(work.constant):
            raise PlanError(NO_CHOICE)
        return True
    if _is_closed(run):
        return True
    if (
        run.incumbent
        and run.upper - run.bound <= LIMITS.close_to_bound * abs(run.upper)
        and variables > LIMITS.large_core
    ):
        return False
    if not run.milp and (run.upper < math.inf or time.perf_counter() > run.deadline):
        if run.upper == math.inf:
            raise NotFoundError("the time limit is reached")
        return False
    left = max(run.deadline - time.perf_counter(), 1.0)
    found = solve_core(list(work.core()), work.sizes, upper=run.upper - work.constant, time_limit=left)
    run.bound = max(run.bound, work.constant + found.lower_bound)
    if found.choice is not None and work.cost(found.choice) <= run.upper:
        run.incumbent, run.mark = found.choice, len(work.steps)
    if not run.incumbent:
        if found.exact:
            raise PlanError(NO_CHOICE)
        raise NotFoundError(f"no choice of strategies was found in {left:.0f} s")
    return found.exact


def _is_closed(run: ExactSearch) -> bool:
    """Whether the incumbent is proven optimal."""
    return bool(run.incumbent) and run.upper - run.bound <= TOLERANCE * (abs(run.upper) + abs(run.bound))


def _is_too_dear(run: ExactSearch) -> bool:
    """Whether no choice costs less than ``upper``."""
    return not run.incumbent and run.bound >= run.upper


def _timed(run: ExactSearch, name: str, stage: Callable[[ExactSearch], Result]) -> Result:
    begin = time.perf_counter()
    result = stage(run)
    run.seconds[name] = round(run.seconds.get(name, 0.0) + time.perf_counter() - begin, 4)
    return result
