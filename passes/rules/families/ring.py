"""Queries, keys and values cut along the sequence: ring attention, where keys and values, and their gradients, go round, and
keys and values that are gathered in pieces.

The run time is :mod:`autoshard.runtime.attention.ring`; here is what it may be used for, what it sends, and how even its
work is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.layout import Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Strategy, laid_out, used
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Internal, spell
from autoshard.passes.rules.base import Site
from autoshard.runtime.attention.banded import banded_op
from autoshard.runtime.attention.order import (
    ALL,
    CAUSAL,
    ROWS,
    Band,
    exchanged,
    held,
    helped_work,
    longest,
    received,
    spans,
    stops,
    work,
)
from autoshard.runtime.attention.pieces import boxes_of

ATTENTION = frozenset({aten.scaled_dot_product_attention.default, banded_op._opoverload})

RING, FOLDED, HELPED = "ring", "folded ring", "ring with helpers"
LABELS = (RING, FOLDED, HELPED)
PIECES, FOLDED_PIECES = "gathered in pieces", "folded, gathered in pieces"
GATHERED = (PIECES, FOLDED_PIECES)
ALONG = (*LABELS, *GATHERED)
"""strategies that cut queries, keys and values"""
FOLDED_ROWS = "folded queries"
"""queries alone are cut, and swapped so that under a causal mask all ranks have the same work"""
SEQUENCE = ("queries", "keys", FOLDED_ROWS, *ALONG)
"""strategies that cut queries or keys; no two of them go together, but where both are plain"""
IN_FOLDED_ORDER = (FOLDED, FOLDED_ROWS, FOLDED_PIECES)
PIECE = 128 * 2**20
"""bytes that the keys and values of a piece have at most, unless one head of a sequence has more: two pieces and
their gradients, which are wider, take less than a gigabyte"""
LAUNCHES = 10
"""kernels that a piece adds, forward and backward, for each of its three collectives"""
MERGE_KERNELS = 6
"""elementwise kernels that merge a tile's result into that of the tiles before it"""
PASSES = 6
"""times that a matrix of weights is read or written: scores, their scale, the softmax's two passes, the last product"""
PASSES_OF_DROPOUT = 12
"""the same where all weights are spelled out, as dropout wants: with a mask, rows that see nothing, and what is dropped"""


def band_of(node: Node) -> Band:
    """The keys that a query of an attention sees by its position."""
    if node.op is banded_op._opoverload:
        return Band(node.argument("before"), node.argument("after"))
    return CAUSAL if node.argument("is_causal") else ALL


def order_of(node: Node) -> int:
    """Of how many ranks the folded order is in which an attention reads and makes the sequence; 0: its own."""
    order: int = node.argument("folded", 0)
    return order


def strategies(node: Node, graph: Graph, queries: int, keys: int) -> tuple[Strategy, ...]:
    """The ring, and under a causal mask the folded orders and the ring with helpers, which leave all ranks the same work.

    A ring not where the mask wants a gradient. No other axis may cut queries or keys in another way, nor features of
    values, so that tiles have a fused kernel. What comes in folded order is cut by as many ranks as that is of.
    """
    mask, found = node.argument("attn_mask"), list[tuple[str, tuple[str, ...]]]()
    rows = mask is not None and _has_rows(graph.shape(mask), queries)  # which would have to be folded as well
    causal = band_of(node) == CAUSAL and not rows
    if mask is None or not graph.types[mask.name].grad:
        even = causal and queries == keys
        plain = not node.argument("dropout_p", 0.0) and not node.argument("sloped", False)
        found = [(label, ()) for label in LABELS if label == RING or (even and (label == FOLDED or plain))]
        found += [(label, ()) for label in GATHERED if label == PIECES or even]
    if causal and (node.op is banded_op._opoverload or not node.argument("dropout_p", 0.0)):
        found.append((FOLDED_ROWS, ("key", "value")))
    result = Shard(len(graph.types[node.outputs[0]].shape) - 2)
    made = []
    for label, whole in found:
        cut = {name: _placed(name, graph.shape(node.argument(name)), queries) for name in node.positions}
        placements = tuple(R if name in whole else placement for name, placement in cut.items())
        size, apart = queries if whole else min(queries, keys, key=int), frozenset((*SEQUENCE, "embed")) - {label}
        ranks = order_of(node) or None
        if ranks is None or label in IN_FOLDED_ORDER:
            made.append(Strategy(label, placements, (result,), size, divides=True, apart=apart, ranks=ranks))
    return tuple(made)


