"""Tied layers (symmetry): equal layers choose alike. The best such choice is one of the full
problem; messages, divided among the copies, bound it: to message passing, a layer is its own
neighbour."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.passes.search.arrays import Matrix, transpose_matrix, weighted_sum
from autoshard.passes.search.exact.elimination import Eliminator, Scope, Tables
from autoshard.passes.search.exact.pruning import Dual, deduplicated_entries
from autoshard.passes.search.limits import LIMITS
from autoshard.passes.search.network import Array, Choice, CostNetwork
from autoshard.passes.search.rows.stacked import Stacked


@dataclass(frozen=True)
class Tied:
    """``problem``: classes as nodes, tables summed over copies. ``of``: node → class."""

    problem: Stacked
    of: tuple[int, ...]

    def lifted(self, choice: Choice) -> Choice:
        """A choice of the classes as a choice of the nodes."""
        return tuple(choice[k] for k in self.of)


def tie_layers(problem: Stacked, labels: Sequence[Hashable | None]) -> Tied | None:
    """Ties nodes of one label and equal tables; None if that makes the problem hardly smaller."""
    of = _class_numbers([(label, problem.factors[i,]) if label is not None else i for i, label in enumerate(labels)])
    if max(of) + 1 > LIMITS.max_tied_share * len(of):
        return None
    copies = Counter((tuple([of[i] for i in scope]), number) for scope, number in problem.factors.items())
    counts: dict[Scope, Counter[int]] = {}
    store = problem.store
    for (where, number), many in copies.items():
        if len(where) == 2 and where[0] == where[1]:
            where, number = where[:1], store.diagonal(number)
        elif len(where) == 2 and where[0] > where[1]:
            where, number = where[::-1], store.transposed(number)
        counts.setdefault(where, Counter())[number] += many
    factors = {where: store.summed(counter) for where, counter in sorted(counts.items())}
    sizes = dict(zip(of, problem.sizes, strict=True))
    return Tied(replace(problem, sizes=tuple(sizes[k] for k in range(len(sizes))), factors=factors), of)


def _class_numbers(keys: Sequence[Hashable]) -> tuple[int, ...]:
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)


def tied_bound(network: CostNetwork, of: Sequence[int], enough: float = math.inf) -> tuple[float, Callable[[], Choice]]:
    """(lower bound of ``network``, decoder of a choice from its messages, which are float32).
    ``of``: node → class. ``enough``: a sufficient bound (a known cost): then sweeps around
    irregular nodes are skipped if final ones cover all nodes."""
    whole = Eliminator.of(network, Tables())
    whole.run(max_degree=2, max_weight=LIMITS.quick_join)
    nodes = sorted(whole.alive)
    if not nodes:
        return whole.constant, lambda: _full_choice(whole, {})
    classes = _class_numbers([(of[i], whole.factors.get((i,))) for i in nodes])
    at = dict(zip(nodes, classes, strict=True))
    quotient, shares = _quotient(whole, at)
    between = Dual(quotient, single=True)
    del quotient  # its float64 tables are twice as large
    _converge(between, LIMITS.least_gain)
    messages, promised = _copy_messages(whole, at, between, shares), between.bound
    del between
    kinds: dict[Scope, tuple[Any, ...]] = {s: (*_class_scope(s, at), table) for s, table in whole.factors.items()}
    last = deduplicated_entries(whole) <= LIMITS.last_sweep_entries
    if math.isinf(enough) or not last:
        rough = Dual(whole, single=True)
        _begin_with(rough, messages, kinds)
        near = _nodes_near_rare(nodes, _unlike_their_copies(at, kinds), len(nodes) / max(Counter(classes).values()))
        _converge(rough, LIMITS.least_gain_near, near)
        for scope in rough.edges:
            if not near.isdisjoint(scope):
                messages[scope], kinds[scope] = rough.moved(scope), (scope,)
        del rough
    dual = Dual(whole, alike=True)
    _begin_with(dual, messages, kinds)
    if last or promised - dual.bound > LIMITS.promised * abs(dual.bound):
        for _ in range(LIMITS.last_sweeps):
            before = dual.bound
            dual.sweep(math.inf)
            if not 0 < enough - dual.bound <= dual.bound - before:  # reached, or out of reach of one more
                break
    return dual.bound, lambda: _full_choice(whole, dual.decode())


def _full_choice(network: Eliminator, choice: dict[int, int]) -> Choice:
    """The choice with eliminated nodes."""
    every = network.back_substitute(choice, len(network.steps))
    return tuple(every[i] for i in range(len(network.sizes)))


def _quotient(whole: Eliminator, at: Mapping[int, int]) -> tuple[Eliminator, Counter[Scope]]:
    """The network of classes, and the number of copies of every edge."""
    parts: dict[Scope, list[tuple[int, Matrix]]] = {}
    shares: Counter[Scope] = Counter()
    counts: Counter[tuple[Scope, int, bool]] = Counter()
    for scope, table in whole.factors.items():
        where, turned = _class_scope(scope, at)
        if len(where) == len(set(where)):  # edges between copies of one node stay separate
            counts[where, table, turned] += 1
    for (where, table, turned), many in sorted(counts.items()):
        matrix = whole.tables.matrix(table)
        parts.setdefault(where, []).append((many, transpose_matrix(matrix) if turned else matrix))
        shares[where] += many
    sizes = {k: whole.sizes[i] for i, k in at.items()}
    quotient = Eliminator(Tables(), [sizes[k] for k in range(len(sizes))])
    for where, each in parts.items():
        quotient.insert(where, quotient.tables.intern(weighted_sum(each)))
    return quotient, shares


def _class_scope(scope: Scope, at: Mapping[int, int]) -> tuple[Scope, bool]:
    """Scope of classes, and whether it is reversed."""
    where = tuple(at[i] for i in scope)
    return (where[::-1], True) if where[0] > where[-1] else (where, False)


def _converge(dual: Dual, least_gain: float, among: frozenset[int] | None = None) -> None:
    """Sweep until the bound hardly rises."""
    before = -math.inf
    for sweep in range(LIMITS.tied_sweeps):
        dual.sweep(math.inf, among=among)
        if sweep % 4 == 3:
            if dual.bound - before <= least_gain * abs(dual.bound):
                return
            before = dual.bound


def _copy_messages(
    whole: Eliminator, at: Mapping[int, int], between: Dual, shares: Counter[Scope]
) -> dict[Scope, tuple[Array, ...]]:
    """Each copy's share of the messages between classes."""
    shared = {where: tuple(moved / shares[where] for moved in between.moved(where)) for where in between.edges}
    found: dict[Scope, tuple[Array, ...]] = {}
    for scope in whole.factors:
        where, turned = _class_scope(scope, at)
        if where in shared:
            found[scope] = shared[where][::-1] if turned else shared[where]
    return found


