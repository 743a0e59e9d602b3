"""Which outputs a gradient reaches a value from."""

from __future__ import annotations

import functools
import operator

from autoshard.passes.ir.graph import Graph, Ref
from autoshard.passes.ir.known import known_of_graph


@known_of_graph
def outputs_reached(graph: Graph) -> dict[str, int]:
    """Value → bit mask of the outputs whose gradient reaches it.

    A value with ``type.grad`` may get none: all its readers detach it, or only another output than
    the loss depends on it. The gradients of its parameters are None then, not zeros.
    """
    found: dict[str, int] = dict.fromkeys(graph.types, 0)
    for i, out in enumerate(graph.outputs):
        if isinstance(out, Ref) and graph.types[out.name].grad:
            found[out.name] |= 1 << i
    for node in reversed(graph.nodes):
        for name in node.inputs:
            found[name] |= functools.reduce(operator.or_, (found[o] for o in node.outputs if graph.types[o].grad), 0)
    return found
