"""Attention patterns: products around a softmax become one scaled dot product attention, which
keeps no [queries, keys] matrix and has its sharding rules. Where keys and values differ in head
dim, zeros pad the narrower, so that fused kernels apply."""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.attention_masks import (
    BANDED_ATTENTION,
    SDPA,
    MaskedFill,
    MaskMatcher,
    intersect_bands,
)
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.patterns import Bindings, behind, permutation_of, product_of
from autoshard.passes.ir.rewrite import NodeBuilder, rewrite
from autoshard.passes.ir.sizes import Size
from autoshard.passes.rules.facts import is_random
from autoshard.runtime.attention.ring_geometry import Band

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
    order: tuple[int, ...]
    """permutation of the dims"""


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

    @property
    def is_plain(self) -> bool:
        """Whether nothing is added to the product, hidden or capped."""
        return not self.added and not self.hidden and self.soft_cap is None


class KeyVisibility(enum.Enum):
    """Whether each query sees some key."""

    SURE = 1
    """yes, by positions"""
    OPEN = 2
    """unknown: finite summands may hide all keys of a query"""


class AttentionWeights(NamedTuple):
    """Attention weights: the softmax of scores, then dropout."""

    scores: Ref
    path: tuple[str, ...]
    """the values from the softmax to the weights"""
    dropout: float = 0.0
    sinks: Ref | None = None
    """attention sinks [1, h, 1, 1] or [h, 1, 1]: a score per head that has no value"""


WITH_SINKS = "cat([scores, sinks], -1) | sub((joint := cat([scores, sinks], -1)), row_maximum(joint))"
"""scores beside those of sinks; subtracted maxima change no weight"""


