"""Where rules are restricted: data-dependent sizes, ops without a rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.aten import aten
from autoshard.errors import RuleError
from autoshard.layout import Invariant, Replicate, Shard
from autoshard.passes.ir.analyses import cached_per_graph
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType, refs, tensor_arguments
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.base import Rule
from autoshard.passes.rules.facts import is_random


def needs_full_tensors(node: Node, types: Mapping[str, TensorType], rule: Rule | None) -> bool:
    """Whether ``node`` must run on full tensors: it makes or takes a data-dependent size or number
    (but ``x * n``, where n counts as a scalar tensor), or its rule's local form computes with
    one."""
    used = [types[name] for name in node.values]
    if all(t.number is None and not t.unknown for t in used):
        return False
    if any(types[name].number is not None for name in node.outputs):
        return True
    if any(t.unknown for t in used) and (rule is None or (rule.local is not None and rule.sized)):
        return True
    takes = tensor_arguments(node.op)
    return any(
        types[ref.name].number is not None for name, value in node.given if name not in takes for ref in refs(value)
    )


def keeps_unknown_unsharded(strategy: Strategy, types: Sequence[TensorType]) -> bool:
    """Whether ``strategy`` leaves dims of unknown length and numbers unsharded."""
    for placement, type_ in zip(strategy.placements, types, strict=True):
        if isinstance(placement, Shard) and placement.dim in type_.unknown:
            return False
        if type_.number is not None and not isinstance(placement, Replicate | Invariant):
            return False
    return True


def check_random(graph: Graph) -> None:
    """Raise :class:`RuleError` for a random op with a gradient and no rule: one draw has none."""
    for node in graph.nodes:
        if is_random(node) and rule_for(node.op) is None and graph.is_differentiable(node):
            raise RuleError(
                f"{node.op} in module {node.fqn or '(root)'!r} at {node.source} draws random numbers and "
                "has a gradient but no sharding rule. One draw for all ranks would lose the gradient. Draw "
                "with torch.rand or dropout and compute from that, or add a rule (autoshard.register_rule)."
            )


@cached_per_graph
def with_own_streams(graph: Graph) -> Graph:
    """``graph`` whose dropout draws per shard, from its own stream; attention stays fused."""

    def drops(node: Node) -> bool:
        fused = node.op is aten.scaled_dot_product_attention.default and node.argument("dropout_p", 0.0)
        return bool(fused) or (node.op is aten.dropout.default and is_random(node))

    nodes = tuple(replace(node, exact=False) if node.exact and drops(node) else node for node in graph.nodes)
    return graph if all(a is b for a, b in zip(nodes, graph.nodes, strict=True)) else replace(graph, nodes=nodes)


def check_rules(graph: Graph) -> None:
    """``strict=True``: raise :class:`RuleError` for the first op without a sharding rule."""
    for node in graph.nodes:
        where = f"in module {node.fqn or '(root)'!r} at {node.source}"
        rigid = needs_full_tensors(node, graph.types, rule_for(node.op))
        if rigid and any(graph.types[name].unknown for name in node.values):
            raise RuleError(
                f"{node.op} {where} runs on full tensors, because a length in it depends on the data. "
                "Use a mask or a fixed size, or compile with strict=False."
            )
        if not has_rule(node, graph):
            shapes = ", ".join(str(graph.types[n]) for n in node.inputs)
            raise RuleError(
                f"no sharding rule for {node.op}({shapes}) {where}. "
                f'Add one: autoshard.register_rule(torch.ops.{node.op}, "...") with one letter per dim, '
                "or compile with strict=False to run it on full tensors."
            )


def has_rule(node: Node, graph: Graph) -> bool:
    """Whether ``node`` has a sharding rule or needs none (checks, data-dependent sizes)."""
    silent = not node.op._schema.returns
    return silent or rule_for(node.op) is not None or needs_full_tensors(node, graph.types, None)
