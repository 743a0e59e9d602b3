"""Embedding look-ups: tables sharded by rows (vocabulary-parallel), by columns, or table-wise."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from autoshard.aten import aten
from autoshard.errors import PlanError
from autoshard.layout import Owned, P, R, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import InternalCollective, Local, LocalCall, axes_argument
from autoshard.passes.rules.base import (
    Dims,
    Factors,
    Facts,
    Rule,
    Site,
    Space,
    numbered_factors,
    operand_factors,
    positive,
    rules,
    sizes_of,
)
from autoshard.runtime.operations.embedding import pooled_op

BAG_MODES = ("sum", "mean", "max")
LOOKUP_OPS = frozenset(
    {aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx, pooled_op._opoverload}
)
TABLE_WISE_LABEL = "table"
"""table-wise strategy: each rank owns full tables and sends what it looks up to all ranks"""
TABLE_SHARDING_LABELS = frozenset({TABLE_WISE_LABEL, "vocab", "embed"})
"""labels of strategies in which a mesh axis divides tables"""
TABLE_SUMS = "table sums"
"""table-wise, with the owner's rows as a partial sum (others: zeros): any length of batch"""


def _with_table_placement(node: Node, graph: Graph, factors: Factors) -> Space:
    """The strategies of ``factors``, and table-wise ones if the table may have one owner."""
    if not graph.types[node.inputs[node.positions["weight"]]].tables:
        return factors
    placed = tuple(Owned() if name == "weight" else R for name in node.positions)
    batch = graph.shape(node.outputs[0])[0]
    apart = frozenset({"vocab", "embed"})
    whole = Strategy(
        TABLE_WISE_LABEL,
        placed,
        (Shard(0),),
        batch,
        divides=True,
        apart=apart | {TABLE_SUMS},
        joins="none",
        innermost=True,
    )
    sums = Strategy(TABLE_SUMS, placed, (P,), divides=True, apart=apart)
    return (*factors.strategies(node, graph), whole, sums)


def _local_table(site: Site, mode: str, **bags: object) -> LocalCall:
    """``bags``: keyword arguments of ``runtime.table_wise``; None is left out."""
    axes, node = _axes_of_owners(site), site.node
    owners, owner = site.inputs[node.positions["weight"]].owner, 0
    for axis in axes:
        owner = owner * site.mesh.size_of(axis) + owners[axis]
    given = {k: v for k, v in bags.items() if v not in (None, (None,), False)}
    if gives_sparse(site):
        given["sparse"] = True
    if not site.axes(TABLE_WISE_LABEL):
        given["summed"] = True
    tables, indices = (node.argument("weight"),), (node.argument("indices"),)
    return LocalCall("table_wise", (tables, indices, (owner,), axes_argument(axes), mode), given)


def _axes_of_owners(site: Site) -> tuple[str, ...]:
    """The mesh axes along which the table has an owner rank."""
    return site.axes(TABLE_WISE_LABEL) or site.axes(TABLE_SUMS)


def _share_of_latency(site: Site, c: InternalCollective) -> InternalCollective:
    """Look-ups in several tables share one all-to-all, and each pays its share of the latency."""
    tables = site.in_type(site.node.positions["weight"]).together
    return replace(c, share=1.0 / tables) if c.kind == "all_to_all" else c


def _local_pooled(site: Site) -> LocalCall:
    node, axes = site.node, site.axes_of("weight", 0)
    mode, padding = node.argument("mode"), node.argument("padding_idx")
    if _axes_of_owners(site):
        return _local_table(site, mode, padding=(padding if padding >= 0 else None,))
    extra: dict[str, object] = {"padding_idx": padding} if padding >= 0 else {}
    if gives_sparse(site):
        extra["sparse"] = True
    if axes:
        extra |= {"size": site.in_type(node.positions["weight"]).shape[0], "axes": axes_argument(axes)}
    return LocalCall("pooled", (node.argument("weight"), node.argument("indices"), mode), extra)