def _placed(name: str, shape: Sequence[int], queries: int) -> Placement:
    """Along the sequence; a mask by its rows, where it has any; sinks whole."""
    if name == "sinks":
        return R
    if name != "attn_mask":
        return Shard(len(shape) - 2)
    return Shard(len(shape) - 2) if _has_rows(shape, queries) else R


def _has_rows(mask: Sequence[int], queries: int) -> bool:
    return len(mask) > 1 and mask[-2] == queries and queries != 1


def local(site: Site, label: str, operands: tuple[Any, ...], axes: tuple[str, ...], shape: tuple[int, ...]) -> Call:
    """The runtime's attention tile by tile; ``label``: "" where keys are whole, and queries are not folded.

    ``axes``: that cut the queries; ``shape``: the global one of the weights [..., s, t].
    """
    node, band = site.node, band_of(site.node)
    scale = {} if node.argument("scale") is None else {"scale": node.argument("scale")}
    seen = {name: n for name, n in band._asdict().items() if n is not None}
    mask: dict[str, Any] = {} if node.argument("attn_mask") is None else {"attn_mask": node.argument("attn_mask")}
    more = {name: node.argument(name, None) for name in ("sloped", "sinks", "soft_cap")}
    mask |= {name: x for name, x in more.items() if x not in (None, False)}
    if node.argument("dropout_p", 0.0):
        cuts = {d: spell(a) for d in range(len(shape) - 2) if (a := site.outputs[0].axes_of(d))}
        mask |= {"dropout_p": node.argument("dropout_p"), "shape": shape, "cuts": cuts}
        mask |= {} if node.batch is None else {"batch": node.batch}
    carried = {"carried": True} if order_of(node) else {}
    if label not in ALONG:
        cut: dict[str, Any] = {"queries": shape[-2], "axes": spell(axes)} if axes else {}
        order = (carried or {"folded": True}) if label == FOLDED_ROWS else {}
        return Call("banded_rows", operands, {**mask, **scale, **cut, **seen, **order})
    extra: dict[str, Any] = {"is_causal": True} if band == CAUSAL else seen
    extra |= {**mask, **scale, "queries": shape[-2], "keys": shape[-1], "axes": spell(axes)}
    if label in (FOLDED, FOLDED_PIECES, HELPED):
        extra |= carried or {"helpers" if label == HELPED else "folded": True}
    if label in GATHERED:
        cut_in = _cut(site.example, axes, int(shape[-1]))
        extra |= {"pieces": cut_in.pieces} | ({"batches": cut_in.batches} if cut_in.batches > 1 else {})
    return Call("gathered_attention" if label in GATHERED else "ring_attention", operands, extra)


class _Cut(NamedTuple):
    """Keys and values in pieces."""

    pieces: int
    """of the heads"""
    batches: int
    """parts of the batch that each of these comes in"""
    widths: tuple[int, ...]
    """of every piece the elements of a position's keys and values"""


