"""Operands that lend a fill their shape only: without them it is free of how micro-batches share these."""

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
"""op of a tensor like its operand → the same of a size"""


def of_their_own(graph: Graph) -> Graph:
    """``graph`` with such fills by size and dtype; those in another memory order, or of unknown lengths, stay."""
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
