"""Fused projections (QKV, gate and up): slices become one split, types record the segments.

Each segment of the fused dim can be sharded, the dim as one cannot: a contiguous shard would mix
segments."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from autoshard.aten import aten
from autoshard.passes.ir.graph import DimSegments, Graph, Node
from autoshard.passes.ir.sizes import Size
from autoshard.passes.rules.base import positive
from autoshard.passes.rules.families.splits import SPLIT_OPS, split_segments, view_segments
from autoshard.runtime.operations.experts import experts_op

_PROJECTION_OPS = {aten.linear.default, aten.addmm.default, aten.mm.default, aten.matmul.default}


def slices_as_split(graph: Graph) -> Graph:
    """``graph`` with slices that tile the last dim of a product as one split."""
    found: dict[tuple[str, str, int], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op is aten.slice.Tensor and _is_projection_output(graph, node.inputs[0]):
            found[node.inputs[0], node.fqn, node.checkpoint].append(node)
    splits: dict[str, Node | None] = {}
    for slices in found.values():
        if (split := _split_of_slices(slices, graph)) is not None:
            splits |= {node.name: None for node in slices} | {slices[0].name: split}
    nodes = (splits.get(node.name, node) for node in graph.nodes)
    return replace(graph, nodes=tuple(n for n in nodes if n is not None)) if splits else graph


def _is_projection_output(graph: Graph, value: str) -> bool:
    """Whether ``value`` is a matrix product, behind reshapes that keep the last dim."""
    producer = graph.producers.get(value)
    while producer is not None and producer.op is aten.reshape.default:
        (shape,), (result,) = graph.shapes(producer.inputs[:1]), graph.shapes(producer.outputs)
        if shape[-1:] != result[-1:]:
            return False
        producer = graph.producers.get(producer.inputs[0])
    return producer is not None and producer.op in _PROJECTION_OPS


def _split_of_slices(slices: list[Node], graph: Graph) -> Node | None:
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


GATED_EXPERTS = experts_op._opoverload


def mark_fused_projections(graph: Graph) -> Graph:
    """``graph`` whose types record the segments of fused values and of their parameters."""
    found: dict[str, DimSegments] = {}
    for node in graph.nodes:
        for value, parts in _fused_operands(node, graph):
            chain = dict(_propagate_segments(value, parts, graph))
            if (
                all(found.get(name, parts) == parts for name, parts in chain.items())
                and chain.keys() & graph.parameters
            ):
                found |= chain
    if not found:
        return graph
    return replace(graph, types={n: replace(t, parts=found[n]) if n in found else t for n, t in graph.types.items()})


def _fused_operands(node: Node, graph: Graph) -> Iterator[tuple[str, DimSegments]]:
    """(operand of ``node``, its segments): of splits, views, and gated experts."""
    parts = split_segments(node, graph) if node.op in SPLIT_OPS else view_segments(node, graph)
    if parts is not None:
        yield node.inputs[0], parts
    elif node.op is GATED_EXPERTS and node.argument("gated") and not node.argument("interleaved"):
        yield node.inputs[3], (2 if node.argument("transposed") else 1, (1, 1))


def _propagate_segments(value: str, parts: DimSegments, graph: Graph) -> Iterator[tuple[str, DimSegments]]:
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
            yield from _propagate_segments(node.inputs[weight], (0 if turned else 1, ratio), graph)
        if bias is not None and bias < len(shapes) and len(shapes[bias]) == 1:
            yield from _propagate_segments(node.inputs[bias], (0, ratio), graph)
    elif node.op is aten.t.default and len(shapes[0]) == 2:
        yield from _propagate_segments(node.inputs[0], (1 - dim, ratio), graph)
    elif node.op is aten.transpose.int:
        swapped = [positive(node.argument(name), last + 1) for name in ("dim0", "dim1")]
        yield from _propagate_segments(
            node.inputs[0], (swapped[1 - swapped.index(dim)] if dim in swapped else dim, ratio), graph
        )
    elif node.op is aten._to_copy.default:
        yield from _propagate_segments(node.inputs[0], parts, graph)
