"""Expert parallelism, all-to-all dispatch: tokens and experts sharded (Lepikhin et al. 2020)."""

from __future__ import annotations

from autoshard.passes.ir.graph import Node
from autoshard.passes.propagate.experts.families import Families, Family, cut_dims, products
from autoshard.passes.propagate.hints import OWNER
from autoshard.passes.propagate.op_space import Asked
from autoshard.passes.rules.families.experts import exchanges
from autoshard.runtime.operations.experts import experts_op


def mixtures(families: Families) -> tuple[Node, ...]:
    """Mixture-of-experts operations."""
    return tuple(n for n in families.graph.nodes if n.op is experts_op._opoverload)


def in_buffers(families: Families) -> dict[Family, frozenset[str]]:
    """Experts with capacity buffers: family of the expert dim → parameters with expert matrices."""
    found: dict[Family, frozenset[str]] = {}
    for product in products(families):
        for strategy in families.strategies(product.node):
            cut, node = dict(cut_dims(product.node, strategy)), product.node
            matrices = {p for p in families.origins(product.weight) if len(families.graph.types[p].shape) > 2}
            if matrices and cut.keys() >= {*node.inputs, *node.outputs} and (family := families.cut(node, strategy)):
                found[family] = found.get(family, frozenset()) | matrices
    return found


def by_expert(families: Families, batch: frozenset[Family]) -> tuple[dict[str, Asked], dict[str, frozenset[int]]]:
    """(requests to operations, dims of experts' weights): shard the batch, and experts.

    With capacity buffers instead of an experts operation, both families may be sharded.
    """
    found = mixtures(families)
    buffers = {} if found else in_buffers(families)
    free = {
        n.name for n in families.graph.nodes if not families.weights.isdisjoint(n.outputs)
    }  # the experts' requests decide
    either = batch | buffers.keys()
    asked = {n.name: families.asked(n, families.labels(n, either)) for n in families.graph.nodes if n.name not in free}
    for node in families.graph.nodes if buffers else ():
        if families.weights.intersection(node.inputs) and (cuts := families.labels(node, buffers)):
            asked[node.name] = families.asked(node, cuts)
    for node in found:  # with fewer experts than ranks tokens stay where they are
        asked[node.name] = Asked(
            frozenset(s.label for s in families.strategies(node) if exchanges(s)), instead=families.labels(node, batch)
        )
    weights = {p for n in found for v in n.inputs[3:] for p in families.origins(v)}
    types = families.graph.types
    dims = {p: frozenset({OWNER if types[p].tables else 0}) for p in weights}
    for family, matrices in buffers.items():
        every = {p: range(len(types[p].shape)) for p in matrices}
        dims |= {p: frozenset(d for d in each if families.of(p, d) == family) for p, each in every.items()}
    return asked, dims
