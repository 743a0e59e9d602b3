"""The cheapest choice within a memory limit: Lagrangian relaxation for the bound, the MILP for what it leaves open.

Source: Held and Karp (1971) for the bound; Kelley, The cutting-plane method (1960), in a box, for its maximum.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import highspy
import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.bound import Dual
from autoshard.passes.search.eliminate import Eliminator
from autoshard.passes.search.milp import Limit, solve_core
from autoshard.passes.search.network import Array, CostNetwork, Memory, Solution
from autoshard.passes.search.prune import NO_CHOICE, Pruner, restrict

Relaxed = Callable[[CostNetwork, float], Solution]
Choice = tuple[int, ...]

# Where the caller sets no time limit: seconds after which the proof of optimality is given up.
PATIENCE = 30.0
# The part of the time that the bound may take, and its iterations.
BOUND_SHARE = 0.4
MAX_ITERATIONS = 200
# The part of the rest that the search among mixtures of the choices seen may take.
MIX_SHARE = 0.3
# Entries of the largest join of an elimination.
MAX_JOIN = 100_000_000
# Message passing before the MILP.
SWEEPS = 30
# The MILP first looks only this far above the bound, as a part of it; each failure looks four times as far.
FIRST_LOOK = 0.002
MAX_LOOKS = 6
GAP = 1e-9


@dataclass(frozen=True)
class Rows:
    """``live[r, i]``: whether row r counts node i; a row's sum must stay within 1 (usage: parts of the limit)."""

    live: Array
    usage: tuple[Array, ...]

    def used(self, choice: Choice) -> Array:
        total: Array = self.live @ np.array([usage[s] for usage, s in zip(self.usage, choice, strict=True)])
        return total

    def fits(self, choice: Choice) -> bool:
        return bool((self.used(choice) <= 1 + 1e-12).all())


def rows_of(network: CostNetwork, memory: Memory) -> Rows:
    """One row per largest set of nodes that live at once and could exceed the limit."""
    count = len(network.nodes)
    if len(memory.usage) != count or any(u.shape != v.shape for u, v in zip(memory.usage, network.nodes, strict=True)):
        raise PlanError("memory: usage needs one vector per node, as long as the node's costs")
    if memory.limit <= 0:
        raise PlanError(f"memory: the limit must be positive, got {memory.limit}")
    shared = {id(u): u / memory.limit for u in memory.usage}
    usage = tuple(shared[id(u)] for u in memory.usage)
    intervals = memory.intervals or ((0, 1),) * count
    moments = sorted({start for start, end in intervals if start < end})
    most = np.array([u.max() for u in usage])
    sets = {frozenset(i for i, (start, end) in enumerate(intervals) if start <= t < end): None for t in moments}
    tight = [s for s in sets if most[list(s)].sum() > 1]
    tight = [s for s in tight if not any(s < other for other in tight)]
    live = np.zeros((len(tight), count))
    for r, members in enumerate(tight):
        live[r, list(members)] = 1.0
    allowed = [usage[np.isfinite(costs)] for usage, costs in zip(usage, network.nodes, strict=True)]
    if not all(map(len, allowed)):
        raise PlanError(NO_CHOICE)
    least = live @ np.array([usage.min() for usage in allowed])
    if least.size and least.max() > 1:
        raise PlanError(
            f"no plan fits the memory limit of {memory.limit:.6g} bytes: "
            f"the least that any plan holds is {least.max() * memory.limit:.6g}"
        )
    return Rows(live, usage)


def penalise(network: CostNetwork, rows: Rows, prices: Array) -> CostNetwork:
    """The network with every node's usage paid at the rows' prices. Shared arrays stay shared."""
    weight = prices @ rows.live
    made: dict[tuple[int, int, float], Array] = {}
    nodes = []
    for vector, usage, w in zip(network.nodes, rows.usage, weight.tolist(), strict=True):
        if w:
            vector = made.setdefault((id(vector), id(usage), w), vector + w * usage)
        nodes.append(vector)
    return CostNetwork(tuple(nodes), network.edges)