def _lookup_factors(node: Node, graph: Graph, pooled: bool = False) -> Space:
    """Factors: index dims (``pooled``: not the last), columns, and rows, whose look-ups sum up."""
    indices, weight = graph.shape(node.argument("indices")), graph.shape(node.argument("weight"))
    kept = indices[:-1] if pooled else indices
    named = numbered_factors(kept)
    sizes = {**sizes_of(kept), "vocab": weight[0], "embed": weight[1]}
    if node.argument("scale_grad_by_freq", False):  # frequencies are those of the full batch
        sizes = {"embed": weight[1]}
    factors = Factors(
        operand_factors(node, {"weight": ("vocab", "embed"), "indices": (*named, *(None,) * pooled)}),
        ((*named, "embed"),),
        sizes,
        linear=((node.positions["weight"],),),
        nonempty=frozenset({"embed"}),
    )
    return _with_table_placement(node, graph, factors)


def _local_embedding(site: Site) -> LocalCall:
    axes, sparse, padding = site.axes_of("weight", 0), gives_sparse(site), site.node.argument("padding_idx")
    if _axes_of_owners(site):
        return _local_table(site, "sum", padding=(padding if padding >= 0 else None,))
    if not axes:
        return site.unchanged() if sparse == site.node.argument("sparse") else site.unchanged(sparse=sparse)
    weight, indices = (site.node.argument(a) for a in ("weight", "indices"))
    rows = site.in_type(site.node.positions["weight"]).shape[0]
    extra: dict[str, object] = {"padding_idx": padding} if padding >= 0 else {}
    if sparse:
        extra["sparse"] = True
    return LocalCall("vocab_embedding", (weight, indices, rows, axes_argument(axes)), extra)


def lookup_kernels(node: Node, choice: Sequence[Strategy], ranks: Sequence[int], together: int = 1) -> float:
    """Kernels of one look-up on a rank, a fraction where it looks up only its own tables: one more
    if pooled, four (range, mask, places, zeros) for a table sharded by rows. ``together``:
    grouped ones share all but one
    (:func:`~autoshard.runtime.operations.embedding.pooled_together`)."""
    pooled, owned = node.op is pooled_op._opoverload, {TABLE_WISE_LABEL, TABLE_SUMS}
    once = pooled + 4 * any(s.label == "vocab" for s in choice)
    if pooled and owned.isdisjoint(s.label for s in choice):
        return 1 + once / together
    return (1 + once) / math.prod(n for s, n in zip(choice, ranks, strict=True) if s.label in owned)


def grouped_lookups(graph: Graph) -> dict[Hashable, list[Node]]:
    """Groups of equal, independent look-ups in possibly table-wise tables, as
    :mod:`autoshard.passes.lower.coalescing` groups calls."""
    depth: dict[str, int] = {}
    found: dict[Hashable, list[Node]] = {}
    for node in graph.nodes:
        level = max((depth.get(n, 0) for n in node.inputs), default=0)
        looks_up = node.op in LOOKUP_OPS and graph.types[node.inputs[0]].tables > 0
        depth.update(dict.fromkeys(node.outputs, level + looks_up))
        if looks_up:
            kind = graph.types[node.inputs[0]].sparse, graph.types[node.outputs[0]].dtype
            found.setdefault((level, *kind, *_pooling_form(node)), []).append(node)
    return found


def _pooling_form(node: Node) -> tuple[Any, ...]:
    """How a look-up pools; whether its bags are jagged and weighted."""
    if node.op == aten.embedding.default:
        return "sum", False
    if node.op == pooled_op._opoverload:
        return node.argument("mode"), False
    weighted = node.argument("per_sample_weights") is not None
    return BAG_MODES[node.argument("mode")], True, weighted


def gives_sparse(site: Site) -> bool:
    """Whether the table's gradient is sparse: every use asks for it, as in eager."""
    return site.in_type(site.node.positions["weight"]).sparse


