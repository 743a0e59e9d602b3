"""Lagrangian prices of moments by subgradient steps, between sweeps of message passing.

Elimination leaves the same core of nodes at all prices, so messages stay valid from step to step.
Source: Held and Karp, The traveling-salesman problem and minimum spanning trees (1971); Polyak (1969); Bertelè and Brioschi,
Nonserial Dynamic Programming (1972)."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType

import numpy as np

from autoshard.errors import PlanError
from autoshard.passes.search.arrays import Classes
from autoshard.passes.search.exact.elimination import BLOCK, Eliminator, Scope, Tables, by_join
from autoshard.passes.search.exact.pruning import NO_CHOICE, Dual, _Edge
from autoshard.passes.search.network import Array, Choice
from contest.liveness import LivenessProblem
from contest.local_search import Best, descend

# Entries of the largest join, and neighbours of an eliminated node.
CORE_JOIN = 300_000
CORE_NEIGHBOURS = 2


@dataclass
class _CoreStep:
    """A computed value: a sum of ``parts``, or the factor of an eliminated node.

    Then the parts are its vector and a matrix per neighbour in ``around``; ``second``: whether the
    node is its second axis.
    """

    parts: tuple[int, ...]
    node: int = -1
    around: Scope = ()
    second: tuple[bool, ...] = ()
    seen: tuple[Array, ...] = ()
    result: Array = field(default_factory=lambda: np.empty(0))

    def run(self, values: list[Array]) -> Array:
        """The value; the previous array if the parts are unchanged."""
        parts = tuple(values[k] for k in self.parts)
        if not self.seen or any(a is not b for a, b in zip(parts, self.seen, strict=True)):
            self.seen, self.result = parts, self._made(*parts)
        return self.result

    def _made(self, first: Array, *others: Array) -> Array:
        if self.node < 0:
            return sum(others, first)
        return least_sum(first, [m if last else m.T for m, last in zip(others, self.second, strict=True)])

    def totals(self, choice: Sequence[int] | Mapping[int, int]) -> Array:
        """Costs of the node's strategies given its neighbours' choices."""
        total = self.seen[0]
        for matrix, last, other in zip(self.seen[1:], self.second, self.around, strict=True):
            total = total + (matrix[choice[other]] if last else matrix[:, choice[other]])
        return total


def least_sum(own: Array, matrices: list[Array]) -> Array:
    """min over s of own[s] + Σ matrices[k][a_k, s], for up to two matrices."""
    if not matrices:
        return np.asarray(own.min())
    first = matrices[0] + own
    if len(matrices) == 1:
        least: Array = first.min(axis=1)
        return least
    second = np.ascontiguousarray(matrices[1])
    step = max(1, BLOCK // second.size)
    blocks = [slice(k, k + step) for k in range(0, len(first), step)]
    return np.concatenate([(first[block, None, :] + second).min(axis=2) for block in blocks])


def _with_table(edge: _Edge, array: Array, kept: Sequence[Classes]) -> _Edge:
    """With the ``kept`` rows and columns of another matrix; moved costs stay."""
    new = copy(edge)
    new.table = array.take(kept[0], 0).take(kept[1], 1)
    new.members = [np.arange(n) for n in new.table.shape]
    new.differ, new.settled = [True, True], [False, False]
    return new


class RepricedDual(Dual):
    """Messages that stay valid from one price to the next."""

    def reprice(
        self, change: Mapping[int, Array], constant: float, edges: Mapping[Scope, Array] = MappingProxyType({})
    ) -> None:
        """Add vectors over original strategies to node costs, and ``constant`` to the total.
        ``edges``: replacement matrices; costs moved in stay. A sweep restores the bound."""
        self.bound += constant
        for scope, array in edges.items():
            self.edges[scope] = _with_table(self.edges[scope], array, [self.kept[i] for i in scope])
        for i, vector in change.items():
            self.node[i] += vector[self.kept[i]]
            least = float(self.node[i].min())
            self.bound += least
            self.node[i] -= least

    def gap(self, i: int, choice: Sequence[int]) -> float:
        """Excess of node ``i`` and half of each of its edges over their minima, inf if a strategy
        was dropped. After a sweep the sum over nodes is the choice's cost less the bound."""
        at = self._place(i, choice)
        if at is None:
            return math.inf
        total = float(self.node[i][at])
        for scope in self.before[i] + self.after[i]:
            side = scope.index(i)
            other = self._place(scope[1 - side], choice)
            if other is None:
                return math.inf
            edge, pair = self.edges[scope], ((at, other) if side == 0 else (other, at))
            total += edge.table[tuple(m[s] for m, s in zip(edge.members, pair, strict=True))] / 2
            total += sum(float(moved[s]) for moved, s in zip(edge.moved_in, pair, strict=True)) / 2
        return total

    def _place(self, i: int, choice: Sequence[int]) -> int | None:
        """Position of the chosen strategy among the remaining ones."""
        place = int(np.searchsorted(self.kept[i], choice[i]))
        return place if place < len(self.kept[i]) and self.kept[i][place] == choice[i] else None

    def marginal(self, i: int) -> Array:
        """Lower bound per remaining strategy on its excess over the best, from node and edges."""
        total = self.node[i].copy()
        for scope in self.before[i] + self.after[i]:
            total += self._message(scope, i)
        return total


