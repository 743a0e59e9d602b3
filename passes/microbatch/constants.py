"""Constants added to a sum over micro-batches: each of them adds its share."""

from __future__ import annotations

from dataclasses import replace

from autoshard.aten import aten
from autoshard.layout import P
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.rules.factors import ADDED

SUMS = frozenset(
    {aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.subtract.Tensor, aten.subtract.Scalar}
    | {aten.rsub.Scalar}
)
"""ops on a tensor and ``other``"""


def on_summands(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """The strategy of tensor + constant on partial sums; run it with :func:`with_share`.

    None for other ops, nor for integers, which have no shares.
    """
    if node.op not in SUMS or len(node.inputs) != 1 or isinstance(node.argument("other"), Ref):
        return ()
    operand, result = (graph.types[name].dtype for name in (*node.inputs, *node.outputs))
    if operand not in ADDED or not (result.is_floating_point or result.is_complex):
        return ()
    return (Strategy("P(number)", (P,), (P,)),)


def with_share(node: Node, count: int) -> Node:
    """``node`` with its constant divided by ``count``."""
    args, kwargs = node.with_arguments(other=node.argument("other") / count)
    return replace(node, args=args, kwargs=kwargs)
