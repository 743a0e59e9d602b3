"""Fills like an operand (``zeros_like``) as fills by size, independent of its micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from autoshard.aten import aten
from autoshard.passes.capture.translate.canonical import remove_dead
from autoshard.passes.ir.graph import Graph, Node

_FILLED: dict[Any, Any] = {
    aten.zeros_like.default: aten.zeros.default,
    aten.new_zeros.default: aten.zeros.default,
    aten.ones_like.default: aten.ones.default,
    aten.new_ones.default: aten.ones.default,
    aten.full_like.default: aten.full.default,
    aten.new_full.default: aten.full.default,
}
"""fill like an operand → fill by size"""


def of_their_own(graph: Graph) -> Graph:
    """``graph`` with fills by size; not with another memory order or unknown lengths."""
    nodes = tuple(_alone(node, graph) for node in graph.nodes)
    return graph if nodes == graph.nodes else remove_dead(replace(graph, nodes=nodes))


def _alone(node: Node, graph: Graph) -> Node:
    if node.op not in _FILLED:
        return node
    type_ = graph.types[node.outputs[0]]
    if type_.permuted or type_.unknown:
        return node
    value = [node.argument("fill_value")] if _FILLED[node.op] is aten.full.default else []
    args = ([*type_.shape], *value)
    return replace(node, op=_FILLED[node.op], args=args, kwargs={"dtype": type_.dtype})
