"""Strategies of the micro-batch axis beyond the rules. An added constant is divided among the
micro-batches. Of concatenated inputs (siamese networks, ``net(cat([a, b]))``) a micro-batch
takes its chunk of each: :class:`~autoshard.layout.Grouped`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from autoshard.aten import aten
from autoshard.layout import Grouped, P, Shard, fits_split_factor
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import DimSegments, Graph, Node, Ref
from autoshard.passes.rules.base import SUMMABLE_DTYPES, positive
from autoshard.passes.rules.facts import is_random
from autoshard.passes.rules.families.reshape import view_groups
from autoshard.passes.rules.families.splits import SPLIT_OPS, segment_placement, split_segments

ADDITIONS = frozenset(
    {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.subtract.Tensor, aten.subtract.Scalar}
    | {aten.rsub.Scalar}
)
"""ops on a tensor and ``other``"""


def partial_with_constant(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """The strategy of tensor + constant on partial sums, or None: integers have no shares."""
    if node.op not in ADDITIONS or len(node.inputs) != 1 or isinstance(node.argument("other"), Ref):
        return ()
    operand, result = (graph.types[name].dtype for name in node.values)
    if operand not in SUMMABLE_DTYPES or not (result.is_floating_point or result.is_complex):
        return ()
    return (Strategy("P(number)", (P,), (P,)),)


def with_constant_share(node: Node, count: int) -> Node:
    args, kwargs = node.with_arguments(other=node.argument("other") / count)
    return replace(node, args=args, kwargs=kwargs)


_CONCATS = frozenset({aten.cat.default, aten.concat.default, aten.concatenate.default})
TAKES_APART = "apart"
"""label of ops that end the segments; only their local form sees them, others see one dim"""


def concat_parts(node: Node, graph: Graph) -> DimSegments | None:
    """The dim along which ``node`` concatenates, and the ratio of lengths; None for other ops."""
    if node.op not in _CONCATS or len(node.inputs) < 2:
        return None
    (result,), shapes = graph.shapes(node.outputs), graph.shapes(node.inputs)
    dim = positive(node.argument("dim"), len(result))
    lengths = [shape[dim] if len(shape) == len(result) else 0 for shape in shapes]
    if min(lengths) < 1 or not fits_split_factor(lengths):
        return None
    return dim, Grouped(dim, tuple(lengths)).parts


def slices_as_splits(graph: Graph) -> Graph:
    """``graph`` with slices of a concatenated dim to one segment, ``h[:len(a)]``, as splits."""
    joins = {found for node in graph.nodes if (found := concat_parts(node, graph))}
    nodes = tuple(_slice_as_split(node, graph, joins) for node in graph.nodes) if joins else graph.nodes
    return replace(graph, nodes=nodes) if nodes != graph.nodes else graph


def _slice_as_split(node: Node, graph: Graph, joins: set[DimSegments]) -> Node:
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


def concat_strategies(
    found: Sequence[Strategy], node: Node, graph: Graph, count: int, joined: Mapping[str, DimSegments]
) -> Iterator[Strategy]:
    """Strategies along concatenated dims: ``node`` makes one, keeps it, or splits it. ``found``:
    strategies without communication for a plain dim; ``joined``: the operands' dims. Not for
    random ops, which draw in the order of the full batch."""
    if (parts := concat_parts(node, graph)) is not None:
        dim, size = parts[0], math.gcd(*(shape[parts[0]] for shape in graph.shapes(node.inputs)))
        if size % count == 0:
            yield Strategy(f"join/{size}", (Shard(dim),) * len(node.inputs), (Grouped(*parts),), divides=True)
    if not any(name in joined for name in node.inputs) or is_random(node):
        return
    yield from _ending_strategies(node, graph, count, joined)
    for strategy in found:
        cut = [(n, p) for n, p in zip(node.inputs, strategy.inputs, strict=True) if isinstance(p, Shard)]
        ratios = {joined[n][1] if n in joined and joined[n][0] == p.dim else () for n, p in cut}
        if not strategy.divides or len(ratios) != 1 or not (ratio := ratios.pop()):
            continue
        names = node.values
        lengths = [
            graph.shape(n)[p.dim] for n, p in zip(names, strategy.placements, strict=True) if isinstance(p, Shard)
        ]
        if all(n % (count * sum(ratio)) == 0 for n in lengths):
            inputs, outputs = (
                [segment_placement(p, ratio) for p in side] for side in (strategy.inputs, strategy.outputs)
            )
            label = f"{strategy.label}/{len(ratio)}"
            yield replace(strategy, label=label, inputs=tuple(inputs), outputs=tuple(outputs))


def _ending_strategies(node: Node, graph: Graph, count: int, joined: Mapping[str, DimSegments]) -> Iterator[Strategy]:
    """A split into the segments, or a view as (segments, size)."""
    parts = joined.get(node.inputs[0])
    if parts is None:
        return
    (dim, ratio), shape = parts, graph.shape(node.inputs[0])
    if shape[dim] % (count * sum(ratio)):
        return
    if node.op in SPLIT_OPS and split_segments(node, graph) == parts:
        yield Strategy(TAKES_APART, (Grouped(dim, ratio),), (Shard(dim),) * len(node.outputs), divides=True)
    if node.op is aten.reshape.default and len(node.inputs) == 1 and len(set(ratio)) == 1:
        result = graph.shape(node.outputs[0])
        for left, right in view_groups(shape, result):
            if left == (dim,) and len(right) > 1 and result[right[0]] == len(ratio) and result[right[1]] % count == 0:
                yield Strategy(TAKES_APART, (Grouped(dim, ratio),), (Shard(right[1]),), divides=True)


def as_single_dim(strategy: Strategy) -> Strategy:
    """``strategy`` with segments as one plain dim, unless the op ends them."""
    if strategy.label == TAKES_APART:
        return strategy
    inputs, outputs = (
        tuple(Shard(p.dim) if isinstance(p, Grouped) else p for p in side)
        for side in (strategy.inputs, strategy.outputs)
    )
    return replace(strategy, inputs=inputs, outputs=outputs)
