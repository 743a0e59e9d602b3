"""Overlap of communication and computation: the time of a step from its parts.

    T = C + O + B + Σ over link classes max(M, C + (1 − η)·M) − C

C: compute. O: work that overlaps with nothing (optimizer, kernel launches). B: *blocking*
communication, of activations, which the next operation waits for. M: *movable* communication on a
link class (in a node, between nodes), of parameters: a gather can be prefetched, and nothing before
the optimizer waits for a gradient reduction. Beside it compute runs at speed η
(:attr:`~autoshard.mesh.Mesh.overlap`): hidden communication costs (1 − η)·M, and at most C / η is
hidden. Blocking, too, are launches of collectives, the first gather and last reduction
(:func:`movable_values`), and gathers longer than the compute of a block
(:func:`~autoshard.passes.propagate.prices.coalescing.latency_shares`).

A step of several micro-batches has as many *passes*. Gradient sums over replicas and the optimizer
come once per step, the sums beside the last pass.

In the cost network, a row per link class has the excess η·M − C of movable communication over
compute, priced where it exceeds 0. With several passes there are rows for the last pass and
weighted rows for the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.hardware import Overlap
from autoshard.passes.ir.analyses import cached_per_graph
from autoshard.passes.ir.graph import Graph
from autoshard.passes.search import CostNetwork, LinearRow
from autoshard.passes.search.arrays import Classes, CompactMatrix, Matrix
from autoshard.passes.search.network import Array


def _zero_array() -> Array:
    return np.zeros(())


@dataclass(frozen=True, eq=False)
class StepParts:
    """Seconds per pass on the busiest rank, for one choice or an array of choices; additive."""

    compute: Array = field(default_factory=_zero_array)
    other: Array = field(default_factory=_zero_array)
    """compute that overlaps with nothing: launches"""
    blocking: Array = field(default_factory=_zero_array)
    node: Array = field(default_factory=_zero_array)
    """movable, links inside a node"""
    network: Array = field(default_factory=_zero_array)
    """movable, links between nodes"""
    hidden: Array = field(default_factory=_zero_array)
    """communication inside an operation, hidden by its compute"""
    once: Array = field(default_factory=_zero_array)
    """once per step, blocking: optimizer, last sum over replicas, launches of others"""
    node_once: Array = field(default_factory=_zero_array)
    """once per step, movable, in a node: sums over replicas"""
    network_once: Array = field(default_factory=_zero_array)
    """the same between nodes"""

    def __iter__(self) -> Iterator[Array]:
        return iter(vars(self).values())  # in declaration order

    def __add__(self, other: StepParts) -> StepParts:
        return StepParts(*(x + y for x, y in zip(self, other, strict=True)))

    def __sub__(self, other: StepParts) -> StepParts:
        return StepParts(*(x - y for x, y in zip(self, other, strict=True)))

    def map(self, change: Callable[[Array], Array]) -> StepParts:
        """``change`` of every part; one that is 0 for all choices stays a scalar."""
        return StepParts(*(change(x) if x.ndim else x for x in self))

    def __getitem__(self, index: Any) -> StepParts:
        """Parts of some choices."""
        return self.map(lambda x: x[index])

    def communication(self, passes: int = 1) -> Array:
        """All communication of a step, hidden or not."""
        return (
            passes * (self.blocking + self.node + self.network + self.hidden)
            + self.once
            + self.node_once
            + self.network_once
        )

    def exposed(self, overlap: Overlap, passes: int = 1) -> Array:
        """Exposed communication of a step."""
        exposed = passes * self.blocking + self.once + self.slowdown(overlap, passes)
        for last, times in _overlap_rows(passes):
            for excess in self.excess(overlap, last):
                exposed = exposed + times * np.maximum(0.0, excess)
        return exposed

    def slowdown(self, overlap: Overlap, passes: int = 1) -> Array:
        """Slowdown of compute beside movable communication, hidden or not."""
        near, far = passes * self.node + self.node_once, passes * self.network + self.network_once
        return np.multiply(1.0 - overlap.node, near) + np.multiply(1.0 - overlap.network, far)

    def excess(self, overlap: Overlap, last: bool) -> tuple[Array, Array]:
        """Per link class: unhidden movable communication of a (or the ``last``) pass; may be <
        0."""
        node = self.node + self.node_once if last else self.node
        network = self.network + self.network_once if last else self.network
        return overlap.node * node - self.compute, overlap.network * network - self.compute

    def step(self, overlap: Overlap, passes: int = 1) -> Array:
        return passes * (self.compute + self.other) + self.exposed(overlap, passes)


NO_SECONDS = StepParts()


def sum_of_terms(terms: Mapping[str, StepParts]) -> StepParts:
    """The sum of named terms, in their order."""
    first, *others = terms.values() if terms else (NO_SECONDS,)
    return sum(others, first)


def total_parts(parts: Iterable[StepParts]) -> StepParts:
    """The sum of scalar parts."""
    return StepParts(*(np.array(math.fsum(map(float, column))) for column in zip(*parts, strict=True)))


@cached_per_graph
def movable_values(graph: Graph) -> frozenset[str]:
    """Values whose redistributions overlap: parameters, and values from them alone (casts); not the
    first matrix and what is read before it, before whose gather and after whose gradient nothing
    is computed."""
    made_of = {name: frozenset((name,)) for name in graph.parameters}
    first: set[str] = set()
    complete = False
    for node in graph.nodes:
        read = dict.fromkeys(node.inputs)
        if read and all(name in made_of for name in read):
            whole = frozenset(node.outputs).union(*(made_of[name] for name in read))
            made_of.update(dict.fromkeys(node.outputs, whole))
        elif not complete:
            weights = [name for name in read if name in made_of]
            first.update(*(made_of[name] for name in weights))
            complete = any(len(graph.types[name].shape) >= 2 for name in weights)
    return frozenset(name for name, parts in made_of.items() if first.isdisjoint(parts))


@dataclass(frozen=True, eq=False)
class StepTables:
    """What one table adds to the step's time: to the cost, and to every row (None: nothing)."""

    cost: Matrix
    over: tuple[Matrix | None, ...]


