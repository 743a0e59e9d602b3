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
FOLDED_ROWS = "folded queries"
"""queries alone are cut, and swapped so that under a causal mask all ranks have the same work"""
SEQUENCE = ("queries", "keys", FOLDED_ROWS, *LABELS)
"""strategies that cut queries or keys; no two of them go together, but where both are plain"""
MERGE_KERNELS = 6
"""elementwise kernels that merge a tile's result into that of the tiles before it"""
PASSES = 6
"""times that a matrix of weights is read or written: scores, their scale, the softmax's two passes, the last product"""


def strategies(node: Node, graph: Graph, queries: int, keys: int) -> tuple[Strategy, ...]:
    """The ring, and under a causal mask the folded orders, which leave all ranks the same work.

    A ring not where the mask wants a gradient. No other axis may cut queries or keys in another way, nor features of
    values, so that tiles have a fused kernel.
    """
    mask, causal, found = (
        node.argument("attn_mask"),
        bool(node.argument("is_causal")),
        list[tuple[str, tuple[str, ...]]](),
    )
    if mask is None or not graph.types[mask.name].grad:
        found = [(label, ()) for label in (LABELS if causal and queries == keys else (RING,))]
    if causal and not node.argument("dropout_p"):
        found.append((FOLDED_ROWS, ("key", "value")))
    result = Shard(len(graph.types[node.outputs[0]].shape) - 2)
    made = []
    for label, whole in found:
        cut = {name: _placed(name, graph.shape(node.argument(name)), queries) for name in node.positions}
        placements = tuple(R if name in whole else placement for name, placement in cut.items())
        size = queries if whole else min(queries, keys, key=int)
        made.append(
            Strategy(label, placements, (result,), size, divides=True, apart=frozenset((*SEQUENCE, "embed")) - {label})
        )
    return tuple(made)


def _placed(name: str, shape: Sequence[int], queries: int) -> Placement:
    """Along the sequence; a mask by its rows, where it has any."""
    if name != "attn_mask":
        return Shard(len(shape) - 2)
    return Shard(len(shape) - 2) if len(shape) > 1 and shape[-2] == queries else R


def local(site: Site, label: str, operands: tuple[Any, ...], axes: tuple[str, ...], shape: tuple[int, ...]) -> Call:
    """The runtime's attention tile by tile; ``label``: "" where queries alone are cut, under a causal mask, as they lie.

    ``axes``: that cut the queries; ``shape``: the global one of the weights [..., s, t].
    """
    node = site.node
    scale = {} if node.argument("scale") is None else {"scale": node.argument("scale")}
    if label not in LABELS:
        order = {"folded": True} if label == FOLDED_ROWS else {}
        return Call("causal_rows", operands, {**scale, "queries": shape[-2], "axes": spell(axes), **order})
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
    fused: bool = True
    """whether it needs no matrix of weights that it would not need on one device"""


def tiling(node: Node, graph: Graph, mesh: Mesh, choice: Sequence[Strategy]) -> Tiling:
    """With a causal mask half of all pairs count. What it hides is left out, but where keys alone are cut: there the mask
    is a tensor, and all are computed. Where queries are cut, the rank with the last ones computes most, but in folded order.
    Where the value's features are cut, every rank computes all weights.
    """
    queries, keys = (int(graph.types[name].shape[-2]) for name in node.inputs[:2])
    causal, ranks = bool(node.argument("is_causal")), dict[str, tuple[int, ...]]()
    for strategy, n in zip(choice, mesh.shape, strict=True):
        ranks[strategy.label] = (*ranks.get(strategy.label, ()), n)
    pairs = 1.0
    if "embed" in ranks:
        made, summed = (graph.types[node.inputs[i]].shape[-1] for i in (2, 0))
        pairs = (math.prod(ranks["embed"]) * summed + made) / (summed + made)
    label = next((x for x in SEQUENCE if x in ranks), "")
    if label == "keys":
        return Tiling(pairs * (2.0 if causal else 1.0), keys, fused=False)
    if label and causal:
        found = work(queries, keys, ranks[label], label in (FOLDED, FOLDED_ROWS), label in LABELS)
        pairs *= max(found) * len(found) / sum(found)
    if label not in LABELS:
        tiles = 4 if label == FOLDED_ROWS else 2 if label and causal else 1
        return Tiling(pairs, keys, tiles, "embed" not in ranks)
    n = math.prod(ranks[label])
    return Tiling(pairs, max(1, keys // n), 2 * n + 1 if label == FOLDED else n, "embed" not in ranks)


def collectives(site: Site, label: str, queries: int, keys: int) -> tuple[Internal, ...]:
    """Hops of keys and values, and in the backward those of their gradients behind them; swaps of a folded order."""
    axes = site.axes(label)
    ranks, n = tuple(site.mesh.size_of(a) for a in axes), site.mesh.size_of(axes)
    folded, around = label in (FOLDED, FOLDED_ROWS), label in LABELS
    rows, columns = (spans(int(size), ranks, folded) for size in (queries, keys))
    element = site.in_type(0).dtype.itemsize
    wide = torch.promote_types(site.in_type(0).dtype, torch.float32).itemsize
    query, key, value = (math.prod(_features(site, name)) for name in ("query", "key", "value"))
    result = query // _features(site, "query")[-1] * _features(site, "value")[-1]
    longest = max(map(length_of, columns)) * (key + value)

    def hops(phase: str, what: str, size: int, beside: float, last: float) -> list[Internal]:
        each = [beside] * (n - 2) + [last]
        return [
            Internal("permute", axes, float(longest * size), phase, f"{what}, hop {i}", share / n)
            for i, share in enumerate(each, 1)
            if around
        ]

    def swap(phase: str, what: str, of_rows: int, of_columns: int = 0) -> list[Internal]:
        if not folded:
            return []
        moved = of_rows * max(x[1][1] for x in rows) + of_columns * around * max(x[1][1] for x in columns)
        return [Internal("permute", axes, float(moved * element), phase, f"second halves of {what}")]

    found = swap("forward", "the operands", query, key + value)
    found += hops("forward", "keys and values", element, 1.0, 1.0) + swap("forward", "the result", result)
    if site.grad:  # the last gradients come home when nothing is left to compute
        part = element / (element + wide)
        found += swap("backward", "the result and its gradient", 2 * result)
        found += hops("backward", "keys and values", element, part, part)
        found += hops("backward", "gradients of keys and values", wide, 1 - part, 0.0)
        found += swap("backward", "the gradients", query, key + value)
    return tuple(found)


def _features(site: Site, name: str) -> tuple[int, ...]:
    """The local shape of an operand, without the sequence; key heads that query heads share, where these are cut alone."""
    *lead, _, last = site.local_shape(name)
    if name != "query" and site.axes("query heads"):
        lead[-1] = site.local_shape("query")[-3]
    return (*lead, last)
