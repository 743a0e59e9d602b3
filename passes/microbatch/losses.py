"""Losses of a micro-batched step: the loss output, and means as local sums over a global count."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.errors import PlanError
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_refs
from autoshard.passes.propagate.recompute import duplicable_nodes
from autoshard.passes.rules.base import ops
from autoshard.passes.rules.families.loss import CLASSES_LAST, class_dim_of


def loss_output(graph: Graph, asked: str) -> tuple[int, dict[int, str]]:
    """The flat position of the loss; positions and names of other scalars with a gradient.

    The loss is the scalar named "loss", else the first. Raises :class:`PlanError` if there is none;
    ``asked``: the option that needs it, for the message.
    """
    outputs = enumerate((graph.types[o.name] if isinstance(o, Ref) else None) for o in graph.outputs)
    found = [i for i, type_ in outputs if type_ is not None and type_.grad and not type_.shape]
    if not found:
        raise PlanError(
            f"{asked}: no output of the model is a scalar that carries a gradient. Its forward has to return one loss, because "
            "forward and backward of a micro-batch run together."
        )
    names = output_names(graph.out_spec)
    loss = next((i for i in found if names.get(i) == "loss"), found[0])
    return loss, {i: output_description(i, names) for i in found if i != loss}


def output_description(position: int, names: dict[int, str]) -> str:
    """How a message names an output."""
    return f"output {names[position]!r}" if position in names else f"output number {position}"


def output_names(spec: Any) -> dict[int, str]:
    """Flat position → key or field, of outputs at the top level."""
    children = [] if spec.is_leaf() else spec.children()
    labels = getattr(spec.context, "_fields", getattr(spec.context, "names", spec.context))
    if not isinstance(labels, list | tuple) or len(labels) != len(children):
        return {}
    found, position = {}, 0
    for label, child in zip(labels, children, strict=True):
        if child.is_leaf():
            found[position] = str(label)
        position += child.num_leaves
    return found


MEAN_REDUCTION, SUM_REDUCTION = 1, 2
"""ATen's enum of reductions"""

COUNTED_LOSSES = frozenset(
    {aten.cross_entropy_loss.default, CLASSES_LAST, aten.nll_loss_nd.default, aten.nll_loss.default}
    | {aten.nll_loss2d.default}
)
"""losses whose mean divides by the number, or weights, of targets that are not ignored"""

_CLASS_NUMBER_OPS = dict.fromkeys(ops("argmax.default argmin.default multinomial.default"), 0) | dict.fromkeys(
    ops("max.dim min.dim topk.default sort.default"), 1
)
"""ops whose result of this index holds class numbers, never negative"""
_ELEMENT_MOVERS = frozenset(
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
    free = duplicable_nodes(graph)
    for node in graph.nodes:
        if node.op in COUNTED_LOSSES and node.argument("reduction") == MEAN_REDUCTION and len(node.outputs) == 1:
            nodes += _sum_over_count(node, graph, types, whole, free)
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes), types=types)


def _sum_over_count(
    node: Node, graph: Graph, types: dict[str, TensorType], whole: dict[str, str], free: Collection[str]
) -> Iterator[Node]:
    (out,) = node.outputs
    target: Ref = node.argument("target")
    type_ = types[out]
    total = f"{out}_sum"
    types[total] = type_
    args, kwargs = node.with_arguments(reduction=SUM_REDUCTION)
    yield replace(node, name=f"{node.name}_sum", args=args, kwargs=kwargs, outputs=(total,))

    def made(name: str, op: Any, *args: Any, **kwargs: Any) -> Node:
        return replace(node, name=f"{node.name}_{name}", op=op, args=args, kwargs=kwargs, outputs=(f"{out}_{name}",))

    def value(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Ref:
        types[f"{out}_{name}"] = TensorType(shape, dtype)
        return Ref(f"{out}_{name}")

    positions = graph.shape(target)
    weight = node.argument("weight")
    if types[target.name].dtype.is_floating_point or (weight is None and _is_nothing_ignored(node, graph)):
        logits = graph.shape(node.argument("self"))
        samples = 1
        for d, n in enumerate(logits):
            samples *= 1 if d == class_dim_of(node, graph) else int(n)
        yield replace(node, op=aten.div.Scalar, args=(Ref(total), samples), kwargs={})
        return
    yield from _target_copy(target.name, graph, types, whole, free)
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


def _is_nothing_ignored(loss: Node, graph: Graph) -> bool:
    """Whether no label is ever ignored: the model itself computes class numbers (a teacher)."""
    value: Ref = loss.argument("target")
    while (node := graph.producers.get(value.name)) is not None and node.op in _ELEMENT_MOVERS:
        value = node.args[0]
    if node is None or loss.argument("ignore_index") >= 0:
        return False
    return _CLASS_NUMBER_OPS.get(node.op) == node.output_slots[node.outputs.index(value.name)]


def averaged_loss(node: Node, graph: Graph) -> Node | None:
    """The summed loss that ``node`` divides by a count of labels; None for other ops."""
    total = graph.producers.get(node.inputs[0]) if node.op is aten.div.Tensor and len(node.inputs) == 2 else None
    return (
        total
        if total is not None and total.op in COUNTED_LOSSES and total.argument("reduction") == SUM_REDUCTION
        else None
    )


def own_labels_reason(loss: Node, graph: Graph) -> str:
    """Error text: a mean over labels that the model computes does not divide into micro-batches."""
    maker = graph.producers.get(loss.argument("target").name)
    return (
        f"{node_location(loss)} averages over those labels of the whole batch that count, and the model makes "
        "the labels itself "
        f"({node_location(maker)}): a micro-batch knows its own only. Use micro_batches=1; or make the labels outside of the "
        'forward, and give them as an input; or take reduction="none", set to zero what is not to count, and average over all.'
    )


def node_location(node: Node | None) -> str:
    """An op with its module and line, for messages."""
    if node is None:
        return "an input"
    return f"{node.op} in {node.fqn or '(root)'}" + (f" at {node.source}" if node.source else "")


def _target_copy(
    value: str, graph: Graph, types: dict[str, TensorType], whole: dict[str, str], free: Collection[str]
) -> Iterator[Node]:
    """A copy of the ops that make ``value``, unsharded for the count besides the loss's chunk.

    Only ops of inputs alone (``free``) are copied; of other values a micro-batch takes its chunk.
    """
    node = graph.producers.get(value)
    if node is None or value in whole or node.name not in free:
        return
    for name in node.inputs:
        yield from _target_copy(name, graph, types, whole, free)
    for name in node.outputs:
        whole[name] = f"{name}_whole"
        types[whole[name]] = types[name]
    copied: Node = map_refs(node, lambda ref: Ref(whole.get(ref.name, ref.name)))
    yield replace(copied, name=f"{node.name}_whole", outputs=tuple(whole[name] for name in node.outputs))
