"""Subgradient steps on prices of moments, between sweeps of message passing.

They give a bound, near-best choices, and scores of strategies. Source: Held and Karp, The
traveling-salesman problem and minimum spanning trees (1971); Polyak (1969).
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np

from autoshard.passes.search.exact.bound import Dual
from autoshard.passes.search.network import Array, Choice
from autoshard.passes.search.over_time.core import Core
from autoshard.passes.search.over_time.descent import Best, descend

# Sweeps before the first step, and their share of time; most relative aim above the bound; weight of
# the last choice in the mean direction; least squared norm of the direction relative to the last
# slope's; relative fall of the bound that resets prices to the best; steps between descents.
FIRST_SWEEPS = 30
FIRST, FIRST_WHOLE = 0.5, 0.2
AHEAD = 0.2
MEAN = 0.2
LENGTH = 0.05
FALL = 0.3
DESCENT = 8
# Steps end when PATIENCE of them raise the bound by less than this share.
PATIENCE = 10
PROGRESS = 1e-3
PASSES = 40


@dataclass(frozen=True)
class Priced:
    """``prices`` [rows], ``bound``: of every choice; ``seen``: choices, the last ones best.

    ``scores``: approximate excess over the bound per strategy; inf: infeasible.
    """

    prices: Array
    bound: float
    seen: list[Choice]
    scores: list[Array]
    core: Core


def priced(best: Best, steps: int, unit: float, deadline: float, whole: bool = False) -> Priced:
    """Up to ``steps`` steps that offer choices to ``best``; descents price excess at ``unit``.

    ``whole``: messages on all nodes, not just the core: slower, but with scores of each.
    """
    lives = best.lives
    core = Core(lives, most=0) if whole else Core(lives)
    dual = core.dual
    prices = at_best = mean = np.zeros(lives.count)
    bound, ahead, seen = -math.inf, AHEAD, [best.choice]
    bounds: list[float] = []
    now = time.perf_counter()
    first = now + (FIRST_WHOLE if whole else FIRST) * (deadline - now)
    for step in range(steps):
        swept = _sweep(dual, FIRST_SWEEPS if step == 0 else 2, best.cost, first if step == 0 else deadline)
        if swept and dual.bound > bound:
            bound, at_best, ahead = dual.bound, prices, min(ahead * 1.2, AHEAD)
        else:
            ahead /= 1.2
        choice = core.decode()
        seen.append(choice)
        best.offer(choice)
        bounds.append(bound)
        stalled = len(bounds) > PATIENCE and bound - bounds[-1 - PATIENCE] <= PROGRESS * abs(bound)
        if not swept or stalled or time.perf_counter() > deadline:
            break
        if (step + whole) % DESCENT == 0:
            seen.append(descend(lives, choice, unit, PASSES, deadline))
            best.offer(seen[-1])
        slope = lives.sums(lives.held(choice)) - lives.room
        mean = MEAN * slope + (1 - MEAN) * mean if step else slope
        centre = prices if dual.bound > bound - FALL * abs(bound) else at_best
        direction = np.where((mean > 0) | (centre > 0), mean, 0.0)
        aim = min(best.cost, bound + ahead * abs(bound))
        if ahead < 1e-4 or not direction.any() or aim <= bound:
            break
        length = (aim - bound) / max(direction @ direction, LENGTH * (slope @ slope))
        moved = np.maximum(centre + length * direction, 0.0)
        core.reprice(moved)
        prices = moved
    core.reprice(at_best)
    if _sweep(dual, FIRST_SWEEPS, best.cost, deadline):
        bound = max(bound, dual.bound)
    return Priced(at_best, bound, seen, core.scores(best.choice), core)


def _sweep(dual: Dual, most: int, upper: float, deadline: float) -> bool:
    """Up to ``most`` sweeps until the bound hardly rises; returns whether one was completed."""
    for sweep in range(most):
        before = dual.bound
        if not dual.sweep(upper, deadline):
            return sweep > 0
        if dual.bound - before <= 1e-4 * abs(before):
            break
    return True
