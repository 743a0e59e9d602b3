"""Strategies for sparse models: expert parallelism, and table-, row- or column-wise embeddings.
Expert parallelism shards tokens and experts along one axis with all-to-all dispatch (Lepikhin et
al. 2020). Embedding tables are placed whole on owner ranks, or sharded by row or column, with a
sharded batch (Naumov et al. 2019, DLRM)."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.propagate.hints import OWNER_DIM
from autoshard.passes.propagate.named_strategies.families import Families, Family, sharded_dims_of, weight_products
from autoshard.passes.propagate.op_space import OpRequest, axis_strategies
from autoshard.passes.rules.families.embedding import LOOKUP_OPS, TABLE_SUMS, TABLE_WISE_LABEL
from autoshard.passes.rules.families.experts import is_dispatch
from autoshard.runtime.operations.experts import experts_op


def expert_nodes(families: Families) -> tuple[Node, ...]:
    """Mixture-of-experts operations."""
    return tuple(n for n in families.graph.nodes if n.op is experts_op._opoverload)


def capacity_buffers(families: Families) -> dict[Family, frozenset[str]]:
    """Experts with capacity buffers: family of the expert dim → parameters with expert matrices."""
    found: dict[Family, frozenset[str]] = {}
    for product in weight_products(families):
        for strategy in families.strategies(product.node):
            cut, node = dict(sharded_dims_of(product.node, strategy)), product.node
            matrices = {p for p in families.origins(product.weight) if len(families.graph.types[p].shape) > 2}
            if matrices and cut.keys() >= {*node.inputs, *node.outputs} and (family := families.cut(node, strategy)):
                found[family] = found.get(family, frozenset()) | matrices
    return found


def expert_parallel_requests(
    families: Families, batch: frozenset[Family]
) -> tuple[dict[str, OpRequest], dict[str, frozenset[int]]]:
    """(requests to operations, dims of experts' weights): shard the batch, and experts; both
    families without an experts operation."""
    found = expert_nodes(families)
    buffers = {} if found else capacity_buffers(families)
    # the experts' requests decide
    free = {n.name for n in families.graph.nodes if not families.weights.isdisjoint(n.outputs)}
    either = batch | buffers.keys()
    asked = {n.name: families.asked(n, families.labels(n, either)) for n in families.graph.nodes if n.name not in free}
    for node in families.graph.nodes if buffers else ():
        if families.weights.intersection(node.inputs) and (cuts := families.labels(node, buffers)):
            asked[node.name] = families.asked(node, cuts)
    for node in found:  # with fewer experts than ranks tokens stay where they are
        asked[node.name] = OpRequest(
            frozenset(s.label for s in families.strategies(node) if is_dispatch(s)),
            fallback=families.labels(node, batch),
        )
    weights = {p for n in found for v in n.inputs[3:] for p in families.origins(v)}
    types = families.graph.types
    dims = {p: frozenset({OWNER_DIM if types[p].tables else 0}) for p in weights}
    for family, matrices in buffers.items():
        every = {p: range(len(types[p].shape)) for p in matrices}
        dims |= {p: frozenset(d for d in each if families.of(p, d) == family) for p, each in every.items()}
    return asked, dims


MAX_NAMED_TABLES = 8
"""tables that a note names at most"""


def table_requests(
    graph: Graph, label: str, dims: frozenset[int], ranks: int
) -> tuple[dict[str, OpRequest], dict[str, frozenset[int]], dict[str, str]]:
    """(requests to look-ups, dims of tables, table → why not) for strategies named ``label``."""
    # Partial sums would send ranks times the bytes; prices do not see that latencies merge.
    how = OpRequest(frozenset({label}), fallback=frozenset({TABLE_SUMS} if label == TABLE_WISE_LABEL else ()))
    asked: dict[str, OpRequest] = {}
    found: dict[str, frozenset[int]] = {}
    left: dict[str, str] = {}
    tables = [p for p in sorted(graph.parameters) if any(_looks_up(n, p) for n in graph.uses[p])]
    for name in tables:
        nodes, shape = graph.uses[name], graph.types[name].shape
        if short := [d for d in dims if d != OWNER_DIM and int(shape[d]) < ranks]:
            left[name] = f"dim {short[0]}, of length {shape[short[0]]}, leaves some of {ranks} ranks without a shard"
        elif all(_looks_up(n, name) and label in {s.label for s in axis_strategies(n, graph)} for n in nodes):
            found[name] = dims
            asked |= {n.name: how for n in nodes}
        else:
            left[name] = _unplaced_reason(name, nodes, label, len(tables))
    return asked, found, left


def _looks_up(node: Node, table: str) -> bool:
    return node.op in LOOKUP_OPS and node.inputs[0] == table


def _unplaced_reason(name: str, nodes: Sequence[Node], label: str, tables: int) -> str:
    """Why ``label`` cannot shard the look-ups in a table, or all that reads it."""
    for node in nodes:
        if not _looks_up(node, name):
            return f"{node.op} in {node.fqn or '(root)'} reads it as well, and is not a look-up"
    if any(node.argument("scale_grad_by_freq", False) for node in nodes):
        return "gradients are scaled by the frequency of a row in the full batch"
    if label == TABLE_WISE_LABEL and tables == 1:
        return "two tables are needed, and there is only one"
    if label == TABLE_WISE_LABEL:
        return "two or more tables are needed that only look-ups read, one row per sample, with indices from the inputs"
    return "the graph reads more of a look-up than the rows found"


def unplaced_note(left: dict[str, str], graph: Graph) -> str:
    """Note text about tables that cannot be placed as asked."""
    names = graph.fqns
    parts = []
    for why in dict.fromkeys(left.values()):
        tables = [names[n] for n, other in left.items() if other == why]
        more = f" and {len(tables) - MAX_NAMED_TABLES} more" if len(tables) > MAX_NAMED_TABLES else ""
        parts.append(f"{', '.join(tables[:MAX_NAMED_TABLES])}{more} cannot be placed so, because {why}")
    return "; ".join(parts)
