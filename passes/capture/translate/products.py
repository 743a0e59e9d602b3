"""Linear layers on flattened operands become ones on the unflattened: each dim can be sharded."""

from __future__ import annotations

import math
from dataclasses import replace

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType


def unflattened(graph: Graph) -> Graph:
    """``graph`` with [b, s, k] → [b · s, k] @ [k, n] → [b, s, n], as in GPT-2, as one linear.

    A dim b · s could be sharded along s only if b is 1.
    """
    nodes, types, renamed = list[Node](), dict(graph.types), dict[str, str]()
    for node in graph.nodes:
        if node.op is aten.reshape.default and node.inputs[0] in renamed:
            renamed[node.outputs[0]] = node.inputs[0]
            continue
        if (whole := _whole(node, graph)) is not None:
            weight, product, shape = whole
            (of,) = (types[name] for name in weight.inputs)
            types[weight.outputs[0]] = TensorType(of.shape[::-1], of.dtype, of.grad)
            types[node.outputs[0]] = replace(types[node.outputs[0]], shape=shape)
            renamed[node.outputs[0]] = node.outputs[0]
            nodes += [weight, product]
            continue
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), types=types).renamed(renamed) if renamed else graph


def _whole(node: Node, graph: Graph) -> tuple[Node, Node, tuple[int, ...]] | None:
    """(transpose of the weight, linear of the unflattened operand, its shape), or None."""
    if node.op is not aten.addmm.default or node.kwargs or not isinstance(node.args[1], Ref):
        return None
    bias, flat, weight = node.args
    producer, (out,) = graph.producers.get(flat.name), node.outputs
    if producer is None or producer.op is not aten.reshape.default or len(graph.shape(bias)) != 1:
        return None
    operand = producer.args[0]
    before, (rows, features) = graph.shape(operand), graph.shape(flat)
    shape = (*before[:-1], graph.shape(out)[-1])
    uses = graph.uses[out]
    if before[-1] != features or len(before) < 3 or rows != math.prod(before[:-1]) or out in graph.returned or not uses:
        return None
    if any(u.op is not aten.reshape.default or graph.shape(u.outputs[0]) != shape for u in uses):
        return None
    turned = f"{node.name}_weight"
    made = replace(node, name=turned, op=aten.t.default, args=(weight,), outputs=(turned,), output_slots=(0,))
    return made, replace(node, op=aten.linear.default, args=(operand, Ref(turned), bias)), shape
