"""Embedding tables by table, row or column, with a sharded batch (DLRM, Naumov et al. 2019)."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.propagate.hints import OWNER
from autoshard.passes.propagate.op_space import Asked, axis_strategies
from autoshard.passes.rules.families.embedding import LOOK_UPS, TABLE, TABLE_SUMS

NAMED = 8
"""tables that a note names at most"""


def by_table(
    graph: Graph, label: str, dims: frozenset[int], ranks: int
) -> tuple[dict[str, Asked], dict[str, frozenset[int]], dict[str, str]]:
    """(requests to look-ups, dims of tables, table → why not) for strategies named ``label``."""
    # Partial sums would send ranks times the bytes; prices do not see that latencies merge.
    how = Asked(frozenset({label}), instead=frozenset({TABLE_SUMS} if label == TABLE else ()))
    asked: dict[str, Asked] = {}
    found: dict[str, frozenset[int]] = {}
    left: dict[str, str] = {}
    tables = [p for p in sorted(graph.parameters) if any(_looks_up(n, p) for n in graph.uses[p])]
    for name in tables:
        nodes, shape = graph.uses[name], graph.types[name].shape
        if short := [d for d in dims if d != OWNER and int(shape[d]) < ranks]:
            left[name] = f"dim {short[0]}, of length {shape[short[0]]}, leaves some of {ranks} ranks without a part"
        elif all(_looks_up(n, name) and label in {s.label for s in axis_strategies(n, graph)} for n in nodes):
            found[name] = dims
            asked |= {n.name: how for n in nodes}
        else:
            left[name] = _why_not(name, nodes, label, len(tables))
    return asked, found, left


def _looks_up(node: Node, table: str) -> bool:
    return node.op in LOOK_UPS and node.inputs[0] == table


def _why_not(name: str, nodes: Sequence[Node], label: str, tables: int) -> str:
    """Why ``label`` cannot shard the look-ups in a table, or all that reads it."""
    for node in nodes:
        if not _looks_up(node, name):
            return f"{node.op} in {node.fqn or '(root)'} reads it, too, which is no look-up"
    if any(node.argument("scale_grad_by_freq", False) for node in nodes):
        return "gradients are scaled by how often a row is read in the whole batch"
    if label == TABLE and tables == 1:
        return "there is no other table, and two are needed"
    if label == TABLE:
        return (
            "two tables or more are needed that are looked up alone, for one row per element of the batch, by indices that "
            "come from the inputs"
        )
    return "more is read of a look-up than what it finds"


def told(left: dict[str, str], graph: Graph) -> str:
    """Note text about tables that cannot be placed as asked."""
    names = {i.name: i.fqn for i in graph.inputs}
    parts = []
    for why in dict.fromkeys(left.values()):
        tables = [names[n] for n, other in left.items() if other == why]
        more = f" and {len(tables) - NAMED} more" if len(tables) > NAMED else ""
        parts.append(f"{', '.join(tables[:NAMED])}{more} cannot lie so, as {why}")
    return "; ".join(parts)
