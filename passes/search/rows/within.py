"""Search with rows: prices bound, mixtures and branches close the gap, MILP if small."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.exact.bound import Dual
from autoshard.passes.search.exact.eliminate import Eliminator
from autoshard.passes.search.exact.milp import Limit, solve_core
from autoshard.passes.search.exact.prune import NO_CHOICE
from autoshard.passes.search.exact.tables import Tables
from autoshard.passes.search.folded import Classes
from autoshard.passes.search.network import GAP, Array, Choice, Effort, Solution
from autoshard.passes.search.rows.alike import Tied, bound
from autoshard.passes.search.rows.branch import branch
from autoshard.passes.search.rows.mixture import mix
from autoshard.passes.search.rows.prices import Part, Prices, Reduced, Relaxed, Search, maximise_bound
from autoshard.passes.search.rows.stacked import Stacked, undecided, value

# Iterations of the bound for effort 1: at first, and after pruning.
FIRST_ITERATIONS = 12
ITERATIONS = 48
# Sufficient relative gap: closing it would cost a plan of many layers its regularity.
ENOUGH = 2e-3
# Turns between tied and untied layers, and rounds of column generation, for effort 1.
TURNS = 5
COLUMNS = 60
# Mixtures tried.
MIXTURES = 8
# Sweeps of message passing.
SWEEPS = 8
# Entries up to which the MILP solves a problem, directly and after pruning.
SMALL = 500
MILP_ENTRIES = 10_000
# Message passing does not shrink a problem by more than this factor.
HOPELESS = 30
# Entries × nodes of the MILP's tree, for effort 1.
MILP_WORK = 400_000
# First range of the MILP above the bound, relative to it; each failure quadruples it.
FIRST_LOOK = 0.002
MAX_LOOKS = 6


def solve_within(
    reduced: Reduced, problem: Stacked, relaxed: Relaxed, limit: float, effort: Effort, prices: Prices = None
) -> Solution:
    """The cheapest choice of ``problem``; see :func:`searched`."""
    return searched(problem, relaxed, limit, effort, prices, reduced).solution()


def solve_alike(
    reduced: Reduced,
    problem: Stacked,
    tied: Tied,
    relaxed: Relaxed,
    limit: float,
    effort: Effort,
    prices: Prices = None,
) -> Solution:
    """The cheapest choice with tied layers, untied where that pays; its bound may be pending.

    ``reduced``: of the tied problem; else see :func:`searched`.
    """

    def proof(at: Array, enough: float = math.inf) -> tuple[float, Callable[[], Choice]]:
        within = float(at @ problem.limits)
        lower, choice = bound(problem.priced(at), tied.of, enough + within)
        return lower - within, choice

    search = Search(tied.problem, relaxed, time.perf_counter() + limit, prices, reduced)
    begun(search, effort, ENOUGH)
    if search.choice is None:
        raise PlanError("no choice within the limits of all rows was found")
    once = not effort.rough and not np.isinf(problem.prices).any()  # several searches need few bounds
    if once and search.closed:
        found = replace(search.solution(), choice=tied.lifted(search.solution().choice), exact=False)
        enough = found.cost - GAP * abs(found.cost)
        lower = proof(search.part.prices, enough)[0]
        if lower >= enough:
            return found.bounded(lower)
    if not effort.rough:
        columns(search, effort)
    part, found = search.part, search.solution()
    found = replace(found, choice=tied.lifted(found.choice), exact=False)
    for _ in range(0 if effort.rough else TURNS):
        seen = np.array(list(search.seen))
        chosen = [np.unique(strategies) for strategies in seen.T]
        kept = {i: chosen[k] for i, k in enumerate(tied.of)}
        some = undecided(problem.restricted(kept))
        if not len(some.nodes):
            break
        left = max(search.deadline - time.perf_counter(), 1.0)
        inner = searched(some.alone, relaxed, left, effort, part.prices.tolist())
        each, better = inner.solution(), inner.total < found.cost
        if better:
            places = dict(zip(some.nodes.tolist(), each.choice, strict=True))
            choice = tuple(int(strategies[places.get(i, 0)]) for i, strategies in kept.items())
            found = replace(found, choice=choice, cost=each.cost)
        most = min(found.cost, inner.part.bound)  # other strategies can gain only below this
        if most - part.bound <= ENOUGH * abs(found.cost) or not better or search.late:
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
    if found.cost - cost > ENOUGH * abs(cost):  # tied nodes had to differ
        found = replace(found, choice=choice, cost=cost)
    return found.bounded(lower)


def columns(search: Search, effort: Effort) -> None:
    """Column generation: solve among the strategies seen, price all strategies, add the best,
    repeat.

    Source: Dantzig and Wolfe, Decomposition principle for linear programs (1960).
    """
    part, problem = search.part, search.first
    for _ in range(effort.of(COLUMNS)):
        seen = np.array(list(search.seen))
        kept = {i: np.unique(seen[:, i]) for i in range(len(problem.sizes))}
        some = Search(problem.restricted(kept), search.relaxed, search.deadline, part.prices.tolist())
        maximise_bound(some, some.part, ITERATIONS, ENOUGH / 2)
        if some.part.bound - part.bound <= ENOUGH / 2 * abs(some.part.bound) or search.late:
            return
        raise_bound(search, some.part.prices)
        if len(search.seen) == len(seen):
            return


def raise_bound(search: Search, prices: Array) -> None:
    value = search.relax(search.part, prices)
    if value > search.part.bound:
        search.part.bound, search.part.prices = value, prices


def searched(
    problem: Stacked,
    relaxed: Relaxed,
    limit: float,
    effort: Effort,
    prices: Prices = None,
    reduced: Reduced | None = None,
) -> Search:
    """A finished search for the cheapest choice of ``problem``.

    ``relaxed`` solves a network without rows; ``limit``: seconds; ``prices``: of the rows, near the
    best; ``reduced``: the problem's, if known.
    """
    search = Search(problem, relaxed, time.perf_counter() + limit, prices, reduced)
    stats = search.stats
    begun(search, effort)
    if _entries(search.part.problem) <= SMALL:
        stats["looks"] = close_gap(search, effort)
    if search.gap(search.bound) > ENOUGH:
        if search.part.elimination is None:
            thin(search)
        quick = search.part.elimination is not None
        maximise_bound(search, search.part, ITERATIONS if quick else effort.of(ITERATIONS), ENOUGH)
        search.bound = max(search.bound, search.part.bound)
        stats["mixtures"] = mix(search, search.part, ENOUGH, MIXTURES)
        stats["branches"] = branch(search, ENOUGH, effort)
    hopeless = _entries(search.part.problem) > HOPELESS * effort.of(MILP_ENTRIES)
    if search.gap(search.bound) > ENOUGH and "looks" not in stats and not hopeless:
        stats["looks"] = close_gap(search, effort)
    if search.choice is None:
        raise PlanError("no choice within the limits of all rows was found")
    return search


def begun(search: Search, effort: Effort, gap: float = GAP) -> None:
    """A feasible choice and a bound, up to ``gap``. Raises PlanError if nothing is feasible."""
    maximise_bound(search, search.part, 1)
    if search.choice is None:
        maximise_bound(search, search.part, effort.of(FIRST_ITERATIONS))
    if search.choice is None:
        fit(search, effort)
    maximise_bound(search, search.part, effort.of(FIRST_ITERATIONS), gap)
    search.bound = search.part.bound


def _entries(problem: Stacked) -> int:
    return sum(math.prod(problem.sizes[i] for i in scope) for scope in problem.factors)


def fit(search: Search, effort: Effort) -> None:
    """A feasible choice at any cost. Raises PlanError with the least usage found."""
    problem, part = search.first, search.part
    hard = np.flatnonzero(np.isinf(problem.prices))
    if len(hard) == 1:
        weights = np.zeros(len(problem.limits))
        weights[hard] = 1.0
        choice, _, exact = search.cheapest(part, weights, unit=0.0)
    else:
        prices = np.where(np.isinf(problem.prices), 1 / problem.scale, 0.0)
        only = Search(replace(part.problem.costless(), prices=prices), search.relaxed, search.deadline)
        maximise_bound(only, only.part, effort.of(ITERATIONS))
        only.bound = only.part.bound
        if only.total > 0 and not only.closed:
            close_gap(only, effort)
        if only.choice is None:
            raise PlanError(NO_CHOICE)
        choice, exact = part.original(only.choice), only.closed
    search.cut(part, choice)
    if search.choice is None:
        raise PlanError(_unfit(problem, choice, hard, "" if exact else " found"))


def _unfit(problem: Stacked, choice: Choice, hard: np.ndarray, found: str) -> str:
    used, limits = problem.used(choice)[hard], problem.limits[hard]
    k = int(np.argmax(used - limits))
    return f"no choice fits the limit of {limits[k]:.6g}: the least{found} that any choice uses is {used[k]:.6g}"


def thin(search: Search) -> None:
    """Drop the strategies of no choice better than the best."""
    part = search.part
    kept = _within_reach(part, search.total * (1 + GAP) if search.total > 0 else search.total * (1 - GAP), SWEEPS)
    dropped = {i: k for i, k in enumerate(kept) if len(k) < part.problem.sizes[i]}
    if all(map(len, kept)):
        search.part = part.restricted(dropped)


def close_gap(search: Search, effort: Effort) -> int:
    """Prune by the Lagrangian bound and solve the rest as a MILP, ever further above the bound."""
    small = _entries(search.part.problem) <= SMALL
    looks, reach = 0, 0.0 if small else FIRST_LOOK * abs(search.bound)
    while not search.closed and not search.late:
        last = looks == MAX_LOOKS or not 0 < reach < math.inf
        target = search.total if last else min(search.total, search.bound + reach)
        looks += 1
        completed = _look(search, target, effort, 0 if small else SWEEPS)
        if last or not completed or target == search.total:
            break
        reach *= 4
    return looks


def _look(search: Search, target: float, effort: Effort, sweeps: int) -> bool:
    """Search all choices up to ``target``; returns whether that was completed."""
    try:
        kept = _within_reach(search.part, target + GAP * abs(target), sweeps)
    except PlanError:
        kept = []
    if not kept or not all(map(len, kept)):  # nothing is that cheap
        search.bound = max(search.bound, target)
        return True
    lower, completed = solve_programme(search, kept, target, effort)
    search.bound = max(search.bound, min(lower, target, search.total))
    return completed


def _within_reach(part: Part, upper: float, sweeps: int) -> list[Classes]:
    """Strategies per node that a choice of cost up to ``upper`` may contain, by message passing."""
    left = undecided(part.problem)
    network = Eliminator.of(left.problem.priced(part.prices), Tables())
    decided = float(value(left.decided, part.prices, 1.0))
    dual = Dual(network, constant=decided - float(part.prices @ part.problem.limits))
    for _ in range(sweeps):
        dual.sweep(upper)
    kept = [np.zeros(1, dtype=np.intp)] * len(part.problem.sizes)
    for k, i in enumerate(left.nodes.tolist()):
        kept[i] = dual.kept[k]
    return kept


def solve_programme(search: Search, kept: list[Classes], target: float, effort: Effort) -> tuple[float, bool]:
    """Solve the MILP over ``kept``, offer its choice; returns (lower bound, whether solved)."""
    part = search.part.restricted(dict(enumerate(kept)))
    problem = part.problem
    core = [(scope, problem.store.whole(number)[0]) for scope, number in sorted(problem.factors.items())]
    limits = []
    for r, (limit, price) in enumerate(zip(problem.limits, problem.prices, strict=True)):
        stacks = ((scope, problem.store.whole(number)) for scope, number in problem.factors.items())
        amounts = {scope: stack[1 + r] for scope, stack in stacks if len(stack) > 1 + r}
        limits.append(Limit(amounts, float(limit), float(price)))
    found = solve_core(
        core,
        problem.sizes,
        upper=target,
        limits=limits,
        time_limit=max(search.deadline - time.perf_counter(), 1.0),
        most_nodes=effort.of(MILP_WORK / max(_entries(problem), 1)),
        most_entries=effort.of(MILP_ENTRIES),
    )
    if found.choice is not None:
        search.offer(part.original([found.choice[i] for i in range(len(problem.sizes))]))
    return found.lower_bound, found.exact
