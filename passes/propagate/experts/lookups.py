"""Plans of recommenders: embedding tables by table, by row or by column, and the batch cut (Naumov et al. 2019, DLRM)."""

from __future__ import annotations

from autoshard.passes.ir.graph import Graph
from autoshard.passes.propagate.op_space import Asked, axis_strategies
from autoshard.passes.rules.families.embedding import LOOK_UPS, TABLE, TABLE_SUMS


def by_table(graph: Graph, label: str, dims: frozenset[int]) -> tuple[dict[str, Asked], dict[str, frozenset[int]]]:
    """(what is asked of look-ups, the dims along which tables lie): those that can be cut by the strategy ``label``."""
    # As summands the same takes as many times the bytes as there are ranks; that latencies merge the prices do not see.
    how = Asked(frozenset({label}), instead=frozenset({TABLE_SUMS} if label == TABLE else ()))
    asked: dict[str, Asked] = {}
    found: dict[str, frozenset[int]] = {}
    for name in sorted(graph.parameters):
        nodes = graph.uses[name]
        if not nodes or any(n.op not in LOOK_UPS or n.inputs[0] != name for n in nodes):
            continue
        if all(label in {s.label for s in axis_strategies(n, graph)} for n in nodes):
            found[name] = dims
            asked |= {n.name: how for n in nodes}
    return asked, found