class Core:
    """``dual``: messages on the core at ``prices`` [rows]; bounds choices within the limit.

    ``self._values``: costs of nodes and edges, then results of the steps.
    """

    def __init__(self, lives: LivenessProblem, most: int = CORE_JOIN) -> None:
        """``most``: entries of the largest join."""
        self.lives, self.most, self.prices = lives, most, np.zeros(lives.count)
        self.sizes = [len(costs) for costs in lives.network.nodes]
        self._weights = np.zeros(len(self.sizes))
        self._values: list[Array] = []
        self._factors: dict[Scope, int] = {}
        self._constants: list[int] = []
        self._steps: list[_CoreStep] = []
        beside = self._begun()
        self._eliminate(beside)
        self._run()
        self.dual = self._messages()
        self._judged: tuple[Choice, Array] | None = None

    def _begun(self) -> list[set[int]]:
        """Take the network's factors; returns neighbours per node, without one-strategy nodes."""
        beside: list[set[int]] = [set() for _ in self.sizes]
        given: list[tuple[Scope, Array]] = [((node,), costs) for node, costs in enumerate(self.lives.network.nodes)]
        for i, j, matrix in self.lives.network.matrices:
            both, table = ((i, j), matrix) if i < j else ((j, i), matrix.T)
            left: Scope = tuple(node for node in both if self.sizes[node] > 1)
            given.append((left, table if len(left) == 2 else table.reshape([self.sizes[node] for node in left])))
            if len(left) == 2:
                beside[i].add(j)
                beside[j].add(i)
        self._values = [table for _, table in given]
        self._given = len(given)
        for number, (left, _) in enumerate(given):
            self._add(left, number)
        return beside

    def _add(self, scope: Scope, number: int) -> None:
        """Add a value to the factor of a scope."""
        if not scope:
            self._constants.append(number)
        elif scope in self._factors:
            self._factors[scope] = self._step(_CoreStep((self._factors[scope], number)))
        else:
            self._factors[scope] = number

    def _step(self, step: _CoreStep) -> int:
        self._steps.append(step)
        self._values.append(np.empty(0))
        return len(self._values) - 1

    def _eliminate(self, beside: list[set[int]]) -> None:
        """Steps for nodes of few neighbours, smallest join first."""
        sizes = self.sizes

        def weight(node: int) -> int:
            return by_join(sizes[node], [sizes[other] for other in beside[node]])

        current = {node: weight(node) for node in range(len(sizes))}
        heap = [(entries, node) for node, entries in current.items()]
        heapq.heapify(heap)
        while heap:
            entries, node = heapq.heappop(heap)
            if current.get(node) != entries or entries > self.most or len(beside[node]) > CORE_NEIGHBOURS:
                continue
            del current[node]
            around = tuple(sorted(beside[node]))
            scopes = [(min(node, other), max(node, other)) for other in around]
            parts = (self._factors.pop((node,)), *map(self._factors.pop, scopes))
            self._add(around, self._step(_CoreStep(parts, node, around, tuple(other < node for other in around))))
            for other in around:
                beside[other] |= set(around) - {other}
                beside[other].discard(node)
                current[other] = weight(other)
                heapq.heappush(heap, (current[other], other))

    def _run(self) -> None:
        for number, step in enumerate(self._steps, self._given):
            self._values[number] = step.run(self._values)
        self._constant = sum(float(self._values[number]) for number in self._constants)
        if math.isinf(self._constant):
            raise PlanError(NO_CHOICE)

    def _messages(self) -> RepricedDual:
        left = Eliminator(Tables(), self.sizes)
        left.alive = {node for scope in self._factors for node in scope}
        for scope, number in self._factors.items():
            left.insert(scope, left.tables.intern(self._values[number]))
        return RepricedDual(left, self._constant)

    def reprice(self, prices: Array) -> None:
        """Change the prices; the next sweep makes the bound valid."""
        lives, values = self.lives, self._values
        before = [values[number] for number in self._factors.values()], self._constant
        weights = lives.weights(prices)
        for node in np.flatnonzero(weights != self._weights).tolist():
            values[node] = lives.network.nodes[node] + weights[node] * lives.usage[node]
        change = -float((prices - self.prices) @ lives.room)
        self._weights, self.prices, self._judged = weights, prices, None
        self._run()
        nodes, edges = {}, {}
        for (scope, number), old in zip(self._factors.items(), before[0], strict=True):
            new = values[number]
            if new is not old and len(scope) == 1:
                nodes[scope[0]] = np.subtract(new, old, out=np.zeros(len(new)), where=np.isfinite(new))
            elif new is not old:
                edges[scope] = new
        self.dual.reprice(nodes, self._constant - before[1] + change, edges)

    def decode(self) -> Choice:
        choice = self.dual.decode()
        for step in reversed(self._steps):
            if step.node >= 0:
                choice[step.node] = int(np.argmin(step.totals(choice)))
        return tuple(choice[node] for node in range(len(self.sizes)))

    def gaps(self, choice: Choice) -> Array:
        """Excess of a choice over the bound, by node; the sum omits the price of unused room."""
        if self._judged is None:
            self._judged = choice, np.array([self._gap(node, choice) for node in range(len(choice))])
        before, found = self._judged
        changed = {node for node, (a, b) in enumerate(zip(before, choice, strict=True)) if a != b}
        for node in changed.union(*(self._judges[node] for node in changed)):
            found[node] = self._gap(node, choice)
        self._judged = choice, found
        return found

    @cached_property
    def _eliminated(self) -> dict[int, _CoreStep]:
        return {step.node: step for step in self._steps if step.node >= 0}

    @cached_property
    def _judges(self) -> list[set[int]]:
        """Node → nodes whose gap depends on its choice."""
        found: list[set[int]] = [set() for _ in self.sizes]
        for node, step in self._eliminated.items():
            for other in step.around:
                found[other].add(node)
        for i, j in self.dual.edges:
            found[i].add(j)
            found[j].add(i)
        return found

    def _gap(self, node: int, choice: Choice) -> float:
        step = self._eliminated.get(node)
        if step is None:
            return self.dual.gap(node, choice)
        totals = step.totals(choice)
        least, own = float(totals.min()), float(totals[choice[node]])
        return own - least if math.isfinite(least) else math.inf

    def scores(self, choice: Choice) -> list[Array]:
        """Approximate excess over the bound per strategy; of an eliminated node, given
        ``choice``."""
        lives, scores = self.lives, []
        for node, weight in enumerate(self._weights.tolist()):
            kept = self.dual.kept.get(node)
            if kept is None:
                cost = lives.cost_of(node, choice) + weight * lives.usage[node]
                least = float(cost.min())
                scores.append(cost - least if math.isfinite(least) else lives.network.nodes[node])
            else:
                scores.append(np.full(len(lives.usage[node]), math.inf))
                scores[-1][kept] = self.dual.marginal(node)
        return scores


