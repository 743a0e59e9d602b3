"""Ring attention: queries, keys and values cut along the sequence; keys and values, and their gradients, go round.

The run time is :mod:`autoshard.runtime.ring`; here is what it may be used for, what it sends, and how even its work is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autoshard.layout import Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Internal, spell
from autoshard.passes.rules.base import Site
from autoshard.runtime.ring_order import length_of, spans, work

RING, FOLDED = "ring", "folded ring"
LABELS = (RING, FOLDED)
MERGE_KERNELS = 6
"""elementwise kernels that merge a tile's result into that of the tiles before it"""


def strategies(node: Node, graph: Graph, queries: int, keys: int) -> tuple[Strategy, ...]:
    """The ring, and under a causal mask the one in folded order, which leaves all ranks the same work.

    Not where the mask wants a gradient. No other axis may cut queries or keys in another way.
    """
    mask = node.argument("attn_mask")
    if mask is not None and graph.types[mask.name].grad:
        return ()
    labels = LABELS if node.argument("is_causal") and queries == keys else (RING,)
    placements = tuple(_placed(name, graph.shape(node.argument(name)), queries) for name in node.positions)
    result = Shard(len(graph.types[node.outputs[0]].shape) - 2)
    size = min(queries, keys, key=int)
    return tuple(
        Strategy(
            label, placements, (result,), size, divides=True, apart=frozenset(("queries", "keys", *LABELS)) - {label}
        )
        for label in labels
    )


def _placed(name: str, shape: Sequence[int], queries: int) -> Placement:
    """Along the sequence; a mask by its rows, where it has any."""
    if name != "attn_mask":
        return Shard(len(shape) - 2)
    return Shard(len(shape) - 2) if len(shape) > 1 and shape[-2] == queries else R


def local(site: Site, label: str, operands: tuple[Any, ...], axes: tuple[str, ...], shape: tuple[int, ...]) -> Call:
    """The runtime's attention tile by tile; ``label``: "" where queries alone are cut, under a causal mask.

    ``axes``: that cut the queries; ``shape``: the global one of the weights [..., s, t].
    """
    node = site.node
    scale = {} if node.argument("scale") is None else {"scale": node.argument("scale")}
    if not label:
        return Call("causal_rows", operands, {**scale, "queries": shape[-2], "axes": spell(axes)})
    extra: dict[str, Any] = {"is_causal": True} if node.argument("is_causal") else {}
    if node.argument("attn_mask") is not None:
        extra["attn_mask"] = node.argument("attn_mask")
    extra |= {**scale, "queries": shape[-2], "keys": shape[-1], "axes": spell(axes)}
    if label == FOLDED:
        extra["folded"] = True
    if node.argument("dropout_p"):
        cuts = {d: spell(a) for d in range(len(shape) - 2) if (a := site.outputs[0].axes_of(d))}
        extra |= {"dropout_p": node.argument("dropout_p"), "shape": shape, "cuts": cuts}
        extra |= {} if node.batch is None else {"batch": node.batch}
    return Call("ring_attention", operands, extra)


class Tiling(NamedTuple):
    """How the busiest rank computes attention."""

    pairs: float = 1.0
    """pairs of query and key that it computes, over its share of those that count"""
    keys: int = 0
    """how many a kernel sees at a time"""
    tiles: int = 1
    """results over some keys, which are merged"""


def tiling(node: Node, graph: Graph, mesh: Mesh, choice: Sequence[Strategy]) -> Tiling:
    """With a causal mask half of all pairs count. What it hides is left out, but where keys alone are cut: there the mask
    is a tensor, and all are computed. Where queries are cut, the rank with the last ones computes most, but in folded order.
    """
    queries, keys = (int(graph.types[name].shape[-2]) for name in node.inputs[:2])
    causal = bool(node.argument("is_causal"))
    cuts = {s.label for s in choice if s.divides} & {"queries", "keys", *LABELS}
    if not cuts or (cuts == {"queries"} and not causal):
        return Tiling(keys=keys)
    if "keys" in cuts:
        return Tiling(2.0 if causal else 1.0, keys)
    (label,) = cuts
    ranks = tuple(n for s, n in zip(choice, mesh.shape, strict=True) if s.label == label)
    pairs = 1.0
    if causal:
        found = work(queries, keys, ranks, label == FOLDED, label in LABELS)
        pairs = max(found) * len(found) / sum(found)
    if label not in LABELS:
        return Tiling(pairs, keys, 2)
    n = math.prod(ranks)
    return Tiling(pairs, max(1, keys // n), 2 * n + 1 if label == FOLDED else n)


def collectives(site: Site, label: str, axes: tuple[str, ...], queries: int, keys: int) -> tuple[Internal, ...]:
    """Hops of keys and values, and in the backward those of their gradients behind them; swaps of a folded order."""
    mesh: Mesh = site.mesh
    ranks, n = tuple(mesh.size_of(a) for a in axes), mesh.size_of(axes)
    rows, columns = (spans(int(size), ranks, label == FOLDED) for size in (queries, keys))
    column = max(map(length_of, columns))
    element = site.in_type(0).dtype.itemsize
    wide = torch.promote_types(site.in_type(0).dtype, torch.float32).itemsize
    query, key, value = (_features(site, name) for name in ("query", "key", "value"))
    result = math.prod(query[:-1]) * value[-1]
    around = float(column * (math.prod(key) + math.prod(value)))

    def hops(phase: str, what: str, size: int, beside: float) -> list[Internal]:
        return [Internal("permute", axes, around * size, phase, f"{what}, hop {i}", beside) for i in range(1, n)]

    def swap(phase: str, what: str, rows_: int, columns_: bool) -> list[Internal]:
        if label != FOLDED:
            return []
        half, others = max(x[1][1] for x in rows), max(x[1][1] for x in columns) * columns_
        moved = rows_ * half + others * (math.prod(key) + math.prod(value))
        return [Internal("permute", axes, float(moved * element), phase, f"second halves of {what}")]

    whole = math.prod(query)
    found = swap("forward", "queries, keys and values", whole, True) + hops(
        "forward", "keys and values", element, 1 / n
    )
    found += swap("forward", "the result", result, False)
    if site.grad:
        part = element / (element + wide)
        found += swap("backward", "the result and its gradient", 2 * result, False)
        found += hops("backward", "keys and values", element, part / n)
        behind = hops("backward", "gradients of keys and values", wide, (1 - part) / n)
        found += [*behind[:-1], Internal("permute", axes, around * wide, "backward", behind[-1].what)]
        found += swap("backward", "gradients of queries, keys and values", whole, True)
    return tuple(found)


def _features(site: Site, name: str) -> tuple[int, ...]:
    """The local shape of an operand without the sequence; key heads that query heads share, where these are cut alone."""
    *lead, _, last = site.local_shape(name)
    if name != "query" and site.axes("query heads"):
        lead[-1] = site.local_shape("query")[-3]
    return (*lead, last)
