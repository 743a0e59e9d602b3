"""Attention weights in a graph: a softmax of scores, with attention sinks and dropout."""

from __future__ import annotations

from typing import NamedTuple

from autoshard.aten import aten
from autoshard.passes.capture.translate.scores import is_read_once, keeps_matrix
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.rules.facts import is_random


class Weights(NamedTuple):
    """Attention weights: the softmax of scores, then dropout."""

    scores: Ref
    path: tuple[str, ...]
    """the values from the softmax to the weights"""
    dropout: float = 0.0
    sinks: Ref | None = None
    """attention sinks [1, h, 1, 1] or [h, 1, 1]: a score per head that has no value"""


def weights_of(value: Ref, end: Node, graph: Graph) -> Weights | None:
    """``value`` [..., s, t] as attention weights; ``end``: the product of weights and values."""
    node, path, dropout, cut = graph.producers.get(value.name), list[str](), 0.0, False
    while node is not None and is_read_once(node.outputs[0], graph) and node.checkpoint == end.checkpoint:
        path.append(node.outputs[0])
        if node.op is aten.softmax.int:
            last = node.args[1] % len(graph.shape(node.args[0])) == len(graph.shape(node.args[0])) - 1
            plain = Weights(node.args[0], tuple(path), dropout)
            return None if not last else _with_sinks(plain, graph) if cut else plain
        if node.op is aten.dropout.default and not dropout and not node.order and _draws_next(node, end, graph):
            dropout = float(node.args[1])
        elif not cut and _drops_last(node, graph):
            cut = True
        elif node.op is not aten._to_copy.default and not (
            node.op is aten.reshape.default and keeps_matrix(node, graph)
        ):
            return None
        node = graph.producers.get(node.inputs[0])
    return None


def _draws_next(node: Node, end: Node, graph: Graph) -> bool:
    """Whether no random op stands between ``node`` and ``end``."""
    first, last = graph.nodes.index(node), graph.nodes.index(end)
    return not any(is_random(n) for n in graph.nodes[first + 1 : last])


def _drops_last(node: Node, graph: Graph) -> bool:
    """Whether ``node`` is a slice that drops the last column."""
    if node.op is not aten.slice.Tensor or node.argument("start") not in (None, 0) or node.argument("step") != 1:
        return False
    before, after = graph.shape(node.args[0]), graph.shape(node.outputs[0])
    return before[:-1] == after[:-1] and before[-1] == after[-1] + 1


def _with_sinks(found: Weights, graph: Graph) -> Weights | None:
    """``found`` of a softmax over [scores, sinks]; subtracted maxima change no weight."""
    joint, path = found.scores, list(found.path)
    node = graph.producers.get(joint.name)
    if node is not None and node.op is aten.sub.Tensor and len(node.inputs) == 2 and not node.kwargs:
        joint, most = node.args
        largest = graph.producers.get(most.name)
        if largest is None or not _is_largest(largest, joint, graph) or not is_read_once(node.outputs[0], graph):
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
    narrow = _before_expansion(sinks, graph)
    shape, whole = graph.shape(narrow), graph.shape(sinks)
    if len(shape) not in (3, 4) or shape[-2:] != (1, 1) or shape[:-3] not in ((), (1,)) or whole[-1] != 1:
        return None
    return found._replace(scores=scores, path=(*path, *node.outputs), sinks=narrow)


def _is_largest(node: Node, of: Ref, graph: Graph) -> bool:
    """Whether ``node`` is the maximum of each row of ``of``, keepdim."""
    if node.op not in (aten.max.dim, aten.amax.default) or node.inputs != (of.name,) or not node.argument("keepdim"):
        return False
    dims, rank = node.argument("dim"), len(graph.shape(of))
    named = list(dims) if isinstance(dims, list | tuple) else [dims]
    return [d % rank for d in named] == [rank - 1] and len(node.outputs) == 1


def _before_expansion(value: Ref, graph: Graph) -> Ref:
    """``value`` before expands and casts."""
    node = graph.producers.get(value.name)
    while node is not None and node.op in (aten.expand.default, aten._to_copy.default):
        value = node.args[0]
        node = graph.producers.get(value.name)
    return value
