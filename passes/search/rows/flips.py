"""Local search by single-node moves: one node changes its strategy while all others stay.

Prices alone change all equal layers at once. Single moves use up a limit: for example, one layer
keeps a value and another recomputes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.passes.search.network import Array, Choice
from autoshard.passes.search.rows.stacked import Stacked

# Most moves per node.
CHANGES = 2.0
# Least relative gain.
LEAST = 1e-9


def flipped(problem: Stacked, slack: Array, choice: Sequence[int]) -> Choice:
    """``choice`` after moves into the hard limits at least cost, then moves of largest gain.

    ``slack``: tolerated excess per row.
    """
    state = _State(problem, slack, choice)
    for _ in range(int(CHANGES * len(problem.sizes))):
        at = state.best()
        if at is None:
            break
        state.take(at)
    return tuple(state.choice)


class _State:
    """``change`` [1 + rows, strategies of all nodes]: effect of a move on cost and row sums."""

    def __init__(self, problem: Stacked, slack: Array, choice: Sequence[int]) -> None:
        self.problem, self.slack, self.choice = problem, slack, [int(s) for s in choice]
        self.unit = 1.0 / problem.scale
        self.starts = np.concatenate([[0], np.cumsum(problem.sizes)])
        self.around: list[list[tuple[int, ...]]] = [[] for _ in problem.sizes]
        for scope in problem.factors:
            for i in scope:
                self.around[i].append(scope)
        self.change = np.zeros((1 + len(problem.limits), int(self.starts[-1])))
        self.known: dict[object, Array] = {}
        """effects of moves where equal layers and their neighbours choose alike"""
        for i in range(len(problem.sizes)):
            self._look(i)
        self.cost, *used = problem.sums(tuple(self.choice)).tolist()
        self.over = np.array(used) - problem.limits

    def _look(self, i: int) -> None:
        """Update the moves of node ``i``."""
        store = self.problem.store
        beside = [(self.problem.factors[scope], self._other(scope, i)) for scope in self.around[i]]
        key = self.choice[i], *beside
        if key not in self.known:
            own = np.zeros((len(self.change), self.problem.sizes[i]))
            for number, other in beside:
                part = store.arrays[number] if other is None else store.beside(number, *other)
                own[: len(part)] += part
            now = own[:, self.choice[i]].copy()
            if np.isinf(now[0]):  # forbidden: any allowed strategy beats moves elsewhere
                own[0], now[0] = np.where(np.isfinite(own[0]), -np.inf, np.inf), 0.0
            self.known[key] = own - now[:, None]
        self.change[:, self.starts[i] : self.starts[i + 1]] = self.known[key]

    def _other(self, scope: tuple[int, ...], i: int) -> tuple[int, int] | None:
        """The other node's axis of a pair, and its choice."""
        if len(scope) == 1:
            return None
        axis = 1 - scope.index(i)
        return axis, self.choice[scope[axis]]

    def best(self) -> int | None:
        """The next move; None: nothing improves."""
        hard, soft = np.isinf(self.problem.prices), np.isfinite(self.problem.prices)
        after = self.over[:, None] + self.change[1:]
        prices = self.problem.prices[soft, None]
        more = (prices * (np.maximum(after[soft], 0.0) - np.maximum(self.over[soft], 0.0)[:, None])).sum(axis=0)
        more += self.change[0]
        unit = self.unit[hard]
        left = (unit[:, None] * np.maximum(after[hard] - self.slack[hard, None], 0.0)).sum(axis=0)
        now = float((unit * np.maximum(self.over[hard] - self.slack[hard], 0.0)).sum())
        if now > 0:  # least cost per excess removed
            nearer = np.flatnonzero(left < now)
            if not len(nearer):
                return None
            return int(nearer[np.argmin(more[nearer] / (now - left[nearer]))])
        more[left > 0] = np.inf
        at = int(np.argmin(more))
        least = LEAST * abs(self.cost) if np.isfinite(self.cost) else 0.0
        return at if more[at] < -least else None

    def take(self, at: int) -> None:
        i = int(np.searchsorted(self.starts, at, side="right")) - 1
        self.over = self.over + self.change[1:, at]
        self.choice[i] = at - int(self.starts[i])
        gain = float(self.change[0, at])
        self.cost = self.cost + gain if np.isfinite(self.cost) else float(self.problem.sums(tuple(self.choice))[0])
        for node in {j for scope in self.around[i] for j in scope}:
            self._look(node)
