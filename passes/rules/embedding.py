"""Embedding tables: cut by rows (vocabulary), by columns, or looked up for a part of the indices."""

from __future__ import annotations

import torch

from autoshard.errors import PlanError
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Local, spell
from autoshard.passes.rules.base import Facts, Rule, Site, rules
from autoshard.passes.rules.factors import Dims, Factors, inputs, numbered, sizes_of

aten = torch.ops.aten

BAG_MODES = ("sum", "mean", "max")


def _embedding(node: Node, graph: Graph) -> Factors:
    """Index dims, columns, and rows: each rank looks up the rows it holds, and they sum up (P)."""
    indices, weight = graph.shape(node.argument("indices")), graph.shape(node.argument("weight"))
    named = numbered(indices)
    sizes = {**sizes_of(indices), "vocab": weight[0], "embed": weight[1]}
    if node.argument("scale_grad_by_freq"):  # frequencies are those of the whole batch
        sizes = {"embed": weight[1]}
    return Factors(
        inputs(node, {"weight": ("vocab", "embed"), "indices": named}),
        ((*named, "embed"),),
        sizes,
        linear=((node.positions["weight"],),),
    )


def _local_embedding(site: Site) -> Call:
    axes, sparse = site.axes_of("weight", 0), gives_sparse(site)
    if not axes:
        return site.unchanged() if sparse == site.node.argument("sparse") else site.unchanged(sparse=sparse)
    weight, indices, padding = (site.node.argument(a) for a in ("weight", "indices", "padding_idx"))
    rows = site.in_type(site.node.positions["weight"]).shape[0]
    extra: dict[str, object] = {"padding_idx": padding} if padding >= 0 else {}
    if sparse:
        extra["sparse"] = True
    return Call("vocab_embedding", (weight, indices, rows, spell(axes)), extra)


def gives_sparse(site: Site) -> bool:
    """Whether the table's gradient is sparse: every use of it asks for that, as in eager the sum with a dense one is dense."""
    return bool(site.in_type(site.node.positions["weight"]).looked_up)


def _bag(node: Node, graph: Graph) -> Factors:
    """Columns always; rows where bags are sums; bags where all are equally long, so that their indices can be cut."""
    weight, bags = graph.shape(node.argument("weight")), graph.shape(node.argument("offsets"))[0]
    sizes: dict[str, int] = {"embed": weight[1]}
    if BAG_MODES[node.argument("mode")] == "sum" and not node.argument("scale_grad_by_freq"):
        sizes["vocab"] = weight[0]
    if bag_length(node, graph) and not node.argument("scale_grad_by_freq"):
        sizes["bags"] = bags
    if node.output_slots != (0,):  # the op's book-keeping is wanted too
        sizes = {}
    flat: Dims = ("bags",)
    dims: dict[str, Dims] = {"weight": ("vocab", "embed"), "indices": flat, "offsets": (None,)}
    ranks = [len(graph.types[name].shape) for name in node.outputs]
    return Factors(
        inputs(node, {**dims, "per_sample_weights": flat}),
        tuple(
            (None,) * rank if slot else ("bags", "embed") for slot, rank in zip(node.output_slots, ranks, strict=True)
        ),
        sizes,
        even=frozenset({"bags"}),
        linear=((node.positions["weight"],),) if "vocab" in sizes else (),
    )


def bag_length(node: Node, graph: Graph) -> int:
    """The length of all bags where ``F.embedding_bag`` made the offsets from 2-D indices; 0 where it is not known."""
    made = graph.producers.get(node.argument("offsets").name)
    if made is None or made.op is not aten.arange.start_step or node.argument("include_last_offset"):
        return 0
    start, end, step = (made.argument(a) for a in ("start", "end", "step"))
    regular = start == 0 and end == graph.shape(node.argument("indices"))[0] and end % step == 0
    return int(step) if regular else 0


def _local_bag(site: Site) -> Call:
    node = site.node
    weight, indices, offsets = (node.argument(a) for a in ("weight", "indices", "offsets"))
    if bags := site.axes("bags"):
        captured = next(n for n in site.graph.nodes if n.name == node.name)
        if not bag_length(captured, site.graph):
            raise PlanError(f"{node.name} ({node.fqn}, {node.source}): bags of unequal length cannot be sharded")
        count = Local(site.graph.shape(offsets)[0], bags)
        offsets = Call(aten.slice.Tensor, (offsets, 0, 0, count), {})  # starts count from this rank's first index
    rows_axes = site.axes_of("weight", 0)
    if not rows_axes:
        return site.unchanged(offsets=offsets, sparse=gives_sparse(site))
    rows = site.in_type(node.positions["weight"]).shape[0]
    padding = node.argument("padding_idx") if node.op is aten.embedding_bag.padding_idx else None
    extra = {
        "per_sample_weights": node.argument("per_sample_weights"),
        "include_last_offset": node.argument("include_last_offset") or None,
        "padding_idx": padding if padding is None or padding >= 0 else padding + rows,
        "sparse": gives_sparse(site) or None,
    }
    given = {k: v for k, v in extra.items() if v is not None}
    return Call("vocab_embedding_bag", (weight, indices, offsets, rows, spell(rows_axes)), given)


RULES: tuple[Rule, ...] = (
    *rules("embedding.default", _embedding, _local_embedding, "vocab embed, ... -> ... embed", facts=Facts("indices")),
    *rules(
        "embedding_bag.default embedding_bag.padding_idx",
        _bag,
        _local_bag,
        "vocab embed, (bags _), _, (bags _) -> bags embed",
        facts=Facts("indices offsets per_sample_weights result1 result2 result3; per_sample_weights: weight"),
    ),
)
