"""Anytime search under a memory limit at each moment (liveness).

Infeasible strategies are dropped. Lagrangian prices give a bound, choices by their messages, and
windows where a choice exceeds the bound. Unless the network is large, branch and bound among likely
strategies improves the choice, among all it raises the bound. Neighbourhoods improve further.
"""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.arrays import Classes
from autoshard.passes.search.exact.pruning import NO_CHOICE
from autoshard.passes.search.exact.solver import solve_plain
from autoshard.passes.search.network import Array, Choice, CostNetwork, Solution
from contest.branch_and_bound import Cheaper, Leaf, Tree, solve_below
from contest.liveness import SLACK, Domains, LivenessProblem, Memory
from contest.local_search import MAX_NEIGHBOURHOOD, Best, Neighbourhoods, descend
from contest.subgradient import SubgradientResult, subgradient_prices

PROVEN_GAP = 1e-9
# Shares of the time: reserve for the last step and the answer; end of the first descent, of its
# repair; of the rest, for prices, for few strategies, and for few strategies if a choice is known.
RESERVE = 0.05
DESCENT = 0.35
REPAIR = 0.5
PRICES = 0.2
FEW_TIME_SHARE = 0.6
BRIEFLY = 0.15
DESCENT_PASSES = 40
# Share for prices in a network larger than any neighbourhood, which relies on messages.
LARGE_PRICES = 0.4
# Neighbourhoods that repair the first choice without a time limit, and those between descents.
REPAIRS = 200
DESCENTS = 8
# Window sizes for choices by messages.
WINDOWS = 100, 200, 400
# Price steps without and with a time limit; strategies per node that are tried first, by score, and
# leaves of their tree.
STEPS = 40
MOST_STEPS = 400
STRATEGIES = 12
TRIALS = 8
# Without a time limit, for effort 1: leaves, more for small tables, and neighbourhoods.
LEAVES = 16
ENTRIES = 200_000
NEIGHBOURHOODS = 60
# Share of time, or of leaves and neighbourhoods together, for the tree.
TREE_SHARE = 0.35
# Initial advance of the tree, as a share of time: its first leaf may prove the choice.
HEAD_START = 0.1

Better = Callable[[float, Callable[[], Choice]], None]
"""called with a better choice: (its cost, function that returns it)"""


def ignore_better(cost: float, choice: Callable[[], Choice]) -> None:
    """Ignore."""


def solve_within_memory(
    network: CostNetwork,
    memory: Memory,
    time_limit: float = math.inf,
    effort: float = 1.0,
    better: Better = ignore_better,
) -> Solution:
    """The cheapest choice within the memory limit at each moment; ``time_limit``: seconds.

    ``effort`` scales the work without a time limit. Else see :func:`solve_over_time`.
    """
    begin = time.perf_counter()
    lives = LivenessProblem.of(network, memory)
    if not lives.count:
        return solve_plain(network, deadline=begin + time_limit)
    return solve_over_time(lives, solve_below, time_limit - (time.perf_counter() - begin), effort, better)


def solve_over_time(
    given: LivenessProblem, cheaper: Cheaper, limit: float, effort: float, better: Better = ignore_better
) -> Solution:
    """The best choice found in ``limit`` seconds; ``better``: called with each improvement.

    PlanError: no choice is within the memory limit, or none was found.
    """
    begin = time.perf_counter()
    limit *= 1 - RESERVE
    _least_memory_choice(given)
    lives, numbers = _reduce_problem(given, begin, limit)
    best = Best(
        lives, _least_memory_choice(lives), lambda cost, choice: better(cost, lambda: _original_choice(choice, numbers))
    )
    unit = _excess_price(lives)
    deadline = begin + limit
    now = time.perf_counter()
    large = len(lives.usage) > MAX_NEIGHBOURHOOD
    if not large:
        best.offer(descend(lives, best.choice, unit, DESCENT_PASSES, begin + DESCENT * limit))
        _repair_locally(Neighbourhoods(best, cheaper, begin + REPAIR * limit, [best.choice], *_no_scores(lives)))
        now = time.perf_counter()
    steps = math.ceil(STEPS * effort) if not large or math.isinf(limit) else MOST_STEPS
    part = LARGE_PRICES if large else PRICES
    try:
        found = subgradient_prices(best, steps, unit, now + part * (deadline - now), whole=not large)
    except PlanError:
        raise PlanError(_forbidden_text(given)) from None
    if large:
        best.offer(descend(lives, best.choice, unit, DESCENT_PASSES, deadline))
        _repair(best, cheaper, found, deadline)
    run = _AnytimeSearch(best, cheaper, found, deadline)
    known = math.isfinite(best.cost)
    if large:
        run.tree.give_up()
    else:
        run.few(found, now + (PRICES + (BRIEFLY if known else FEW_TIME_SHARE)) * (deadline - now))
    if math.isinf(limit):
        run.leaves(math.ceil(max(LEAVES, min(ENTRIES / run.entries, ENTRIES)) * effort))
    run.alternate(math.ceil(NEIGHBOURHOODS * effort) if math.isinf(limit) else 10**9, unit)
    if math.isinf(best.cost):
        raise PlanError(_unfit_text(given, best, numbers))
    choice = _original_choice(best.choice, numbers)
    cost = given.network.cost(choice)
    stats = {"rows": lives.count, "leaves": run.tree.looked, "neighbourhoods": run.near.tried, "seconds": run.seconds}
    return Solution(choice, cost, cost if run.closed else min(run.tree.bound, cost), run.closed, stats)


