"""The cheapest choice under a limit on what is held at any time: at every moment the best so far is there.

Prices of the moments raise the bound of message passing; local search and the MILP in neighbourhoods better the choice; what
the gap leaves goes to the MILP as a whole where it is small.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import PlanError
from autoshard.passes.search.bound import Dual
from autoshard.passes.search.descent import Best, descend
from autoshard.passes.search.eliminate import Eliminator, Scope
from autoshard.passes.search.lives import Lives
from autoshard.passes.search.milp import Limit, solve_core
from autoshard.passes.search.neighbourhood import around, improve, likely, scored, together
from autoshard.passes.search.network import Array, Solution
from autoshard.passes.search.prune import NO_CHOICE
from autoshard.passes.search.tables import Classes, Tables

GAP = 1e-9
# Steps of the prices, and the part of the time that they may take; sweeps before the first; how far above the bound a step
# aims at most; the share of the last choice in the mean that gives the direction; what the mean decides of a step's length;
# by how much of itself the bound may fall before the prices go back to the best.
STEPS = 200
FIRST_SWEEPS = 30
AHEAD = 0.2
MEAN = 0.2
LENGTH = 0.05
FALL = 0.3
SHARE = 0.25
# The part of the time that is left for what is under way when it is up, and for the answer.
RESERVE = 0.05
PASSES = 40
# Neighbourhoods for effort 1 (where there is no time limit); of one: nodes, entries (without and with a
# time limit), strategies of a node, seconds.
NEIGHBOURHOODS = 60
COUNT = 2_000
LARGE = 20_000
LARGEST = 200_000
STRATEGIES = (1, 4, 10, 25, 200)
SEEN = 40
SECONDS = 20.0
# The MILP of all is tried up to so many entries, with so many nodes of its tree.
WHOLE = 60_000
NODES = 20_000
SMALL = 500
# What is looked at first lies this far above the bound, as a part of it; each failure looks four times as far.
FIRST_LOOK = 0.02
MAX_LOOKS = 6


@dataclass
class _Run:
    lives: Lives
    best: Best
    deadline: float
    bound: float = -math.inf
    dual: Dual | None = None
    seen: NDArray[np.intp] = field(init=False)
    """choices [many, nodes]"""
    tried: int = 0
    size: float = 2_000
    """entries of a neighbourhood"""
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seen = np.zeros((0, len(self.lives.usage)), np.intp)

    @property
    def closed(self) -> bool:
        return math.isfinite(self.best.cost) and self.best.cost - self.bound <= GAP * abs(self.best.cost)

    @property
    def left(self) -> float:
        return self.deadline - time.perf_counter()


def solve_over_time(given: Lives, limit: float, effort: float) -> Solution:
    """The best choice found in ``limit`` seconds. PlanError: none is within the memory's limit, or none was found."""
    begin = time.perf_counter()
    limit *= 1 - RESERVE
    lives, numbers = given.without_beaten(begin + 0.1 * limit)
    start = _least(lives)
    run = _Run(lives, Best(lives, start), begin + limit)
    price = _unit(lives)
    run.best.offer(descend(lives, start, price, PASSES, begin + 0.3 * limit))
    run.seconds["start"] = time.perf_counter() - begin
    small = sum(m.size for _, _, m in lives.network.edges) <= SMALL
    raise_prices(run, 2 if small else math.ceil(STEPS * effort), price, time.perf_counter() + SHARE * run.left)
    run.seconds["bound"] = time.perf_counter() - begin
    generator = np.random.default_rng(0)
    many = math.ceil(NEIGHBOURHOODS * effort)
    if not run.closed:
        neighbourhoods(run, 0 if small else many // 4, price, generator)
        close(run, small)
    run.seconds["close"] = time.perf_counter() - begin
    if not run.closed:
        neighbourhoods(run, many if math.isinf(limit) else 10**9, price, generator)
    if math.isinf(run.best.cost):
        most = float(lives.sums(lives.held(run.best.choice)).max(initial=0.0))
        raise PlanError(f"no choice within the limit of {lives.limit:.6g} was found: the least found uses {most:.6g}")
    stats = {
        "rows": lives.count,
        "neighbourhoods": run.tried,
        "seconds": {k: round(v, 2) for k, v in run.seconds.items()},
    }
    lower = run.best.cost if run.closed else min(run.bound, run.best.cost)
    choice = tuple(int(number[s]) for number, s in zip(numbers, run.best.choice, strict=True))
    return Solution(choice, run.best.cost, lower, run.closed, stats)


def _least(lives: Lives) -> tuple[int, ...]:
    """What holds least, node by node. Raises PlanError where even that is too much."""
    choice = []
    for costs, usage in zip(lives.network.nodes, lives.usage, strict=True):
        if not np.isfinite(costs).any():
            raise PlanError(NO_CHOICE)
        choice.append(int(np.lexsort((costs, np.where(np.isfinite(costs), usage, np.inf)))[0]))
    least = float(lives.sums(lives.held(choice)).max(initial=0.0))
    if least > lives.limit * (1 + 1e-12):
        raise PlanError(f"no choice fits the limit of {lives.limit:.6g}: the least that any choice uses is {least:.6g}")
    return tuple(choice)


def _unit(lives: Lives) -> float:
    """A price of what is held too much, to begin with."""
    spread = [float(np.ptp(costs[np.isfinite(costs)])) for costs in lives.network.nodes]
    edges = [float(np.ptp(m[np.isfinite(m)])) for _, _, m in lives.network.edges if np.isfinite(m).any()]
    return (sum(spread) + sum(edges) or 1.0) / len(spread) / lives.limit * 10


def raise_prices(run: _Run, steps: int, price: float, deadline: float) -> None:
    """Subgradient steps of the rows' prices between sweeps of message passing; local search from what it decodes."""
    lives, best = run.lives, run.best
    dual = run.dual = Dual(Eliminator.of(lives.network, Tables()))
    prices = at_best = np.zeros(lives.count)
    mean = np.zeros(lives.count)
    ahead = AHEAD  # the bound that a step aims at lies this part above the best
    for step in range(steps):
        _sweep(run, dual, FIRST_SWEEPS if step == 0 else 2, deadline)
        if dual.bound > run.bound:
            run.bound, at_best, ahead = dual.bound, prices, min(ahead * 1.2, AHEAD)
        else:
            ahead /= 1.2
        if run.closed or time.perf_counter() > deadline:
            break
        choice = tuple(s for _, s in sorted(dual.decode().items()))
        best.offer(choice)
        run.seen = np.append(run.seen, [choice], axis=0)[-SEEN:]
        if step % 8 == 7:
            best.offer(descend(lives, choice, price, PASSES, deadline))
        slope = lives.sums(lives.held(choice)) - lives.limit
        mean = MEAN * slope + (1 - MEAN) * mean if step else slope
        centre = prices if dual.bound > run.bound - FALL * abs(run.bound) else at_best
        direction = np.where((mean > 0) | (centre > 0), mean, 0.0)
        if run.closed or ahead < 1e-4 or not direction.any():
            break
        aim = min(best.cost, run.bound + ahead * abs(run.bound))
        length = (aim - run.bound) / max(direction @ direction, LENGTH * (slope @ slope))
        moved = np.maximum(centre + length * direction, 0.0)
        _reprice(lives, dual, moved - prices)
        prices = moved
    _reprice(lives, dual, at_best - prices)
    _sweep(run, dual, FIRST_SWEEPS, deadline)
    run.bound = max(run.bound, dual.bound)


def _sweep(run: _Run, dual: Dual, most: int, deadline: float) -> None:
    """Up to ``most`` sweeps, until they hardly raise the bound."""
    for _ in range(most):
        before = dual.bound
        dual.sweep(run.best.cost, deadline)
        if time.perf_counter() > deadline or dual.bound - before <= 1e-4 * abs(before):
            break


def _reprice(lives: Lives, dual: Dual, change: Array) -> None:
    weights = lives.weights(change)
    paid = {i: weights[i] * lives.usage[i] for i in np.flatnonzero(weights).tolist()}
    dual.reprice(paid, -lives.limit * float(change.sum()))


def neighbourhoods(run: _Run, most: int, price: float, generator: np.random.Generator) -> None:
    """Better the best choice by freeing parts of it: larger ones where these are solved to the end."""
    lives, best = run.lives, run.best
    scores: dict[int, tuple[Array, Classes]] = {}
    for _ in range(most):
        if run.closed or run.left < 0.5:
            return
        run.tried += 1
        used = lives.sums(lives.held(best.choice))
        if run.tried % 2 or not lives.count:
            order = around(lives, int(generator.integers(len(best.choice))), COUNT, generator)
        else:
            row = int(generator.integers(lives.count)) if math.isfinite(best.cost) else int(np.argmax(used))
            order = together(lives, row, COUNT, generator)
        many = int(generator.choice(STRATEGIES))
        kept: dict[int, Classes] = {}
        entries = 0
        for node in order:
            if run.dual is not None and node not in scores:
                scores[node] = run.dual.marginal(node), run.dual.kept[node]
            own = scored(lives, node, best.choice, price, used)
            mine = np.union1d(run.seen[:, node], likely(own, np.arange(len(own)), best.choice[node], many))
            if many and node in scores:
                mine = np.union1d(mine, likely(*scores[node], best.choice[node], many))
                mine = np.union1d(mine, generator.integers(len(own), size=many // 2))
            entries += len(mine) * (1 + sum(len(kept[other]) for other, _ in lives.beside[node] if other in kept))
            if entries > run.size and kept:
                break
            kept[node] = mine
        seconds = min(SECONDS, max(run.left, 0.5)) if math.isfinite(run.deadline) else math.inf
        _, exact = improve(best, kept, price, seconds)
        if exact and entries > run.size:
            run.size = min(run.size * 1.5, LARGEST if math.isfinite(run.deadline) else LARGE)
        elif not exact:
            run.size = max(run.size / 1.5, SMALL)


def close(run: _Run, small: bool) -> None:
    """Solve what costs little more than the bound as one MILP, looking further and further above the bound."""
    if run.dual is None:
        return
    reach = math.inf if small else FIRST_LOOK * abs(run.bound)
    for look in range(MAX_LOOKS):
        before = run.best.cost
        target = before if look == MAX_LOOKS - 1 else min(before, run.bound + reach)
        if run.closed or run.left < 1.0 or not _look(run, target):
            return
        reach = reach * 4 if run.best.cost == before else math.inf  # one that is new is nearly the best


def _look(run: _Run, target: float) -> bool:
    """Search all choices of cost up to ``target``; returns whether this was completed."""
    lives, dual = run.lives, run.dual
    assert dual is not None
    kept = {}
    for i in dual.order:
        near = dual.marginal(i) + dual.bound <= target + GAP * abs(target)
        kept[i] = dual.kept[i][near]
    if not all(map(len, kept.values())):
        run.bound = max(run.bound, target)
        return True
    factors: dict[Scope, Array] = {(i,): lives.network.nodes[i][k] for i, k in kept.items()}
    for i, j, matrix in lives.network.edges:
        scope, part = ((i, j), matrix) if i < j else ((j, i), matrix.T)
        part = part[np.ix_(kept[scope[0]], kept[scope[1]])]
        factors[scope] = factors[scope] + part if scope in factors else part
    limits = []
    for r in range(lives.count):
        alive = np.flatnonzero((lives.first <= r) & (r < lives.last)).tolist()
        limits.append(Limit({(i,): lives.usage[i][kept[i]] for i in alive}, lives.limit))
    sizes = [len(kept[i]) for i in range(len(kept))]
    found = solve_core(
        sorted(factors.items()),
        sizes,
        upper=target,
        limits=limits,
        time_limit=max(run.left, 1.0),
        most_nodes=NODES,
        most_entries=WHOLE,
    )
    if found.choice is not None:
        run.best.offer(tuple(int(kept[i][found.choice[i]]) for i in range(len(kept))))
    run.bound = max(run.bound, min(found.lower_bound, target, run.best.cost))
    return found.exact
