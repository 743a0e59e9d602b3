"""What ranks wait for one another before a message that an operation waits for.

Ranks do not compute equally fast: after more compute they come at moments that differ more. Calibration measures how much
(:attr:`~autoshard.hardware.Hardware.waiting`). How much compute lies between two messages depends on the plan; what counts is
that of a plan which cuts all work and has two in each direction for eight products, as a transformer's layer under tensor
parallelism.
Messages that are not waited for meet in the course of the step, and pay nothing of this.
"""

from __future__ import annotations

import numpy as np

from autoshard.layout import R
from autoshard.mesh import Mesh
from autoshard.passes.ir.graph import Graph
from autoshard.passes.ir.known import known_of_graph, signature
from autoshard.passes.propagate.prices.cost import node_flops, node_seconds
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.factors import whole

PRODUCTS = 2.0
"""products, each with those of its gradients, between two messages"""


@known_of_graph
def waiting(graph: Graph, mesh: Mesh) -> float:
    """Seconds before each message, beyond its latency; 0 where none was measured."""
    if not mesh.hardware.waiting:
        return 0.0
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
    return mesh.hardware.waits(PRODUCTS * total / mesh.size / products) if products else 0.0


def with_waits(launches: np.ndarray, mesh: Mesh, waits: float) -> np.ndarray:
    """Seconds of launches, and what ranks wait for one another (``waits``) before each collective that they launch."""
    return launches * (1.0 + waits / mesh.hardware.kernel_latency) if waits else launches
