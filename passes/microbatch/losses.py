"""Classification losses: "mean" as a micro-batch's sum over the full batch's count."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_refs
from autoshard.passes.propagate.floating import floating
from autoshard.passes.rules.base import ops
from autoshard.passes.rules.families.loss import CLASSES_LAST, class_dim_of

MEAN, SUM = 1, 2
"""ATen's enum of reductions"""

COUNTED = frozenset(
    {aten.cross_entropy_loss.default, CLASSES_LAST, aten.nll_loss_nd.default, aten.nll_loss.default}
    | {aten.nll_loss2d.default}
)
"""losses whose mean divides by the number, or weights, of targets that are not ignored"""

_NUMBERS = dict.fromkeys(ops("argmax.default argmin.default multinomial.default"), 0) | dict.fromkeys(
    ops("max.dim min.dim topk.default sort.default"), 1
)
"""ops whose result of this index holds class numbers, never negative"""
_MOVED = frozenset(
    ops(
        "reshape.default unsqueeze.default squeeze.dim select.int slice.Tensor transpose.int permute.default expand.default "
        "detach.default clone.default flip.default _to_copy.default"
    )
)
"""ops that only rearrange or select elements"""


def separable_means(graph: Graph) -> Graph:
    """``graph`` with the mean of each classification loss as a sum over a count of targets."""
    types = dict(graph.types)
    whole: dict[str, str] = {}
    nodes: list[Node] = []
    free = floating(graph)
    for node in graph.nodes:
        if node.op in COUNTED and node.argument("reduction") == MEAN and len(node.outputs) == 1:
            nodes += _divided(node, graph, types, whole, free)
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes), types=types)


def _divided(
    node: Node, graph: Graph, types: dict[str, TensorType], whole: dict[str, str], free: Collection[str]
) -> Iterator[Node]:
    (out,) = node.outputs
    target: Ref = node.argument("target")
    type_ = types[out]
    total = f"{out}_sum"
    types[total] = type_
    args, kwargs = node.with_arguments(reduction=SUM)
    yield replace(node, name=f"{node.name}_sum", args=args, kwargs=kwargs, outputs=(total,))

    def made(name: str, op: Any, *args: Any, **kwargs: Any) -> Node:
        return replace(node, name=f"{node.name}_{name}", op=op, args=args, kwargs=kwargs, outputs=(f"{out}_{name}",))

    def value(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Ref:
        types[f"{out}_{name}"] = TensorType(shape, dtype)
        return Ref(f"{out}_{name}")

    positions = graph.shape(target)
    weight = node.argument("weight")
    if types[target.name].dtype.is_floating_point or (weight is None and _all_count(node, graph)):
        logits = graph.shape(node.argument("self"))
        samples = 1
        for d, n in enumerate(logits):
            samples *= 1 if d == class_dim_of(node, graph) else int(n)
        yield replace(node, op=aten.div.Scalar, args=(Ref(total), samples), kwargs={})
        return
    yield from _copied(target.name, graph, types, whole, free)
    target = Ref(whole.get(target.name, target.name))
    valid = value("valid", positions, torch.bool)
    yield made("valid", aten.ne.Scalar, target, node.argument("ignore_index"))
    if weight is None:
        count = value("count", (), type_.dtype)
        yield made("count", aten.sum.default, valid, dtype=type_.dtype)
    else:
        classes = value("classes", positions, types[target.name].dtype)
        yield made("classes", aten.mul.Tensor, target, valid)
        each = value("each", positions, types[weight.name].dtype)
        yield made("each", aten.index.Tensor, weight, [classes])
        counted = value("counted", positions, types[weight.name].dtype)
        yield made("counted", aten.mul.Tensor, each, valid)
        count = value("count", (), types[weight.name].dtype)
        yield made("count", aten.sum.default, counted)
    yield replace(node, op=aten.div.Tensor, args=(Ref(total), count), kwargs={})


def _all_count(loss: Node, graph: Graph) -> bool:
    """Whether no label is ever ignored: the model itself computes class numbers (a teacher)."""
    value: Ref = loss.argument("target")
    while (node := graph.producers.get(value.name)) is not None and node.op in _MOVED:
        value = node.args[0]
    if node is None or loss.argument("ignore_index") >= 0:
        return False
    return _NUMBERS.get(node.op) == node.output_slots[node.outputs.index(value.name)]


def averaged(node: Node, graph: Graph) -> Node | None:
    """The summed loss that ``node`` divides by a count of labels; None for other ops."""
    total = graph.producers.get(node.inputs[0]) if node.op is aten.div.Tensor and len(node.inputs) == 2 else None
    return total if total is not None and total.op in COUNTED and total.argument("reduction") == SUM else None


def of_own_labels(loss: Node, graph: Graph) -> str:
    """Error text: a mean over labels that the model computes does not divide into micro-batches."""
    maker = graph.producers.get(loss.argument("target").name)
    return (
        f"{located(loss)} averages over those labels of the whole batch that count, and the model makes the labels itself "
        f"({located(maker)}): a micro-batch knows its own only. Use micro_batches=1; or make the labels outside of the "
        'forward, and give them as an input; or take reduction="none", set to zero what is not to count, and average over all.'
    )


def located(node: Node | None) -> str:
    """An op with its module and line, for messages."""
    if node is None:
        return "an input"
    return f"{node.op} in {node.fqn or '(root)'}" + (f" at {node.source}" if node.source else "")


def _copied(
    value: str, graph: Graph, types: dict[str, TensorType], whole: dict[str, str], free: Collection[str]
) -> Iterator[Node]:
    """A copy of the ops that make ``value``, unsharded for the count besides the loss's chunk.

    Only ops of inputs alone (``free``) are copied; of other values a micro-batch takes its chunk.
    """
    node = graph.producers.get(value)
    if node is None or value in whole or node.name not in free:
        return
    for name in node.inputs:
        yield from _copied(name, graph, types, whole, free)
    for name in node.outputs:
        whole[name] = f"{name}_whole"
        types[whole[name]] = types[name]
    copied: Node = map_refs(node, lambda ref: Ref(whole.get(ref.name, ref.name)))
    yield replace(copied, name=f"{node.name}_whole", outputs=tuple(whole[name] for name in node.outputs))