# Sweeps before the first step, and their share of time; most relative aim above the bound; weight of
# the last choice in the mean direction; least squared norm of the direction relative to the last
# slope's; relative fall of the bound that resets prices to the best; steps between descents.
FIRST_SWEEPS = 30
FIRST_TIME_SHARE, FIRST_WHOLE = 0.5, 0.2
MAX_AIM = 0.2
MEAN = 0.2
LENGTH = 0.05
MAX_BOUND_FALL = 0.3
DESCENT = 8
# Steps end when PATIENCE of them raise the bound by less than this share.
STALLED_STEPS = 10
PROGRESS = 1e-3
STEP_DESCENT_PASSES = 40


@dataclass(frozen=True)
class SubgradientResult:
    """``prices`` [rows], ``bound``: of every choice; ``seen``: choices, the last ones best.

    ``scores``: approximate excess over the bound per strategy; inf: infeasible.
    """

    prices: Array
    bound: float
    seen: list[Choice]
    scores: list[Array]
    core: Core


def subgradient_prices(best: Best, steps: int, unit: float, deadline: float, whole: bool = False) -> SubgradientResult:
    """Up to ``steps`` steps that offer choices to ``best``; descents price excess at ``unit``.

    ``whole``: messages on all nodes, not just the core: slower, but with scores of each.
    """
    lives = best.lives
    core = Core(lives, most=0) if whole else Core(lives)
    dual = core.dual
    prices = at_best = mean = np.zeros(lives.count)
    bound, ahead, seen = -math.inf, MAX_AIM, [best.choice]
    bounds: list[float] = []
    now = time.perf_counter()
    first = now + (FIRST_WHOLE if whole else FIRST_TIME_SHARE) * (deadline - now)
    for step in range(steps):
        swept = _sweep(dual, FIRST_SWEEPS if step == 0 else 2, best.cost, first if step == 0 else deadline)
        if swept and dual.bound > bound:
            bound, at_best, ahead = dual.bound, prices, min(ahead * 1.2, MAX_AIM)
        else:
            ahead /= 1.2
        choice = core.decode()
        seen.append(choice)
        best.offer(choice)
        bounds.append(bound)
        stalled = len(bounds) > STALLED_STEPS and bound - bounds[-1 - STALLED_STEPS] <= PROGRESS * abs(bound)
        if not swept or stalled or time.perf_counter() > deadline:
            break
        if (step + whole) % DESCENT == 0:
            seen.append(descend(lives, choice, unit, STEP_DESCENT_PASSES, deadline))
            best.offer(seen[-1])
        slope = lives.sums(lives.held(choice)) - lives.room
        mean = MEAN * slope + (1 - MEAN) * mean if step else slope
        centre = prices if dual.bound > bound - MAX_BOUND_FALL * abs(bound) else at_best
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
    return SubgradientResult(at_best, bound, seen, core.scores(best.choice), core)


def _sweep(dual: Dual, most: int, upper: float, deadline: float) -> bool:
    """Up to ``most`` sweeps until the bound hardly rises; returns whether one was completed."""
    for sweep in range(most):
        before = dual.bound
        if not dual.sweep(upper, deadline):
            return sweep > 0
        if dual.bound - before <= 1e-4 * abs(before):
            break
    return True
