"""``nonzero`` as ``where``: indices at which a condition holds, one tensor per dim."""

from __future__ import annotations

from dataclasses import replace

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node


def by_dim(graph: Graph) -> Graph:
    """``graph`` with each ``nonzero(condition)`` that is read by column as ``where(condition)``."""
    columns = {n.name: found for n in graph.nodes if n.op is aten.nonzero.default and (found := _columns(n, graph))}
    if not columns:
        return graph
    taken = {name for found in columns.values() for names in found.values() for name in names}
    nodes = []
    for node in graph.nodes:
        if node.name in columns:
            slots = sorted(columns[node.name])
            first = tuple(columns[node.name][slot][0] for slot in slots)
            where = replace(node, op=aten.where.default, args=node.args[:1], kwargs={}, outputs=first)
            nodes.append(replace(where, output_slots=tuple(slots)))
        elif taken.isdisjoint(node.outputs):
            nodes.append(node)
    again = {name: names[0] for found in columns.values() for names in found.values() for name in names[1:]}
    made = replace(graph, nodes=tuple(nodes))
    return made.renamed(again) if again else made


def _columns(node: Node, graph: Graph) -> dict[int, list[str]]:
    """Column number → values that read it; empty if anything but columns of ``node`` is read."""
    value = node.outputs[0]
    dims = len(graph.types[node.inputs[0]].shape)
    found: dict[int, list[str]] = {}
    for use in graph.uses[value]:
        if use.op not in (aten.select.int, aten.unbind.int) or use.argument("dim") not in (1, -1):
            return {}
        if use.op is aten.unbind.int:
            columns = zip(use.output_slots, use.outputs, strict=True)
        else:
            columns = zip((use.argument("index") % dims,), use.outputs, strict=True)
        for number, name in columns:
            found.setdefault(number, []).append(name)
    return {} if value in graph.returned else found
