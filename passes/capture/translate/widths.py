"""Pad head dims of attention where keys and values differ, so that fused kernels apply.

PyTorch's fused kernels want one head dim. Multi-head latent attention has keys of 192 features and
values of 128; without padding its [queries, keys] matrix is materialized and saved.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType


def one_width(graph: Graph) -> Graph:
    """``graph`` whose attention operands are padded to one head dim, and results sliced."""
    types = dict(graph.types)
    nodes = tuple(made for node in graph.nodes for made in _widened(node, graph, types))
    return replace(graph, nodes=nodes, types=types) if len(nodes) > len(graph.nodes) else graph


def _widened(node: Node, graph: Graph, types: dict[str, TensorType]) -> Iterator[Node]:
    """``node`` with pads of its operands and a slice of its result; adds to ``types``."""
    width = _width(node, graph)
    if width is None:
        yield node
        return
    changed: dict[str, object] = {}
    for name in ("query", "key", "value"):
        operand = node.argument(name)
        before = types[operand.name]
        if (more := width - before.shape[-1]) > 0:
            padded = f"{node.name}_{name}"
            types[padded] = replace(before, shape=(*before.shape[:-1], width))
            changed[name] = Ref(padded)
            yield _beside(node, padded, aten.constant_pad_nd.default, (operand, [0, more], 0.0))
    if node.argument("scale") is None:
        changed["scale"] = graph.shape(node.argument("query"))[-1] ** -0.5
    (out,) = node.outputs
    args, kwargs = node.with_arguments(**changed)
    if "value" not in changed:
        yield replace(node, args=args, kwargs=kwargs)
        return
    wide = f"{node.name}_wide"
    types[wide] = replace(types[out], shape=(*types[out].shape[:-1], width))
    yield replace(node, name=wide, args=args, kwargs=kwargs, outputs=(wide,))
    last, narrow = len(types[out].shape) - 1, types[out].shape[-1]
    yield _beside(node, out, aten.slice.Tensor, (Ref(wide), last, 0, narrow, 1))


def _beside(node: Node, name: str, op: torch._ops.OpOverload, args: tuple[object, ...]) -> Node:
    return replace(node, name=name, op=op, args=args, kwargs={}, outputs=(name,), output_slots=(0,))


def _width(node: Node, graph: Graph) -> int | None:
    """The largest head dim, if they differ and a fused kernel takes the padded operands."""
    if node.op is not aten.scaled_dot_product_attention.default or node.argument("dropout_p", 0.0):
        return None
    query, key, value = (graph.shape(node.argument(name)) for name in ("query", "key", "value"))
    mask = node.argument("attn_mask")
    heads = query[:-2] == key[:-2] == value[:-2] or node.argument("enable_gqa")
    if len(query) != 4 or not heads or (mask is not None and graph.types[mask.name].grad):
        return None
    width = max(query[-1], value[-1])
    return width if query[-1] != value[-1] else None