class ScoreMatcher(MaskMatcher):
    """Matches scores and weights of attention in a graph."""

    def __init__(self, graph: Graph) -> None:
        super().__init__(graph)
        self.rules |= {"row_maximum(x)": "max(x, -1, True) | amax(x, [-1], True)"}
        self.predicates["fill"] = self._fill

    def scores(self, value: Ref) -> AttentionScores | None:
        """``value`` [..., s, t] as scores, if nothing else reads it or its intermediate values."""
        node = self.graph.producers.get(value.name)
        if node is None or not is_read_once(value.name, self.graph):
            return None
        if (product := _scores_of_product(node, self.graph)) is not None:
            return product
        for form, change in _SCORE_STEPS.items():
            for step in self.matches(form, value):
                inner = step["scores"]
                whole = isinstance(inner, Ref) and self.graph.shape(inner)[-2:] == self.graph.shape(value)[-2:]
                found = self.scores(inner) if whole else None
                changed = change(found, step, self.graph) if found is not None else None
                if changed is not None:
                    return replace(changed, path=(*changed.path, value.name))
        return None

    def _fill(self, value: Ref, _: Bindings) -> Iterator[tuple[Ref, MaskedFill]]:
        """(scores, masked fill) of a value that is a fill of all scores."""
        found = self.fill(value)
        if found is not None and self.graph.shape(found[0]) == self.graph.shape(value):
            yield found

    def weights(self, value: Ref, end: Node) -> AttentionWeights | None:
        """``value`` [..., s, t] as attention weights; ``end``: product of weights and values."""
        graph, path, dropout, cut = self.graph, list[str](), 0.0, False
        node = graph.producers.get(value.name)
        while node is not None and is_read_once(value.name, graph) and node.checkpoint == end.checkpoint:
            path.append(value.name)
            if (found := self.match("softmax(joint, -1, dtype=_)", value)) is not None:
                plain = AttentionWeights(found["joint"], tuple(path), dropout)
                return self._with_sinks(plain, node) if cut else plain
            if node.op is aten.dropout.default and not dropout and not node.order and _is_next_draw(node, end, graph):
                dropout = float(node.args[1])
            elif not cut and self._drops_last_column(value):
                cut = True
            elif node.op is not aten._to_copy.default and not keeps_last_two_dims(node, graph):
                return None
            value = Ref(node.inputs[0])
            node = graph.producers.get(value.name)
        return None

    def _drops_last_column(self, value: Ref) -> bool:
        found = self.match("slice(x, -1, None, _) | slice(x, -1, 0, _)", value)
        before = self.graph.shape(found["x"]) if found is not None else (0,)
        return before[-1] == self.graph.shape(value)[-1] + 1

    def _with_sinks(self, found: AttentionWeights, softmax: Node) -> AttentionWeights | None:
        """``found`` of a softmax over [scores, sinks]."""
        joint = self.match(WITH_SINKS, found.scores)
        if joint is None or not self.is_closed(joint, softmax):
            return None
        narrow = behind(joint["sinks"], (aten.expand.default, aten._to_copy.default), self.graph)
        shape = self.graph.shape(narrow)
        if len(shape) not in (3, 4) or shape[-2:] != (1, 1) or shape[:-3] not in ((), (1,)):
            return None
        if self.graph.shape(joint["sinks"])[-1] != 1:
            return None
        return found._replace(scores=joint["scores"], path=(*found.path, *joint[""]), sinks=narrow)

    def key_visibility(self, found: AttentionScores) -> KeyVisibility | None:
        """None if -inf or fills may hide all of a query's keys: nan, or no gradient."""
        rows, columns = self.graph.shape(found.path[0])[-2:]
        dtype, bands, known = self.graph.types[found.path[0]].dtype, list[Band](), KeyVisibility.SURE
        parts: list[Ref | MaskedFill] = [*found.hidden]
        for part in parts + [p for bias in found.added for p in self.summands(bias.value)]:
            if isinstance(part, MaskedFill):
                band, finite = self.band_of_fill(part, (rows, columns), dtype), math.isfinite(part.value)
            else:
                band, finite = self.band(part, (rows, columns)), self._is_finite(part)
                if band is None and self.alibi(_before_repeat(part, self.graph)) is not None:
                    continue
            if band is not None:
                bands.append(band)
            elif found.hidden or not finite:
                return None
            else:
                known = KeyVisibility.OPEN
        return known if _sees_some_key(intersect_bands(bands), rows, columns) else None

    def _is_finite(self, value: Any) -> bool:
        if not isinstance(value, Ref):
            return not isinstance(value, float) or math.isfinite(value)
        known, dtype = self.positions(value), self.graph.types[value.name].dtype
        if known is not None:
            return all(math.isfinite(x) for piece in known.pieces for x in piece)
        if not dtype.is_floating_point:
            return not dtype.is_complex
        if value.name in self.graph.constants:
            return bool(self.graph.constants[value.name].isfinite().all())
        node = self.graph.producers.get(value.name)
        if node is None or (node.op not in _FINITENESS_PRESERVING and not self._is_power(value)):
            return False
        if node.op is aten._to_copy.default:
            before = self.graph.types[node.inputs[0]].dtype
            if before.is_floating_point and torch.finfo(before).max > 2 * torch.finfo(dtype).max:
                return False
        return all(self._is_finite(x) for x in node.args if isinstance(x, Ref | float))

    def _is_power(self, value: Ref) -> bool:
        """Whether it is a power of a positive constant, as ALiBi slopes are."""
        found = self.match("pow(base, exponent)", value)
        base = self.positions(found["base"]) if found is not None else None
        return base is not None and base.constant is not None and base.constant > 0


def is_read_once(name: str, graph: Graph) -> bool:
    """Whether exactly one operand of one operation reads a value."""
    uses = graph.uses[name]
    return len(uses) == 1 and uses[0].inputs.count(name) == 1 and name not in graph.returned


def keeps_last_two_dims(node: Node, graph: Graph) -> bool:
    if node.op is not aten.reshape.default:
        return False
    before, after = graph.shape(node.args[0]), graph.shape(node.outputs[0])
    return len(before) > 2 and len(after) > 2 and before[-2:] == after[-2:]


def _is_next_draw(node: Node, end: Node, graph: Graph) -> bool:
    """Whether no random op stands between ``node`` and ``end``."""
    first, last = graph.nodes.index(node), graph.nodes.index(end)
    return not any(is_random(n) for n in graph.nodes[first + 1 : last])


# --- scores: a product, and what is done to it step by step ---


def _copied(found: AttentionScores, step: Bindings, graph: Graph) -> AttentionScores | None:
    return found if len(graph.shape(step["scores"])) > 2 else None


