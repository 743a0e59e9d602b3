"""What ranks wait for one another: before messages that an operation waits for, and at the end of the step.

Ranks do not compute equally fast: after more compute they come at moments that differ more. Calibration measures how much
(:attr:`~autoshard.hardware.Hardware.waiting`). How much compute lies between two messages depends on the plan; but as what they
wait grows about as a line, all that they wait in a step does not: it is so much before each message, and a share of all that is
computed. The line is that from the compute of two products (a transformer's layer under tensor parallelism has two messages in
each direction for eight) to that of the whole step.
Messages that are not waited for meet in the course of the step, and pay nothing of this.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoshard.layout import R
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Placements
from autoshard.passes.ir.graph import Graph, TensorType
from autoshard.passes.ir.known import known_of_graph, signature
from autoshard.passes.propagate.prices.cost import node_flops, node_seconds, optimizer_seconds
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.factors import whole

PRODUCTS = 2.0
"""products, each with those of its gradients, between two messages"""


class Waits(NamedTuple):
    """Of ranks for one another."""

    message: float = 0.0
    """seconds before each message that an operation waits for, beyond its latency"""
    share: float = 0.0
    """seconds per second of compute"""


NOBODY = Waits()


@known_of_graph
def waiting(graph: Graph, mesh: Mesh) -> Waits:
    """The line of ``graph``; 0 where none was measured."""
    if not mesh.hardware.waiting:
        return NOBODY
    graph, seconds = graph.example, dict[object, float]()  # what it is for the example's lengths binds no program
    total, products = 0.0, 0
    for node in graph.nodes:
        flops = node_flops(node, graph, rule_for(node.op))
        products += flops > 0
        key = signature(node, graph.types)
        if key not in seconds:
            names = (*node.inputs, *node.outputs)
            choice = (whole(len(node.inputs), len(node.outputs))[0],) * mesh.ndim
            placed = [(R,) * mesh.ndim] * len(names)
            seconds[key] = node_seconds(node, graph, mesh, choice, flops, placed).step
        total += seconds[key]
    if not products:
        return NOBODY
    between, all_ = PRODUCTS * total / mesh.size / products, total / mesh.size
    short, long = mesh.hardware.waits(between), mesh.hardware.waits(all_)
    share = (long - short) / (all_ - between) if all_ > between else 0.0
    return Waits(max(0.0, short - share * between), share)


def update_seconds(optimizer: str, type_: TensorType, placements: Placements, graph: Graph, mesh: Mesh) -> float:
    """:func:`~autoshard.passes.propagate.prices.cost.optimizer_seconds` with what ranks wait for one another after it."""
    return (1.0 + waiting(graph, mesh).share) * optimizer_seconds(optimizer, type_, placements, mesh)


def with_waits(launches: np.ndarray, mesh: Mesh, waits: float) -> np.ndarray:
    """Seconds of launches, and what ranks wait for one another (``waits``) before each collective that they launch."""
    return launches * (1.0 + waits / mesh.hardware.kernel_latency) if waits else launches
