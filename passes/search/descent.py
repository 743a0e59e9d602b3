"""Local search under a limit on what is held at any time: one node after the other takes its best strategy."""

from __future__ import annotations

import time

import numpy as np

from autoshard.passes.search.lives import Lives

# Stands for what is forbidden.
FORBIDDEN = 1e18


class Best:
    """The best choice so far: within the limit if there is one, otherwise that which holds the least too much."""

    def __init__(self, lives: Lives) -> None:
        self.lives = lives
        self.choice: tuple[int, ...] | None = None
        self.key = (np.inf, np.inf)

    @property
    def cost(self) -> float:
        """Infinite where no choice is within the limit."""
        return self.key[1] if self.key[0] == 0 else np.inf

    def offer(self, choice: list[int] | tuple[int, ...]) -> bool:
        """Take a choice if it is the best; returns whether it is."""
        cost = self.lives.network.cost(tuple(choice))
        if not np.isfinite(cost):
            return False
        key = (self.lives.excess(choice), cost)
        if key < self.key:
            self.choice, self.key = tuple(choice), key
            return True
        return False


def descend(lives: Lives, start: tuple[int, ...], price: float, passes: int, deadline: float) -> list[int]:
    """From ``start`` to a choice that no change of one node betters; a unit held too much costs ``price``.

    The price doubles with every pass until nothing too much is held.
    """
    choice = list(start)
    used = lives.sums(lives.held(choice))
    waiting = set(range(len(choice)))
    for _ in range(passes):
        changed: set[int] = set()
        for node in sorted(waiting):
            if len(lives.usage[node]) == 1:
                continue
            own = float(lives.usage[node][choice[node]])
            total = np.minimum(lives.cost_of(node, choice), FORBIDDEN)
            total = total + price * lives.excess_of(node, used, own)
            best = int(np.argmin(total))
            if total[best] < total[choice[node]]:
                used[lives.first[node] : lives.last[node]] += lives.usage[node][best] - own
                choice[node] = best
                changed.update([node, *(other for other, _ in lives.beside[node])])
            if node % 64 == 0 and time.perf_counter() > deadline:
                return choice
        waiting = changed
        if (used > lives.limit * (1 + 1e-12)).any():
            price *= 2
            waiting = set(range(len(choice)))
        elif not changed:
            break
    return choice