@dataclass
class Search:
    """The state of one search: the best feasible choice, the best bound and the prices that give it."""

    network: CostNetwork
    rows: Rows
    prices: Array
    deadline: float
    bound: float = -math.inf
    cost: float = math.inf
    choice: Choice | None = None
    iterations: int = 0
    seen: list[Choice] = field(default_factory=list)

    def offer(self, choice: Choice) -> None:
        if self.rows.fits(choice) and (cost := self.network.cost(choice)) < self.cost:
            self.choice, self.cost = choice, cost

    @property
    def closed(self) -> bool:
        return self.choice is not None and self.cost - self.bound <= GAP * abs(self.cost)


def solve_within(
    network: CostNetwork, memory: Memory, relaxed: Relaxed, make: Callable[[], tuple[Eliminator, Pruner]], limit: float
) -> Solution:
    """The cheapest choice within ``memory``; ``relaxed`` solves a network without a limit; ``limit``: seconds.

    ``make`` gives a fresh eliminator of the network and a pruner. ``exact`` where the gap was closed.
    """
    begin = time.perf_counter()
    seconds = limit if math.isfinite(limit) else PATIENCE
    rows = rows_of(network, memory)
    search = Search(network, rows, np.zeros(len(rows.live)), begin + seconds)
    maximise_bound(search, relaxed, begin + BOUND_SHARE * seconds)
    bounded = time.perf_counter()
    looks = 0
    if not search.closed and len(search.rows.live):
        mix(search, make, _part(search, MIX_SHARE))
        looks = close_gap(search, make)
    if search.choice is None:
        what = "exists" if math.isinf(search.bound) else f"was found in {seconds:.0f} s"
        raise PlanError(f"no plan within the memory limit of {memory.limit:.6g} bytes {what}")
    stats = {
        "rows": len(rows.live),
        "iterations": search.iterations,
        "looks": looks,
        "seconds": {"bound": round(bounded - begin, 3), "milp": round(time.perf_counter() - bounded, 3)},
    }
    lower = search.cost if search.closed else min(search.bound, search.cost)
    return Solution(search.choice, search.cost, lower, search.closed, stats)


def maximise_bound(search: Search, relaxed: Relaxed, deadline: float) -> None:
    """Prices that maximise L(prices) = min over choices of cost + prices · (used − 1), by cutting planes in a box."""
    count = len(search.rows.live)
    cuts: list[tuple[float, Array]] = []  # L(p) ≤ cost + p · slope
    prices, radius = np.zeros(count), math.inf
    while search.iterations < MAX_ITERATIONS:
        search.iterations += 1
        try:
            found = relaxed(penalise(search.network, search.rows, prices), deadline)
        except PlanError:
            if search.iterations == 1:
                raise
            return
        slope = search.rows.used(found.choice) - 1
        cost = search.network.cost(found.choice)
        value = found.lower_bound - float(prices.sum())
        search.offer(found.choice)
        search.seen.append(found.choice)
        cuts.append((cost, slope))
        if value > search.bound:
            search.bound, search.prices = value, prices
        elif math.isfinite(radius):
            radius /= 2
        if search.closed or count == 0 or time.perf_counter() > deadline:
            return
        if not math.isfinite(radius) or radius == 0:
            radius = 8 * max(abs(cost), 1e-300) / max(float(slope.max(initial=-1)), 1e-3)
        prices, model, on_edge = _master(cuts, search.prices, radius)
        if on_edge and value >= search.bound:
            radius *= 2
        if model - search.bound <= 1e-6 * abs(model):
            if not on_edge:
                return
            radius *= 4


