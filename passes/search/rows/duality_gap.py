"""Closing the duality gap: single-node moves, mixtures of two near-best choices, branch and bound.
Prices alone change all equal layers at once. Moves of one node fill a limit to the brim; mixtures let k of L equal layers
choose differently; branching decides the few large choices that do not average out."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.arrays import Classes
from autoshard.passes.search.exact.elimination import by_join
from autoshard.passes.search.limits import LIMITS
from autoshard.passes.search.network import Array, Choice, Effort
from autoshard.passes.search.rows.lagrangian import ChoicePart, LagrangianSearch, maximise_bound
from autoshard.passes.search.rows.relaxation import Elimination
from autoshard.passes.search.rows.stacked import Stacked


def flip_nodes(problem: Stacked, slack: Array, choice: Sequence[int]) -> Choice:
    """``choice`` after moves into the hard limits at least cost, then moves of largest gain.
    ``slack``: tolerated excess per row."""
    state = _FlipState(problem, slack, choice)
    for _ in range(int(LIMITS.max_flips_per_node * len(problem.sizes))):
        at = state.best()
        if at is None:
            break
        state.take(at)
    return tuple(state.choice)


class _FlipState:
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
        least = LIMITS.min_flip_gain * abs(self.cost) if np.isfinite(self.cost) else 0.0
        return at if more[at] < -least else None

    def take(self, at: int) -> None:
        i = int(np.searchsorted(self.starts, at, side="right")) - 1
        self.over = self.over + self.change[1:, at]
        self.choice[i] = at - int(self.starts[i])
        gain = float(self.change[0, at])
        self.cost = self.cost + gain if np.isfinite(self.cost) else float(self.problem.sums(tuple(self.choice))[0])
        for node in {j for scope in self.around[i] for j in scope}:
            self._look(node)


# Share of nodes that are free on each side of a border: some layers.
FREE_SHARE = 1 / 20
# First shift of a border, as a share of nodes: beyond the nodes that were free.
BORDER_STEP = 2 * FREE_SHARE


def search_mixtures(search: LagrangianSearch, part: ChoicePart, enough: float, trials: int) -> int:
    """Move the borders of a mixture to the cheapest choice; returns the number of trials."""
    mixture = sorted(part.mixture, key=lambda weighted: tuple(weighted[1].slope))
    if part.elimination is None or len(mixture) < 2:
        return 0
    borders = _Borders(search, part, [part.renumbered(cut.choice) for _, cut in mixture])
    return borders.move(np.cumsum([weight for weight, _ in mixture])[:-1], enough, trials)


class _Borders:
    """Nodes up to a border follow one of ``choices``, later ones the next."""

    def __init__(self, search: LagrangianSearch, part: ChoicePart, choices: list[Choice]) -> None:
        self.search, self.part = search, part
        self.choices = np.array(choices)
        self.count = len(part.problem.sizes)
        most = part.problem.prices
        self.charge = np.where(np.isinf(most), LIMITS.hard_row_factor * part.prices, most)
        self.pairs = np.array([scope for scope in part.problem.factors if len(scope) == 2]).reshape(-1, 2)
        self.tried: dict[tuple[int, ...], float] = {}

    def value(self, borders: tuple[int, ...]) -> float:
        """Cost at these borders, with hard rows' excess at a price; inf if infeasible."""
        if borders not in self.tried:
            part = self.part.restricted({i: self.choices[k, i : i + 1] for i, k in self._fixed(borders)})
            elimination = Elimination(part.problem, by_join)
            self.search.solved += 1
            self.search.work += elimination.work
            try:
                choice, _ = elimination.solve(part.prices)
            except PlanError:  # the two choices are incompatible across the border
                self.tried[borders] = math.inf
                return math.inf
            whole = self.part.renumbered(part.original(choice))
            filled = flip_nodes(self.part.problem, self.search.slack, whole)
            cost, over = self.search.offer(self.part.original(filled))
            self.tried[borders] = cost + float(np.maximum(over, 0.0) @ self.charge)
        return self.tried[borders]

    def _fixed(self, borders: tuple[int, ...]) -> list[tuple[int, int]]:
        """(node, number of the choice that it follows)."""
        nodes = np.arange(self.count)
        which = np.searchsorted(np.array(borders), nodes, side="right")
        free = np.zeros(self.count, dtype=bool)
        for border in borders:
            free |= np.abs(nodes - border + 0.5) < max(FREE_SHARE * self.count, 2)
        first, second = self.pairs.T
        low, high = which.copy(), which.copy()
        for a, b in ((first, second), (second, first)):
            np.minimum.at(low, a, which[b])
            np.maximum.at(high, a, which[b])
        free |= low < high
        return [(int(i), int(which[i])) for i in np.flatnonzero(~free)]

    def move(self, parts: Array, enough: float, trials: int) -> int:
        """Shift one border after the other, in ever smaller steps."""
        best = tuple(round(part * self.count) for part in parts)
        self.value(best)
        step = max(int(BORDER_STEP * self.count), 1)
        while step and len(self.tried) < trials and self.search.gap(self.search.bound) > enough:
            found = best
            for k, shift in itertools.product(range(len(best)), (-step, step)):
                moved = (*best[:k], best[k] + shift, *best[k + 1 :])
                if (
                    list(moved) == sorted(moved)
                    and moved[0] >= 0
                    and moved[-1] <= self.count
                    and len(self.tried) < trials
                ):
                    found = min(found, moved, key=self.value)
            if found == best:
                step //= 2
            best = found
        return len(self.tried)


def branch_and_bound(search: LagrangianSearch, enough: float, effort: Effort) -> int:
    """Narrow the gap of a search to ``enough``; returns the number of branches."""
    if not effort.branches:
        return 0
    leaves: list[tuple[float, int, ChoicePart]] = [(search.part.bound, 0, search.part)]
    made, most = 0, search.work + LIMITS.branch_work * effort.part
    while leaves and made < LIMITS.branches * effort.part and search.work < most:
        if search.gap(leaves[0][0]) <= enough:
            break
        bound, _, part = heapq.heappop(leaves)
        split = _branching_node(part)
        if split is None:  # its cheapest choices use the same
            heapq.heappush(leaves, (bound, made, part))
            break
        node, halves = split
        for kept in halves:
            made += 1
            half = part.restricted({node: kept})
            try:
                maximise_bound(search, half, LIMITS.branch_iterations, enough / 2, LIMITS.branch_box)
            except PlanError:
                continue
            if search.gap(half.bound) > enough:
                search_mixtures(search, half, enough, LIMITS.branch_mixtures)
            heapq.heappush(leaves, (half.bound, made, half))
        leaves = [leaf for leaf in leaves if leaf[0] < search.total]
        heapq.heapify(leaves)
    search.bound = max(search.bound, min([search.total, *(bound for bound, _, _ in leaves)]))
    return made


def _branching_node(part: ChoicePart) -> tuple[int, tuple[Classes, Classes]] | None:
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


def _uses(part: ChoicePart, choices: tuple[Choice, Choice]) -> list[Array]:
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
