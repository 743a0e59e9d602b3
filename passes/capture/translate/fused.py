"""Fused projections (QKV, gate and up): types record segments, each of which can be sharded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, Parts
from autoshard.passes.ir.sizes import Size
from autoshard.passes.rules.factors import positive
from autoshard.passes.rules.families.parts import SPLITS, parts_of_split, viewed_parts
from autoshard.runtime.operations.experts import experts_op

EXPERTS = experts_op._opoverload


def fused(graph: Graph) -> Graph:
    """``graph`` whose types record the segments of fused values and of their parameters."""
    found: dict[str, Parts] = {}
    for node in graph.nodes:
        for value, parts in _split(node, graph):
            chain = dict(_behind(value, parts, graph))
            if (
                all(found.get(name, parts) == parts for name, parts in chain.items())
                and chain.keys() & graph.parameters
            ):
                found |= chain
    if not found:
        return graph
    return replace(graph, types={n: replace(t, parts=found[n]) if n in found else t for n, t in graph.types.items()})


def _split(node: Node, graph: Graph) -> Iterator[tuple[str, Parts]]:
    """(operand of ``node``, its segments): of splits, views, and gated experts."""
    parts = parts_of_split(node, graph) if node.op in SPLITS else viewed_parts(node, graph)
    if parts is not None:
        yield node.inputs[0], parts
    elif node.op is EXPERTS and node.argument("gated") and not node.argument("interleaved"):
        yield node.inputs[3], (2 if node.argument("transposed") else 1, (1, 1))


def _behind(value: str, parts: Parts, graph: Graph) -> Iterator[tuple[str, Parts]]:
    """``value`` and the values behind it that have the same segments, down to parameters."""
    yield value, parts
    node, (dim, ratio) = graph.producers.get(value), parts
    if node is None or isinstance(graph.shape(value)[dim], Size):
        return
    shapes = graph.shapes(node.inputs)
    last = len(graph.shape(value)) - 1
    if node.op in (aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default) and dim == last:
        turned = node.op is aten.linear.default
        weight, bias = (1, 2) if turned else (len(node.inputs) - 1, 0 if node.op is aten.addmm.default else None)
        if len(shapes[weight]) == 2:
            yield from _behind(node.inputs[weight], (0 if turned else 1, ratio), graph)
        if bias is not None and bias < len(shapes) and len(shapes[bias]) == 1:
            yield from _behind(node.inputs[bias], (0, ratio), graph)
    elif node.op is aten.t.default and len(shapes[0]) == 2:
        yield from _behind(node.inputs[0], (1 - dim, ratio), graph)
    elif node.op is aten.transpose.int:
        swapped = [positive(node.argument(name), last + 1) for name in ("dim0", "dim1")]
        yield from _behind(node.inputs[0], (swapped[1 - swapped.index(dim)] if dim in swapped else dim, ratio), graph)
    elif node.op is aten._to_copy.default:
        yield from _behind(node.inputs[0], parts, graph)
