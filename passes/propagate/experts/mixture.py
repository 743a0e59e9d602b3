"""Expert parallel plans: rows and experts cut along one axis, and rows exchanged (Lepikhin et al. 2020)."""

from __future__ import annotations

from autoshard.passes.ir.graph import Node
from autoshard.passes.propagate.experts.families import Families, Family
from autoshard.passes.propagate.hints import OWNER
from autoshard.passes.propagate.op_space import Asked
from autoshard.passes.rules.families.experts import exchanges
from autoshard.runtime.operations.experts import experts_op


def mixtures(families: Families) -> tuple[Node, ...]:
    """The operations that run experts."""
    return tuple(n for n in families.graph.nodes if n.op is experts_op._opoverload)


def by_expert(families: Families, batch: frozenset[Family]) -> tuple[dict[str, Asked], dict[str, frozenset[int]]]:
    """(what is asked of operations, the dims along which experts' weights lie): the batch is cut, and whole experts."""
    found = mixtures(families)
    free = {
        n.name for n in families.graph.nodes if not families.weights.isdisjoint(n.outputs)
    }  # as the experts want it
    asked = {n.name: families.asked(n, families.labels(n, batch)) for n in families.graph.nodes if n.name not in free}
    asked |= {n.name: Asked(frozenset(s.label for s in families.strategies(n) if exchanges(s))) for n in found}
    weights = {p for n in found for v in n.inputs[3:] for p in families.origins(v)}
    types = families.graph.types
    return asked, {p: frozenset({OWNER if types[p].tables else 0}) for p in weights}
