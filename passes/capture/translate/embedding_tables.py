"""Embedding tables: sum and mean pooling fuse into look-ups; types mark tables only looked up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.rules.families.embedding import LOOKUP_OPS, grouped_lookups
from autoshard.runtime.operations.embedding import pooled_op

POOLED_OP = pooled_op._opoverload
_POOLING_MODES = {aten.sum.dim_IntList: "sum", aten.mean.dim: "mean"}


def mark_embedding_tables(graph: Graph) -> Graph:
    """``graph`` whose types describe its embedding tables: rows read, sparsity, placement.

    Several tables with one row per sample may be table-wise; only then pooling is fused."""
    found = [i.name for i in graph.inputs if i.kind == "parameter" and _is_only_looked_up(i.name, graph)]
    pooled = _fuse_pooling(graph, found)
    whole = [name for name in found if _can_be_table_wise(name, pooled)]
    graph, whole = (pooled, whole) if len(whole) > 1 else (graph, [])
    types = dict(graph.types)
    for name in found:
        uses = graph.uses[name]
        sparse = graph.training and types[name].grad and all(bool(node.argument("sparse")) for node in uses)
        if sparse or name in whole:
            looked_up = sum(graph.types[node.inputs[node.positions["indices"]]].numel for node in uses)
            alike = sum(2 * graph.types[other].nbytes >= types[name].nbytes for other in whole)
            alike = alike if name in whole else 0
            types[name] = replace(types[name], looked_up=max(1, looked_up), sparse=sparse, tables=alike)
    for name, number in _lookups_per_call(replace(graph, types=types)).items():
        types[name] = replace(types[name], together=number)
    return replace(graph, types=types) if types != graph.types else graph


def _lookups_per_call(graph: Graph) -> dict[str, int]:
    """Table → number of look-ups in the grouped look-up it takes part in (the smallest one)."""
    found: dict[str, int] = {}
    for nodes in grouped_lookups(graph).values():
        found |= {n: min(len(nodes), found.get(n, len(nodes))) for n in (node.inputs[0] for node in nodes)}
    return found


def _is_only_looked_up(name: str, graph: Graph) -> bool:
    uses = graph.uses[name]
    outputs = {out.name for out in graph.outputs if isinstance(out, Ref)}
    return bool(uses) and name not in outputs and all(n.op in LOOKUP_OPS and n.inputs[0] == name for n in uses)


def _can_be_table_wise(name: str, graph: Graph) -> bool:
    """Whether look-ups give one row per sample, by indices from inputs (table-wise placement)."""
    given = _from_inputs(graph)
    return all(
        len(graph.types[node.outputs[0]].shape) == 2
        and node.inputs[node.positions["indices"]] in given
        and node.output_slots == (0,)
        and not node.argument("scale_grad_by_freq", False)
        for node in graph.uses[name]
    )


def _from_inputs(graph: Graph) -> frozenset[str]:
    found = {i.name for i in graph.inputs if i.kind == "input"}
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return frozenset(found)


def _fuse_pooling(graph: Graph, tables: Sequence[str]) -> Graph:
    """``graph`` with ``embedding(…).sum(-2)`` or ``.mean(-2)`` of these tables as one operation."""
    gone: set[str] = set()
    merged: dict[str, Node] = {}
    for table in tables:
        for node in graph.uses[table]:
            users = graph.uses[node.outputs[0]]
            if node.op is not aten.embedding.default or len(users) != 1 or node.outputs[0] in graph.returned:
                continue
            if (mode := _pooling_mode(users[0], len(graph.types[node.outputs[0]].shape))) and not node.argument(
                "scale_grad_by_freq"
            ):
                args = (*node.args[:2], mode, node.argument("padding_idx"), node.argument("sparse"))
                gone.add(node.name)
                name, outputs = users[0].name, users[0].outputs
                merged[name] = replace(node, name=name, op=POOLED_OP, args=args, kwargs={}, outputs=outputs)
    if not merged:
        return graph
    nodes = tuple(merged.get(n.name, n) for n in graph.nodes if n.name not in gone)
    unread = {o for n in graph.nodes if n.name in gone for o in n.outputs}
    return replace(graph, nodes=nodes, types={n: t for n, t in graph.types.items() if n not in unread})


def _pooling_mode(node: Node, ndim: int) -> str:
    """ "sum" or "mean" if ``node`` pools dim -2 of its operand of ``ndim`` dims, else ""."""
    mode = _POOLING_MODES.get(node.op, "")
    if not mode or ndim < 3 or node.argument("keepdim") or node.argument("dtype") is not None:
        return ""
    dims = node.argument("dim")
    return mode if dims is not None and len(dims) == 1 and dims[0] % ndim == ndim - 2 else ""