def _repair(best: Best, cheaper: Cheaper, found: SubgradientResult, deadline: float) -> None:
    """Windows where the choice is infeasible, then of the largest gap; then neighbourhoods."""
    weights = best.lives.weights(found.prices).tolist()
    near = Neighbourhoods(best, cheaper, deadline, found.seen, found.scores, weights, found.prices)
    for least, size, beside in itertools.product((math.inf, 0.0), WINDOWS, (False, True)):
        near.aim(found.core.gaps, size, beside, least)
    _repair_locally(near)


def _repair_locally(near: Neighbourhoods) -> None:
    """Neighbourhoods of infeasible nodes until the choice is feasible."""
    most = REPAIRS if math.isinf(near.deadline) else sys.maxsize
    while math.isinf(near.best.cost) and near.tried < most and time.perf_counter() < near.deadline:
        near.step()


def _no_scores(lives: LivenessProblem) -> tuple[tuple[Array, ...], list[float]]:
    """Scores and weights before any are known."""
    return lives.network.nodes, [0.0] * len(lives.usage)


def _reduce_problem(given: LivenessProblem, begin: float, limit: float) -> tuple[LivenessProblem, list[Classes]]:
    """Without infeasible and dominated strategies; and the original numbers of the rest."""
    domains = Domains.of(given, begin + limit)
    if domains is None:
        raise PlanError(_forbidden_text(given))
    lives, left = given.restricted(domains.kept).without_beaten()
    return lives, [kept[k] for kept, k in zip(domains.kept, left, strict=True)]


def _original_choice(choice: Choice, numbers: Sequence[Classes]) -> Choice:
    return tuple(int(number[s]) for number, s in zip(numbers, choice, strict=True))


def _forbidden_text(given: LivenessProblem) -> str:
    return f"no choice that costs do not forbid fits the limit of {given.limit:.6g}"


