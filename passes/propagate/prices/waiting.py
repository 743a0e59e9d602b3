"""Synchronization skew: ranks wait for stragglers before blocking messages and at the step's end.

Ranks differ in speed: after more compute, arrival times differ more. Calibration measures the wait
as a function of compute (:attr:`~autoshard.hardware.Hardware.waiting`). Compute between messages
depends on the plan; the search needs a linear price: a constant per message plus a share of all
compute. The line goes through the compute of two products (tensor parallelism: two messages per
direction for eight) and that of the step. Movable messages pay nothing: they meet during the step.
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
"""products (with gradients) between two messages"""


class Waits(NamedTuple):
    """Linear model of synchronization skew."""

    message: float = 0.0
    """seconds before each blocking message, beyond latency"""
    share: float = 0.0
    """seconds per second of compute"""


NOBODY = Waits()


@known_of_graph
def waiting(graph: Graph, mesh: Mesh) -> Waits:
    """The line for ``graph``; 0 if nothing was measured."""
    if not mesh.hardware.waiting:
        return NOBODY
    graph, seconds = graph.example, dict[object, float]()  # a price for example lengths does not specialize the program
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
    """:func:`~autoshard.passes.propagate.prices.cost.optimizer_seconds` with skew after it."""
    return (1.0 + waiting(graph, mesh).share) * optimizer_seconds(optimizer, type_, placements, mesh)


def with_waits(launches: np.ndarray, mesh: Mesh, waits: float) -> np.ndarray:
    """Seconds of launches plus ``waits`` seconds of skew per launched collective."""
    return launches * (1.0 + waits / mesh.hardware.kernel_latency) if waits else launches
