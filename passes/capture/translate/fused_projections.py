"""Fused projections (QKV, gate and up): slices become one split, types record the segments. Each
segment can be sharded; a contiguous shard of the fused dim would mix them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace

from autoshard.aten import aten
from autoshard.passes.ir.graph import DimSegments, Graph, Node, Ref
from autoshard.passes.ir.patterns import Matcher, permutation_of, product_of
from autoshard.passes.ir.rewrite import NodeBuilder, rewrite
from autoshard.passes.ir.sizes import Size
from autoshard.passes.rules.families.splits import SPLIT_OPS, split_segments, view_segments
from autoshard.runtime.operations.experts import experts_op

GATED_EXPERTS = experts_op._opoverload


def slices_as_split(graph: Graph) -> Graph:
    """``graph`` with slices that tile the last dim of a matrix product as one split."""
    found: dict[tuple[str, str, int], list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op is aten.slice.Tensor and _is_matrix_product(node.args[0], graph):
            found[node.inputs[0], node.fqn, node.checkpoint].append(node)
    splits = [split for slices in found.values() if (split := _split_of_slices(slices, graph)) is not None]
    of_value = {name: split for split in splits for name in split.outputs}

    def tiled(build: NodeBuilder, node: Node) -> bool:
        made = of_value.get(node.outputs[0]) if node.outputs else None
        if made is not None and made.name == node.name:
            build.nodes.append(made)
        return made is not None

    return rewrite(graph, tiled) if splits else graph


def _is_matrix_product(value: Ref, graph: Graph) -> bool:
    """Whether ``value`` is a product with a matrix, behind reshapes that keep the last dim."""
    found = (graph.producers.get(m["x"].name) for m in Matcher(graph).matches("+(x := _)", value))
    return any(n is not None and n.op is not aten.einsum.default and product_of(n, graph) for n in found)


def _split_of_slices(slices: list[Node], graph: Graph) -> Node | None:
    """The split that is equivalent to ``slices`` of one value, or None."""
    shape, starts = graph.shape(slices[0].args[0]), dict[str, int]()
    for node in slices:
        found = Matcher(graph).match("slice(x, -1, start, _)", Ref(node.outputs[0]))
        start = (found["start"] or 0) if found is not None else None
        if not isinstance(start, int) or isinstance(start, Size):
            return None
        starts[node.outputs[0]] = start if start >= 0 else start + shape[-1]
    names = sorted(starts, key=starts.__getitem__)
    lengths = [graph.shape(name)[-1] for name in names]
    ends = [starts[name] + n for name, n in zip(names, lengths, strict=True)]
    if len(names) < 2 or [starts[name] for name in names] + [shape[-1]] != [0, *ends]:
        return None
    args, slots = (slices[0].args[0], lengths, len(shape) - 1), tuple(range(len(names)))
    whole = replace(slices[0], op=aten.split_with_sizes.default, args=args, kwargs={})
    return replace(whole, outputs=tuple(names), output_slots=slots)


def mark_fused_projections(graph: Graph) -> Graph:
    """``graph`` whose types record the segments of fused values and of their parameters."""
    found: dict[str, DimSegments] = {}
    for node in graph.nodes:
        for value, parts in _fused_operands(node, graph):
            chain = dict(_propagate_segments(value, parts, graph))
            agreed = all(found.get(name, parts) == parts for name, parts in chain.items())
            if agreed and chain.keys() & graph.parameters:
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
    node, (dim, ratio), shape = graph.producers.get(value), parts, graph.shape(value)
    if node is None or isinstance(shape[dim], Size):
        return
    product = product_of(node, graph) if node.op is not aten.einsum.default and dim == len(shape) - 1 else None
    behind: list[tuple[Ref, int]] = []
    if product is not None:
        matrix, term = product.operands[1], product.dims[1]
        behind = [(matrix, term.index(product.result[dim]))] if len(term) == 2 else []
        if product.bias is not None and len(graph.shape(product.bias)) == 1:
            behind.append((product.bias, 0))
    elif (order := permutation_of(node, graph)) is not None and node.op is not aten.permute.default:
        behind = [(node.args[0], order[dim])]
    elif node.op is aten._to_copy.default:
        behind = [(node.args[0], dim)]
    for source, place in behind:
        yield from _propagate_segments(source.name, (place, ratio), graph)
