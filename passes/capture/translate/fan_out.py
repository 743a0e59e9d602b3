"""Ordered gradient accumulation in float32 islands: an explicit fan-out of values to readers."""

from __future__ import annotations

from dataclasses import replace

from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_refs
from autoshard.passes.rules.exact import SINGLE
from autoshard.runtime.operations.fan_out import FAN_OUT


def fan_out(graph: Graph) -> Graph:
    """``graph`` in which float32 values sum three or more gradients in the order of one device.

    autograd adds the last reader's gradient first. Other layouts of readers, or ranks in one
    autograd graph, would change that order. A sum of two gradients has no order.
    """
    if not graph.is_double or not graph.training:
        return graph
    types, copies = dict(graph.types), _copies(graph)
    nodes: list[Node] = []
    for value in graph.inputs:
        _spread_to(copies, value.name, None, nodes, types)
    for node in graph.nodes:
        differentiable = any(graph.types[o].grad for o in node.outputs)

        def use(ref: Ref, differentiable: bool = differentiable) -> Ref:
            return Ref(copies[ref.name].pop(0)) if differentiable and ref.name in copies else ref

        nodes.append(map_refs(node, use))
        for name in node.outputs:
            _spread_to(copies, name, node, nodes, types)
    outputs = tuple(Ref(copies[o.name].pop(0)) if isinstance(o, Ref) and o.name in copies else o for o in graph.outputs)
    return replace(graph, nodes=tuple(nodes), types=types, outputs=outputs)


def _copies(graph: Graph) -> dict[str, list[str]]:
    """Value with three or more gradients → names of its uses, in the order of readers."""
    count: dict[str, int] = {}
    for node in graph.nodes:
        if any(graph.types[o].grad for o in node.outputs):
            for name in node.inputs:
                count[name] = count.get(name, 0) + 1
    for out in graph.outputs:
        if isinstance(out, Ref):
            count[out.name] = count.get(out.name, 0) + 1
    many = [n for n, uses in count.items() if uses > 2 and graph.types[n].grad and graph.types[n].dtype in SINGLE]
    return {name: [f"{name}_use{i}" for i in range(count[name])] for name in many}


def _spread_to(
    copies: dict[str, list[str]], name: str, maker: Node | None, nodes: list[Node], types: dict[str, TensorType]
) -> None:
    """Add the fan-out of ``name``, if it has one."""
    if name not in copies:
        return
    names = tuple(copies[name])
    types.update(dict.fromkeys(names, types[name]))
    spread = Node(f"{name}_uses", FAN_OUT, (Ref(name), len(names)), {}, names, tuple(range(len(names))))
    if maker is not None:
        spread = replace(spread, fqn=maker.fqn, module_types=maker.module_types, frames=maker.frames)
    nodes.append(spread)
