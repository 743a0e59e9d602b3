"""Where gradients come from."""

from __future__ import annotations

import functools
import operator

from autoshard.passes.ir.graph import Graph, Ref
from autoshard.passes.ir.known import known_of_graph


@known_of_graph
def outputs_reached(graph: Graph) -> dict[str, int]:
    """Value → the outputs that a gradient reaches it from, as bits.

    A value can carry a gradient (``type.grad``) and yet none comes: from the loss, where it only gives other outputs, or
    is detached by all who read it. Parameters it is computed from have no gradient then, which is not one of zeros.
    """
    found: dict[str, int] = dict.fromkeys(graph.types, 0)
    for i, out in enumerate(graph.outputs):
        if isinstance(out, Ref) and graph.types[out.name].grad:
            found[out.name] |= 1 << i
    for node in reversed(graph.nodes):
        for name in node.inputs:
            found[name] |= functools.reduce(operator.or_, (found[o] for o in node.outputs if graph.types[o].grad), 0)
    return found