def _with_bias(found: AttentionScores, step: Bindings, graph: Graph) -> AttentionScores | None:
    scores, bias = step["scores"], step["bias"]
    whole = isinstance(bias, Ref) and bias != scores and len(graph.shape(bias)) <= len(graph.shape(scores))
    return replace(found, added=(*found.added, ScoreBias(bias, len(graph.shape(scores))))) if whole else None


def _with_fill(found: AttentionScores, step: Bindings, graph: Graph) -> AttentionScores | None:
    return replace(found, hidden=(*found.hidden, step["hidden"]))


def _with_soft_cap(found: AttentionScores, step: Bindings, graph: Graph) -> AttentionScores | None:
    return replace(found, soft_cap=1.0) if found.is_plain else None


def _with_scale(found: AttentionScores, step: Bindings, graph: Graph) -> AttentionScores | None:
    factor, op = step["factor"], aten.mul.Tensor if "divided" not in step else aten.div.Tensor
    if isinstance(factor, Ref):
        scalar = not graph.shape(factor) and not graph.types[factor.name].grad and factor != step["scores"]
        return replace(found, factors=(*found.factors, (op, factor))) if scalar and found.is_plain else None
    if isinstance(factor, bool) or not isinstance(factor, int | float) or factor <= 0:
        return None
    by = 1 / factor if op is aten.div.Tensor else float(factor)
    biases = tuple(b._replace(factor=b.factor * by) for b in found.added)
    hidden = tuple(h._replace(value=h.value * by) for h in found.hidden)
    if found.soft_cap is not None:
        return replace(found, soft_cap=found.soft_cap * by, added=biases, hidden=hidden)
    return replace(found, scale=found.scale * by, added=biases, hidden=hidden)


ScoreStep = Callable[[AttentionScores, Bindings, Graph], AttentionScores | None]
_SCORE_STEPS: Mapping[str, ScoreStep] = {
    "_to_copy(scores, dtype=_) | clone(scores, memory_format=_) | reshape(scores)": _copied,
    "mul(scores, factor)": _with_scale,
    "(divided := div(scores, factor))": _with_scale,
    "tanh(scores)": _with_soft_cap,
    "add(scores, bias)": _with_bias,
    "fill(scores, hidden)": _with_fill,
}
"""pattern of a value → the scores that it is, of those that it reads"""


def _scores_of_product(node: Node, graph: Graph) -> AttentionScores | None:
    """Scores [.., s, t] of a product that contracts one dim."""
    product = product_of(node, graph)
    if product is None or len(product.operands) != 2:
        return None
    for query, key in itertools.permutations(product.operands):
        of_query, of_key, result = product.named(query, key)
        summed = (set(of_query) & set(of_key)) - set(result)
        if len(result) not in (3, 4) or len(summed) != 1 or query == key:
            continue
        wanted = (result[:-1] + min(summed), result[:-2] + result[-1] + min(summed))
        if all(sorted(have) == sorted(want) for have, want in zip((of_query, of_key), wanted, strict=True)):
            orders = (tuple(map(have.index, want)) for have, want in zip((of_query, of_key), wanted, strict=True))
            queries, keys = (_before_upcast(x, graph, order) for x, order in zip((query, key), orders, strict=True))
            found = AttentionScores(queries, keys, node.outputs)
            return found if product.bias is None else _with_summand(found, product.bias, node)
    return None


def _with_summand(found: AttentionScores, bias: Ref, node: Node) -> AttentionScores | None:
    """The scores of alpha · product + bias."""
    if float(node.argument("beta")) != 1 or bias in (found.query.value, found.key.value):
        return None
    rank = len(found.query.order)
    return replace(found, scale=float(node.argument("alpha")), added=(ScoreBias(bias, rank),))


def _before_upcast(value: Ref, graph: Graph, order: tuple[int, ...]) -> AttentionOperand:
    """An operand before an upcast: attention accumulates in a wider type anyway."""
    node = graph.producers.get(value.name)
    if node is not None and node.op is aten._to_copy.default:
        before, after = graph.types[node.inputs[0]].dtype, graph.types[value.name].dtype
        if before.is_floating_point and torch.promote_types(before, after) == after:
            return AttentionOperand(node.args[0], order)
    return AttentionOperand(value, order)


