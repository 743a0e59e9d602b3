"""Search with rows: prices bound, mixtures and branches close the gap, MILP if small."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.arrays import Classes
from autoshard.passes.search.exact.elimination import Eliminator, Tables
from autoshard.passes.search.exact.milp import MilpLimit, solve_core
from autoshard.passes.search.exact.pruning import NO_CHOICE, Dual
from autoshard.passes.search.limits import LIMITS
from autoshard.passes.search.network import CLOSED_GAP, Array, Choice, Effort, Solution
from autoshard.passes.search.rows.duality_gap import branch_and_bound, search_mixtures
from autoshard.passes.search.rows.lagrangian import (
    ChoicePart,
    LagrangianSearch,
    ReducedProblem,
    RowPrices,
    maximise_bound,
)
from autoshard.passes.search.rows.stacked import Stacked, priced_table, undecided
from autoshard.passes.search.rows.tied_layers import Tied, tied_bound


def solve_within(
    reduced: ReducedProblem,
    problem: Stacked,
    effort: Effort,
    prices: RowPrices = None,
) -> Solution:
    """The cheapest choice of ``problem``; see :func:`run_search`."""
    return run_search(problem, effort, prices, reduced).solution()


def solve_alike(
    reduced: ReducedProblem,
    problem: Stacked,
    tied: Tied,
    effort: Effort,
    prices: RowPrices = None,
) -> Solution:
    """The cheapest choice with tied layers, untied where that pays; its bound may be pending.
    ``reduced``: of the tied problem; else see :func:`run_search`."""

    def proof(at: Array, enough: float = math.inf) -> tuple[float, Callable[[], Choice]]:
        within = float(at @ problem.limits)
        lower, choice = tied_bound(problem.priced(at), tied.of, enough + within)
        return lower - within, choice

    search = LagrangianSearch(tied.problem, prices, reduced)
    start_search(search, effort, effort.enough)
    if search.choice is None:
        raise PlanError("no choice within the limits of all rows was found")
    once = not effort.rough and not np.isinf(problem.prices).any()  # several searches need few bounds
    if once and search.closed:
        found = replace(search.solution(), choice=tied.lifted(search.solution().choice), exact=False)
        enough = found.cost - CLOSED_GAP * abs(found.cost)
        lower = proof(search.part.prices, enough)[0]
        if lower >= enough:
            return found.bounded(lower)
    if not effort.rough:
        generate_columns(search, effort)
    part, found = search.part, search.solution()
    found = replace(found, choice=tied.lifted(found.choice), exact=False)
    for _ in range(0 if effort.rough else LIMITS.tied_turns):
        seen = np.array(list(search.seen))
        chosen = [np.unique(strategies) for strategies in seen.T]
        kept = {i: chosen[k] for i, k in enumerate(tied.of)}
        some = undecided(problem.restricted(kept))
        if not len(some.nodes):
            break
        inner = run_search(some.alone, effort, part.prices.tolist())
        each, better = inner.solution(), inner.total < found.cost
        if better:
            places = dict(zip(some.nodes.tolist(), each.choice, strict=True))
            choice = tuple(int(strategies[places.get(i, 0)]) for i, strategies in kept.items())
            found = replace(found, choice=choice, cost=each.cost)
        most = min(found.cost, inner.part.bound)  # other strategies can gain only below this
        if most - part.bound <= effort.enough * abs(found.cost) or not better:
            break
        raise_bound(search, np.array(each.prices))
        if len(search.seen) == len(seen):
            break
    found.stats["solved"], at = search.solved, part.prices
    found = replace(found, lower_bound=-math.inf, prices=tuple(at.tolist()))
    if not once:
        return replace(found, prove=lambda: proof(at)[0])
    lower, decoded = proof(at)
    choice = decoded()
    cost = problem.total(choice)
    if found.cost - cost > effort.enough * abs(cost):  # tied nodes had to differ
        found = replace(found, choice=choice, cost=cost)
    return found.bounded(lower)


def generate_columns(search: LagrangianSearch, effort: Effort) -> None:
    """Column generation (Dantzig and Wolfe 1960): solve among the strategies seen, price all, add
    the best, repeat."""
    part, problem = search.part, search.first
    for _ in range(effort.of(LIMITS.column_rounds)):
        seen = np.array(list(search.seen))
        kept = {i: np.unique(seen[:, i]) for i in range(len(problem.sizes))}
        some = LagrangianSearch(problem.restricted(kept), part.prices.tolist())
        maximise_bound(some, some.part, LIMITS.iterations, effort.enough / 2)
        if some.part.bound - part.bound <= effort.enough / 2 * abs(some.part.bound):
            return
        raise_bound(search, some.part.prices)
        if len(search.seen) == len(seen):
            return


def raise_bound(search: LagrangianSearch, prices: Array) -> None:
    value = search.relax(search.part, prices)
    if value > search.part.bound:
        search.part.bound, search.part.prices = value, prices


def run_search(
    problem: Stacked,
    effort: Effort,
    prices: RowPrices = None,
    reduced: ReducedProblem | None = None,
) -> LagrangianSearch:
    """A finished search for the cheapest choice of ``problem``. ``prices``: of the rows, near the
    best; ``reduced``: the problem's, if known."""
    search = LagrangianSearch(problem, prices, reduced)
    stats = search.stats
    start_search(search, effort)
    if _problem_entries(search.part.problem) <= LIMITS.direct_milp_entries:
        stats["looks"] = close_gap(search, effort)
    if search.gap(search.bound) > effort.enough:
        if search.part.elimination is None:
            drop_dear_strategies(search)
        cheap = search.part.elimination is not None and effort.branches
        most = LIMITS.iterations if cheap else effort.of(LIMITS.iterations)
        maximise_bound(search, search.part, most, effort.enough)
        search.bound = max(search.bound, search.part.bound)
        stats["mixtures"] = search_mixtures(search, search.part, effort.enough, LIMITS.mixtures)
        stats["branches"] = branch_and_bound(search, effort.enough, effort)
    hopeless = _problem_entries(search.part.problem) > LIMITS.hopeless * effort.of(LIMITS.milp_entries)
    if search.gap(search.bound) > effort.enough and "looks" not in stats and not hopeless:
        stats["looks"] = close_gap(search, effort)
    if search.choice is None:
        raise PlanError("no choice within the limits of all rows was found")
    return search


