"""Data parallelism: finds the batch through sharding rules; parameters are not sharded by it."""

from __future__ import annotations

from autoshard.passes.propagate.experts.families import Families, Family


def batch_of(families: Families) -> frozenset[Family]:
    """Families of the batch: the input dim along which most work is independent, on no parameter.

    Ties: dim 0 of the first input. Empty if there is none.
    """
    graph = families.graph
    inputs = [i.name for i in graph.inputs if i.kind == "input"]
    places: dict[Family, tuple[int, int]] = {}
    for number, value in enumerate(inputs):
        for dim in range(len(graph.types[value].shape)):
            places.setdefault(families.of(value, dim), (-dim, -number))
    places = {f: place for f, place in places.items() if f not in families.of_parameters}
    if not places:
        return frozenset()
    scores = _independent(families, frozenset(places))
    ranked = sorted(places, key=lambda f: (*scores[f], places[f]), reverse=True)
    best = ranked[0]
    if scores[best] == (0.0, 0.0):
        return frozenset()
    alike = [f for f in ranked[1:] if families.length(f) == families.length(best) and places[f][0] == 0]
    return frozenset({best, *(f for f in alike if _is_batch_too(f, families, inputs, best))})


def _independent(families: Families, found: frozenset[Family]) -> dict[Family, tuple[float, float]]:
    """Family → (FLOPs, elements) of operations that it divides into independent parts."""
    from_rules = dict.fromkeys(found, (0.0, 0.0))
    for node in families.graph.nodes:
        made = sum(families.graph.types[o].numel for o in node.outputs)
        cuts = [families.cut(node, s) for s in families.strategies(node) if not families.loose(node, s)]
        for family in found.intersection(cuts):  # counted once, whatever the number of attention strategies
            flops, elements = from_rules[family]
            from_rules[family] = (flops + families.flops(node), elements + made)
    return from_rules


def _is_batch_too(family: Family, families: Families, inputs: list[str], batch: Family) -> bool:
    """Whether it is the batch of inputs without one: two towers that never meet."""
    having = [v for v in inputs if family in families.of_all([v])]
    return not any(batch in families.of_all([v]) for v in having)
