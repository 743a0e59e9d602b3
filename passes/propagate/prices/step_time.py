"""The time of a step from its parts: what computes, what the next operation waits for, and what hides behind compute.

    T = C + O + B + Σ over link classes max(M, C + (1 − η)·M) − C

C compute, O what hides nothing (the optimizer, launches of kernels), B *blocking* communication (activations: the next
operation waits for them), M *movable* communication on one link class, inside a node or between nodes: conversions of
parameters, whose source is there from the start (a gather can be prefetched) or whose result nobody awaits before the
optimizer (a reduction of gradients). While it runs, compute runs at the speed η of what it has alone, which differs between
the two (:attr:`~autoshard.mesh.Mesh.overlap`): hidden communication costs (1 − η)·M, and more than C / η of it cannot
hide. What can hide behind nothing counts as blocking: the launch of every collective, the first gather and the last
reduction (see :func:`movable_values`), and what of a gather lasts longer than the compute of a block (see
:func:`~autoshard.passes.propagate.prices.bucketed.latency_shares`).

A step of several micro-batches is as many *passes*, each as above; sums of gradients over replicas, and the optimizer, come
once, the sums beside the last pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from autoshard.hardware import Overlap
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.known import known_of_graph
from autoshard.passes.search.network import Array


def _zero() -> Array:
    return np.zeros(())


@dataclass(frozen=True, eq=False)
class Parts:
    """Seconds per pass on the busiest rank, for one choice or for an array of them; parts of several things add up."""

    compute: Array = field(default_factory=_zero)
    other: Array = field(default_factory=_zero)
    """computing that hides nothing: launches"""
    blocking: Array = field(default_factory=_zero)
    node: Array = field(default_factory=_zero)
    """movable, on the link inside a node"""
    network: Array = field(default_factory=_zero)
    """movable, on the link between nodes"""
    hidden: Array = field(default_factory=_zero)
    """communication inside an operation, behind its own compute"""
    once: Array = field(default_factory=_zero)
    """once a step, and blocking: the optimizer, the last sum over replicas, launches of others"""
    node_once: Array = field(default_factory=_zero)
    """once a step and movable, on the link inside a node: sums over replicas"""
    network_once: Array = field(default_factory=_zero)
    """the same, on the link between nodes"""

    def __iter__(self) -> Iterator[Array]:
        return iter(vars(self).values())  # in the order in which they are declared

    def __add__(self, other: Parts) -> Parts:
        return Parts(*(x + y for x, y in zip(self, other, strict=True)))

    def __sub__(self, other: Parts) -> Parts:
        return Parts(*(x - y for x, y in zip(self, other, strict=True)))

    def __getitem__(self, index: Any) -> Parts:
        """Of some of the choices; a part that is the same for all, 0, stays one number."""
        return Parts(*(x[index] if x.ndim else x for x in self))

    def communication(self, passes: int = 1) -> Array:
        """All communication of a step, hidden or not."""
        return (
            passes * (self.blocking + self.node + self.network + self.hidden)
            + self.once
            + self.node_once
            + self.network_once
        )

    def exposed(self, overlap: Overlap, passes: int = 1) -> Array:
        """Communication of a step that compute does not hide."""
        exposed = passes * self.blocking + self.once + self.slowing(overlap, passes)
        for excess in self.excess(overlap, last=True):
            exposed = exposed + np.maximum(0.0, excess)
        if passes > 1:
            for excess in self.excess(overlap, last=False):
                exposed = exposed + (passes - 1) * np.maximum(0.0, excess)
        return exposed

    def slowing(self, overlap: Overlap, passes: int = 1) -> Array:
        """What movable communication costs in any case: compute runs slower beside it."""
        near, far = passes * self.node + self.node_once, passes * self.network + self.network_once
        return np.multiply(1.0 - overlap.node, near) + np.multiply(1.0 - overlap.network, far)

    def excess(self, overlap: Overlap, last: bool) -> tuple[Array, Array]:
        """Per link class: the movable communication of a pass that more compute would hide; below 0 where there is more
        compute. ``last``: of the pass with the sums that come once."""
        node = self.node + self.node_once if last else self.node
        network = self.network + self.network_once if last else self.network
        return overlap.node * node - self.compute, overlap.network * network - self.compute

    def step(self, overlap: Overlap, passes: int = 1) -> Array:
        """The time of the step."""
        return passes * (self.compute + self.other) + self.exposed(overlap, passes)


def summed(parts: Iterable[Parts]) -> Parts:
    """The sum of parts that are one number each."""
    return Parts(*(np.array(math.fsum(map(float, column))) for column in zip(*parts, strict=True)))


@known_of_graph
def movable_values(graph: Graph) -> frozenset[str]:
    """Values whose conversions can move in time: parameters, and what is computed from them alone, such as their casts.

    Not those of the first weight (of two dims or more) and of the parameters read before it: before it is gathered
    nothing can be computed, and after its gradient nothing is left that could hide the reduction.
    """
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
