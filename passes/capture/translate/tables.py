"""Embedding tables: which gradients are sparse."""

from __future__ import annotations

from dataclasses import replace

import torch

from autoshard.passes.ir.graph import Graph, Node

aten = torch.ops.aten

LOOK_UPS = frozenset({aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx})


def with_sparse_gradients(graph: Graph) -> Graph:
    """``graph`` with the number of look-ups in the types of tables whose gradients are sparse: every use asks for it."""
    if not graph.training:
        return graph
    types = dict(graph.types)
    for name in (i.name for i in graph.inputs if i.kind == "parameter" and types[i.name].grad):
        uses = graph.uses[name]
        if uses and all(_is_sparse(node) for node in uses):
            looked_up = sum(graph.types[node.inputs[node.positions["indices"]]].numel for node in uses)
            types[name] = replace(types[name], looked_up=max(1, looked_up))
    return replace(graph, types=types) if types != graph.types else graph


def _is_sparse(node: Node) -> bool:
    return node.op in LOOK_UPS and bool(node.argument("sparse"))
