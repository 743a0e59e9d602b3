"""Embedding tables: sum and mean pooling fuse into look-ups; types mark tables only looked up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.aten import aten
from autoshard.passes.capture.translate.canonicalize import remove_dead
from autoshard.passes.ir.analyses import values_reached
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.patterns import Matcher
from autoshard.passes.ir.rewrite import NodeBuilder, rewrite
from autoshard.passes.rules.families.embedding import LOOKUP_OPS, grouped_lookups
from autoshard.runtime.operations.embedding import pooled_op

POOLED_OP = pooled_op._opoverload
_POOLING_OPS = (aten.sum.dim_IntList, aten.mean.dim)
_POOLED = {
    f"{mode}((rows := embedding(table, indices, padding, False, sparse)), [-2])": mode for mode in ("sum", "mean")
}
"""pooled look-ups → mode"""


def mark_embedding_tables(graph: Graph) -> Graph:
    """``graph`` whose types describe its embedding tables: rows read, sparsity, placement.
    Several tables with one row per sample may be table-wise; only then pooling is fused."""
    found = [i.name for i in graph.of_kind("parameter") if _is_only_looked_up(i.name, graph)]
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
    given = values_reached(graph, (i.name for i in graph.of_kind("input")))
    return all(
        len(graph.types[node.outputs[0]].shape) == 2
        and node.inputs[node.positions["indices"]] in given
        and node.output_slots == (0,)
        and not node.argument("scale_grad_by_freq", False)
        for node in graph.uses[name]
    )


def _fuse_pooling(graph: Graph, tables: Sequence[str]) -> Graph:
    """``graph`` with ``embedding(…).sum(-2)`` or ``.mean(-2)`` of these tables as one operation."""
    matcher = Matcher(graph)

    def pooled(build: NodeBuilder, node: Node) -> bool:
        for form, mode in _POOLED.items() if node.op in _POOLING_OPS else ():
            found = matcher.match(form, Ref(node.outputs[0]))
            if found is None or found["table"].name not in tables or not matcher.is_closed(found, node):
                continue
            if len(graph.shape(found["rows"])) > 2:
                looked_up = graph.producers[found["rows"].name]
                build.place = replace(looked_up, name=node.name, outputs=node.outputs)
                build.finish(
                    POOLED_OP, *(found[name] for name in ("table", "indices")), mode, found["padding"], found["sparse"]
                )
                return True
        return False

    made = rewrite(graph, pooled)
    return graph if made is graph else remove_dead(made)
