"""Splits of a sharded dim (ranks exchange halos), and of fused dims (q, k, v; gate and up) sharded
segment by segment: of a :class:`~autoshard.layout.Grouped` one the split is local."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.aten import aten
from autoshard.layout import Grouped, Placement, Shard, fits_split_factor
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import DimSegments, Graph, Node
from autoshard.passes.ir.program import LocalCall, axes_argument
from autoshard.passes.ir.sizes import Size
from autoshard.passes.rules.base import (
    KEEPS_NOTHING,
    Factors,
    Facts,
    Rule,
    Site,
    numbered_factors,
    positive,
    rules,
    sizes_of,
)
from autoshard.passes.rules.families.reshape import view_groups


def _split_factors(node: Node, graph: Graph) -> Factors:
    """The dim may be sharded if each rank gets a chunk of every result."""
    (shape,) = graph.shapes(node.inputs)
    dim = positive(node.argument("dim"), len(shape))
    lengths = split_lengths(node, shape[dim])
    fixed = not any(isinstance(n, Size) for n in (shape[dim], *lengths))
    dims = numbered_factors(shape, () if fixed else (dim,))
    sizes = sizes_of(shape) | {f"d{dim}": min(lengths, default=0)}
    return Factors((dims,), (dims,) * len(node.outputs), sizes, linear=((0,),))


def split_lengths(node: Node, size: int) -> list[int]:
    if (given := node.argument("split_sizes", None)) is not None:
        return list(given)
    step = node.argument("split_size", None)
    if isinstance(step, list | tuple):
        return list(step)
    step = -(-size // node.argument("chunks")) if step is None else step
    return [min(step, size - start) for start in range(0, size, step)] if step else [size]


def _local_split(site: Site) -> LocalCall:
    dim, axes = site.sharded_dim
    if (ranks := site.mesh.size_of(tuple(site.inputs[0].grouped))) > 1:
        return _split_of_segments(site, dim, ranks)
    if site.mesh.size_of(axes) == 1:
        return site.unchanged()
    lengths = split_lengths(site.node, site.in_type(0).shape[dim])
    return LocalCall("split", (site.node.args[0], dim, lengths, axes_argument(axes)), {})


def _split_of_segments(site: Site, dim: int, ranks: int) -> LocalCall:
    """A local split of this rank's chunks of all segments."""
    lengths = [n // ranks for n in split_lengths(site.node, site.in_type(0).shape[dim])]
    return LocalCall(aten.split.sizes, (site.node.args[0], lengths, dim), {})


SPLIT_VIEW_FACTS = Facts(saves="", view=True)

RULES: tuple[Rule, ...] = (
    *rules(
        "split.Tensor split.sizes split_with_sizes.default split_with_sizes_copy.default chunk.default",
        _split_factors,
        _local_split,
        "... d ... -> ... d ..., ...",
        sends=True,
        facts=KEEPS_NOTHING,
    ),
    *rules(
        "unsafe_chunk.default unsafe_split.Tensor unsafe_split_with_sizes.default",
        _split_factors,
        _local_split,
        "…",
        sends=True,
        facts=SPLIT_VIEW_FACTS,
    ),
)


SPLIT_OPS = frozenset(rule.op for rule in RULES)
QKV = 3
"""number of segments of a fused query, key, value projection"""
_SEGMENT_OPS = SPLIT_OPS | {
    aten.linear.default,
    aten.addmm.default,
    aten.mm.default,
    aten.matmul.default,
    aten.t.default,
    aten.transpose.int,
    aten._to_copy.default,
}
"""ops with the same local form on chunks of segments"""


def split_segments(node: Node, graph: Graph) -> DimSegments | None:
    """The split dim and the ratio of its segments, if a layout can express them."""
    shape, *lengths_as_values = graph.shapes(node.inputs)
    if lengths_as_values:
        return None
    dim = positive(node.argument("dim"), len(shape))
    lengths = split_lengths(node, shape[dim])
    if len(lengths) < 2 or any(isinstance(n, Size) for n in (shape[dim], *lengths)):
        return None
    if min(lengths) < 1 or sum(lengths) != shape[dim] or not fits_split_factor(lengths):
        return None
    unit = math.gcd(*lengths)
    return dim, tuple(n // unit for n in lengths)


def view_segments(node: Node, graph: Graph) -> DimSegments | None:
    """The dim that a view turns into (3, size, …), with three equal segments: fused q, k, v."""
    if node.op is not aten.reshape.default or len(node.inputs) > 1:  # sizes may be values
        return None
    (source,), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    for left, right in view_groups(source, result):
        cuts = (source[left[0]], *(result[d] for d in right))
        if len(left) == 1 and len(right) > 1 and result[right[0]] == QKV and not any(isinstance(n, Size) for n in cuts):
            return left[0], (1,) * QKV
    return None


def _segment_view(node: Node, graph: Graph) -> Strategy:
    """Before the view every segment is sharded, after it the dim behind the segments."""
    (source,), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    (dim, parts) = view_segments(node, graph) or (0, (1, 1))
    (right,) = (right for left, right in view_groups(source, result) if left == (dim,))
    size = result[right[1]]
    return Strategy("parts", (Grouped(dim, parts),), (Shard(right[1]),), size, even=True, divides=True)


def segment_strategies(found: Sequence[Strategy], node: Node, graph: Graph) -> Iterator[Strategy]:
    """Variants of ``found`` that shard fused dims segment by segment."""
    types = [graph.types[name] for name in node.values]
    if types and types[0].parts and view_segments(node, graph) == types[0].parts:
        yield _segment_view(node, graph)
    if node.op not in _SEGMENT_OPS or not any(t.parts for t in types):
        return
    for strategy in found:
        placed = list(zip(strategy.placements, types, strict=True))
        cut = placed[: len(node.inputs)] if node.op in SPLIT_OPS else placed
        found_parts = {(t.parts[1] if t.parts and t.parts[0] == p.dim else ()) for p, t in cut if isinstance(p, Shard)}
        if strategy.divides and len(found_parts) == 1 and (parts := found_parts.pop()):
            made = [segment_placement(p, parts) for p, _ in cut] + [p for p, _ in placed[len(cut) :]]
            size = next(int(t.shape[p.dim]) for p, t in cut if isinstance(p, Shard)) // sum(parts)
            inputs, outputs = tuple(made[: len(node.inputs)]), tuple(made[len(node.inputs) :])
            label = f"{strategy.label}/{len(parts)}"
            yield replace(strategy, label=label, inputs=inputs, outputs=outputs, size=size, even=True)


def segment_placement(placement: Placement, parts: tuple[int, ...]) -> Placement:
    return Grouped(placement.dim, parts) if isinstance(placement, Shard) else placement
