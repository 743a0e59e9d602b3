"""Slices that tile a fused projection become one split, so that rules see all its segments."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.sizes import Size

_PRODUCTS = {aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default}


def tiled(graph: Graph) -> Graph:
    """``graph`` with slices that tile the last dim of a product as one split."""
    found: dict[tuple[str, str, int], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op is aten.slice.Tensor and _is_product(graph, node.inputs[0]):
            found[node.inputs[0], node.fqn, node.checkpoint].append(node)
    splits: dict[str, Node | None] = {}
    for slices in found.values():
        if (split := _split(slices, graph)) is not None:
            splits |= {node.name: None for node in slices} | {slices[0].name: split}
    nodes = (splits.get(node.name, node) for node in graph.nodes)
    return replace(graph, nodes=tuple(n for n in nodes if n is not None)) if splits else graph


def _is_product(graph: Graph, value: str) -> bool:
    """Whether ``value`` is a matrix product, behind reshapes that keep the last dim."""
    producer = graph.producers.get(value)
    while producer is not None and producer.op is aten.reshape.default:
        (shape,), (result,) = graph.shapes(producer.inputs[:1]), graph.shapes(producer.outputs)
        if shape[-1:] != result[-1:]:
            return False
        producer = graph.producers.get(producer.inputs[0])
    return producer is not None and producer.op in _PRODUCTS


def _split(slices: list[Node], graph: Graph) -> Node | None:
    """The split that is equivalent to ``slices`` of one value, or None."""
    shape = graph.shape(slices[0].inputs[0])  # data-dependent bounds are inputs, too
    last = len(shape) - 1
    starts: dict[str, int] = {}
    for node in slices:
        start, dim = node.argument("start") or 0, node.argument("dim")
        if node.argument("step") != 1 or dim not in (-1, last) or not isinstance(start, int) or isinstance(start, Size):
            return None
        starts[node.outputs[0]] = start if start >= 0 else start + shape[last]
    names = sorted(starts, key=starts.__getitem__)
    lengths = [graph.shape(name)[last] for name in names]
    ends = [starts[name] + n for name, n in zip(names, lengths, strict=True)]
    if len(names) < 2 or [starts[name] for name in names] + [shape[last]] != [0, *ends]:
        return None
    first, slots = slices[0], tuple(range(len(names)))
    args = (first.args[0], lengths, last)
    return replace(
        first, op=aten.split_with_sizes.default, args=args, kwargs={}, outputs=tuple(names), output_slots=slots
    )