def start_search(search: LagrangianSearch, effort: Effort, gap: float = CLOSED_GAP) -> None:
    """A feasible choice and a bound, up to ``gap``. Raises PlanError if nothing is feasible."""
    maximise_bound(search, search.part, 1)
    if search.choice is None:
        maximise_bound(search, search.part, effort.of(LIMITS.first_iterations))
    if search.choice is None:
        find_feasible(search, effort)
    maximise_bound(search, search.part, effort.of(LIMITS.first_iterations), gap)
    search.bound = search.part.bound


def _problem_entries(problem: Stacked) -> int:
    return sum(math.prod(problem.sizes[i] for i in scope) for scope in problem.factors)


def find_feasible(search: LagrangianSearch, effort: Effort) -> None:
    """A feasible choice at any cost. Raises PlanError with the least usage found."""
    problem, part = search.first, search.part
    hard = np.flatnonzero(np.isinf(problem.prices))
    if len(hard) == 1:
        weights = np.zeros(len(problem.limits))
        weights[hard] = 1.0
        choice, _, exact = search.cheapest(part, weights, unit=0.0)
    else:
        prices = np.where(np.isinf(problem.prices), 1 / problem.scale, 0.0)
        only = LagrangianSearch(replace(part.problem.costless(), prices=prices))
        maximise_bound(only, only.part, effort.of(LIMITS.iterations))
        only.bound = only.part.bound
        if only.total > 0 and not only.closed:
            close_gap(only, effort)
        if only.choice is None:
            raise PlanError(NO_CHOICE)
        choice, exact = part.original(only.choice), only.closed
    search.cut(part, choice)
    if search.choice is None:
        raise PlanError(_no_fit_text(problem, choice, hard, "" if exact else " found"))


