"""The exact search for the cheapest strategies of a cost network."""

from __future__ import annotations

import math
import time

from ...errors import PlanError
from .eliminate import Eliminator, Step
from .milp import solve_core
from .network import CostNetwork, Memory, Solution
from .prune import Pruner
from .tables import Tables

__all__ = ["CostNetwork", "Memory", "Solution", "solve"]

# Entries of the largest join that elimination computes; beyond it the core goes to the MILP solver.
MAX_JOIN = 2_000_000_000


def solve(network: CostNetwork, *, time_limit: float | None = None, memory: Memory | None = None) -> Solution:
    """The cheapest strategy per node.

    Raises PlanError when no choice is feasible.
    """
    begin = time.perf_counter()
    tables = Tables()
    eliminator = Eliminator.of(network, tables)
    pruner = Pruner(tables)
    removed = pruner.run(eliminator)
    pruned = time.perf_counter()
    eliminator.run(max_degree=2, max_weight=MAX_JOIN)
    while more := pruner.run(eliminator):
        removed += more
        eliminator.run(max_degree=2, max_weight=MAX_JOIN)
    if eliminator.alive and eliminator.fits(MAX_JOIN):
        eliminator.run(max_degree=len(network.nodes), max_weight=MAX_JOIN)
    eliminated = time.perf_counter()
    choice, bound, exact = {}, eliminator.constant, True
    core = len(eliminator.alive)
    if core and math.isfinite(bound):
        found = solve_core(list(eliminator.core()), eliminator.sizes, time_limit=time_limit)
        choice, bound, exact = dict(found.choice), bound + found.lower_bound, found.exact
    if not math.isfinite(bound):
        raise PlanError("no choice of strategies is feasible: every one meets a forbidden cost")
    eliminator.back_substitute(choice)
    chosen = tuple(choice[node] for node in range(len(network.nodes)))
    cost = network.cost(chosen)
    stats = {
        "pruned": removed,
        "eliminated": sum(isinstance(step, Step) for step in eliminator.steps),
        "core": core,
        "tables": len(tables.arrays),
        "seconds": {"prune": pruned - begin, "eliminate": eliminated - pruned, "core": time.perf_counter() - eliminated},
    }
    return Solution(chosen, cost, cost if exact else min(bound, cost), exact, stats)
