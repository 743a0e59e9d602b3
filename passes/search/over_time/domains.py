"""Constraint propagation: drops strategies that are infeasible whatever the rest chooses.

Source: Mackworth, Consistency in networks of relations (1977); Savelsbergh, Preprocessing and
probing techniques for mixed integer programming problems (1994).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.passes.search.folded import Classes
from autoshard.passes.search.network import Array
from autoshard.passes.search.over_time.lives import SLACK, Integers, Lives

# Visits between clock reads.
OFTEN = 64


@dataclass(frozen=True)
class Domains:
    """``kept``: remaining strategies per node; ``least``, ``most``: the bytes that they hold."""

    kept: tuple[Classes, ...]
    least: Array
    most: Array

    @classmethod
    def of(cls, lives: Lives, deadline: float) -> Domains | None:
        """Without infeasible strategies. None: nothing is feasible."""
        every = tuple(np.arange(len(costs)) for costs in lives.network.nodes)
        zeros = np.zeros(len(every))
        allowed = {node: np.flatnonzero(np.isfinite(costs)) for node, costs in enumerate(lives.network.nodes)}
        return cls(every, zeros, zeros).narrowed(lives, allowed, deadline)

    def narrowed(self, lives: Lives, parts: Mapping[int, Classes], deadline: float) -> Domains | None:
        """Only ``parts`` of some nodes' strategies, propagated. None: nothing is feasible.

        Propagation stops at ``deadline``.
        """
        work = _Narrowing(lives, self)
        if not all(work.keep(node, part) for node, part in parts.items()):
            return None
        while work.waiting:
            if not work.supported(deadline) or not work.fit():
                return None
            if time.perf_counter() > deadline:
                break
        return Domains(tuple(work.kept), work.least, work.most)


class _Narrowing:
    def __init__(self, lives: Lives, domains: Domains) -> None:
        self.lives = lives
        self.kept = list(domains.kept)
        self.least, self.most = domains.least.copy(), domains.most.copy()
        self.waiting: set[int] = set()
        """nodes that lost strategies lately"""

    def keep(self, node: int, part: Classes) -> bool:
        """Keep only a part; returns whether there is one."""
        self.kept[node] = part
        if len(part):
            usage = self.lives.usage[node][part]
            self.least[node], self.most[node] = usage.min(), usage.max()
        self.waiting.add(node)
        return len(part) > 0

    def supported(self, deadline: float) -> bool:
        """Arc consistency: drop unsupported strategies; returns whether each node has some left."""
        visits = 0
        while self.waiting:
            beside = {other for node in self.waiting for other, _ in self.lives.supports[node]}
            self.waiting = set()
            for node in sorted(beside):
                visits += 1
                if visits % OFTEN == 0 and time.perf_counter() > deadline:
                    return True
                own = self.kept[node]
                stay = np.ones(len(own), dtype=bool)
                for other, allowed in self.lives.supports[node]:
                    theirs = self.kept[other]
                    if len(theirs) == 1:
                        stay &= allowed[own, theirs[0]]
                    else:
                        stay &= allowed[np.ix_(own, theirs)].any(axis=1)
                if not stay.all() and not self.keep(node, own[stay]):
                    return False
        return True

    def fit(self) -> bool:
        """Drop strategies that exceed the limit given the others' least; False: so does the
        least."""
        lives = self.lives
        if not lives.count:
            return True
        spare = SLACK * lives.scale
        room = lives.room - lives.sums(self.least) + spare
        if (room < 0).any():
            return False
        left = least_between(room, lives.first, lives.last)
        for node in np.flatnonzero(self.most - self.least > left).tolist():
            part = self.kept[node]
            self.keep(node, part[lives.usage[node][part] - self.least[node] <= left[node]])
        return True


def least_between(values: Array, first: Integers, last: Integers) -> Array:
    """min of values[first : last] per pair; infinite if empty."""
    found = np.full(len(first), np.inf)
    lengths, step, least = last - first, 1, values
    while step <= len(values):
        among = (step <= lengths) & (lengths < 2 * step)  # covered by two windows of this length
        found[among] = np.minimum(least[first[among]], least[last[among] - step])
        least = np.minimum(least[: len(least) - step], least[step:]) if len(least) > step else least[:0]
        step *= 2
    return found