def _begin_with(dual: Dual, messages: Mapping[Scope, tuple[Array, ...]], kinds: Mapping[Scope, Hashable]) -> None:
    """Move these messages from nodes into edges. ``kinds``: equal for equal tables and messages."""
    least: dict[Hashable, float] = {}
    for scope, edge in dual.edges.items():
        if scope in messages:
            edge.moved_in = [moved.astype(edge.table.dtype) for moved in messages[scope]]
            for i, moved in zip(scope, edge.moved_in, strict=True):
                dual.node[i] -= moved
        if kinds[scope] not in least:
            least[kinds[scope]] = float(edge.message(0).min())
        edge.moved_in[0] = edge.moved_in[0] - least[kinds[scope]]
        dual.bound += least[kinds[scope]]
    for i in dual.order:
        lowest = float(dual.node[i].min())
        dual.node[i] -= lowest
        dual.bound += lowest


def _unlike_their_copies(at: Mapping[int, int], kinds: Mapping[Scope, tuple[Any, ...]]) -> list[int]:
    """Irregular nodes: joined unlike most of their copies."""
    around: dict[int, list[tuple[Scope, bool]]] = {i: [] for i in at}
    for scope, (where, turned, _) in kinds.items():
        for i in scope if len(scope) == 2 else ():
            around[i].append((where, turned != (i == scope[1])))
    joined = {i: (at[i], tuple(sorted(each))) for i, each in around.items()}
    count = Counter(joined.values())
    most: Counter[int] = Counter()
    for (k, _), many in count.items():
        most[k] = max(most[k], many)
    return [i for i in at if count[joined[i]] < most[at[i]]]


def _nodes_near_rare(nodes: Sequence[int], rare: Sequence[int], layer: float) -> frozenset[int]:
    """Nodes within one layer of the irregular ones."""
    place = {i: k for k, i in enumerate(nodes)}
    reach = math.ceil(layer)
    spans = [range(max(place[i] - reach, 0), min(place[i] + reach + 1, len(nodes))) for i in rare]
    return frozenset(nodes[k] for span in spans for k in span)
