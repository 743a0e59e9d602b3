"""Context parallelism: ring attention, keys and values gathered in head chunks, and the zigzag
(load-balanced) order, which gives every rank equal causal work. Kernels:
:mod:`autoshard.runtime.attention`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from autoshard.aten import aten
from autoshard.layout import Placement, R, Shard
from autoshard.mesh import Mesh
from autoshard.passes.ir.assignment import Strategy, cached_layout, operand_placements
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import InternalCollective, LocalCall, axes_argument
from autoshard.passes.rules.base import KEEPS_NOTHING, Factors, Rule, Site, Space, numbered_factors, positive, sizes_of
from autoshard.runtime.attention.head_chunks import head_chunk_boxes
from autoshard.runtime.attention.masked_attention import banded_op
from autoshard.runtime.attention.ring_geometry import (
    ALL_KEYS,
    CAUSAL,
    WINDOW_BLOCK_ROWS,
    Band,
    balanced_pairs_per_rank,
    longest_exchanged,
    longest_keys,
    pairs_per_rank,
    query_and_key_spans,
    rank_spans,
    received_half,
    ring_schedule,
)
from autoshard.runtime.attention.zigzag import from_zigzag_op, to_zigzag_op

ATTENTION_OPS = frozenset({aten.scaled_dot_product_attention.default, banded_op._opoverload})

RING, ZIGZAG_RING, HELPED_RING = "ring", "zigzag ring", "ring with helpers"
RING_LABELS = (RING, ZIGZAG_RING, HELPED_RING)
CHUNKED, ZIGZAG_CHUNKED = "gathered in chunks", "zigzag, gathered in chunks"
CHUNKED_LABELS = (CHUNKED, ZIGZAG_CHUNKED)
SEQUENCE_SHARDED = (*RING_LABELS, *CHUNKED_LABELS)
"""strategies that shard queries, keys and values"""
ZIGZAG_QUERIES = "zigzag queries"
"""only queries are sharded, in zigzag order, so that causal work is even"""
SEQUENCE_LABELS = ("queries", "keys", ZIGZAG_QUERIES, *SEQUENCE_SHARDED)
"""strategies that shard queries or keys; two of them combine only if both are plain"""
ZIGZAG_LABELS = (ZIGZAG_RING, ZIGZAG_QUERIES, ZIGZAG_CHUNKED)
CHUNK_BYTES = 128 * 2**20
"""most bytes of keys and values per chunk; two chunks and their gradients stay below 1 GB"""
MERGE_KERNELS = 6
"""elementwise kernels that merge the result of a tile"""
MATRIX_PASSES = 6
"""reads and writes of an unfused attention matrix: scores, scale, softmax (2), product; as many more with dropout"""


def band_of(node: Node) -> Band:
    """The keys that a query sees by position."""
    if node.op is banded_op._opoverload:
        return Band(node.argument("before"), node.argument("after"))
    return CAUSAL if node.argument("is_causal") else ALL_KEYS


def zigzag_order_ranks(node: Node) -> int:
    """Number of ranks of the zigzag order of an attention's operands; 0: sequential order."""
    return node.argument("folded", 0)


