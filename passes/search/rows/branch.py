"""Branch and bound on the Lagrangian bound: split where two near-best choices differ most.

A duality gap comes from a few large decisions that do not average out over many layers.
"""

from __future__ import annotations

import heapq

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.folded import Classes
from autoshard.passes.search.network import Array, Choice, Effort, NotFoundError
from autoshard.passes.search.rows.mixture import mix
from autoshard.passes.search.rows.prices import Part, Search, maximise_bound

# Iterations of a branch's bound, and their first box.
ITERATIONS = 8
REACH = 0.3
# Branches for effort 1, and entries that they may compute (a billion takes about a second).
BRANCHES = 24
WORK = 4_000_000_000
# Mixtures tried per branch.
MIXTURES = 2


def branch(search: Search, enough: float, effort: Effort) -> int:
    """Narrow the gap of a search to ``enough``; returns the number of branches."""
    if not effort.branches:
        return 0
    leaves: list[tuple[float, int, Part]] = [(search.part.bound, 0, search.part)]
    made, most = 0, search.work + WORK * effort.part
    while leaves and made < BRANCHES * effort.part and search.work < most and not search.late:
        if search.gap(leaves[0][0]) <= enough:
            break
        bound, _, part = heapq.heappop(leaves)
        split = _split(part)
        if split is None:  # its cheapest choices use the same
            heapq.heappush(leaves, (bound, made, part))
            break
        node, halves = split
        for kept in halves:
            made += 1
            half = part.restricted({node: kept})
            try:
                maximise_bound(search, half, ITERATIONS, enough / 2, REACH)
            except NotFoundError:
                heapq.heappush(leaves, (bound, made, half))
                continue
            except PlanError:
                continue
            if search.gap(half.bound) > enough:
                mix(search, half, enough, MIXTURES)
            heapq.heappush(leaves, (half.bound, made, half))
        leaves = [leaf for leaf in leaves if leaf[0] < search.total]
        heapq.heapify(leaves)
    search.bound = max(search.bound, min([search.total, *(bound for bound, _, _ in leaves)]))
    return made


def _split(part: Part) -> tuple[int, tuple[Classes, Classes]] | None:
    """The node where two near-best choices differ most in usage, and its two halves."""
    parts = sorted(part.mixture, key=lambda weighted: -weighted[0])[:2]
    if len(parts) < 2:
        return None
    first, second = (part.renumbered(cut.choice) for _, cut in parts)
    uses = _uses(part, (first, second))
    change = [u[:, a] - u[:, b] for u, a, b in zip(uses, first, second, strict=True)]
    node = int(np.argmax([np.abs(c).sum() for c in change]))
    if not change[node].any():
        return None
    # position of each strategy between the second choice's (0) and the first's (1)
    way = change[node] @ (uses[node] - uses[node][:, [second[node]]]) / (change[node] @ change[node])
    return node, (np.flatnonzero(way < 0.5), np.flatnonzero(way >= 0.5))


def _uses(part: Part, choices: tuple[Choice, Choice]) -> list[Array]:
    """Per node [rows, strategies]: priced usage, given the mean of neighbours in ``choices``."""
    problem = part.problem
    uses = [np.zeros((len(part.prices), n)) for n in problem.sizes]
    for scope, number in problem.factors.items():
        rows = len(problem.stacks[number]) - 1
        if len(scope) == 1:
            uses[scope[0]][:rows] += problem.stacks[number][1:]
            continue
        for choice in choices if rows else ():
            for axis, (own, other) in enumerate((scope, scope[::-1])):
                uses[own][:rows] += problem.store.beside(number, 1 - axis, choice[other])[1:] / 2
    return [part.prices[:, None] * used for used in uses]
