"""Fused dims (q, k, v; gate and up) sharded segment by segment (:class:`Grouped`).

A later split of the dim, or a view as (segments, size), ends it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.aten import aten
from autoshard.layout import Grouped, Placement, Shard, can_be_parts
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Parts, TensorType
from autoshard.passes.ir.sizes import Size
from autoshard.passes.rules.factors import positive
from autoshard.passes.rules.families.shape import view_groups
from autoshard.passes.rules.families.splits import RULES, lengths_of

SPLITS = frozenset(rule.op for rule in RULES)
QKV = 3
"""number of segments of a fused query, key, value projection"""
_CARRY = SPLITS | {
    aten.linear.default,
    aten.addmm.default,
    aten.mm.default,
    aten.matmul.default,
    aten.t.default,
    aten.transpose.int,
    aten._to_copy.default,
}
"""ops with the same local form on chunks of segments"""


def parts_of_split(node: Node, graph: Graph) -> Parts | None:
    """The split dim and the ratio of its segments, if a layout can express them."""
    shape, *lengths_as_values = graph.shapes(node.inputs)
    if lengths_as_values:
        return None
    dim = positive(node.argument("dim"), len(shape))
    lengths = lengths_of(node, shape[dim])
    if len(lengths) < 2 or any(isinstance(n, Size) for n in (shape[dim], *lengths)):
        return None
    if min(lengths) < 1 or sum(lengths) != shape[dim] or not can_be_parts(lengths):
        return None
    unit = math.gcd(*lengths)
    return dim, tuple(n // unit for n in lengths)


def viewed_parts(node: Node, graph: Graph) -> Parts | None:
    """The dim that a view turns into (3, size, …), with three equal segments: fused q, k, v."""
    if node.op is not aten.reshape.default or len(node.inputs) > 1:  # sizes may be values
        return None
    (source,), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    for left, right in view_groups(source, result):
        cuts = (source[left[0]], *(result[d] for d in right))
        if len(left) == 1 and len(right) > 1 and result[right[0]] == QKV and not any(isinstance(n, Size) for n in cuts):
            return left[0], (1,) * QKV
    return None


def _viewed(node: Node, graph: Graph) -> Strategy:
    """Before the view every segment is sharded, after it the dim behind the segments."""
    (source,), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    (dim, parts) = viewed_parts(node, graph) or (0, (1, 1))
    (right,) = (right for left, right in view_groups(source, result) if left == (dim,))
    size = result[right[1]]
    return Strategy("parts", (Grouped(dim, parts),), (Shard(right[1]),), size, even=True, divides=True)


def in_parts(found: Sequence[Strategy], node: Node, graph: Graph) -> Iterator[Strategy]:
    """Variants of ``found`` that shard fused dims segment by segment."""
    types = [graph.types[name] for name in (*node.inputs, *node.outputs)]
    if types and types[0].parts and viewed_parts(node, graph) == types[0].parts:
        yield _viewed(node, graph)
    if node.op not in _CARRY or not any(t.parts for t in types):
        return
    for strategy in found:
        placed = list(zip((*strategy.inputs, *strategy.outputs), types, strict=True))
        cut = placed[: len(node.inputs)] if node.op in SPLITS else placed
        found_parts = {_parts(p, t) for p, t in cut if isinstance(p, Shard)}
        if strategy.divides and len(found_parts) == 1 and (parts := found_parts.pop()):
            made = [_grouped(p, parts) for p, _ in cut] + [p for p, _ in placed[len(cut) :]]
            size = next(int(t.shape[p.dim]) for p, t in cut if isinstance(p, Shard)) // sum(parts)
            inputs, outputs = tuple(made[: len(node.inputs)]), tuple(made[len(node.inputs) :])
            label = f"{strategy.label}/{len(parts)}"
            yield replace(strategy, label=label, inputs=inputs, outputs=outputs, size=size, even=True)


def _parts(placement: Shard, type_: TensorType) -> tuple[int, ...]:
    """The segments of the sharded dim, or ()."""
    return type_.parts[1] if type_.parts and type_.parts[0] == placement.dim else ()


def _grouped(placement: Placement, parts: tuple[int, ...]) -> Placement:
    return Grouped(placement.dim, parts) if isinstance(placement, Shard) else placement
