"""Attention patterns: products around a softmax become one scaled dot product attention.

The fused operation keeps no [queries, keys] matrix for the backward, and has the sharding rules
of attention: by heads, ring attention, masks by position. Where keys and values differ in head
dim, zeros pad the narrower, so that fused kernels apply."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.attention_masks import BANDED_ATTENTION, SDPA
from autoshard.passes.capture.translate.attention_scores import (
    SCORE_PRODUCTS,
    AttentionOperand,
    AttentionScores,
    KeyVisibility,
    attention_scores_of,
    attention_weights_of,
    keeps_last_two_dims,
    key_visibility,
)
from autoshard.passes.capture.translate.canonicalize import remove_dead
from autoshard.passes.capture.translate.moe_patterns import einsum_dims
from autoshard.passes.capture.translate.positions import PositionAnalysis
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.rules.base import broadcast_shape
from autoshard.torch_private.ops import OpOverload


class MatchedAttention(NamedTuple):
    """A matched attention; ``heads``: (b, h) of its dims [b, h, ..., ...]."""

    scores: AttentionScores
    value: AttentionOperand
    heads: tuple[int, int]
    dropout: float
    order: tuple[int, ...]
    """permutation from [b, h, s, d] to the dims of the result"""
    weights: frozenset[str]
    """values of the softmax and behind it, which the fused operation replaces"""
    seen: KeyVisibility
    sinks: Ref | None = None
    """attention sinks [1, h, 1, 1] or [h, 1, 1]"""


def fuse_attention(graph: Graph) -> Graph:
    """``graph`` with matched attention patterns as :data:`SDPA` or banded attention.

    Unchanged if an input requires a gradient: forces and gradient penalties may differentiate
    twice, and fused attention has no second derivative.
    """
    if any(i.kind == "input" and graph.types[i.name].grad for i in graph.inputs):
        return graph
    positions, nodes, types, gone = PositionAnalysis(graph), list[Node](), dict(graph.types), set[str]()
    for node in graph.nodes:
        found = _match_attention(node, graph, positions) if node.op in SCORE_PRODUCTS else None
        if found is None:
            nodes.append(node)
            continue
        writer = _AttentionWriter(node, graph, types)
        writer.attention(found)
        nodes += writer.nodes
        gone |= found.weights
    if not gone:
        return graph
    return remove_dead(replace(graph, nodes=tuple(n for n in nodes if not gone.intersection(n.outputs)), types=types))


def _match_attention(node: Node, graph: Graph, positions: PositionAnalysis) -> MatchedAttention | None:
    """The attention whose product of weights and values is ``node``, else None."""
    for weights, value, order in _weights_and_values(node, graph):
        found = attention_weights_of(weights, node, graph)
        scores = None if found is None else attention_scores_of(found.scores, graph, positions)
        if found is None or scores is None:
            continue
        path, dropout, sinks = (*scores.path, *found.path), found.dropout, found.sinks
        heads = _batch_and_heads((scores.query.value, value.value), path, graph)
        if heads is None or not _is_fusable_attention(scores, value, path, node, heads, graph):
            continue
        if sinks is not None and graph.shape(sinks)[-3] != heads[1]:
            continue
        seen = key_visibility(scores, graph, positions)
        alike = all(graph.types[b.value.name].dtype == graph.types[node.outputs[0]].dtype for b in scores.added)
        if seen is KeyVisibility.SURE or (seen is KeyVisibility.OPEN and not dropout and alike):
            return MatchedAttention(scores, value, heads, dropout, order, frozenset(found.path), seen, sinks)
    return None


def _weights_and_values(node: Node, graph: Graph) -> Iterator[tuple[Ref, AttentionOperand, tuple[int, ...]]]:
    """(weights [..., s, t], values [..., t, d], permutation from [b, h, s, d]) of a product."""
    if node.op in (aten.matmul.default, aten.bmm.default) and len({len(s) for s in graph.shapes(node.inputs)}) == 1:
        yield node.args[0], AttentionOperand(node.args[1]), (0, 1, 2, 3)
    if node.op is aten.einsum.default and len(node.args[1]) == 2:
        for weights, value in (node.args[1], node.args[1][::-1]):
            of_weights, of_value, result = einsum_dims(node, (weights, value))
            if of_weights == "abcd" and sorted(of_value) == sorted("abde") and sorted(result) == sorted("abce"):
                yield (
                    weights,
                    AttentionOperand(value, tuple(map(of_value.index, "abde"))),
                    tuple(map("abce".index, result)),
                )


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
    dtype = types[0].dtype
    if not dtype.is_floating_point or any(t.dtype != dtype for t in types):
        return False
    if any(torch.promote_types(graph.types[n].dtype, dtype) != graph.types[n].dtype for n in path):
        return False
    biases = [graph.types[b.value.name] for b in scores.added]
    if any(b.grad or not b.dtype.is_floating_point or torch.promote_types(b.dtype, dtype) != b.dtype for b in biases):
        return False
    if any(graph.producers[n].checkpoint != node.checkpoint for n in path):
        return False
    flat = TensorType(heads, dtype).numel
    if any(graph.shape(n)[:-2] not in (heads, (flat,)) for n in path):  # heads in groups
        return False
    whole = (*heads, *graph.shape(scores.path[0])[-2:])
    given = [graph.shape(h.condition) for h in scores.hidden]
    given += [s for s in (graph.shape(b.value) for b in scores.added) if s[:-2] != (flat,)]
    if any(len(s) > 4 or any(n not in (1, m) for n, m in zip(s[::-1], whole[::-1], strict=False)) for s in given):
        return False
    for x in operands:
        shape = graph.shape(x.value)
        lead = tuple(shape[i] for i in x.order[:-2]) if x.order else shape[:-2]
        if lead not in (heads, (flat,)):
            return False
    return True


class _AttentionWriter:
    """Writes nodes that replace ``place``, and adds their types."""

    def __init__(self, place: Node, graph: Graph, types: dict[str, TensorType]) -> None:
        self.place, self.graph, self.types, self.nodes = place, graph, types, list[Node]()

    def make(self, op: Any, *args: Any, shape: tuple[int, ...], last: bool = False, **kwargs: Any) -> Ref:
        """Add a node; the ``last`` has the output of ``place``. ``dtype``: if not the operand's."""
        (out,) = self.place.outputs if last else (f"{self.place.name}_attention{len(self.nodes)}",)
        node = replace(self.place, name=out, op=op, args=args, kwargs=kwargs, outputs=(out,), output_slots=(0,))
        self.nodes.append(node)
        if not last:
            of = [self.types[name] for name in node.inputs]
            self.types[out] = TensorType(shape, kwargs.get("dtype", of[0].dtype), any(t.grad for t in of))
        return Ref(out)

    def attention(self, found: MatchedAttention) -> None:
        scores, heads = found.scores, found.heads
        query, key, value = (self.in_heads(x, heads) for x in (scores.query, scores.key, found.value))
        for op, factor in scores.factors:
            query = self.make(op, query, factor, shape=self.types[query.name].shape)
        shape = (*self.types[query.name].shape[:-1], self.types[value.name].shape[-1])
        kwargs: dict[str, Any] = {"attn_mask": self.mask(scores, heads), "dropout_p": found.dropout or None}
        cap, scale = scores.soft_cap, scores.scale * (scores.soft_cap or 1.0)
        if scale != 1 / math.sqrt(self.types[query.name].shape[-1]):
            kwargs["scale"] = scale
        if found.sinks is not None:
            kwargs["sinks"] = self.make(aten.reshape.default, found.sinks, [heads[1]], shape=heads[1:])
        kwargs["soft_cap"] = cap
        kwargs = {name: x for name, x in kwargs.items() if x is not None}
        result = self.types[self.place.outputs[0]].shape
        last = len(result) == 4 and found.order == (0, 1, 2, 3)
        # Torch's CPU kernel (2.13) has wrong gradients where finite summands hide a full row.
        plain = cap is None and found.sinks is None and found.seen is KeyVisibility.SURE
        op = SDPA if plain else BANDED_ATTENTION
        made = self.make(op, query, key, value, shape=shape, last=last, **kwargs)
        if len(result) == 3:
            self.make(aten.reshape.default, made, list(result), shape=result, last=True)
        elif not last:
            self.make(aten.permute.default, made, list(found.order), shape=result, last=True)

    def in_heads(self, given: AttentionOperand, heads: tuple[int, int]) -> Ref:
        """The operand as [b, h, ..., ...]."""
        value, order = given.value, given.order or tuple(range(len(self.types[given.value.name].shape)))
        if order != tuple(range(len(order))) and (turned := _before_permutation(value, self.graph)) is not None:
            value, order = turned.value, tuple(turned.order[d] for d in order)
        shape = self.types[value.name].shape
        if len(shape) == 3:
            value, order = self.split(value, heads), (0, 1, *(d + 1 for d in order[1:]))
            shape = self.types[value.name].shape
        if order == (0, 1, 2, 3):
            return value
        return self.make(aten.permute.default, value, list(order), shape=tuple(shape[d] for d in order))

    def split(self, value: Ref, heads: tuple[int, int]) -> Ref:
        """[b · h, ..., ...] → [b, h, ..., ...]: its source before flattening, or a reshape."""
        shape = self.types[value.name].shape
        whole = (*heads, *shape[1:])
        node = self.graph.producers.get(value.name)
        if node is not None and node.op is aten.reshape.default and self.types[node.inputs[0]].shape == whole:
            return Ref(node.inputs[0])
        return self.make(aten.reshape.default, value, list(whole), shape=whole)

    def mask(self, scores: AttentionScores, heads: tuple[int, int]) -> Ref | None:
        """Biases and masked fills as one additive mask; without biases a boolean mask."""
        mask: Ref | None = None
        for bias in scores.added:
            shape = self.types[bias.value.name].shape
            flat = bias.rank == 3 and shape[:-2] == (TensorType(heads, torch.int8).numel,)
            one = self.of_heads(bias.value, heads) if flat else bias.value
            if bias.factor != 1:
                one = self.make(aten.mul.Tensor, one, bias.factor, shape=self.types[one.name].shape)
            mask = one if mask is None else self.both(aten.add.Tensor, mask, one)
        by_bias = mask is not None
        for condition, shows, value in scores.hidden:
            shape = self.types[condition.name].shape
            if by_bias and mask is not None:
                hidden = self.make(aten.logical_not.default, condition, shape=shape) if shows else condition
                mask = self.both(aten.masked_fill.Scalar, mask, hidden, value)
            else:
                shown = condition if shows else self.make(aten.logical_not.default, condition, shape=shape)
                mask = shown if mask is None else self.both(aten.bitwise_and.Tensor, mask, shown)
        return self.cast(mask, self.types[self.place.outputs[0]].dtype) if by_bias and mask is not None else mask

    def cast(self, value: Ref, dtype: torch.dtype) -> Ref:
        of = self.types[value.name]
        return value if of.dtype == dtype else self.make(aten._to_copy.default, value, shape=of.shape, dtype=dtype)

    def both(self, op: Any, one: Ref, other: Ref, *more: Any) -> Ref:
        a, b = (self.types[x.name] for x in (one, other))
        if op is aten.add.Tensor and a.dtype != b.dtype:
            one, other = (self.cast(x, torch.promote_types(a.dtype, b.dtype)) for x in (one, other))
        return self.make(op, one, other, *more, shape=broadcast_shape(a.shape, b.shape))

    def of_heads(self, bias: Ref, heads: tuple[int, int]) -> Ref:
        """[b · h, ..., t] → [b, h, ..., t], or [h, ..., t] if it is repeated for every sample."""
        node, (batch, count) = self.graph.producers.get(bias.name), heads
        if node is not None and node.op is aten._to_copy.default:
            return self.cast(self.of_heads(node.args[0], heads), self.types[bias.name].dtype)
        if node is not None and node.op is aten.repeat.default and list(node.args[1]) == [batch, 1, 1]:
            source: Ref = node.args[0]
            if self.types[source.name].shape == (count, *self.types[bias.name].shape[1:]):
                return source
        return self.split(bias, heads)


