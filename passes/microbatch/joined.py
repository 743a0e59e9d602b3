"""Batches concatenated from several inputs, ``net(cat([a, b]))``, as in siamese networks.

A micro-batch takes a chunk of each input. Along the concatenated dim values are :class:`Grouped`:
chunk i of every segment. Per-sample ops keep that; a split into the segments, or a view as
(segments, size), ends it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autoshard.aten import aten
from autoshard.layout import Grouped, Placement, Shard, can_be_parts
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Parts
from autoshard.passes.rules.factors import positive
from autoshard.passes.rules.facts import is_random
from autoshard.passes.rules.families.parts import SPLITS, parts_of_split
from autoshard.passes.rules.families.shape import view_groups

_JOINS = frozenset({aten.cat.default, aten.concat.default, aten.concatenate.default})
ENDS = "apart"
"""label of ops that end the segments; only their local form sees them, others see one dim"""


def joined_by(node: Node, graph: Graph) -> Parts | None:
    """The dim along which ``node`` concatenates, and the ratio of lengths; None for other ops."""
    if node.op not in _JOINS or len(node.inputs) < 2:
        return None
    (result,), shapes = graph.shapes(node.outputs), graph.shapes(node.inputs)
    dim = positive(node.argument("dim"), len(result))
    lengths = [shape[dim] if len(shape) == len(result) else 0 for shape in shapes]
    if min(lengths) < 1 or not can_be_parts(lengths):
        return None
    return dim, Grouped(dim, tuple(lengths)).parts


def sliced_as_split(graph: Graph) -> Graph:
    """``graph`` with slices of a concatenated dim to one segment, ``h[:len(a)]``, as splits."""
    joins = {found for node in graph.nodes if (found := joined_by(node, graph))}
    nodes = tuple(_split(node, graph, joins) for node in graph.nodes) if joins else graph.nodes
    return replace(graph, nodes=nodes) if nodes != graph.nodes else graph


def _split(node: Node, graph: Graph, joins: set[Parts]) -> Node:
    if node.op is not aten.slice.Tensor or node.argument("step") != 1 or len(node.inputs) > 1:
        return node
    (shape,), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    dim, start = positive(node.argument("dim"), len(shape)), node.argument("start") or 0
    start = positive(start, shape[dim])
    for parts in (parts for d, parts in joins if d == dim and shape[dim] % sum(parts) == 0):
        lengths = [n * shape[dim] // sum(parts) for n in parts]
        for slot, (end, length) in enumerate(zip(itertools.accumulate(lengths), lengths, strict=True)):
            if (start, result[dim]) == (end - length, length):
                args = (node.args[0], lengths, dim)
                return replace(node, op=aten.split.sizes, args=args, kwargs={}, output_slots=(slot,))
    return node


def along_parts(
    found: Sequence[Strategy], node: Node, graph: Graph, count: int, joined: Mapping[str, Parts]
) -> Iterator[Strategy]:
    """Strategies along concatenated dims: ``node`` makes one, keeps it, or splits it.

    ``found``: strategies without communication for a plain dim; ``joined``: the operands' dims.
    Random ops are excluded: they draw in the order of the full batch.
    """
    if (parts := joined_by(node, graph)) is not None:
        dim, size = parts[0], math.gcd(*(shape[parts[0]] for shape in graph.shapes(node.inputs)))
        if size % count == 0:
            yield Strategy(f"join/{size}", (Shard(dim),) * len(node.inputs), (Grouped(*parts),), divides=True)
    if not any(name in joined for name in node.inputs) or is_random(node):
        return
    yield from _apart(node, graph, count, joined)
    for strategy in found:
        cut = [(n, p) for n, p in zip(node.inputs, strategy.inputs, strict=True) if isinstance(p, Shard)]
        ratios = {joined[n][1] if n in joined and joined[n][0] == p.dim else () for n, p in cut}
        if not strategy.divides or len(ratios) != 1 or not (ratio := ratios.pop()):
            continue
        names = (*node.inputs, *node.outputs)
        lengths = [
            graph.shape(n)[p.dim] for n, p in zip(names, strategy.placements, strict=True) if isinstance(p, Shard)
        ]
        if all(n % (count * sum(ratio)) == 0 for n in lengths):
            inputs, outputs = ([_grouped(p, ratio) for p in side] for side in (strategy.inputs, strategy.outputs))
            label = f"{strategy.label}/{len(ratio)}"
            yield replace(strategy, label=label, inputs=tuple(inputs), outputs=tuple(outputs))


def _apart(node: Node, graph: Graph, count: int, joined: Mapping[str, Parts]) -> Iterator[Strategy]:
    """A split into the segments, or a view as (segments, size)."""
    parts = joined.get(node.inputs[0])
    if parts is None:
        return
    (dim, ratio), shape = parts, graph.shape(node.inputs[0])
    if shape[dim] % (count * sum(ratio)):
        return
    if node.op in SPLITS and parts_of_split(node, graph) == parts:
        yield Strategy(ENDS, (Grouped(dim, ratio),), (Shard(dim),) * len(node.outputs), divides=True)
    if node.op is aten.reshape.default and len(node.inputs) == 1 and len(set(ratio)) == 1:
        result = graph.shape(node.outputs[0])
        for left, right in view_groups(shape, result):
            if left == (dim,) and len(right) > 1 and result[right[0]] == len(ratio) and result[right[1]] % count == 0:
                yield Strategy(ENDS, (Grouped(dim, ratio),), (Shard(right[1]),), divides=True)


def as_one(strategy: Strategy) -> Strategy:
    """``strategy`` with segments as one plain dim, unless the op ends them."""
    if strategy.label == ENDS:
        return strategy
    inputs, outputs = (
        tuple(Shard(p.dim) if isinstance(p, Grouped) else p for p in side)
        for side in (strategy.inputs, strategy.outputs)
    )
    return replace(strategy, inputs=inputs, outputs=outputs)


def _grouped(placement: Placement, ratio: tuple[int, ...]) -> Placement:
    return Grouped(placement.dim, ratio) if isinstance(placement, Shard) else placement