def _master(cuts: list[tuple[float, Array]], centre: Array, radius: float) -> tuple[Array, float, bool]:
    """The cutting-plane model within ``radius`` of ``centre``: (best prices, its value, whether the box binds)."""
    count = len(centre)
    unit = max(abs(cost) for cost, _ in cuts) or 1.0
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    lower = np.maximum(0.0, centre - radius) / unit
    for low, high in zip(lower, (centre + radius) / unit, strict=True):
        highs.addVar(float(low), float(high))
    highs.addVar(-highspy.kHighsInf, highspy.kHighsInf)
    highs.changeColCost(count, -1.0)
    for cost, slope in cuts:
        highs.addRow(-highspy.kHighsInf, cost / unit, count + 1, np.arange(count + 1), np.append(-slope, 1.0))
    highs.run()
    solution = np.asarray(highs.getSolution().col_value)
    prices = np.maximum(solution[:count] * unit, 0.0)
    on_edge = bool(
        (prices > (centre + radius) * (1 - 1e-9)).any() or ((prices < lower * unit * (1 + 1e-9)) & (lower > 0)).any()
    )
    return prices, float(solution[count] * unit), on_edge


def close_gap(search: Search, make: Callable[[], tuple[Eliminator, Pruner]]) -> int:
    """Prune by the Lagrangian bound and solve what is left as a MILP, looking further and further above the bound."""
    looks, reach = 0, FIRST_LOOK * abs(search.bound)
    while not search.closed and time.perf_counter() < search.deadline:
        last = looks == MAX_LOOKS or not 0 < reach < math.inf
        target = search.cost if last else min(search.cost, search.bound + reach)
        looks += 1
        completed = _look(search, *make(), target)
        if last or not completed or target == search.cost:
            break
        reach *= 4
    return looks


def _part(search: Search, share: float) -> float:
    """The time when ``share`` of what is left will have passed."""
    now = time.perf_counter()
    return now + share * max(search.deadline - now, 0.0)


def _dual(search: Search, network: Eliminator) -> Dual:
    """The dual of the network with memory paid at the best prices."""
    weight = search.prices @ search.rows.live
    return Dual(network, {i: weight[i] * network.held(i) for i in network.alive}, -float(search.prices.sum()))


def mix(search: Search, make: Callable[[], tuple[Eliminator, Pruner]], deadline: float) -> None:
    """The best choice that takes every node's strategy from one of the choices seen; often near the best of all."""
    network, pruner = make()
    for node, strategies in enumerate(zip(*search.seen, strict=True)):
        restrict(network, node, np.unique(np.array(strategies)))
    try:
        shrink(network, pruner)
    except PlanError:
        return
    _exact(search, network, search.cost, deadline)


def _look(search: Search, network: Eliminator, pruner: Pruner, target: float) -> bool:
    """Search all choices that cost at most ``target``; returns whether this was completed (then the bound is known)."""
    try:
        pruner.run(network)
        dual = _dual(search, network)
        for _ in range(SWEEPS):
            dual.sweep(target + GAP * abs(target))
        for node, kept in dual.kept.items():
            restrict(network, node, kept)
        shrink(network, pruner)
    except PlanError:  # nothing is left below the target
        search.bound = max(search.bound, target)
        return True
    lower, completed = _exact(search, network, target, search.deadline)
    search.bound = max(search.bound, min(lower, target, search.cost))
    return completed


def shrink(network: Eliminator, pruner: Pruner) -> None:
    """Prune, and eliminate the nodes that always hold the same, until neither finds anything."""
    pruner.run(network)
    network.run(max_degree=2, max_weight=MAX_JOIN)
    while pruner.run(network):
        network.run(max_degree=2, max_weight=MAX_JOIN)


def _exact(search: Search, network: Eliminator, target: float, deadline: float) -> tuple[float, bool]:
    """Offers what the MILP finds; returns (lower bound of the choices left, whether it was solved to the end)."""
    gone = network.gone
    limits = [
        Limit({i: network.held(i) for i in network.alive if row[i]}, 1 - sum(gone[i] for i in gone if row[i]))
        for row in search.rows.live
    ]
    left = max(deadline - time.perf_counter(), 1.0)
    upper = target - network.constant
    found = solve_core(list(network.core()), network.sizes, upper=upper, limits=limits, time_limit=left)
    if found.choice is not None:
        choice = network.back_substitute(dict(found.choice), len(network.steps))
        search.offer(tuple(choice[node] for node in range(len(network.sizes))))
    return network.constant + found.lower_bound, found.exact
