"""Losses of a micro-batched step: the loss output, and means as local sums over a global count."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from autoshard.aten import aten
from autoshard.errors import PlanError
from autoshard.passes.ir.graph import Graph, Node, Ref, map_refs
from autoshard.passes.ir.patterns import behind
from autoshard.passes.ir.rewrite import NodeBuilder, rewrite
from autoshard.passes.propagate.recompute import duplicable_nodes
from autoshard.passes.rules.base import ops
from autoshard.passes.rules.families.loss import CLASSES_LAST, OF_LINEAR, class_dim_of


def loss_output(graph: Graph, asked: str) -> tuple[int, dict[int, str]]:
    """The flat position of the loss (the scalar named "loss", else the first); positions and names
    of other scalars with a gradient. Raises :class:`PlanError` if there is none; ``asked``: the
    option that needs it."""
    outputs = enumerate((graph.types[o.name] if isinstance(o, Ref) else None) for o in graph.outputs)
    found = [i for i, type_ in outputs if type_ is not None and type_.grad and not type_.shape]
    if not found:
        raise PlanError(
            f"{asked}: no output of the model is a scalar that carries a gradient. Its forward "
            "must return one loss, because each micro-batch runs its forward and backward together."
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
    | {aten.nll_loss2d.default, OF_LINEAR}
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
    whole: dict[str, str] = {}
    free = duplicable_nodes(graph)

    def separated(build: NodeBuilder, node: Node) -> bool:
        counted = node.op in COUNTED_LOSSES and node.argument("reduction") == MEAN_REDUCTION and len(node.outputs) == 1
        if counted:
            _build_sum_over_count(build, node, whole, free)
        return counted

    return rewrite(graph, separated)


def _build_sum_over_count(build: NodeBuilder, node: Node, whole: dict[str, str], free: Collection[str]) -> None:
    graph, (out,), target, weight = build.graph, node.outputs, node.argument("target"), node.argument("weight")
    args, kwargs = node.with_arguments(reduction=SUM_REDUCTION)
    total = build(node.op, *args, name=f"{out}_sum", **kwargs)
    if graph.types[target.name].dtype.is_floating_point or (weight is None and _is_nothing_ignored(node, graph)):
        along = class_dim_of(node, graph)
        lengths = (int(n) for d, n in enumerate(graph.shape(node.argument("self"))) if d != along)
        build.finish(aten.div.Scalar, total, math.prod(lengths))
        return
    _copy_target(build, target.name, whole, free)
    target = Ref(whole.get(target.name, target.name))
    valid = build(aten.ne.Scalar, target, node.argument("ignore_index"), name=f"{out}_valid")
    if weight is None:
        count = build(aten.sum.default, valid, dtype=graph.types[out].dtype, name=f"{out}_count")
    else:
        each = build(
            aten.index.Tensor,
            weight,
            [build(aten.mul.Tensor, target, valid, name=f"{out}_classes")],
            name=f"{out}_each",
        )
        count = build(aten.sum.default, build(aten.mul.Tensor, each, valid, name=f"{out}_counted"), name=f"{out}_count")
    build.finish(aten.div.Tensor, total, count)


def _is_nothing_ignored(loss: Node, graph: Graph) -> bool:
    """Whether no label is ever ignored: the model itself computes class numbers (a teacher)."""
    value: Ref = loss.argument("target")
    value = behind(value, _ELEMENT_MOVERS, graph)
    node = graph.producers.get(value.name)
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
        f"{node_location(loss)} averages over the labels of the full batch that count, but the "
        f"model makes them itself ({node_location(maker)}), and a micro-batch has only its own. "
        'Use micro_batches=1, or pass the labels as an input. Or use reduction="none", set '
        "losses that do not count to zero, and average over all."
    )


def node_location(node: Node | None) -> str:
    """An op with its module and line, for messages."""
    if node is None:
        return "an input"
    return f"{node.op} in {node.fqn or '(root)'}" + (f" at {node.source}" if node.source else "")


def _copy_target(build: NodeBuilder, value: str, whole: dict[str, str], free: Collection[str]) -> None:
    """Copy the ops that make ``value``, unsharded for the count besides the loss's chunk: ops of
    inputs alone (``free``); of other values a micro-batch takes its chunk."""
    node = build.graph.producers.get(value)
    if node is None or value in whole or node.name not in free:
        return
    for name in node.inputs:
        _copy_target(build, name, whole, free)
    for name in node.outputs:
        whole[name] = f"{name}_whole"
        build.types[whole[name]] = build.types[name]
    copied: Node = map_refs(node, lambda ref: Ref(whole.get(ref.name, ref.name)))
    outputs = tuple(whole[name] for name in node.outputs)
    build.nodes.append(replace(copied, name=f"{node.name}_whole", outputs=outputs))
