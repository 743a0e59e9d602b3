"""Large neighbourhood search: some nodes are free, the others stay, and the MILP finds the best for those.

Source: Shaw, Using constraint programming and local search methods to solve vehicle routing problems (1998).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from autoshard.passes.search.descent import FORBIDDEN, Best
from autoshard.passes.search.eliminate import Scope
from autoshard.passes.search.lives import Lives
from autoshard.passes.search.milp import Limit, solve_core
from autoshard.passes.search.network import Array
from autoshard.passes.search.tables import Classes

# Nodes of the MILP's tree in a neighbourhood.
NODES = 200


def around(lives: Lives, seed: int, count: int, generator: np.random.Generator) -> list[int]:
    """``count`` nodes next to ``seed``, breadth first; of a node with many neighbours only some."""
    found, waiting = {seed: None}, deque([seed])
    while waiting and len(found) < count:
        near = [other for other, _ in lives.beside[waiting.popleft()] if other not in found]
        near = [near[k] for k in generator.permutation(len(near))[:8]]
        for other in near[: count - len(found)]:
            found[other] = None
            waiting.append(other)
    return list(found)


def together(lives: Lives, row: int, count: int, generator: np.random.Generator) -> list[int]:
    """``count`` nodes that live in a row, and then those that live nearest to it."""
    away = np.maximum(lives.first - row, row + 1 - lives.last).clip(0) + generator.random(len(lives.first))
    away[lives.first >= lives.last] += lives.count
    return [int(node) for node in np.argsort(away, kind="stable")[:count]]


def improve(best: Best, kept: dict[int, Classes], price: float, seconds: float) -> tuple[bool, bool]:
    """Free some nodes of the best choice, with the strategies ``kept``.

    Returns whether a better one was found, and whether all were searched.

    While no choice within the limit is known a unit held too much costs ``price``.
    """
    lives, choice = best.lives, best.choice
    numbers = {node: k for k, node in enumerate(sorted(kept))}
    nodes = list(numbers)
    factors: dict[Scope, Array] = {}
    current = list(choice)
    for node, k in numbers.items():
        total = lives.network.nodes[node][kept[node]]
        for other, matrix in lives.beside[node]:
            if other not in numbers:
                total = total + matrix[kept[node], choice[other]]
            elif other > node:
                scope, part = (k, numbers[other]), matrix[np.ix_(kept[node], kept[other])]
                factors[scope] = factors[scope] + part if scope in factors else part
        factors[k,] = total
    hard = math.isfinite(best.cost)
    limits = _limits(lives, choice, nodes, kept, math.inf if hard else price)
    before = {node: int(np.flatnonzero(kept[node] == choice[node])[0]) for node in nodes}
    now = sum(float(f[tuple(before[nodes[k]] for k in scope)]) for scope, f in factors.items())
    upper = now - 1e-7 * abs(now) if hard else math.inf
    sizes = [len(kept[node]) for node in nodes]
    found = solve_core(sorted(factors.items()), sizes, upper=upper, limits=limits, time_limit=seconds, most_nodes=NODES)
    if found.choice is None:
        return False, found.exact
    for k, node in enumerate(nodes):
        current[node] = int(kept[node][found.choice[k]])
    return best.offer(tuple(current)), found.exact


def _limits(
    lives: Lives, choice: Sequence[int], nodes: list[int], kept: dict[int, Classes], price: float
) -> list[Limit]:
    """What the free nodes may hold beside the others, once for each set of them that lives at once."""
    held = lives.held(choice)
    held[nodes] = 0.0
    room = lives.limit - lives.sums(held)
    borders = sorted({int(r) for node in nodes for r in (lives.first[node], lives.last[node])})
    found: dict[tuple[int, ...], float] = {}
    for begin, end in itertools.pairwise(borders):
        alive = tuple(k for k, node in enumerate(nodes) if lives.first[node] <= begin < lives.last[node])
        if alive:
            found[alive] = min(found.get(alive, math.inf), float(room[begin:end].min()))
    most = np.array([lives.usage[node][kept[node]].max() for node in nodes])
    tight = {alive: left for alive, left in found.items() if most[list(alive)].sum() > left}
    return [
        Limit({(k,): lives.usage[nodes[k]][kept[nodes[k]]] for k in alive}, left, price)
        for alive, left in tight.items()
    ]


def likely(scores: Array, numbers: Classes, present: int, most: int) -> Classes:
    """The ``most`` strategies of the best scores, with the ``present`` one; ``numbers``: what they are called."""
    order = numbers[np.argsort(scores, kind="stable")][: most - 1]
    return np.unique(np.append(order, present))


def scored(lives: Lives, node: int, choice: Sequence[int], price: float, used: Array) -> Array:
    """What each strategy costs beside the others' choices, with what it makes too much."""
    own = float(lives.usage[node][choice[node]])
    total = np.minimum(lives.cost_of(node, choice), FORBIDDEN)
    scores: Array = total + price * lives.excess_of(node, used, own)
    return scores