class _AnytimeSearch:
    def __init__(self, best: Best, cheaper: Cheaper, found: SubgradientResult, deadline: float) -> None:
        self.best, self.cheaper, self.deadline = best, cheaper, deadline
        lives = best.lives
        domains = Domains.of(lives, deadline)
        if domains is None:
            raise PlanError(_forbidden_text(lives))
        self.domains = domains
        self.tree = Tree(lives, cheaper, deadline, best.cost)
        self.tree.put(Leaf(found.bound, domains, found.prices))
        weights = lives.weights(found.prices).tolist()
        self.near = Neighbourhoods(best, cheaper, deadline, found.seen, found.scores, weights)
        self.entries = max(sum(matrix.size for *_, matrix in lives.network.matrices), 1)
        self.seconds = {"few": 0.0, "tree": 0.0, "neighbourhoods": 0.0}
        self.leaf = 0.0
        """seconds of the longest leaf"""
        self.head_start = HEAD_START * (deadline - time.perf_counter())

    @property
    def closed(self) -> bool:
        cost = self.best.cost
        return math.isfinite(cost) and cost - self.tree.bound <= PROVEN_GAP * abs(cost)

    @property
    def late(self) -> bool:
        return time.perf_counter() > self.deadline

    def few(self, found: SubgradientResult, deadline: float) -> None:
        """Choices among strategies seen or of the best scores: a tree of small leaves."""
        begin, seen = time.perf_counter(), np.array(found.seen)
        known = math.isfinite(self.best.cost)
        parts = {}
        for node, scores in enumerate(found.scores):
            likely = np.concatenate([seen[:, node], np.argsort(scores, kind="stable")[:STRATEGIES]])
            parts[node] = np.intersect1d(likely, self.domains.kept[node])
        domains = self.domains.narrowed(self.best.lives, parts, deadline)
        if domains is not None:
            # No upper limit: a first choice is a poor measure of what is dear.
            tree = Tree(self.best.lives, self.cheaper, deadline, math.inf)
            tree.put(Leaf(found.bound, domains, found.prices))
            for trial in itertools.count():
                if (
                    not tree.open
                    or time.perf_counter() > deadline
                    or (trial >= TRIALS and (known or tree.choice is not None))
                ):
                    break
                if trial >= 4 * TRIALS:
                    break
                self.look(tree)
        self.seconds["few"] = time.perf_counter() - begin

    def look(self, tree: Tree) -> None:
        begin = time.perf_counter()
        tree.search(1)
        if tree.latest is not None:
            self.near.seen.append(tree.latest)
        if tree.choice is not None:
            self.best.offer(tree.choice)
        self.leaf = max(self.leaf, time.perf_counter() - begin)

    def leaves(self, most: int) -> None:
        begin = time.perf_counter()
        while self.tree.open and not self.closed and not self.late and self.tree.looked < most:
            self.tree.upper = min(self.tree.upper, self.best.cost)
            self.look(self.tree)
        self.seconds["tree"] += time.perf_counter() - begin

    def alternate(self, most: int, unit: float) -> None:
        """Up to ``most`` neighbourhoods, alternating with leaves."""
        spent = self.seconds
        while not self.closed and not self.late and self.near.tried < most:
            if math.isfinite(self.deadline):
                next_one = spent["tree"] + self.leaf
                turn = next_one <= TREE_SHARE * (next_one + spent["neighbourhoods"] + self.head_start)
            else:
                turn = self.tree.looked <= TREE_SHARE * (self.tree.looked + self.near.tried)
            if turn and self.tree.open:
                self.leaves(self.tree.looked + 1)
                continue
            begin = time.perf_counter()
            self.near.step()
            if math.isinf(self.best.cost) and self.near.tried % DESCENTS == 0:
                self.best.offer(descend(self.best.lives, self.best.choice, unit, DESCENT_PASSES, self.deadline))
            spent["neighbourhoods"] += time.perf_counter() - begin


def _least_memory_choice(lives: LivenessProblem) -> Choice:
    """The choice that holds least. Raises PlanError if it is infeasible."""
    choice = []
    for costs, usage in zip(lives.network.nodes, lives.usage, strict=True):
        if not np.isfinite(costs).any():
            raise PlanError(NO_CHOICE)
        choice.append(int(np.lexsort((costs, np.where(np.isfinite(costs), usage, np.inf)))[0]))
    used = lives.sums(lives.held(choice))
    if (used > lives.room).any():
        raise PlanError(
            f"no choice fits the limit of {lives.limit:.6g}: the least that any choice uses is {used.max():.6g}"
        )
    return tuple(choice)


def _unfit_text(given: LivenessProblem, best: Best, numbers: Sequence[Classes]) -> str:
    """The error if no choice was found."""
    nearest = _original_choice(best.choice, numbers)
    used = given.sums(given.held(nearest)).max(initial=0.0)
    if used <= given.limit * (1 + SLACK):
        return f"no choice was found that costs do not forbid: {best.forbidden} tables forbid the nearest one"
    return f"no choice within the limit of {given.limit:.6g} was found: the least found uses {used:.6g}"


def _excess_price(lives: LivenessProblem) -> float:
    """An initial price of excess."""
    spread = [float(np.ptp(costs[np.isfinite(costs)])) for costs in lives.network.nodes]
    edges = [float(np.ptp(m[np.isfinite(m)])) for _, _, m in lives.network.matrices if np.isfinite(m).any()]
    return (sum(spread) + sum(edges) or 1.0) / len(spread) / lives.scale * 10