def _no_fit_text(problem: Stacked, choice: Choice, hard: np.ndarray, found: str) -> str:
    used, limits = problem.used(choice)[hard], problem.limits[hard]
    k = int(np.argmax(used - limits))
    return f"no choice fits the limit of {limits[k]:.6g}: the least{found} that any choice uses is {used[k]:.6g}"


def drop_dear_strategies(search: LagrangianSearch) -> None:
    """Drop the strategies of no choice better than the best."""
    part = search.part
    kept = _within_reach(
        part, search.total * (1 + CLOSED_GAP) if search.total > 0 else search.total * (1 - CLOSED_GAP), LIMITS.sweeps
    )
    dropped = {i: k for i, k in enumerate(kept) if len(k) < part.problem.sizes[i]}
    if all(map(len, kept)):
        search.part = part.restricted(dropped)


def close_gap(search: LagrangianSearch, effort: Effort) -> int:
    """Prune by the Lagrangian bound and solve the rest as a MILP, ever further above the bound."""
    small = _problem_entries(search.part.problem) <= LIMITS.direct_milp_entries
    looks, reach = 0, 0.0 if small else LIMITS.first_look * abs(search.bound)
    while not search.closed:
        last = looks == LIMITS.max_looks or not 0 < reach < math.inf
        target = search.total if last else min(search.total, search.bound + reach)
        looks += 1
        completed = _search_below(search, target, effort, 0 if small else LIMITS.sweeps)
        if last or not completed or target == search.total:
            break
        reach *= 4
    return looks


def _search_below(search: LagrangianSearch, target: float, effort: Effort, sweeps: int) -> bool:
    """Search all choices up to ``target``; returns whether that was completed."""
    try:
        kept = _within_reach(search.part, target + CLOSED_GAP * abs(target), sweeps)
    except PlanError:
        kept = []
    if not kept or not all(map(len, kept)):  # nothing is that cheap
        search.bound = max(search.bound, target)
        return True
    lower, completed = solve_programme(search, kept, target, effort)
    search.bound = max(search.bound, min(lower, target, search.total))
    return completed


def _within_reach(part: ChoicePart, upper: float, sweeps: int) -> list[Classes]:
    """Strategies per node that a choice of cost up to ``upper`` may contain, by message passing."""
    left = undecided(part.problem)
    network = Eliminator.of(left.problem.priced(part.prices), Tables())
    decided = float(priced_table(left.decided, part.prices, 1.0))
    dual = Dual(network, constant=decided - float(part.prices @ part.problem.limits))
    for _ in range(sweeps):
        dual.sweep(upper)
    kept = [np.zeros(1, dtype=np.intp)] * len(part.problem.sizes)
    for k, i in enumerate(left.nodes.tolist()):
        kept[i] = dual.kept[k]
    return kept


def solve_programme(search: LagrangianSearch, kept: list[Classes], target: float, effort: Effort) -> tuple[float, bool]:
    """Solve the MILP over ``kept``, offer its choice; returns (lower bound, whether solved)."""
    part = search.part.restricted(dict(enumerate(kept)))
    problem = part.problem
    core = [(scope, problem.store.whole(number)[0]) for scope, number in sorted(problem.factors.items())]
    limits = []
    for r, (limit, price) in enumerate(zip(problem.limits, problem.prices, strict=True)):
        stacks = ((scope, problem.store.whole(number)) for scope, number in problem.factors.items())
        amounts = {scope: stack[1 + r] for scope, stack in stacks if len(stack) > 1 + r}
        limits.append(MilpLimit(amounts, float(limit), float(price)))
    found = solve_core(
        core,
        problem.sizes,
        upper=target,
        limits=limits,
        most_nodes=effort.of(LIMITS.milp_work / max(_problem_entries(problem), 1)),
        most_entries=effort.of(LIMITS.milp_entries),
    )
    if found.choice is not None:
        search.offer(part.original([found.choice[i] for i in range(len(problem.sizes))]))
    return found.lower_bound, found.exact
