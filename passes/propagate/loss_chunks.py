"""Chunked cross entropy: a linear layer and its loss as one operation, which keeps no logits.

The operation (``autoshard::linear_cross_entropy``) computes the logits of one chunk of rows at a
time, and once more in the backward. It saves what the linear layer reads, and two numbers per row.
Chunks are of a rank's own rows, so batch, sequence and vocabulary may be sharded, and messages are
those of one loss."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.patterns import permutation_of
from autoshard.passes.ir.rewrite import NodeBuilder, rewrite
from autoshard.passes.rules.base import positive
from autoshard.passes.rules.families.loss import CLASSES_LAST, OF_LINEAR

_LOSSES = (aten.cross_entropy_loss.default, CLASSES_LAST)


@dataclass(frozen=True)
class _Head:
    """A linear layer whose logits only one loss reads."""

    linear: Node
    between: tuple[Node, ...]
    """casts, reshapes, slices of rows and the like, from the linear layer to the loss"""


def chunk_losses(graph: Graph, chunks: int) -> Graph:
    """``graph`` with each cross entropy of a linear layer's logits in ``chunks`` chunks of the rows."""

    def chunked(build: NodeBuilder, node: Node) -> bool:
        head = _head_of(node, graph)
        if not isinstance(head, _Head):
            return False
        rows, matrix, bias = (head.linear.argument(name) for name in ("input", "weight", "bias"))
        for step in head.between:
            build.place = replace(step, fqn=head.linear.fqn, module_types=head.linear.module_types)
            if step.op is aten.reshape.default:
                rows = build(step.op, rows, [*graph.shape(step.outputs[0])[:-1], build.shape(rows)[-1]])
            elif step.op is aten.slice.Tensor:
                rows = build(step.op, rows, *step.args[1:], **step.kwargs)
        build.place = replace(node, fqn=head.linear.fqn, module_types=head.linear.module_types)
        dtype = graph.types[node.argument("self").name].dtype
        options = (node.argument(name) for name in ("weight", "reduction", "ignore_index", "label_smoothing"))
        build.finish(OF_LINEAR, rows, node.argument("target"), matrix, bias, dtype, chunks, *options)
        build.dropped.update(step.name for step in (head.linear, *head.between))
        return True

    return rewrite(graph, chunked) if chunks > 1 else graph


def logits_bytes(graph: Graph) -> int:
    """Bytes of the largest logits of a cross entropy."""
    return max((graph.types[n.argument("self").name].nbytes for n in graph.nodes if n.op in _LOSSES), default=0)


def why_unchunked(graph: Graph) -> str:
    """Why :func:`chunk_losses` changes no loss, as a sentence without its end; "": it does, or there is none."""
    found = [(node, _head_of(node, graph)) for node in graph.nodes if node.op in _LOSSES]
    if not found or any(isinstance(head, _Head) for _, head in found):
        return ""
    node, why = found[0]
    return f"the cross entropy{f' at {node.source}' if node.source else ''} does not run in chunks, since {why}"


def _head_of(node: Node, graph: Graph) -> _Head | str:
    """The linear layer that makes the logits of ``node``, or why there is none."""
    if node.op not in _LOSSES:
        return "it is another loss"
    if graph.types[node.argument("target").name].dtype.is_floating_point:
        return "its targets are probabilities"
    value, between, loss = node.argument("self"), list[Node](), node
    rank = len(graph.shape(value))
    if node.op is not CLASSES_LAST and rank > 2:
        moved = graph.producers.get(value.name)
        if moved is None or permutation_of(moved, graph) != (0, rank - 1, *range(1, rank - 1)):
            return "its logits change after classes are moved, or classes are not their last dim"
    while True:
        maker = graph.producers.get(value.name)
        if value.name in graph.returned:
            return "the model returns its logits, too"
        if len(others := graph.uses[value.name]) > 1:
            return f"{next(other.op for other in others if other.name != loss.name)} reads its logits, too"
        if maker is not None and maker.op is aten.linear.default and len(graph.shape(value)) > 1:
            return _Head(maker, tuple(reversed(between)))
        turned = node.op is not CLASSES_LAST and rank > 2 and not between
        if maker is None or not _moves_rows(maker, graph, first=turned):
            return "its logits are not the results of a linear layer"
        between.append(maker)
        value, loss = maker.args[0], maker


def _moves_rows(node: Node, graph: Graph, first: bool) -> bool:
    """Whether ``node`` casts logits, or moves their rows as it would move those of features.

    ``first``: of the logits that the loss reads; only these may have their classes elsewhere."""
    if len(node.inputs) != 1 or not isinstance(node.args[0], Ref):
        return False
    (before,), (after,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    match node.op:
        case aten.reshape.default:
            return before[-1] == after[-1]
        case aten.slice.Tensor:
            return positive(node.argument("dim"), len(before)) < len(before) - 1
        case aten._to_copy.default:
            old, new = graph.types[node.args[0].name].dtype, graph.types[node.outputs[0]].dtype
            return new.is_floating_point and torch.promote_types(old, new) == new  # a narrower type rounds
        case aten.clone.default:
            return True
    return first and permutation_of(node, graph) == (0, len(before) - 1, *range(1, len(before) - 1))