def sequence_strategies(node: Node, graph: Graph, queries: int, keys: int) -> tuple[Strategy, ...]:
    """Ring attention, head chunks, and with a causal mask zigzag orders and a ring with helpers.
    The balanced forms give all ranks equal causal work. No ring if the mask has a gradient. Other
    axes may not shard queries, keys or value features otherwise, so that tiles have a fused kernel.
    Operands in zigzag order are sharded by as many ranks as the order has. More than 64 ranks share
    a sequence where each has 128 queries, as many as a fused kernel's tile, and never more than
    256."""
    mask, found = node.argument("attn_mask"), list[tuple[str, tuple[str, ...]]]()
    rows = mask is not None and _has_rows(graph.shape(mask), queries)  # would need zigzag order
    causal = band_of(node) == CAUSAL and not rows
    if mask is None or not graph.types[mask.name].grad:
        even = causal and queries == keys
        plain = not node.argument("dropout_p", 0.0) and not node.argument("sloped", False)
        found = [(label, ()) for label in RING_LABELS if label == RING or (even and (label == ZIGZAG_RING or plain))]
        found += [(label, ()) for label in CHUNKED_LABELS if label == CHUNKED or even]
    if causal and (node.op is banded_op._opoverload or not node.argument("dropout_p", 0.0)):
        found.append((ZIGZAG_QUERIES, ("key", "value")))
    result = Shard(len(graph.types[node.outputs[0]].shape) - 2)
    made = []
    for label, whole in found:
        cut = {name: _sequence_placement(name, graph.shape(node.argument(name)), queries) for name in node.positions}
        placements = tuple(R if name in whole else placement for name, placement in cut.items())
        most = min(max(64, int(queries) // 128), 256)  # the time to price a ring is its ranks' square
        length = min(queries, queries if whole else keys, key=int)
        apart = frozenset((*SEQUENCE_LABELS, "embed")) - {label}
        ranks = zigzag_order_ranks(node) or None
        if ranks is None or label in ZIGZAG_LABELS:
            made.append(
                Strategy(label, placements, (result,), length, divides=True, apart=apart, most=most, ranks=ranks)
            )
    return tuple(made)


def _sequence_placement(name: str, shape: Sequence[int], queries: int) -> Placement:
    """Sharded along the sequence; masks by rows if they have any; sinks replicated."""
    if name == "sinks":
        return R
    if name != "attn_mask":
        return Shard(len(shape) - 2)
    return Shard(len(shape) - 2) if _has_rows(shape, queries) else R


def _has_rows(mask: Sequence[int], queries: int) -> bool:
    return len(mask) > 1 and mask[-2] == queries and queries != 1


def tiled_attention_call(
    site: Site, label: str, operands: tuple[Any, ...], axes: tuple[str, ...], shape: tuple[int, ...]
) -> LocalCall:
    """The runtime's tiled attention over queries sharded by ``axes``; ``label`` "" if keys are
    unsharded and not in zigzag order; ``shape``: global [..., queries, keys]."""
    node, sharded = site.node, label in SEQUENCE_SHARDED
    spec: dict[str, Any] = {"queries": shape[-2]} if axes or sharded else {}
    spec |= {"keys": shape[-1]} if sharded else {}
    spec |= {"axes": axes_argument(axes)} if axes or sharded else {}
    given = band_of(node)._asdict() | {name: node.argument(name, None) for name in ("scale", "sloped", "soft_cap")}
    spec |= {name: x for name, x in given.items() if x is not None and x is not False}
    if node.argument("dropout_p", 0.0):
        cuts = {d: axes_argument(a) for d in range(len(shape) - 2) if (a := site.outputs[0].axes_of(d))}
        spec |= {"dropout_p": node.argument("dropout_p"), "shape": shape, "cuts": cuts}
        spec |= {} if node.batch is None else {"batch": node.batch}
    if label in (*ZIGZAG_LABELS, HELPED_RING):
        order = "carried" if zigzag_order_ranks(node) else "helpers" if label == HELPED_RING else "folded"
        spec[order] = True
    if label in CHUNKED_LABELS:
        cut_in = _head_chunks(site.example, axes, int(shape[-1]))
        spec |= {"pieces": cut_in.pieces} | ({"batches": cut_in.batches} if cut_in.batches > 1 else {})
    function = "gathered_attention" if label in CHUNKED_LABELS else "ring_attention" if sharded else "banded_rows"
    tensors = {name: x for name in ("attn_mask", "sinks") if (x := node.argument(name, None)) is not None}
    return LocalCall(function, (*operands, LocalCall("AttentionSpec", (), spec)), tensors)


class _HeadChunks(NamedTuple):
    """Keys and values in head chunks."""

    pieces: int
    """chunks of the heads"""
    batches: int
    """chunks of the batch for each chunk of heads"""
    widths: tuple[int, ...]
    """per chunk: elements of keys and values at one position"""


def _head_chunks(site: Site, axes: tuple[str, ...], keys: int) -> _HeadChunks:
    """Chunks of keys and values gathered over ``axes``: some heads, or sequences of one head. With
    w seconds on the wire and latency a, n chunks cost w/n + n·a: least for n = √(w/a)."""
    shapes = [_features(site, name) for name in ("query", "key", "value")]
    counts = [s[-2] if len(s) > 1 else 1 for s in shapes]
    sequences = {s[-3] if len(s) > 2 else 1 for s in shapes}
    batch = sequences.pop() if len(sequences) == 1 else 1
    widths = [math.prod(s) // max(1, n * batch) for s, n in zip(shapes, counts, strict=True)]
    heads = max(1, math.gcd(*counts))
    size = sum(math.prod(s) for s in shapes[1:]) * keys * site.in_type(0).dtype.itemsize
    latency, rate = site.mesh.link(axes).rate("all_gather")
    latency += 10 * site.mesh.hardware.kernel_latency  # kernels per chunk, forward and backward
    units = heads * max(1, batch)
    least = math.sqrt(rate * size / latency) if latency else units
    each = max(1, int(min(units * CHUNK_BYTES / max(1, size), units / max(1, round(least)))))
    pieces = math.ceil(heads / max(1, each // max(1, batch)))
    batches = math.ceil(batch / each) if each < batch else 1
    found = (
        sum(length * n * w for (_, n), w in zip(of[1:], widths[1:], strict=True))
        for (_, length), of in head_chunk_boxes(batch, counts, batches, pieces)
    )
    return _HeadChunks(pieces, batches, tuple(found))


class AttentionTiling(NamedTuple):
    """Attention work of the busiest rank."""

    pairs: float = 1.0
    """computed pairs of query and key / its share of visible pairs"""
    keys: int = 0
    """keys per kernel call"""
    tiles: int = 1
    """partial results that are merged"""
    pieces: int = 1
    """chunks of heads or sequences, each with as many tiles"""
    matrix: float = 0.0
    """keys per row in an unfused attention matrix"""
    passes: int = MATRIX_PASSES
    """reads and writes of that matrix"""


def attention_tiling(node: Node, graph: Graph, mesh: Mesh, choice: Sequence[Strategy]) -> AttentionTiling:
    """Attention work of the busiest rank under ``choice``: pairs visible by position, or all if
    only keys are sharded (the mask is a tensor). With sharded queries and a causal mask it is
    the last rank, but in zigzag order. With sharded value features every rank computes all
    weights."""
    queries, keys = (int(graph.types[name].shape[-2]) for name in node.inputs[:2])
    band, ranks = band_of(node), dict[str, tuple[int, ...]]()
    for strategy, n in zip(choice, mesh.shape, strict=True):
        ranks[strategy.label] = (*ranks.get(strategy.label, ()), n)
    pairs = 1.0
    if "embed" in ranks:
        made, summed = (graph.types[node.inputs[i]].shape[-1] for i in (2, 0))
        pairs = (math.prod(ranks["embed"]) * summed + made) / (summed + made)
    label, whole = next((x for x in SEQUENCE_LABELS if x in ranks), ""), pairs
    counting = band.pairs(queries, keys) or 1.0
    banded, fused = node.op is banded_op._opoverload, not node.exact and label in ("", "queries")
    drops = bool(node.argument("dropout_p", 0.0)) and not fused
    passes = 2 * MATRIX_PASSES if drops and not banded else MATRIX_PASSES
    if label == "keys":
        return AttentionTiling(
            whole * queries * keys / counting, keys, matrix=keys / math.prod(ranks[label]), passes=passes
        )
    if label == HELPED_RING:
        found = balanced_pairs_per_rank(queries, ranks[label])
        pairs *= max(found) * len(found) / counting
    elif (label and band != ALL_KEYS) or band.before is not None:
        found = pairs_per_rank(queries, keys, ranks.get(label, ()), label in ZIGZAG_LABELS, label in RING_LABELS, band)
        pairs *= max(found) * len(found) / counting
    matrix = keys if "embed" in ranks else 0.0
    if node.argument("soft_cap", None) is not None or (drops and banded):
        matrix = pairs * counting / queries
    elif drops:  # the mask is a tensor; tiles lose in float32 products what they save in pairs
        pairs = (whole if label == "queries" else pairs) * queries * keys / counting
        matrix = pairs * counting / queries
    elif fused and label and band != ALL_KEYS:  # the mask is a tensor
        pairs = whole * queries * keys / counting
    if label not in RING_LABELS:
        tiles = 4 if label in ZIGZAG_LABELS else 2 if label and band == CAUSAL else 1
        pieces = 1
        if label in CHUNKED_LABELS:
            read = (operand_placements(choice, i, graph.types[name].grad) for i, name in enumerate(node.inputs))
            site = Site(node, graph, mesh, tuple(cached_layout(mesh, placed) for placed in read), (), tuple(choice))
            pieces = len(_head_chunks(site.example, site.axes(label), keys).widths)
        return AttentionTiling(pairs, _keys_at_a_time(band, keys), tiles, pieces, matrix, passes)
    n = len(ring_schedule(*query_and_key_spans(queries, keys, ranks[label], False), band))
    each = max(1, keys // math.prod(ranks[label]))
    if label == HELPED_RING:
        return AttentionTiling(pairs, each, 1 + math.prod(ranks[label]) // 2, matrix=matrix, passes=passes)
    apart = (
        (n == 2 and not zigzag_order_ranks(node)) or "attn_mask" in node.positions or node.argument("dropout_p", 0.0)
    )
    tiles = 2 * n + (n > 2) if label == ZIGZAG_RING and apart else n
    return AttentionTiling(pairs, _keys_at_a_time(band, each), tiles, matrix=matrix, passes=passes)


def tile_padding_ratio(node: Node, graph: Graph, tile: int) -> float:
    """Computed / visible pairs if a causal mask skips ``tile`` keys at a time; 0: single keys."""
    if not tile or band_of(node) != CAUSAL:
        return 1.0
    queries, keys = (int(graph.types[name].shape[-2]) for name in node.inputs[:2])
    seen = sum(min(keys, math.ceil((q + 1) / tile) * tile) for q in range(queries))
    return seen / (CAUSAL.pairs(queries, keys) or 1.0)


def reordered_elements(node: Node, choice: Sequence[Strategy], shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of zigzag operands and results (``shapes``: local) that a rank holds in full."""
    order, labels = zigzag_order_ranks(node), {s.label for s in choice}
    if not order or ZIGZAG_RING in labels:
        return 0
    query, *keys = (math.prod(shapes[node.positions[name]]) for name in ("query", "key", "value"))
    if ZIGZAG_CHUNKED in labels:
        return order * sum(keys)
    return sum(keys) + (0 if ZIGZAG_QUERIES in labels else query + math.prod(shapes[-1]))


def _keys_at_a_time(band: Band, keys: int) -> int:
    """Keys per kernel call, of ``keys``."""
    return keys if band.before is None else min(keys, WINDOW_BLOCK_ROWS + band.before + (band.after or 0))


def sequence_collectives(site: Site, label: str, queries: int, keys: int) -> tuple[InternalCollective, ...]:
    """Ring hops of keys, values and their gradients; swaps into and out of zigzag order."""
    axes = site.axes(label)
    ranks = tuple(site.mesh.size_of(a) for a in axes)
    if label == HELPED_RING:
        return _helper_collectives(site, axes, longest_exchanged(rank_spans(int(queries), ranks, False)))
    carried, around = bool(zigzag_order_ranks(site.node)), label in RING_LABELS
    folded = label in ZIGZAG_LABELS and not carried
    rows, columns = query_and_key_spans(int(queries), int(keys), ranks, folded, carried)
    element = site.in_type(0).dtype.itemsize
    wide = torch.promote_types(site.in_type(0).dtype, torch.float32).itemsize
    query, key, value = (math.prod(_features(site, name)) for name in ("query", "key", "value"))
    result = query // _features(site, "query")[-1] * _features(site, "value")[-1]
    band = band_of(site.node)
    there = ring_schedule(rows, columns, band)
    lengths = [longest_keys(rows, columns, band, stop) for stop in there]

    def hops(phase: str, what: str, size: int, beside: float, last: float) -> list[InternalCollective]:
        each = [beside] * (len(there) - 2) + [last]
        return [
            InternalCollective(
                "permute", axes, float(lengths[i] * (key + value) * size), phase, f"{what}, hop {i}", share / len(there)
            )
            for i, share in enumerate(each, 1)
            if around and len(there) > 1
        ]

    def swap(phase: str, what: str, of_rows: int, of_columns: int = 0) -> list[InternalCollective]:
        if not folded:
            return []
        orders = [(rows, of_rows), (columns, of_columns if around and len(columns[0]) > 1 else 0)]
        moved = sum(
            max(x[received_half(r, len(of))][1] for r, x in enumerate(of)) * each for of, each in orders if each
        )
        return [InternalCollective("permute", axes, float(moved * element), phase, f"halves of {what}")]

    found = swap("forward", "the operands", query, key + value)
    found += hops("forward", "keys and values", element, 1.0, 1.0) + _chunk_gathers(site, label, int(keys), "forward")
    found += swap("forward", "the result", result)
    if site.grad:  # the last gradients arrive when nothing is left to overlap
        part = element / (element + wide)
        found += swap("backward", "the result's gradient", result)
        found += hops("backward", "keys and values", element, part, part)
        found += hops("backward", "gradients of keys and values", wide, 1 - part, 0.0)
        found += _chunk_gathers(site, label, int(keys), "backward")
        found += swap("backward", "the gradients", query, key + value)
    return tuple(found)


def _chunk_gathers(site: Site, label: str, keys: int, phase: str) -> list[InternalCollective]:
    """Head chunks: gathers overlap the chunk before, reduce-scatters the one after."""
    if label not in CHUNKED_LABELS:
        return []
    axes, dtype = site.axes(label), site.in_type(0).dtype
    ranks = site.mesh.size_of(axes)
    element, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    rows, pieces = math.ceil(keys / ranks) * ranks, _head_chunks(site, axes, keys).widths
    each, found = 1 / len(pieces), list[InternalCollective]()
    for i, width in enumerate(pieces):
        share = 0.0 if i == 0 else each if phase == "forward" or i == 1 else each * element / (element + wide)
        found.append(
            InternalCollective(
                "all_gather", axes, float(rows * width * element), phase, f"keys and values, chunk {i + 1}", share
            )
        )
    for i, width in enumerate(pieces if phase == "backward" else ()):
        left = len(pieces) - 1 - i
        share = 0.0 if left == 0 else each if left == 1 else each * wide / (element + wide)
        what = f"gradients of keys and values, chunk {i + 1}"
        found.append(InternalCollective("reduce_scatter", axes, float(rows * width * wide), phase, what, share))
    return found


def _helper_collectives(
    site: Site, axes: tuple[str, ...], longest: tuple[tuple[int, int], ...]
) -> tuple[InternalCollective, ...]:
    """Per step, keys and values or queries are sent to helpers, and results back, while the step's
    tile runs. ``longest_keys``: rows and columns per message."""
    dtype, ranks = site.in_type(0).dtype, math.prod(site.mesh.size_of(a) for a in axes)
    query, key, value = (math.prod(_features(site, name)) for name in ("query", "key", "value"))
    heads = query // _features(site, "query")[-1]
    result = heads * _features(site, "value")[-1]
    sums = heads * torch.promote_types(dtype, torch.float32).itemsize // dtype.itemsize
    work = [1 / ranks, *(2 / ranks if 2 * t < ranks else 1 / ranks for t in range(1, ranks // 2 + 1))]

    def steps(phase: str, there: tuple[int, int], back: tuple[int, int]) -> list[InternalCollective]:
        sizes = [[max(r * rows, c * columns) * dtype.itemsize for rows, columns in longest] for r, c in (there, back)]
        found = []
        for t, (out, home) in enumerate(zip(*sizes, strict=True)):
            together = (out, sizes[1][t - 2]) if t > 1 else (out,)  # from the step before last
            found.append(_hop(axes, out, phase, f"keys or queries, step {t + 1}", work[t] * out / (sum(together) or 1)))
            rest = work[t + 2] if t + 2 < len(work) else 0.0
            following = sizes[0][t + 2] if t + 2 < len(longest) else 0.0
            found.append(_hop(axes, home, phase, f"results of step {t + 1}", rest * home / (home + following or 1)))
        return found

    found = steps("forward", (query, key + value), (result + sums, 0))
    if site.grad:
        found += steps("backward", (query + 2 * result + sums, key + value), (query, key + value))
    return tuple(found)


def _hop(axes: tuple[str, ...], size: float, phase: str, what: str, beside: float) -> InternalCollective:
    return InternalCollective("permute", axes, float(size), phase, what, beside)


def _features(site: Site, name: str) -> tuple[int, ...]:
    """Local shape of an operand without the sequence; key heads as many as query heads use."""
    *lead, _, last = site.local_shape(name)
    if name != "query" and site.axes("query heads"):
        lead[-1] = site.local_shape("query")[-3]
    return (*lead, last)


ZIGZAG_OPS = TO_ZIGZAG, FROM_ZIGZAG = to_zigzag_op._opoverload, from_zigzag_op._opoverload
SWAPPED = "swapped"
"""label of the strategy that shards the sequence"""


def _zigzag_strategies(node: Node, graph: Graph) -> Space:
    (shape,) = graph.shapes(node.inputs)
    dim: int = positive(node.argument("dim"), len(shape))
    dims = numbered_factors(shape, (dim,))
    others = Factors((dims,), (dims,), sizes_of(shape), linear=((0,),)).strategies(node, graph)
    cut, ranks = Shard(dim), node.argument("ranks")
    return (*others, Strategy(SWAPPED, (cut,), (cut,), shape[dim], divides=True, ranks=ranks))


def _local_zigzag(site: Site) -> LocalCall:
    node, axes = site.node, site.axes(SWAPPED)
    cut = {"axes": axes_argument(axes)} if axes else {}
    return LocalCall("to_zigzag" if node.op is TO_ZIGZAG else "from_zigzag", node.args, cut)


RULES: tuple[Rule, ...] = tuple(
    Rule(
        op,
        _zigzag_strategies,
        _local_zigzag,
        notation="...",
        sends=True,
        facts=KEEPS_NOTHING,
        named=named,
    )
    for op, named in ((TO_ZIGZAG, "folded"), (FROM_ZIGZAG, "unfolded"))
)