def _before_repeat(value: Ref, graph: Graph) -> Ref:
    """``value`` before it was repeated for every sample, and cast."""
    node = graph.producers.get(behind(value, (aten._to_copy.default,), graph).name)
    if node is None or node.op is not aten.repeat.default or any(n != 1 for n in node.args[1][1:]):
        return value
    source: Ref = node.args[0]
    return source if len(graph.shape(source)) == len(node.args[1]) else value


def _sees_some_key(band: Band, rows: int, columns: int) -> bool:
    if band.after is not None and band.after < 0:
        return False
    if band.before is None or str(rows) == str(columns):
        return band.before is None or band.before >= 0
    return not isinstance(rows, Size) and not isinstance(columns, Size) and rows - 1 - band.before < columns


# --- the attention around scores ---


class MatchedAttention(NamedTuple):
    """A matched attention; ``heads``: (b, h) of its dims [b, h, ..., ...]."""

    scores: AttentionScores
    value: AttentionOperand
    heads: tuple[int, int]
    dropout: float
    order: tuple[int, ...]
    """permutation from [b, h, s, d] to the dims of the result"""
    weights: tuple[str, ...]
    """values of the softmax and behind it, which the fused operation replaces"""
    seen: KeyVisibility
    sinks: Ref | None = None
    """attention sinks [1, h, 1, 1] or [h, 1, 1]"""


def fuse_attention(graph: Graph) -> Graph:
    """``graph`` with matched attention patterns as :data:`SDPA` or banded attention. Unchanged if
    an input requires a gradient: forces may differentiate twice, which fused attention
    cannot."""
    if any(i.kind == "input" and graph.types[i.name].grad for i in graph.inputs):
        return graph
    scores = ScoreMatcher(graph)

    def fused(build: NodeBuilder, node: Node) -> bool:
        if (found := _match_attention(node, scores)) is None:
            return False
        build.dropped |= {graph.producers[name].name for name in found.weights}
        _build_attention(build, found)
        return True

    return rewrite(graph, fused)


def _match_attention(node: Node, scores: ScoreMatcher) -> MatchedAttention | None:
    """The attention whose product of weights and values is ``node``, else None."""
    graph = scores.graph
    for weights, value, order in _weights_and_values(node, graph):
        found = scores.weights(weights, node)
        of = None if found is None else scores.scores(found.scores)
        if found is None or of is None:
            continue
        path = (*of.path, *found.path)
        heads = _batch_and_heads((of.query.value, value.value), path, graph)
        if heads is None or not _is_fusable_attention(of, value, path, node, heads, graph):
            continue
        if found.sinks is not None and graph.shape(found.sinks)[-3] != heads[1]:
            continue
        seen = scores.key_visibility(of)
        alike = all(graph.types[b.value.name].dtype == graph.types[node.outputs[0]].dtype for b in of.added)
        if seen is KeyVisibility.SURE or (seen is KeyVisibility.OPEN and not found.dropout and alike):
            return MatchedAttention(of, value, heads, found.dropout, order, found.path, seen, found.sinks)
    return None


def _weights_and_values(node: Node, graph: Graph) -> Iterator[tuple[Ref, AttentionOperand, tuple[int, ...]]]:
    """(weights [..., s, t], values [..., t, d], permutation from [.., s, d]) of a product."""
    product = product_of(node, graph)
    if product is None or product.bias is not None or len(product.operands) != 2:
        return
    for weights, value in itertools.permutations(product.operands):
        of_weights, of_value, result = product.named(weights, value)
        heads, keys = of_weights[:-2], of_weights[-1:]
        width = "".join(sorted({*of_value} - {*of_weights}))
        of_values, of_rows = heads + keys + width, of_weights[:-1] + width
        fits = sorted(of_value) == sorted(of_values) and sorted(result) == sorted(of_rows)
        if len(of_weights) in (3, 4) and fits:
            order = tuple(map(of_value.index, of_values))
            yield weights, AttentionOperand(value, order), tuple(map(of_rows.index, result))


def _batch_and_heads(operands: tuple[Ref, ...], path: tuple[str, ...], graph: Graph) -> tuple[int, int] | None:
    """(b, h) of scores, or, where they are [b · h, s, t], of an operand before flattening."""
    shapes = [graph.shape(name) for name in path]
    for operand in operands:
        producer = graph.producers.get(operand.name)
        if producer is not None and producer.op is aten.reshape.default and keeps_last_two_dims(producer, graph):
            shapes.append(graph.shape(producer.args[0]))
    return next(((s[0], s[1]) for s in shapes if len(s) == 4), None)


