"""Attention scores and weights in a graph: a scaled query-key product, masked, biased, softmax."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.attention_masks import (
    MaskedFill,
    alibi_bias_of,
    band_of_fill,
    band_of_mask,
    intersect_bands,
    mask_summands,
    masked_fill_of,
)
from autoshard.passes.capture.translate.moe_patterns import einsum_dims
from autoshard.passes.capture.translate.positions import LinearIndex, PositionAnalysis
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.sizes import Size
from autoshard.passes.rules.facts import is_random
from autoshard.runtime.attention.ring_geometry import Band

SCORE_PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default}
_SCORE_COPIES = {aten._to_copy.default, aten.clone.default}
_FINITENESS_PRESERVING = {
    aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.neg.default, aten.abs.default, aten.cumsum.default,
    aten.reshape.default, aten.expand.default, aten.repeat.default, aten.unsqueeze.default, aten.squeeze.dim,
    aten.slice.Tensor, aten.select.int, aten.transpose.int, aten.permute.default, aten.where.ScalarOther, aten.where.self,
    aten.masked_fill.Scalar, aten.clone.default, aten._to_copy.default,
}  # fmt: skip
"""ops whose results are finite for finite operands"""


class AttentionOperand(NamedTuple):
    """An operand of attention: ``value``, permuted."""

    value: Ref
    order: tuple[int, ...] = ()
    """permutation of the dims; (): none"""


class ScoreBias(NamedTuple):
    """A summand of scores, times ``factor``."""

    value: Ref
    rank: int
    """number of dims of the scores that it is added to"""
    factor: float = 1.0


@dataclass(frozen=True)
class AttentionScores:
    """scale · query · keyᵀ + biases, with masked fills; a soft cap: cap · tanh of the product."""

    query: AttentionOperand
    key: AttentionOperand
    path: tuple[str, ...]
    """the values from the product to the scores"""
    scale: float = 1.0
    factors: tuple[tuple[Any, Ref], ...] = ()
    """(op, scalar tensor) applied besides ``scale``"""
    added: tuple[ScoreBias, ...] = ()
    hidden: tuple[MaskedFill, ...] = ()
    soft_cap: float | None = None


def attention_scores_of(value: Ref, graph: Graph, positions: PositionAnalysis) -> AttentionScores | None:
    """``value`` [..., s, t] as scores, if nothing else reads it or its intermediate values."""
    node = graph.producers.get(value.name)
    if node is None or not is_read_once(value.name, graph):
        return None
    if node.op in SCORE_PRODUCTS:
        return _scores_of_product(node, graph)
    for inner, change in _score_steps(node, graph, positions):
        found = attention_scores_of(inner, graph, positions)
        if found is not None and (changed := change(found)) is not None:
            return replace(changed, path=(*changed.path, value.name))
    return None


def is_read_once(name: str, graph: Graph) -> bool:
    """Whether exactly one operand of one operation reads a value."""
    uses = graph.uses[name]
    return len(uses) == 1 and uses[0].inputs.count(name) == 1 and name not in graph.returned


def keeps_last_two_dims(node: Node, graph: Graph) -> bool:
    """Whether a reshape keeps the last two dims."""
    before, after = graph.shape(node.args[0]), graph.shape(node.outputs[0])
    return len(before) > 2 and len(after) > 2 and before[-2:] == after[-2:]


ScoreStep = tuple[Ref, Callable[[AttentionScores], "AttentionScores | None"]]


def _score_steps(node: Node, graph: Graph, positions: PositionAnalysis) -> Iterator[ScoreStep]:
    """(operand that may be scores, function of scores that ``node`` applies)."""
    if node.op in _SCORE_COPIES or (node.op is aten.reshape.default and keeps_last_two_dims(node, graph)):
        yield node.args[0], lambda found: found
    elif node.op in (aten.mul.Tensor, aten.div.Tensor) and isinstance(node.args[0], Ref):
        yield node.args[0], lambda found: _with_scale(found, node, graph)
    elif node.op is aten.tanh.default:
        yield node.args[0], _with_soft_cap
    elif node.op is aten.add.Tensor and not node.kwargs and len(node.inputs) == 2:
        rank = len(graph.shape(node.outputs[0]))
        for scores, bias in (node.args, node.args[::-1]):
            if graph.shape(scores) == graph.shape(node.outputs[0]):
                yield scores, partial(_with_bias, ScoreBias(bias, rank))
    elif (found := masked_fill_of(node, positions)) is not None and graph.shape(found[0]) == graph.shape(
        node.outputs[0]
    ):
        yield found[0], lambda inner: replace(inner, hidden=(*inner.hidden, found[1]))


def _with_bias(bias: ScoreBias, found: AttentionScores) -> AttentionScores:
    return replace(found, added=(*found.added, bias))


def _with_soft_cap(found: AttentionScores) -> AttentionScores | None:
    plain = not found.added and not found.hidden and found.soft_cap is None
    return replace(found, soft_cap=1.0) if plain else None


def _with_scale(found: AttentionScores, node: Node, graph: Graph) -> AttentionScores | None:
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


def _scores_of_product(node: Node, graph: Graph) -> AttentionScores | None:
    if node.op is aten.einsum.default:
        return _scores_of_einsum(node, graph)
    (result,), (query, key) = node.outputs, node.args[-2:]
    rank = len(graph.shape(result))
    if rank not in (3, 4) or {len(graph.shape(x)) for x in (query, key)} != {rank} or query == key:
        return None
    turned = (*range(rank - 2), rank - 1, rank - 2)
    found = AttentionScores(_before_upcast(query, graph), _before_upcast(key, graph, turned), (result,))
    if node.op is not aten.baddbmm.default:
        return found
    scale, bias = float(node.argument("alpha")), node.args[0]
    if float(node.argument("beta")) != 1 or bias in (query, key):
        return None
    return replace(found, scale=scale, added=(ScoreBias(bias, rank),))


def _scores_of_einsum(node: Node, graph: Graph) -> AttentionScores | None:
    """Scores [b, h, s, t] of an einsum that contracts one dim."""
    for query, key in (node.args[1], node.args[1][::-1]) if len(node.args[1]) == 2 else ():
        of_query, of_key, result = einsum_dims(node, (query, key))
        summed = (set(of_query) & set(of_key)) - set(result)
        if len(result) != 4 or len(summed) != 1 or query == key:
            continue
        wanted = (result[:3] + min(summed), result[:2] + result[3] + min(summed))
        if all(sorted(have) == sorted(want) for have, want in zip((of_query, of_key), wanted, strict=True)):
            orders = (tuple(map(have.index, want)) for have, want in zip((of_query, of_key), wanted, strict=True))
            queries, keys = (_before_upcast(x, graph, order) for x, order in zip((query, key), orders, strict=True))
            return AttentionScores(queries, keys, node.outputs)
    return None


def _before_upcast(value: Ref, graph: Graph, order: tuple[int, ...] = ()) -> AttentionOperand:
    """An operand before an upcast: attention accumulates in a wider type anyway."""
    node = graph.producers.get(value.name)
    if node is not None and node.op is aten._to_copy.default:
        before, after = graph.types[node.inputs[0]].dtype, graph.types[value.name].dtype
        if before.is_floating_point and torch.promote_types(before, after) == after:
            return AttentionOperand(node.args[0], order)
    return AttentionOperand(value, order)


class KeyVisibility(enum.Enum):
    """Whether each query sees some key."""

    SURE = 1
    """yes, by positions"""
    OPEN = 2
    """unknown: finite summands may hide all keys of a query"""


def key_visibility(found: AttentionScores, graph: Graph, positions: PositionAnalysis) -> KeyVisibility | None:
    """None if -inf or fills may hide all keys of a query: softmax is nan, or has no gradient."""
    rows, columns = graph.shape(found.path[0])[-2:]
    dtype, bands, known = graph.types[found.path[0]].dtype, list[Band](), KeyVisibility.SURE
    for hidden in found.hidden:
        if (band := band_of_fill(hidden, (rows, columns), dtype, positions)) is None:
            return None
        bands.append(band)
    for part in (p for bias in found.added for p in mask_summands(bias.value, graph, positions)):
        if isinstance(part, MaskedFill):
            band, finite = band_of_fill(part, (rows, columns), dtype, positions), math.isfinite(part.value)
        else:
            band, finite = band_of_mask(part, (rows, columns), graph, positions), _is_finite(part, graph, positions)
            if band is None and alibi_bias_of(_before_repeat(part, graph), graph, positions) is not None:
                continue
        if band is not None:
            bands.append(band)
        elif found.hidden or not finite:
            return None
        else:
            known = KeyVisibility.OPEN
    return known if _sees_some_key(intersect_bands(bands), rows, columns) else None


def _before_repeat(value: Ref, graph: Graph) -> Ref:
    """``value`` before it was repeated for every sample."""
    node = graph.producers.get(value.name)
    if node is not None and node.op is aten._to_copy.default:
        return value if _before_repeat(node.args[0], graph) == node.args[0] else _before_repeat(node.args[0], graph)
    if node is None or node.op is not aten.repeat.default or any(n != 1 for n in node.args[1][1:]):
        return value
    source: Ref = node.args[0]
    return source if len(graph.shape(source)) == len(node.args[1]) else value


def _sees_some_key(band: Band, rows: int, columns: int) -> bool:
    """Whether each row sees a column."""
    if band.after is not None and band.after < 0:
        return False
    if band.before is None or str(rows) == str(columns):
        return band.before is None or band.before >= 0
    return not isinstance(rows, Size) and not isinstance(columns, Size) and rows - 1 - band.before < columns


def _is_finite(value: Any, graph: Graph, positions: PositionAnalysis) -> bool:
    """Whether a value is certainly finite."""
    if not isinstance(value, Ref):
        return not isinstance(value, float) or math.isfinite(value)
    known = positions(value)
    if known is not None:
        numbers = (known.start, *known.steps) if isinstance(known, LinearIndex) else known.values
        return all(math.isfinite(x) for x in numbers)
    if not graph.types[value.name].dtype.is_floating_point:
        return not graph.types[value.name].dtype.is_complex
    if value.name in graph.constants:
        return bool(graph.constants[value.name].isfinite().all())
    node = graph.producers.get(value.name)
    if node is None or (node.op not in _FINITENESS_PRESERVING and not _is_power(node, positions)):
        return False
    if node.op is aten._to_copy.default:
        (before,), after = (graph.types[n].dtype for n in node.inputs), graph.types[value.name].dtype
        if before.is_floating_point and torch.finfo(before).max > 2 * torch.finfo(after).max:
            return False
    return all(_is_finite(x, graph, positions) for x in node.args if isinstance(x, Ref | float))


def _is_power(node: Node, positions: PositionAnalysis) -> bool:
    """Whether it is a power of a positive constant, as ALiBi slopes are."""
    if node.op not in (aten.pow.Scalar, aten.pow.Tensor_Tensor):
        return False
    base = positions(node.args[0])
    return isinstance(base, LinearIndex) and base.is_constant and base.start > 0


class AttentionWeights(NamedTuple):
    """Attention weights: the softmax of scores, then dropout."""

    scores: Ref
    path: tuple[str, ...]
    """the values from the softmax to the weights"""
    dropout: float = 0.0
    sinks: Ref | None = None
    """attention sinks [1, h, 1, 1] or [h, 1, 1]: a score per head that has no value"""


def attention_weights_of(value: Ref, end: Node, graph: Graph) -> AttentionWeights | None:
    """``value`` [..., s, t] as attention weights; ``end``: the product of weights and values."""
    node, path, dropout, cut = graph.producers.get(value.name), list[str](), 0.0, False
    while node is not None and is_read_once(node.outputs[0], graph) and node.checkpoint == end.checkpoint:
        path.append(node.outputs[0])
        if node.op is aten.softmax.int:
            last = node.args[1] % len(graph.shape(node.args[0])) == len(graph.shape(node.args[0])) - 1
            plain = AttentionWeights(node.args[0], tuple(path), dropout)
            return None if not last else _with_sinks(plain, graph) if cut else plain
        if node.op is aten.dropout.default and not dropout and not node.order and _is_next_draw(node, end, graph):
            dropout = float(node.args[1])
        elif not cut and _drops_last_column(node, graph):
            cut = True
        elif node.op is not aten._to_copy.default and not (
            node.op is aten.reshape.default and keeps_last_two_dims(node, graph)
        ):
            return None
        node = graph.producers.get(node.inputs[0])
    return None


def _is_next_draw(node: Node, end: Node, graph: Graph) -> bool:
    """Whether no random op stands between ``node`` and ``end``."""
    first, last = graph.nodes.index(node), graph.nodes.index(end)
    return not any(is_random(n) for n in graph.nodes[first + 1 : last])


def _drops_last_column(node: Node, graph: Graph) -> bool:
    """Whether ``node`` is a slice that drops the last column."""
    if node.op is not aten.slice.Tensor or node.argument("start") not in (None, 0) or node.argument("step") != 1:
        return False
    before, after = graph.shape(node.args[0]), graph.shape(node.outputs[0])
    return before[:-1] == after[:-1] and before[-1] == after[-1] + 1


def _with_sinks(found: AttentionWeights, graph: Graph) -> AttentionWeights | None:
    """``found`` of a softmax over [scores, sinks]; subtracted maxima change no weight."""
    joint, path = found.scores, list(found.path)
    node = graph.producers.get(joint.name)
    if node is not None and node.op is aten.sub.Tensor and len(node.inputs) == 2 and not node.kwargs:
        joint, most = node.args
        largest = graph.producers.get(most.name)
        if largest is None or not _is_row_maximum(largest, joint, graph) or not is_read_once(node.outputs[0], graph):
            return None
        if len(graph.uses[joint.name]) != 2 or not is_read_once(most.name, graph):
            return None
        path += [*node.outputs, *largest.outputs]
        node = graph.producers.get(joint.name)
    elif not is_read_once(joint.name, graph):
        return None
    if node is None or node.op is not aten.cat.default or len(node.args[0]) != 2 or joint.name in graph.returned:
        return None
    (scores, sinks), rank = node.args[0], len(graph.shape(joint))
    if node.argument("dim") % rank != rank - 1:
        return None
    narrow = _before_expand(sinks, graph)
    shape, whole = graph.shape(narrow), graph.shape(sinks)
    if len(shape) not in (3, 4) or shape[-2:] != (1, 1) or shape[:-3] not in ((), (1,)) or whole[-1] != 1:
        return None
    return found._replace(scores=scores, path=(*path, *node.outputs), sinks=narrow)


def _is_row_maximum(node: Node, of: Ref, graph: Graph) -> bool:
    """Whether ``node`` is the maximum of each row of ``of``, keepdim."""
    if node.op not in (aten.max.dim, aten.amax.default) or node.inputs != (of.name,) or not node.argument("keepdim"):
        return False
    dims, rank = node.argument("dim"), len(graph.shape(of))
    named = list(dims) if isinstance(dims, list | tuple) else [dims]
    return [d % rank for d in named] == [rank - 1] and len(node.outputs) == 1


def _before_expand(value: Ref, graph: Graph) -> Ref:
    """``value`` before expands and casts."""
    node = graph.producers.get(value.name)
    while node is not None and node.op in (aten.expand.default, aten._to_copy.default):
        value = node.args[0]
        node = graph.producers.get(value.name)
    return value
