"""Local search under a memory limit at each moment: nodes take their best strategies in turn."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

import numpy as np

from autoshard.passes.search.network import Choice
from autoshard.passes.search.over_time.lives import Lives

# Finite cost of forbidden choices.
FORBIDDEN = 1e18


class Best:
    """The best choice so far: feasible if one is known, else the nearest to feasible."""

    def __init__(
        self, lives: Lives, choice: Choice, better: Callable[[float, Choice], None] = lambda cost, choice: None
    ) -> None:
        """``better``: called with every better feasible choice."""
        self.lives, self.choice, self.better = lives, choice, better
        self.used = lives.sums(lives.held(choice))
        self._broken: set[int] | None = None
        self.forbidden, self.excess, self._cost = lives.judge(choice)

    @property
    def cost(self) -> float:
        """Infinite if no feasible choice is known."""
        return math.inf if self.forbidden or self.excess else self._cost

    def offer(self, choice: Choice) -> bool:
        """Keep a choice if it is the best; returns whether it is."""
        found = self.lives.judge(choice)
        if found >= (self.forbidden, self.excess, self._cost):
            return False
        self.choice, self._broken, (self.forbidden, self.excess, self._cost) = choice, None, found
        self.used = self.lives.sums(self.lives.held(choice))
        self._tell()
        return True

    def change(self, part: Mapping[int, int]) -> bool:
        """Change the strategies of some nodes if that is better; returns whether it is."""
        lives, choice = self.lives, list(self.choice)
        never, cost = lives.touched(part, choice)
        used = self.used.copy()
        for node, strategy in part.items():
            usage = lives.usage[node]
            used[lives.first[node] : lives.last[node]] += usage[strategy] - usage[choice[node]]
            choice[node] = strategy
        never_now, cost_now = lives.touched(part, choice)
        excess = float(np.maximum(used - lives.room, 0.0).sum())
        found = self.forbidden + never_now - never, excess, self._cost + cost_now - cost
        if found >= (self.forbidden, self.excess, self._cost):
            return False
        self.choice, self.used, (self.forbidden, self.excess, self._cost) = tuple(choice), used, found
        if self._broken is not None:
            self._broken.update(part)
        self._tell()
        return True

    def _tell(self) -> None:
        if math.isfinite(self.cost):
            self.better(self.cost, self.choice)

    @property
    def broken(self) -> list[int]:
        """Nodes of tables that forbid the choice, at least one per table."""
        lives, choice = self.lives, self.choice
        if self._broken is None:
            pairs = [(i, j) for i, j, matrix in lives.network.matrices if math.isinf(matrix[choice[i], choice[j]])]
            self._broken = {node for pair in pairs for node in pair}
        self._broken = {
            node
            for node in self._broken
            if any(math.isinf(matrix[choice[node], choice[other]]) for other, matrix in lives.beside[node])
        }
        return sorted(self._broken)


def descend(lives: Lives, start: Choice, price: float, passes: int, deadline: float) -> Choice:
    """From ``start`` to a choice that no move of one node betters; excess costs ``price`` a unit.

    The price doubles with every pass until nothing exceeds the limit.
    """
    choice = list(start)
    used = lives.sums(lives.held(choice))
    waiting = set(range(len(choice)))
    visits = 0
    for _ in range(passes):
        changed: set[int] = set()
        for node in sorted(waiting):
            if len(lives.usage[node]) == 1:
                continue
            visits += 1
            if visits % 64 == 0 and time.perf_counter() > deadline:
                return tuple(choice)
            own = float(lives.usage[node][choice[node]])
            total = np.minimum(lives.cost_of(node, choice), FORBIDDEN)
            total = total + price * lives.excess_of(node, used, own)
            best = int(np.argmin(total))
            if total[best] < total[choice[node]]:
                used[lives.first[node] : lives.last[node]] += lives.usage[node][best] - own
                choice[node] = best
                changed.update([node, *(other for other, _ in lives.beside[node])])
        waiting = changed
        if (used > lives.room).any():
            price *= 2
            waiting = set(range(len(choice)))
        elif not changed:
            break
    return tuple(choice)
