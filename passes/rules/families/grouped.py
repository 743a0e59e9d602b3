"""Grouped GEMM for mixture of experts: rows sorted by expert, one matrix per expert."""

from __future__ import annotations

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Local, Offset, spell
from autoshard.passes.ir.schema import tensor_arguments
from autoshard.passes.rules.base import Facts, Rule, Site, Types, each_other
from autoshard.passes.rules.factors import Factors, Space, whole
from autoshard.runtime.operations.grouped import grouped_mm


def _grouped(node: Node, graph: Graph) -> Space:
    """Rows [s, k] · matrices [e, k, n], group ends [e] → [s, n]; other forms stay replicated."""
    shapes = graph.shapes(node.inputs)
    if [len(s) for s in shapes] != [2, 3, 1]:
        return whole(len(shapes), 1)
    (s, k), (e, _, n), _ = shapes
    even: frozenset[str] = frozenset()
    if node.op is aten._grouped_mm.default:  # its kernel needs rows of multiples of 16 bytes
        unit = 16 // graph.types[node.inputs[0]].dtype.itemsize
        k, n, even = k // unit, n // unit, frozenset("kn")
    return Factors(
        (("s", "k"), ("e", "k", "n"), (None,)),
        (("s", "n"),),
        {"s": s, "k": k, "n": n, "e": e},
        even,
        linear=((0,), (1,)),
    )


def _local(site: Site) -> Call:
    """Sharded rows: shift the group ends. Sharded matrices: only rows of this rank's groups."""
    node = site.node
    if len(site.inputs) != 3:
        return site.unchanged()
    x, weight, ends = node.args[:3]
    rows, groups = site.inputs[0].axes_of(0), site.inputs[1].axes_of(0)
    if rows:
        size = site.in_type(0).shape[0]
        moved = Call(aten.sub.Tensor, (ends, Offset(size, rows)), {})
        ends = Call(aten.clamp.default, (moved, 0, Local(size, rows)), {})
    if groups:
        return Call("sharded_grouped_mm", (x, weight, ends, site.in_type(1).shape[0], spell(groups)), {})
    return Call(node.op, (x, weight, ends, *node.args[3:]), node.kwargs)


def _flops(node: Node, graph: Graph) -> float:
    """One matrix per row."""
    return 2.0 * graph.shapes(node.inputs)[0][-1] * graph.types[node.outputs[0]].numel


def _saves(node: Node, types: Types) -> str:
    x, weight, ends = tensor_arguments(node.op)[:3]
    return f"{ends}; {each_other(x, weight)}"


def grouped_rule(op: torch._ops.OpOverload) -> Rule:
    """The rule of an op ``(rows, matrices, ends, …)``."""
    return Rule(op, _grouped, _local, _flops, "s k, e k n, _ -> s n", sized=False, facts=Facts(_saves))


RULES: tuple[Rule, ...] = (grouped_rule(aten._grouped_mm.default), grouped_rule(grouped_mm._opoverload))

BY_NAME = {"transformers.grouped_mm_fallback.default": grouped_rule}
"""makers of rules for ops that exist only after another library is imported"""
