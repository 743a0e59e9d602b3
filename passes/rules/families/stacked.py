"""Stacked expert weights: separate parameters, each owned by one rank or all sharded alike."""

from __future__ import annotations

from typing import Any

from autoshard.layout import Grouped, Owned, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call
from autoshard.passes.rules.base import Facts, Rule, Site
from autoshard.passes.rules.factors import Factors, Space
from autoshard.runtime.operations.stacked import stacked_op

STACKED = stacked_op._opoverload
OWNERS = "owners"
"""label: an axis distributes full experts over ranks, in order"""


def _stacked(node: Node, graph: Graph) -> Space:
    """All matrices sharded alike; if an expert has several, each of these segments of dim 0."""
    (first, *others), parts = graph.shapes(node.inputs)[0], node.argument("parts")
    rest = tuple(f"d{i}" for i in range(1, 1 + len(others)))
    rows = "rows" if parts == 1 else None
    many = len(node.inputs)
    factors = Factors(
        ((rows, *rest),) * many,
        ((None, rows, *rest),),
        {"rows": first, **dict(zip(rest, others, strict=True))},
        linear=(tuple(range(many)),),
    )
    found = factors.strategies(node, graph)
    if parts > 1:
        each = Strategy(
            f"rows/{parts}", (Shard(0),) * many, (Grouped(1, (1,) * parts),), first, even=True, divides=True
        )
        found = (*found, each)
    if all(graph.types[name].tables for name in node.inputs):
        found = (*found, Strategy(OWNERS, (Owned(),) * many, (Shard(0),), many // parts, divides=True, joins="none"))
    return found


def _local(site: Site) -> Call:
    kwargs: dict[str, Any] = {"parts": site.node.argument("parts")} if site.node.argument("parts") > 1 else {}
    if site.axes(OWNERS):
        kwargs["owned"] = site.local_sizes(site.inputs[0], site.in_type(0).shape)[0]
    return Call("stacked", (tuple(site.node.args[0]),), kwargs)


RULES: tuple[Rule, ...] = (
    Rule(
        STACKED,
        _stacked,
        _local,
        notation="all alike -> new dim whole",
        facts=Facts(saves="", rounding="exact", joins=True),
        named="stacked",
    ),
)