def _cut(site: Site, axes: tuple[str, ...], keys: int) -> _Cut:
    """The pieces of keys and values that are gathered over ``axes``: some heads of the batch, or some sequences of one head.

    Nothing hides what comes first, and each piece has a latency: w seconds on the wire and a of latencies are least,
    w/n + n·a, in n = √(w/a) pieces.
    """
    shapes = [_features(site, name) for name in ("query", "key", "value")]
    counts = [s[-2] if len(s) > 1 else 1 for s in shapes]
    sequences = {s[-3] if len(s) > 2 else 1 for s in shapes}
    batch = sequences.pop() if len(sequences) == 1 else 1
    widths = [math.prod(s) // max(1, n * batch) for s, n in zip(shapes, counts, strict=True)]
    heads = max(1, math.gcd(*counts))
    size = sum(math.prod(s) for s in shapes[1:]) * keys * site.in_type(0).dtype.itemsize
    latency, rate = site.mesh.link(axes).rate("all_gather")
    latency += LAUNCHES * site.mesh.hardware.kernel_latency
    units = heads * max(1, batch)
    least = math.sqrt(rate * size / latency) if latency else units
    each = max(1, int(min(units * PIECE / max(1, size), units / max(1, round(least)))))
    pieces = math.ceil(heads / max(1, each // max(1, batch)))
    batches = math.ceil(batch / each) if each < batch else 1
    found = (
        sum(length * n * w for (_, n), w in zip(of[1:], widths[1:], strict=True))
        for (_, length), of in boxes_of(batch, counts, batches, pieces)
    )
    return _Cut(pieces, batches, tuple(found))


class Tiling(NamedTuple):
    """How the busiest rank computes attention."""

    pairs: float = 1.0
    """pairs of query and key that it computes, over its share of those that count"""
    keys: int = 0
    """how many a kernel sees at a time"""
    tiles: int = 1
    """results over some keys, which are merged"""
    pieces: int = 1
    """of heads or sequences, each of which has as many"""
    matrix: float = 0.0
    """keys of every row whose weights are written down: by no fused kernel"""
    passes: int = PASSES
    """times that these are read or written"""


def tiling(node: Node, graph: Graph, mesh: Mesh, choice: Sequence[Strategy]) -> Tiling:
    """Only pairs that positions show count. What they hide is left out, but where keys alone are cut: there the mask is a
    tensor, and all are computed. Where queries are cut, under a causal mask the rank with the last ones computes most, but
    in folded order.
    Where the value's features are cut, every rank computes all weights.
    """
    queries, keys = (int(graph.types[name].shape[-2]) for name in node.inputs[:2])
    band, ranks = band_of(node), dict[str, tuple[int, ...]]()
    for strategy, n in zip(choice, mesh.shape, strict=True):
        ranks[strategy.label] = (*ranks.get(strategy.label, ()), n)
    pairs = 1.0
    if "embed" in ranks:
        made, summed = (graph.types[node.inputs[i]].shape[-1] for i in (2, 0))
        pairs = (math.prod(ranks["embed"]) * summed + made) / (summed + made)
    label, whole = next((x for x in SEQUENCE if x in ranks), ""), pairs
    counting = band.pairs(queries, keys) or 1.0
    drops, banded = bool(node.argument("dropout_p", 0.0)), node.op is banded_op._opoverload
    passes = PASSES_OF_DROPOUT if drops and not banded else PASSES
    if label == "keys":
        return Tiling(whole * queries * keys / counting, keys, matrix=keys / math.prod(ranks[label]), passes=passes)
    if label == HELPED:
        found = helped_work(queries, ranks[label])
        pairs *= max(found) * len(found) / counting
    elif (label and band != ALL) or band.before is not None:
        found = work(queries, keys, ranks.get(label, ()), label in IN_FOLDED_ORDER, label in LABELS, band)
        pairs *= max(found) * len(found) / counting
    matrix = keys if "embed" in ranks else 0.0
    if node.argument("soft_cap", None) is not None or (drops and banded):
        matrix = pairs * counting / queries
    elif drops:  # a causal mask is a tensor; in tiles products in single precision take as much longer as it leaves out
        pairs = (whole if label == "queries" else pairs) * queries * keys / counting
        matrix = pairs * counting / queries
    if label not in LABELS:
        tiles = 4 if label in IN_FOLDED_ORDER else 2 if label and band == CAUSAL else 1
        pieces = 1
        if label in GATHERED:
            read = (used(choice, i, graph.types[name].grad) for i, name in enumerate(node.inputs))
            site = Site(node, graph, mesh, tuple(laid_out(mesh, placed) for placed in read), (), tuple(choice))
            pieces = len(_cut(site.example, site.axes(label), keys).widths)
        return Tiling(pairs, _at_a_time(band, keys), tiles, pieces, matrix, passes)
    n = len(stops(*held(queries, keys, ranks[label], False), band))
    each = max(1, keys // math.prod(ranks[label]))
    if label == HELPED:
        return Tiling(pairs, each, 1 + math.prod(ranks[label]) // 2, matrix=matrix, passes=passes)
    apart = (n == 2 and not order_of(node)) or "attn_mask" in node.positions or node.argument("dropout_p", 0.0)
    tiles = 2 * n + (n > 2) if label == FOLDED and apart else n
    return Tiling(pairs, _at_a_time(band, each), tiles, matrix=matrix, passes=passes)


def in_tiles(node: Node, graph: Graph, tile: int) -> float:
    """Pairs that are computed over pairs that count, where a causal mask leaves out ``tile`` keys at a time; 0: each."""
    if not tile or band_of(node) != CAUSAL:
        return 1.0
    queries, keys = (int(graph.types[name].shape[-2]) for name in node.inputs[:2])
    seen = sum(min(keys, math.ceil((q + 1) / tile) * tile) for q in range(queries))
    return seen / (CAUSAL.pairs(queries, keys) or 1.0)


def reordered(node: Node, choice: Sequence[Strategy], shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements that a rank puts into another order, of operands and a result of these local shapes: those in folded order that
    it has, or gathers, of the whole sequence."""
    order, labels = order_of(node), {s.label for s in choice}
    if not order or FOLDED in labels:
        return 0
    query, *keys = (math.prod(shapes[node.positions[name]]) for name in ("query", "key", "value"))
    if FOLDED_PIECES in labels:
        return order * sum(keys)
    return sum(keys) + (0 if FOLDED_ROWS in labels else query + math.prod(shapes[-1]))


def _at_a_time(band: Band, keys: int) -> int:
    """How many of ``keys`` a kernel sees at a time."""
    return keys if band.before is None else min(keys, ROWS + band.before + (band.after or 0))


def collectives(site: Site, label: str, queries: int, keys: int) -> tuple[Internal, ...]:
    """Hops of keys and values, and in the backward those of their gradients behind them; swaps of a folded order."""
    axes = site.axes(label)
    ranks = tuple(site.mesh.size_of(a) for a in axes)
    if label == HELPED:
        return _with_helpers(site, axes, exchanged(spans(int(queries), ranks, False)))
    carried, around = bool(order_of(site.node)), label in LABELS
    folded = label in IN_FOLDED_ORDER and not carried
    rows, columns = held(int(queries), int(keys), ranks, folded, carried)
    element = site.in_type(0).dtype.itemsize
    wide = torch.promote_types(site.in_type(0).dtype, torch.float32).itemsize
    query, key, value = (math.prod(_features(site, name)) for name in ("query", "key", "value"))
    result = query // _features(site, "query")[-1] * _features(site, "value")[-1]
    band = band_of(site.node)
    there = stops(rows, columns, band)
    lengths = [longest(rows, columns, band, stop) for stop in there]

    def hops(phase: str, what: str, size: int, beside: float, last: float) -> list[Internal]:
        each = [beside] * (len(there) - 2) + [last]
        return [
            Internal(
                "permute", axes, float(lengths[i] * (key + value) * size), phase, f"{what}, hop {i}", share / len(there)
            )
            for i, share in enumerate(each, 1)
            if around and len(there) > 1
        ]

    def swap(phase: str, what: str, of_rows: int, of_columns: int = 0) -> list[Internal]:
        if not folded:
            return []
        orders = [(rows, of_rows), (columns, of_columns if around and len(columns[0]) > 1 else 0)]
        moved = sum(max(x[received(r, len(of))][1] for r, x in enumerate(of)) * each for of, each in orders if each)
        return [Internal("permute", axes, float(moved * element), phase, f"halves of {what}")]

    found = swap("forward", "the operands", query, key + value)
    found += hops("forward", "keys and values", element, 1.0, 1.0) + _gathers(site, label, int(keys), "forward")
    found += swap("forward", "the result", result)
    if site.grad:  # the last gradients come home when nothing is left to compute
        part = element / (element + wide)
        found += swap("backward", "the result's gradient", result)
        found += hops("backward", "keys and values", element, part, part)
        found += hops("backward", "gradients of keys and values", wide, 1 - part, 0.0)
        found += _gathers(site, label, int(keys), "backward")
        found += swap("backward", "the gradients", query, key + value)
    return tuple(found)


def _gathers(site: Site, label: str, keys: int, phase: str) -> list[Internal]:
    """Of keys and values in pieces, each beside the work on the one before; in the backward their gradients are summed and
    scattered beside the work on the one after, where the two share the time."""
    if label not in GATHERED:
        return []
    axes, dtype = site.axes(label), site.in_type(0).dtype
    ranks = site.mesh.size_of(axes)
    element, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    rows, pieces = math.ceil(keys / ranks) * ranks, _cut(site, axes, keys).widths
    each, found = 1 / len(pieces), list[Internal]()
    for i, width in enumerate(pieces):
        share = 0.0 if i == 0 else each if phase == "forward" or i == 1 else each * element / (element + wide)
        found.append(
            Internal("all_gather", axes, float(rows * width * element), phase, f"keys and values, piece {i + 1}", share)
        )
    for i, width in enumerate(pieces if phase == "backward" else ()):
        left = len(pieces) - 1 - i
        share = 0.0 if left == 0 else each if left == 1 else each * wide / (element + wide)
        what = f"gradients of keys and values, piece {i + 1}"
        found.append(Internal("reduce_scatter", axes, float(rows * width * wide), phase, what, share))
    return found


def _with_helpers(site: Site, axes: tuple[str, ...], longest: tuple[tuple[int, int], ...]) -> tuple[Internal, ...]:
    """In every step keys and values or queries, and what was made of them; ``longest``: of both, as elements of a sequence.

    A message runs beside the tile that was there when it began: of the work of n/2 tiles the own one is half of one.
    """
    dtype, ranks = site.in_type(0).dtype, math.prod(site.mesh.size_of(a) for a in axes)
    query, key, value = (math.prod(_features(site, name)) for name in ("query", "key", "value"))
    heads = query // _features(site, "query")[-1]
    result = heads * _features(site, "value")[-1]
    sums = heads * torch.promote_types(dtype, torch.float32).itemsize // dtype.itemsize
    work = [1 / ranks, *(2 / ranks if 2 * t < ranks else 1 / ranks for t in range(1, ranks // 2 + 1))]

    def steps(phase: str, there: tuple[int, int], back: tuple[int, int]) -> list[Internal]:
        sizes = [[max(r * rows, c * columns) * dtype.itemsize for rows, columns in longest] for r, c in (there, back)]
        found = []
        for t, (out, home) in enumerate(zip(*sizes, strict=True)):
            together = (out, sizes[1][t - 2]) if t > 1 else (out,)  # what comes home of the step before last
            found.append(_hop(axes, out, phase, f"keys or queries, step {t + 1}", work[t] * out / (sum(together) or 1)))
            rest = work[t + 2] if t + 2 < len(work) else 0.0
            following = sizes[0][t + 2] if t + 2 < len(longest) else 0.0
            found.append(_hop(axes, home, phase, f"what comes of step {t + 1}", rest * home / (home + following or 1)))
        return found

    found = steps("forward", (query, key + value), (result + sums, 0))
    if site.grad:
        found += steps("backward", (query + 2 * result + sums, key + value), (query, key + value))
    return tuple(found)


def _hop(axes: tuple[str, ...], size: float, phase: str, what: str, beside: float) -> Internal:
    return Internal("permute", axes, float(size), phase, what, beside)


def _features(site: Site, name: str) -> tuple[int, ...]:
    """The local shape of an operand, without the sequence; key heads that query heads share, where these are cut alone."""
    *lead, _, last = site.local_shape(name)
    if name != "query" and site.axes("query heads"):
        lead[-1] = site.local_shape("query")[-3]
    return (*lead, last)