def tables_of_step(
    parts: StepParts,
    shape: tuple[int, ...],
    overlap: Overlap,
    passes: int = 1,
    fold: tuple[Classes, Classes] | None = None,
) -> StepTables:
    """``parts`` as tables of the network. ``fold``: of an edge, its row and column per state."""

    def table(values: Array) -> Matrix:
        full = values if values.shape == shape else np.broadcast_to(values, shape).copy()
        return full if fold is None else CompactMatrix(full, *fold)

    cost = passes * (parts.compute + parts.other + parts.blocking) + parts.once + parts.slowdown(overlap, passes)
    rows = _overlap_rows(passes) if overlap.node else []
    over = [x for last, _ in rows for x in parts.excess(overlap, last)]
    return StepTables(table(cost), tuple(table(x) if x.any() else None for x in over))


def network_of_steps(
    nodes: Sequence[StepTables], edges: Sequence[tuple[int, int, StepTables]], overlap: Overlap, passes: int = 1
) -> tuple[CostNetwork, tuple[LinearRow, ...]]:
    """(network, rows): cost plus excess of rows is the step's time. Equal tables: one object."""
    vectors = [node.cost for node in nodes]
    network = CostNetwork(tuple(vectors), tuple((i, j, edge.cost) for i, j, edge in edges))  # type: ignore[arg-type]
    rows = _overlap_rows(passes) if overlap.node else []
    prices = [times for _, times in rows for _ in ("node", "network")]
    hiding = (
        LinearRow(tuple(n.over[k] for n in nodes), tuple(e.over[k] for *_, e in edges), limit=0.0, price=price)  # type: ignore[misc]
        for k, price in enumerate(prices)
    )
    return network, tuple(row for row in hiding if any(amounts is not None for amounts in row.edges))


def _overlap_rows(passes: int) -> list[tuple[bool, float]]:
    """Per pair of rows: (whether for the pass with gradient sums, number of passes)."""
    return [(True, 1.0), *([(False, passes - 1.0)] if passes > 1 else [])]
