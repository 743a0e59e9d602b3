"""The cheapest choice with rows: prices for the bound, mixtures and branches for the gap, the MILP for what is small."""

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

# Iterations of the bound, at first and when strategies that are too dear are gone, for effort 1.
FIRST_ITERATIONS = 12
ITERATIONS = 48
# Of a problem of many layers a gap of this part of the cost is not worth more: its plan would lose its regularity.
ENOUGH = 2e-3
# Turns between equal layers as one and each for itself, and between few strategies and all, for effort 1.
TURNS = 5
COLUMNS = 60
# Mixtures tried.
MIXTURES = 8
# Sweeps of message passing.
SWEEPS = 8
# A problem of up to so many entries goes to the MILP as it is, and up to so many when what is too dear is gone.
SMALL = 500
MILP_ENTRIES = 10_000
# Message passing leaves no so small part of a problem that has so many times as many.
HOPELESS = 30
# Entries times nodes of the MILP's tree, for effort 1.
MILP_WORK = 400_000
# The MILP first looks only this far above the bound, as a part of it; each failure looks four times as far.
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
    """The cheapest choice found of ``problem``, whose alike nodes choose alike but where that costs; its bound is of all,
    and still to be found. ``reduced``: of the tied problem; else see :func:`searched`.
    """

    def proof(at: Array, enough: float = math.inf) -> tuple[float, Callable[[], Choice]]:
        within = float(at @ problem.limits)
        lower, choice = bound(problem.priced(at), tied.of, enough + within)
        return lower - within, choice

    search = Search(tied.problem, relaxed, time.perf_counter() + limit, prices, reduced)
    begun(search, effort, ENOUGH)
    if search.choice is None:
        raise PlanError("no choice within the limits of all rows was found")
    once = not effort.rough and not np.isinf(problem.prices).any()  # else of several searches few bounds are asked for
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
        most = min(found.cost, inner.part.bound)  # what is still to be gained by other strategies shows below this
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
    if found.cost - cost > ENOUGH * abs(cost):  # alike nodes had to differ
        found = replace(found, choice=choice, cost=cost)
    return found.bounded(lower)


def columns(search: Search, effort: Effort) -> None:
    """Strategies worth choosing from: at the best prices of those that were seen the best of all are found, and seen, too,
    until they are as good as those before.

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
    """Look at these prices, too."""
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
    """The search for the cheapest choice of ``problem``, when it has ended with one.

    ``relaxed`` solves a network without rows; ``limit``: seconds; ``prices``: of the rows, near the best; ``reduced``: the
    problem's, if it is known.
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
    """A choice within the hard limits, and a bound, until they are this near. Raises PlanError where there is none."""
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
    """A choice within the hard limits, whatever it costs. Raises PlanError with the least usage found if there is none."""
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
    """Drop the strategies that no choice better than the best one contains."""
    part = search.part
    kept = _within_reach(part, search.total * (1 + GAP) if search.total > 0 else search.total * (1 - GAP), SWEEPS)
    dropped = {i: k for i, k in enumerate(kept) if len(k) < part.problem.sizes[i]}
    if all(map(len, kept)):
        search.part = part.restricted(dropped)


def close_gap(search: Search, effort: Effort) -> int:
    """Prune by the Lagrangian bound and solve what is left as a MILP, looking further and further above the bound."""
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
    """Search all choices that cost at most ``target``; returns whether this was completed (then the bound is known)."""
    try:
        kept = _within_reach(search.part, target + GAP * abs(target), sweeps)
    except PlanError:
        kept = []
    if not kept or not all(map(len, kept)):  # nothing costs that little
        search.bound = max(search.bound, target)
        return True
    lower, completed = solve_programme(search, kept, target, effort)
    search.bound = max(search.bound, min(lower, target, search.total))
    return completed


def _within_reach(part: Part, upper: float, sweeps: int) -> list[Classes]:
    """Per node the strategies that some choice of cost up to ``upper`` may contain, by message passing."""
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
    """Offers what the MILP finds among the ``kept``; returns (lower bound of these, whether it was solved to the end)."""
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
