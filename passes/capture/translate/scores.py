"""Attention scores in a graph: the product of queries and keys, scaled, capped, biased, masked."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.masks import band_of_mask, hidden_band, within
from autoshard.passes.capture.translate.patterns import letters
from autoshard.passes.capture.translate.positions import Linear, Positions
from autoshard.passes.capture.translate.slopes import Hidden, added, filled, sloped
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.sizes import Size
from autoshard.runtime.attention.order import Band

PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default}
_SAME = {aten._to_copy.default, aten.clone.default}
_FINITE = {
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.abs.default, aten.cumsum.default,
    aten.reshape.default, aten.expand.default, aten.repeat.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.slice.Tensor, aten.select.int, aten.transpose.int, aten.permute.default, aten.where.ScalarOther, aten.where.self,
    aten.masked_fill.Scalar, aten.clone.default, aten._to_copy.default,
}  # fmt: skip
"""ops whose results are finite for finite operands"""


class Operand(NamedTuple):
    """An operand of attention: ``value``, permuted."""

    value: Ref
    order: tuple[int, ...] = ()
    """permutation of the dims; (): none"""


class Bias(NamedTuple):
    """A summand of scores, times ``factor``."""

    value: Ref
    rank: int
    """number of dims of the scores that it is added to"""
    factor: float = 1.0


@dataclass(frozen=True)
class Scores:
    """scale · query · keyᵀ + biases, with masked fills; a soft cap: cap · tanh of the product."""

    query: Operand
    key: Operand
    path: tuple[str, ...]
    """the values from the product to the scores"""
    scale: float = 1.0
    factors: tuple[tuple[Any, Ref], ...] = ()
    """(op, scalar tensor) applied besides ``scale``"""
    added: tuple[Bias, ...] = ()
    hidden: tuple[Hidden, ...] = ()
    soft_cap: float | None = None


def scores_of(value: Ref, graph: Graph, positions: Positions) -> Scores | None:
    """``value`` [..., s, t] as scores, if nothing else reads it or its intermediate values."""
    node = graph.producers.get(value.name)
    if node is None or not is_read_once(value.name, graph):
        return None
    if node.op in PRODUCTS:
        return _product(node, graph)
    for inner, change in _steps(node, graph, positions):
        found = scores_of(inner, graph, positions)
        if found is not None and (changed := change(found)) is not None:
            return replace(changed, path=(*changed.path, value.name))
    return None


def is_read_once(name: str, graph: Graph) -> bool:
    """Whether exactly one operand of one operation reads a value."""
    uses = graph.uses[name]
    return len(uses) == 1 and uses[0].inputs.count(name) == 1 and name not in graph.returned


def keeps_matrix(node: Node, graph: Graph) -> bool:
    """Whether a reshape keeps the last two dims."""
    before, after = graph.shape(node.args[0]), graph.shape(node.outputs[0])
    return len(before) > 2 and len(after) > 2 and before[-2:] == after[-2:]


Step = tuple[Ref, Callable[[Scores], "Scores | None"]]


def _steps(node: Node, graph: Graph, positions: Positions) -> Iterator[Step]:
    """(operand that may be scores, function of scores that ``node`` applies)."""
    if node.op in _SAME or (node.op is aten.reshape.default and keeps_matrix(node, graph)):
        yield node.args[0], lambda found: found
    elif node.op in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[0], Ref):
        yield node.args[0], lambda found: _scaled(found, node, graph)
    elif node.op is aten.tanh.default:
        yield node.args[0], _capped
    elif node.op is aten.add.Tensor and not node.kwargs and len(node.inputs) == 2:
        rank = len(graph.shape(node.outputs[0]))
        for scores, bias in (node.args, node.args[::-1]):
            if graph.shape(scores) == graph.shape(node.outputs[0]):
                yield scores, partial(_added, Bias(bias, rank))
    elif (found := filled(node, positions)) is not None and graph.shape(found[0]) == graph.shape(node.outputs[0]):
        yield found[0], lambda inner: replace(inner, hidden=(*inner.hidden, found[1]))


def _added(bias: Bias, found: Scores) -> Scores:
    return replace(found, added=(*found.added, bias))


def _capped(found: Scores) -> Scores | None:
    plain = not found.added and not found.hidden and found.soft_cap is None
    return replace(found, soft_cap=1.0) if plain else None


def _scaled(found: Scores, node: Node, graph: Graph) -> Scores | None:
    factor = node.args[1]
    if isinstance(factor, Ref):
        plain = not graph.shape(factor) and not graph.types[factor.name].grad and factor != node.args[0]
        plain = plain and not found.added and not found.hidden and found.soft_cap is None
        return replace(found, factors=(*found.factors, (node.op, factor))) if plain else None
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        return None
    by = 1 / factor if node.op is aten.div.Tensor else float(factor)
    biases = tuple(b._replace(factor=b.factor * by) for b in found.added)
    hidden = tuple(h._replace(value=h.value * by) for h in found.hidden)
    if found.soft_cap is not None:
        return replace(found, soft_cap=found.soft_cap * by, added=biases, hidden=hidden)
    return replace(found, scale=found.scale * by, added=biases, hidden=hidden)


def _product(node: Node, graph: Graph) -> Scores | None:
    if node.op is aten.einsum.default:
        return _contracted(node, graph)
    (result,), (query, key) = node.outputs, node.args[-2:]
    rank = len(graph.shape(result))
    if rank not in (3, 4) or {len(graph.shape(x)) for x in (query, key)} != {rank} or query == key:
        return None
    turned = (*range(rank - 2), rank - 1, rank - 2)
    found = Scores(_narrow(query, graph), _narrow(key, graph, turned), (result,))
    if node.op is not aten.baddbmm.default:
        return found
    scale, bias = float(node.argument("alpha")), node.args[0]
    if float(node.argument("beta")) != 1 or bias in (query, key):
        return None
    return replace(found, scale=scale, added=(Bias(bias, rank),))


def _contracted(node: Node, graph: Graph) -> Scores | None:
    """Scores [b, h, s, t] of an einsum that contracts one dim."""
    for query, key in (node.args[1], node.args[1][::-1]) if len(node.args[1]) == 2 else ():
        of_query, of_key, result = letters(node, (query, key))
        summed = (set(of_query) & set(of_key)) - set(result)
        if len(result) != 4 or len(summed) != 1 or query == key:
            continue
        wanted = (result[:3] + min(summed), result[:2] + result[3] + min(summed))
        if all(sorted(have) == sorted(want) for have, want in zip((of_query, of_key), wanted, strict=True)):
            orders = (tuple(map(have.index, want)) for have, want in zip((of_query, of_key), wanted, strict=True))
            queries, keys = (_narrow(x, graph, order) for x, order in zip((query, key), orders, strict=True))
            return Scores(queries, keys, node.outputs)
    return None


def _narrow(value: Ref, graph: Graph, order: tuple[int, ...] = ()) -> Operand:
    """An operand before an upcast: attention accumulates in a wider type anyway."""
    node = graph.producers.get(value.name)
    if node is not None and node.op is aten._to_copy.default:
        before, after = graph.types[node.inputs[0]].dtype, graph.types[value.name].dtype
        if before.is_floating_point and torch.promote_types(before, after) == after:
            return Operand(node.args[0], order)
    return Operand(value, order)


class Sight(enum.Enum):
    """Whether each query sees some key."""

    SURE = 1
    """yes, by positions"""
    OPEN = 2
    """unknown: finite summands may hide all keys of a query"""


def sight(found: Scores, graph: Graph, positions: Positions) -> Sight | None:
    """None if -inf or fills may hide all keys of a query: softmax is nan, or has no gradient."""
    rows, columns = graph.shape(found.path[0])[-2:]
    dtype, bands, known = graph.types[found.path[0]].dtype, list[Band](), Sight.SURE
    for hidden in found.hidden:
        if (band := hidden_band(hidden, (rows, columns), dtype, positions)) is None:
            return None
        bands.append(band)
    for part in (p for bias in found.added for p in added(bias.value, graph, positions)):
        if isinstance(part, Hidden):
            band, finite = hidden_band(part, (rows, columns), dtype, positions), math.isfinite(part.value)
        else:
            band, finite = band_of_mask(part, (rows, columns), graph, positions), _is_finite(part, graph, positions)
            if band is None and sloped(_once(part, graph), graph, positions) is not None:
                continue
        if band is not None:
            bands.append(band)
        elif found.hidden or not finite:
            return None
        else:
            known = Sight.OPEN
    return known if _shows_some(within(bands), rows, columns) else None


def _once(value: Ref, graph: Graph) -> Ref:
    """``value`` before it was repeated for every sample."""
    node = graph.producers.get(value.name)
    if node is not None and node.op is aten._to_copy.default:
        return value if _once(node.args[0], graph) == node.args[0] else _once(node.args[0], graph)
    if node is None or node.op is not aten.repeat.default or any(n != 1 for n in node.args[1][1:]):
        return value
    source: Ref = node.args[0]
    return source if len(graph.shape(source)) == len(node.args[1]) else value


def _shows_some(band: Band, rows: int, columns: int) -> bool:
    """Whether each row sees a column."""
    if band.after is not None and band.after < 0:
        return False
    if band.before is None or str(rows) == str(columns):
        return band.before is None or band.before >= 0
    return not isinstance(rows, Size) and not isinstance(columns, Size) and rows - 1 - band.before < columns


def _is_finite(value: Any, graph: Graph, positions: Positions) -> bool:
    """Whether a value is certainly finite."""
    if not isinstance(value, Ref):
        return not isinstance(value, float) or math.isfinite(value)
    known = positions(value)
    if known is not None:
        numbers = (known.start, *known.steps) if isinstance(known, Linear) else known.values
        return all(math.isfinite(x) for x in numbers)
    if not graph.types[value.name].dtype.is_floating_point:
        return not graph.types[value.name].dtype.is_complex
    if value.name in graph.constants:
        return bool(graph.constants[value.name].isfinite().all())
    node = graph.producers.get(value.name)
    if node is None or (node.op not in _FINITE and not _is_power(node, positions)):
        return False
    if node.op is aten._to_copy.default:
        (before,), after = (graph.types[n].dtype for n in node.inputs), graph.types[value.name].dtype
        if before.is_floating_point and torch.finfo(before).max > 2 * torch.finfo(after).max:
            return False
    return all(_is_finite(x, graph, positions) for x in node.args if isinstance(x, Ref | float))


def _is_power(node: Node, positions: Positions) -> bool:
    """Whether it is a power of a positive constant, as ALiBi slopes are."""
    if node.op not in (aten.pow.Scalar, aten.pow.Tensor_Tensor):
        return False
    base = positions(node.args[0])
    return isinstance(base, Linear) and base.is_constant and base.start > 0
