"""ALiBi, attention with linear biases (Press et al. 2022): slopes of heads times key distances.

A bias that is equal for all keys of a query changes no attention weight. Therefore slopes times key
positions, times position differences, and, if causal, times distances are equivalent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.positions import Linear, Positions
from autoshard.passes.ir.graph import Graph, Node, Ref

_VIEWS = frozenset(
    {aten.unsqueeze.default, aten.squeeze.dim, aten.reshape.default, aten.expand.default, aten.clone.default,
     aten._to_copy.default}
)  # fmt: skip
_FILLS = {
    aten.masked_fill.Scalar: (0, 1, False),
    aten.where.ScalarOther: (1, 0, True),
    aten.where.self: (1, 0, True),
}
"""op → (index of the kept value, of the condition, whether true means kept); the fill is third"""


class Hidden(NamedTuple):
    """A masked fill of an additive mask: ``value`` where ``condition`` is not ``shows``."""

    condition: Ref
    shows: bool
    value: float


class Sloped(NamedTuple):
    """The bias slopes · step · (key position), up to a term per query."""

    slopes: Ref
    step: float
    causal: bool
    """whether it holds only for keys up to the query"""


def added(mask: Ref, graph: Graph, positions: Positions) -> Iterator[Ref | Hidden]:
    """The summands of an additive (floating point) mask, masked fills included."""
    node = graph.producers.get(mask.name)
    if node is not None and node.op is aten.add.Tensor and len(node.inputs) == 2 and not node.kwargs:
        for operand in node.args:
            yield from added(operand, graph, positions)
        return
    if node is not None and (found := filled(node, positions)) is not None:
        kept, hidden = found
        yield hidden
        yield from added(kept, graph, positions)
        return
    if node is not None and node.op in _VIEWS and positions(mask) is None:
        plain = graph.types[node.args[0].name].dtype.is_floating_point
        if plain and _keeps_places(node, graph) and graph.shape(node.args[0])[-2:] == graph.shape(mask)[-2:]:
            yield from added(node.args[0], graph, positions)
            return
    yield mask


def filled(node: Node, positions: Positions) -> tuple[Ref, Hidden] | None:
    """(kept value, masked fill) of ``node``, if it fills a constant number."""
    if node.op not in _FILLS:
        return None
    kept, condition, shows = _FILLS[node.op]
    number = positions(node.args[2])
    if not isinstance(number, Linear) or not number.is_constant or not isinstance(node.args[kept], Ref):
        return None
    return node.args[kept], Hidden(node.args[condition], shows, float(number.start))


def sloped(value: Ref, graph: Graph, positions: Positions) -> Sloped | None:
    """``value`` [..., keys] as an ALiBi bias, else None."""
    keys = graph.shape(value)[-1:]
    found = _product(value, keys[0], graph, positions) if keys else None
    return None if found is None or found[0] is None or not found[1] else Sloped(found[0], found[1], found[2])


Product = tuple[Ref | None, float, bool]


def _product(value: Ref, keys: int, graph: Graph, positions: Positions) -> Product | None:
    """(slopes or None, step from key to key, whether only for keys up to the query)."""
    known, node = positions(value), graph.producers.get(value.name)
    if isinstance(known, Linear):
        return None, float(known.steps[-1]), False
    if node is None or graph.shape(value)[-1:] != (keys,):
        return None
    if node.op in _VIEWS:
        inner = _product(node.args[0], keys, graph, positions)
        exact = inner is None or inner[0] is None or (_keeps_places(node, graph) and not _widens(node, graph))
        return inner if exact else None
    if node.op is aten.neg.default:
        inner = _product(node.args[0], keys, graph, positions)
        return inner and (inner[0], -inner[1], inner[2])
    if node.op is aten.slice.Tensor:
        before, after = graph.shape(node.args[0]), graph.shape(value)
        if before[:-1] != after[:-1] or node.argument("step") != 1:
            return None
        inner = _product(node.args[0], before[-1], graph, positions)
        return None if inner is None or inner[2] else inner
    if node.op is aten.abs.default:
        return _distance(positions(node.args[0]))
    if node.op is not aten.mul.Tensor:
        return None
    for one, other in (node.args, node.args[::-1]):
        inner = _product(one, keys, graph, positions) if isinstance(one, Ref) else None
        if inner is None:
            continue
        if not isinstance(other, Ref):
            return inner[0], inner[1] * other, inner[2]
        if inner[0] is None and _is_of_heads(other, graph):
            return other, inner[1], inner[2]
    return None


def _keeps_places(node: Node, graph: Graph) -> bool:
    """Whether a view keeps heads, rows and keys in place, and no float was narrower before."""
    narrow, wide = (graph.types[x].dtype for x in (node.inputs[0], node.outputs[0]))
    if narrow.is_floating_point and wide.is_floating_point and torch.finfo(narrow).eps > torch.finfo(wide).eps:
        return False
    before, after = ((1, 1, *graph.shape(x))[-3:] for x in (node.inputs[0], node.outputs[0]))
    if node.op is aten.expand.default:
        before = tuple(new if old == 1 else old for old, new in zip(before, after, strict=True))
    return before == after and graph.types[node.outputs[0]].dtype.is_floating_point


def _widens(node: Node, graph: Graph) -> bool:
    """Whether a cast widens, so that the product was rounded to the narrower type."""
    before, after = (graph.types[name].dtype for name in (node.inputs[0], node.outputs[0]))
    return before.itemsize < after.itemsize


def _is_of_heads(slopes: Ref, graph: Graph) -> bool:
    """Whether it is [.., h, 1, 1], one number per head, without a gradient."""
    shape, type_ = graph.shape(slopes), graph.types[slopes.name]
    plain = type_.dtype.is_floating_point and not type_.grad and not type_.unknown
    return plain and len(shape) > 2 and shape[-2:] == (1, 1) and math.prod(shape) == shape[-3]


def _distance(known: Any) -> Product | None:
    """The product of |row - column|, which falls by one from key to key up to the row."""
    if not isinstance(known, Linear) or known.start or len(known.steps) < 2 or any(known.steps[:-2]):
        return None
    row, column = known.steps[-2:]
    return (None, -abs(float(column)), True) if row == -column != 0 else None