def _before_permutation(value: Ref, graph: Graph) -> AttentionOperand | None:
    """The source of a permuted ``value``, with the permutation."""
    node, rank = graph.producers.get(value.name), len(graph.shape(value))
    if node is not None and node.op is aten.permute.default:
        return AttentionOperand(node.args[0], tuple(d % rank for d in node.args[1]))
    if node is not None and node.op is aten.transpose.int:
        order, (a, b) = list(range(rank)), (d % rank for d in node.args[1:3])
        order[a], order[b] = b, a
        return AttentionOperand(node.args[0], tuple(order))
    return None


def pad_head_dims(graph: Graph) -> Graph:
    """``graph`` whose attention operands are padded to one head dim, and results sliced."""
    types = dict(graph.types)
    nodes = tuple(made for node in graph.nodes for made in _pad_attention(node, graph, types))
    return replace(graph, nodes=nodes, types=types) if len(nodes) > len(graph.nodes) else graph


def _pad_attention(node: Node, graph: Graph, types: dict[str, TensorType]) -> Iterator[Node]:
    """``node`` with pads of its operands and a slice of its result; adds to ``types``."""
    width = _padded_head_dim(node, graph)
    if width is None:
        yield node
        return
    changed: dict[str, object] = {}
    for name in ("query", "key", "value"):
        operand = node.argument(name)
        before = types[operand.name]
        if (more := width - before.shape[-1]) > 0:
            padded = f"{node.name}_{name}"
            types[padded] = replace(before, shape=(*before.shape[:-1], width))
            changed[name] = Ref(padded)
            yield _sibling_node(node, padded, aten.constant_pad_nd.default, (operand, [0, more], 0.0))
    if node.argument("scale") is None:
        changed["scale"] = graph.shape(node.argument("query"))[-1] ** -0.5
    (out,) = node.outputs
    args, kwargs = node.with_arguments(**changed)
    if "value" not in changed:
        yield replace(node, args=args, kwargs=kwargs)
        return
    wide = f"{node.name}_wide"
    types[wide] = replace(types[out], shape=(*types[out].shape[:-1], width))
    yield replace(node, name=wide, args=args, kwargs=kwargs, outputs=(wide,))
    last, narrow = len(types[out].shape) - 1, types[out].shape[-1]
    yield _sibling_node(node, out, aten.slice.Tensor, (Ref(wide), last, 0, narrow, 1))


def _sibling_node(node: Node, name: str, op: OpOverload, args: tuple[object, ...]) -> Node:
    return replace(node, name=name, op=op, args=args, kwargs={}, outputs=(name,), output_slots=(0,))


def _padded_head_dim(node: Node, graph: Graph) -> int | None:
    """The largest head dim, if they differ and a fused kernel takes the padded operands."""
    if node.op is not aten.scaled_dot_product_attention.default or node.argument("dropout_p", 0.0):
        return None
    query, key, value = (graph.shape(node.argument(name)) for name in ("query", "key", "value"))
    mask = node.argument("attn_mask")
    heads = query[:-2] == key[:-2] == value[:-2] or node.argument("enable_gqa")
    if len(query) != 4 or not heads or (mask is not None and graph.types[mask.name].grad):
        return None
    width = max(query[-1], value[-1])
    return width if query[-1] != value[-1] else None