def _bag_factors(node: Node, graph: Graph) -> Space:
    """Columns and rows are factors; bags too if all have equal length."""
    weight, bags = graph.shape(node.argument("weight")), graph.shape(node.argument("offsets"))[0]
    sizes: dict[str, int] = {"embed": weight[1]}
    if not node.argument("scale_grad_by_freq"):
        sizes["vocab"] = weight[0]
    if bag_length(node, graph) and not node.argument("scale_grad_by_freq"):
        sizes["bags"] = bags
    if node.output_slots != (0,):  # the op's bookkeeping results are used too
        sizes = {}
    flat: Dims = ("bags",)
    dims: dict[str, Dims] = {"weight": ("vocab", "embed"), "indices": flat, "offsets": (None,)}
    ranks = [len(graph.types[name].shape) for name in node.outputs]
    factors = Factors(
        operand_factors(node, {**dims, "per_sample_weights": flat}),
        tuple(
            (None,) * rank if slot else ("bags", "embed") for slot, rank in zip(node.output_slots, ranks, strict=True)
        ),
        sizes,
        even=frozenset({"bags"}),
        nonempty=frozenset({"embed"}),  # CUDA kernels read past an empty gradient
        linear=((node.positions["weight"],),) if "vocab" in sizes and BAG_MODES[node.argument("mode")] != "max" else (),
    )
    return _with_table_placement(node, graph, factors)


def bag_length(node: Node, graph: Graph) -> int:
    """Length of all bags if ``F.embedding_bag`` made the offsets from 2-D indices, else 0."""
    made = graph.producers.get(node.argument("offsets").name)
    if made is None or made.op is not aten.arange.start_step or node.argument("include_last_offset"):
        return 0
    start, end, step = (made.argument(a) for a in ("start", "end", "step"))
    regular = start == 0 and end == graph.shape(node.argument("indices"))[0] and end % step == 0
    return int(step) if regular else 0


def _local_bag(site: Site) -> LocalCall:
    node = site.node
    weight, indices, offsets = (node.argument(a) for a in ("weight", "indices", "offsets"))
    if bags := site.axes("bags"):
        captured = next(n for n in site.graph.nodes if n.name == node.name)
        if not bag_length(captured, site.graph):
            raise PlanError(f"{node.name} ({node.fqn}, {node.source}): bags of unequal length cannot be sharded")
        count = Local(site.graph.shape(offsets)[0], bags)
        offsets = LocalCall(aten.slice.Tensor, (offsets, 0, 0, count), {})  # offsets are relative to this rank
    if _axes_of_owners(site):
        if node.argument("include_last_offset"):  # where the last bag ends
            offsets = LocalCall(aten.slice.Tensor, (offsets, 0, 0, -1), {})
        return _local_table(
            site,
            BAG_MODES[node.argument("mode")],
            offsets=(offsets,),
            weights=(node.argument("per_sample_weights"),),
            padding=(_padding_row(site),),
        )
    rows_axes = site.axes_of("weight", 0)
    if not rows_axes:
        return site.unchanged(offsets=offsets, sparse=gives_sparse(site))
    extra = {
        "per_sample_weights": node.argument("per_sample_weights"),
        "include_last_offset": node.argument("include_last_offset") or None,
        "padding_idx": _padding_row(site),
        "sparse": gives_sparse(site) or None,
        "mode": mode if (mode := BAG_MODES[node.argument("mode")]) != "sum" else None,
    }
    given = {k: v for k, v in extra.items() if v is not None}
    rows = site.in_type(node.positions["weight"]).shape[0]
    return LocalCall("vocab_embedding_bag", (weight, indices, offsets, rows, axes_argument(rows_axes)), given)


def _padding_row(site: Site) -> int | None:
    """``padding_idx`` as a non-negative row, or None."""
    padding = site.node.argument("padding_idx", None)
    return padding if padding is None else positive(padding, site.in_type(site.node.positions["weight"]).shape[0])


RULES: tuple[Rule, ...] = (
    *rules(
        "embedding.default",
        _lookup_factors,
        _local_embedding,
        "vocab embed, ... -> ... embed",
        sends=True,
        annotate=_share_of_latency,
        facts=Facts("indices", looks_up=True),
    ),
    Rule(
        pooled_op._opoverload,
        partial(_lookup_factors, pooled=True),
        _local_pooled,
        None,
        "vocab embed, ... _ -> ... embed",
        sends=True,
        annotate=_share_of_latency,
        facts=Facts("indices"),
        named="pooled",
    ),
    *rules(
        "embedding_bag.default embedding_bag.padding_idx",
        _bag_factors,
        _local_bag,
        "vocab embed, (bags _), _, (bags _) -> bags embed",
        sends=True,
        annotate=_share_of_latency,
        facts=Facts("indices offsets per_sample_weights result1 result2 result3; per_sample_weights: weight"),
    ),
)
