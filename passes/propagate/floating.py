"""Cheap operations on inputs alone, to repeat on any rank or stage: masks, positions, rotary."""

from __future__ import annotations

from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.prices.cost import node_flops
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.facts import has_effect

CHEAP = 64.0
"""FLOPs per result element below which repeating beats sending; an outer product is below"""


def floating(graph: Graph, at_most: float = CHEAP) -> frozenset[str]:
    """Operations that may be duplicated: cheap, without gradient, from inputs and constant buffers.

    ``at_most``: FLOPs per element of the result.
    """
    fixed = {i.name for i in graph.inputs if i.kind == "parameter" or i.fqn in graph.mutations}
    found = set()
    for node in graph.nodes:
        results = sum(graph.types[o].numel for o in node.outputs)
        if (
            node.outputs
            and not has_effect(node)
            and (node.op.namespace == "aten" or rule_for(node.op) is not None)  # custom operations may draw or write
            and not any(name in fixed for name in node.inputs)
            and not any(graph.types[o].grad for o in node.outputs)
            and node_flops(node, graph, rule_for(node.op)) <= at_most * results
        ):
            found.add(node.name)
        else:
            fixed.update(node.outputs)
    return frozenset(found)