def _is_fusable_attention(
    scores: AttentionScores,
    value: AttentionOperand,
    path: tuple[str, ...],
    node: Node,
    heads: tuple[int, int],
    graph: Graph,
) -> bool:
    """Whether operands share a dtype, batch and heads, and no intermediate dtype is narrower."""
    operands = (scores.query, scores.key, value)
    types = [graph.types[n] for n in (*(x.value.name for x in operands), *node.outputs)]
    dtype, flat = types[0].dtype, math.prod(heads)

    def is_wide(of: torch.dtype) -> bool:
        return torch.promote_types(of, dtype) == of

    if not dtype.is_floating_point or any(t.dtype != dtype for t in types):
        return False
    if not all(is_wide(graph.types[n].dtype) for n in path):
        return False
    biases = [graph.types[b.value.name] for b in scores.added]
    if any(b.grad or not b.dtype.is_floating_point or not is_wide(b.dtype) for b in biases):
        return False
    if any(graph.producers[n].checkpoint != node.checkpoint for n in path):
        return False
    if any(graph.shape(n)[:-2] not in (heads, (flat,)) for n in path):  # heads in groups
        return False
    whole = (*heads, *graph.shape(scores.path[0])[-2:])
    given = [graph.shape(h.condition) for h in scores.hidden]
    given += [s for s in (graph.shape(b.value) for b in scores.added) if s[:-2] != (flat,)]
    if any(len(s) > 4 or any(n not in (1, m) for n, m in zip(s[::-1], whole[::-1], strict=False)) for s in given):
        return False
    return all(tuple(graph.shape(x.value)[i] for i in x.order[:-2]) in (heads, (flat,)) for x in operands)


# --- what is built ---


def _build_attention(build: NodeBuilder, found: MatchedAttention) -> None:
    """The fused operation in place of the product of weights and values."""
    scores, heads, result = found.scores, found.heads, build.graph.shape(build.place.outputs[0])
    query, key, value = (_in_heads(build, x, heads) for x in (scores.query, scores.key, found.value))
    for op, factor in scores.factors:
        query = build(op, query, factor)
    cap, scale = scores.soft_cap, scores.scale * (scores.soft_cap or 1.0)
    given = {
        "attn_mask": _mask(build, scores, heads),
        "dropout_p": found.dropout or None,
        "scale": scale if scale != 1 / math.sqrt(build.shape(query)[-1]) else None,
        "sinks": None if found.sinks is None else build(aten.reshape.default, found.sinks, [heads[1]]),
        "soft_cap": cap,
    }
    kwargs: dict[str, Any] = {name: x for name, x in given.items() if x is not None}
    # Torch's CPU kernel (2.13) has wrong gradients where finite summands hide a full row.
    plain = cap is None and found.sinks is None and found.seen is KeyVisibility.SURE
    op = SDPA if plain else BANDED_ATTENTION
    if len(result) == 3:
        build.finish(aten.reshape.default, build(op, query, key, value, **kwargs), list(result))
    elif found.order != (0, 1, 2, 3):
        build.finish(aten.permute.default, build(op, query, key, value, **kwargs), list(found.order))
    else:
        build.finish(op, query, key, value, **kwargs)


def _in_heads(build: NodeBuilder, given: AttentionOperand, heads: tuple[int, int]) -> Ref:
    """The operand as [b, h, ..., ...]."""
    value, order = given.value, given.order
    node = build.graph.producers.get(value.name)
    turned = permutation_of(node, build.graph) if order != (*range(len(order)),) else None
    if node is not None and turned is not None:
        value, order = node.args[0], tuple(turned[d] for d in order)
    if len(order) == 3:
        value, order = _with_heads(build, value, heads), (0, 1, *(d + 1 for d in order[1:]))
    return value if order == (0, 1, 2, 3) else build(aten.permute.default, value, list(order))


