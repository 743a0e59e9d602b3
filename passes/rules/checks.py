"""Checks that rules cover a graph before it is planned."""

from __future__ import annotations

from autoshard.errors import RuleError
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.rules import rule_for
from autoshard.passes.rules.facts import is_random
from autoshard.passes.rules.rigid import is_rigid


def check_random(graph: Graph) -> None:
    """Raise :class:`RuleError` for a random op with a gradient and no rule: one draw has none."""
    for node in graph.nodes:
        if is_random(node) and rule_for(node.op) is None and any(graph.types[o].grad for o in node.outputs):
            raise RuleError(
                f"{node.op} in module {node.fqn or '(root)'!r} at {node.source} draws random numbers, has a gradient and no "
                "sharding rule: one draw for all ranks would lose the gradient. Draw with torch.rand or dropout and compute "
                "from that, or add a rule by hand (autoshard.register_rule)."
            )


def check_rules(graph: Graph) -> None:
    """``strict=True``: raise :class:`RuleError` for the first op without a sharding rule."""
    for node in graph.nodes:
        where = f"in module {node.fqn or '(root)'!r} at {node.source}"
        rigid = is_rigid(node, graph.types, rule_for(node.op))
        if rigid and any(graph.types[name].unknown for name in (*node.inputs, *node.outputs)):
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
    return silent or rule_for(node.op) is not None or is_rigid(node, graph.types, None)
