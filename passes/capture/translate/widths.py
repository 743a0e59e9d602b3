"""Attention whose values are narrower or wider than its keys, with zeros that make them equal: so kernels take it.

PyTorch's fused kernels know one width (multi-head latent attention has keys of 192 features and values of 128); else the
matrix of all queries and keys is made, and kept for the backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType


def one_width(graph: Graph) -> Graph:
    """``graph`` in which zeros widen what attention's kernels want to be as wide as the rest, and the result is cut."""
    types = dict(graph.types)
    nodes = tuple(made for node in graph.nodes for made in _widened(node, graph, types))
    return replace(graph, nodes=nodes, types=types) if len(nodes) > len(graph.nodes) else graph


def _widened(node: Node, graph: Graph, types: dict[str, TensorType]) -> Iterator[Node]:
    """``node``, and what widens its operands and cuts its result; ``types`` gets those of what is new."""
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
    """That of the widest operand, where a kernel would take the others at that width."""
    if node.op is not aten.scaled_dot_product_attention.default or node.argument("dropout_p", 0.0):
        return None
    query, key, value = (graph.shape(node.argument(name)) for name in ("query", "key", "value"))
    mask = node.argument("attn_mask")
    heads = query[:-2] == key[:-2] == value[:-2] or node.argument("enable_gqa")
    if len(query) != 4 or not heads or (mask is not None and graph.types[mask.name].grad):
        return None
    width = max(query[-1], value[-1])
    return width if query[-1] != value[-1] else None