def _with_heads(build: NodeBuilder, value: Ref, heads: tuple[int, int]) -> Ref:
    """[b · h, ..., ...] → [b, h, ..., ...]: its source before flattening, or a reshape."""
    whole, node = (*heads, *build.shape(value)[1:]), build.graph.producers.get(value.name)
    if node is not None and node.op is aten.reshape.default and build.shape(node.args[0]) == whole:
        return node.args[0]
    return build(aten.reshape.default, value, list(whole))


def _mask(build: NodeBuilder, scores: AttentionScores, heads: tuple[int, int]) -> Ref | None:
    """Biases and masked fills as one additive mask; without biases a boolean mask."""
    mask: Ref | None = None
    for bias in scores.added:
        flat = bias.rank == 3 and build.shape(bias.value)[:-2] == (math.prod(heads),)
        one = _bias_of_heads(build, bias.value, heads) if flat else bias.value
        if bias.factor != 1:
            one = build(aten.mul.Tensor, one, bias.factor)
        mask = one if mask is None else _sum(build, mask, one)
    by_bias = mask is not None
    for condition, shows, value in scores.hidden:
        condition = condition if shows is not by_bias else build(aten.logical_not.default, condition)
        if mask is None:
            mask = condition
        elif by_bias:
            mask = build(aten.masked_fill.Scalar, mask, condition, value)
        else:
            mask = build(aten.bitwise_and.Tensor, mask, condition)
    return _cast(build, mask, build.types[build.place.outputs[0]].dtype) if by_bias and mask is not None else mask


def _cast(build: NodeBuilder, value: Ref, dtype: torch.dtype) -> Ref:
    return value if build.types[value.name].dtype == dtype else build(aten._to_copy.default, value, dtype=dtype)


def _sum(build: NodeBuilder, one: Ref, other: Ref) -> Ref:
    dtype = torch.promote_types(*(build.types[x.name].dtype for x in (one, other)))
    return build(aten.add.Tensor, _cast(build, one, dtype), _cast(build, other, dtype))


def _bias_of_heads(build: NodeBuilder, bias: Ref, heads: tuple[int, int]) -> Ref:
    """[b · h, ..., t] → [b, h, ..., t], or [h, ..., t] if it is repeated for every sample."""
    node, (batch, count) = build.graph.producers.get(bias.name), heads
    if node is not None and node.op is aten._to_copy.default:
        return _cast(build, _bias_of_heads(build, node.args[0], heads), build.types[bias.name].dtype)
    if node is not None and node.op is aten.repeat.default and list(node.args[1]) == [batch, 1, 1]:
        source: Ref = node.args[0]
        if build.shape(source) == (count, *build.shape(bias)[1:]):
            return source
    return _with_heads(build, bias, heads)


def pad_head_dims(graph: Graph) -> Graph:
    """``graph`` whose attention operands are padded to one head dim, and results sliced."""

    def padded(build: NodeBuilder, node: Node) -> bool:
        if (width := _padded_head_dim(node, graph)) is None:
            return False
        changed: dict[str, object] = {}
        for name in ("query", "key", "value"):
            operand = node.argument(name)
            if (more := width - build.shape(operand)[-1]) > 0:
                changed[name] = build(aten.constant_pad_nd.default, operand, [0, more], 0.0)
        if node.argument("scale") is None:
            changed["scale"] = build.shape(node.argument("query"))[-1] ** -0.5
        args, kwargs = node.with_arguments(**changed)
        if "value" not in changed:
            build.finish(node.op, *args, **kwargs)
        else:
            *lead, narrow = graph.shape(node.outputs[0])
            build.finish(aten.slice.Tensor, build(node.op, *args, **kwargs), len(lead), 0, narrow, 1)
        return True

    return rewrite(graph, padded)


def _padded_head_dim(node: Node, graph: Graph) -> int | None:
    """The largest head dim, if they differ and a fused kernel takes the padded operands."""
    if node.op is not SDPA or node.argument("dropout_p", 0.0):
        return None
    query, key, value = (graph.shape(node.argument(name)) for name in ("query", "key", "value"))
    mask = node.argument("attn_mask")
    heads = query[:-2] == key[:-2] == value[:-2] or node.argument("enable_gqa")
    if len(query) != 4 or not heads or (mask is not None and graph.types[mask.name].grad):
        return None
    width = max(query[-1], value[-1])
    return width if query[-1] != value[-1] else None
