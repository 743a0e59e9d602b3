"""Scaled dot-product attention: sharded batch, heads, queries, keys (ring attention), features."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.layout import R, Shard, chunk
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import InternalCollective, LocalCall, axes_argument
from autoshard.passes.rules.base import (
    Dims,
    Factors,
    Facts,
    Rule,
    Site,
    Space,
    Types,
    broadcast_shape,
    operand_factors,
    unsharded_only,
)
from autoshard.passes.rules.families import context_parallel
from autoshard.runtime.attention.masked_attention import banded_op
from autoshard.runtime.attention.ring_geometry import CAUSAL

OPERANDS = ("query", "key", "value", "attn_mask", "sinks")


def _operand_shapes(node: Node, graph: Graph) -> dict[str, tuple[int, ...]]:
    return {name: graph.shape(node.argument(name)) for name in OPERANDS if name in node.positions}


def is_grouped(node: Node, graph: Graph) -> bool:
    """Whether several query heads share a key or value head (grouped-query attention)."""
    query, key, value = (graph.shape(node.argument(name)) for name in OPERANDS[:3])
    return bool(node.argument("enable_gqa")) and not query[-3] == key[-3] == value[-3]


def weights_shape(node: Node, graph: Graph) -> tuple[int, ...]:
    """Global shape of the attention matrix [..., queries, keys]."""
    shapes = _operand_shapes(node, graph)
    key = shapes["key"]
    lead = [s[:-2] for s in (shapes["query"], key)]
    if is_grouped(node, graph):
        lead[1] = (*key[:-3], shapes["query"][-3])
    return (*broadcast_shape(*lead), shapes["query"][-2], key[-2])


def _attention_strategies(node: Node, graph: Graph) -> Space:
    """Softmax over sharded keys needs the distributed form; other factors are independent. Linear
    in the value. Of fewer key heads than query heads, both are sharded ("heads") or only the
    latter ("query heads")."""
    shapes = _operand_shapes(node, graph)
    shape = weights_shape(node, graph)
    if graph.shapes(node.outputs)[0][:-2] != shape[:-2]:  # only the value has more batch dims
        return unsharded_only(node, graph)
    lead = tuple("heads" if d == len(shape) - 3 else f"batch{d}" for d in range(len(shape) - 2))
    sizes = dict(zip(lead, shape, strict=False))
    sizes |= {"queries": shape[-2], "keys": shape[-1], "embed": shapes["value"][-1]}
    grouped = is_grouped(node, graph)
    dims = {
        "query": (*_leading_dims(shapes["query"], lead, sizes), "queries", None),
        "key": (*_leading_dims(shapes["key"], lead, sizes), "keys", None),
        "value": (*_leading_dims(shapes["value"], lead, sizes), "keys", "embed"),
        "attn_mask": _leading_dims(shapes.get("attn_mask", ()), (*lead, "queries", "keys"), sizes),
        "sinks": ("heads",),
    }
    if grouped:
        for name in ("key", "value"):
            dims[name] = (*dims[name][:-3], "heads", *dims[name][-2:])
        sizes["heads"] = math.gcd(shapes["key"][-3], shapes["value"][-3])
    result = (*lead, "queries", "embed")
    even = frozenset({"heads"}) if grouped else frozenset[str]()
    factors = Factors(operand_factors(node, dims), (result,), sizes, even, linear=((node.positions["value"],),))
    alone = (_query_heads(node, shape, dims),) if grouped else ()
    found = (*factors.strategies(node, graph), *alone, *context_parallel.sequence_strategies(node, graph, *shape[-2:]))
    plain = node.op is aten.scaled_dot_product_attention.default
    left_out = {"queries", "keys"} if context_parallel.zigzag_order_ranks(node) else set() if plain else {"keys"}
    return tuple(s for s in found if s.label not in left_out)


def _leading_dims(shape: tuple[int, ...], names: Dims, sizes: dict[str, int]) -> Dims:
    """Factors of an operand's leading dims (a mask: all dims); broadcast dims have none."""
    kept = shape if names[-1:] == ("keys",) else shape[:-2]
    named = names[len(names) - len(kept) :]
    return tuple(f if f is not None and n == sizes[f] else None for f, n in zip(named, kept, strict=True))


def _query_heads(node: Node, shape: tuple[int, ...], dims: dict[str, Dims]) -> Strategy:
    """Query heads sharded, key and value heads replicated: each rank picks those it needs."""
    cut = {name for name in ("query", "attn_mask", "sinks") if "heads" in dims[name]}
    placements = tuple(Shard(dims[name].index("heads")) if name in cut else R for name in node.positions)
    return Strategy("query heads", placements, (Shard(len(shape) - 3),), shape[-3], divides=True)


def _local_attention(site: Site) -> LocalCall:
    node, graph = site.node, site.graph
    sequence_label = _sequence_label(site)
    query, key, value = (_sequential_operand(site, name, sequence_label) for name in OPERANDS[:3])
    mask = node.argument("attn_mask")
    shape = weights_shape(node, graph)
    last = len(shape) - 1
    causal, probability = context_parallel.band_of(node) == CAUSAL, float(node.argument("dropout_p", 0.0))
    key_axes, row_axes = _axes_from_end(site, "key", 2), _axes_from_end(site, "query", 2)
    grouped = is_grouped(node, graph)
    rows_alone = causal and bool(row_axes) and not key_axes and not probability
    exactly = probability if node.exact else 0.0
    spelled_out = bool(key_axes or exactly or _loses_mask_gradient(site))
    in_tiles = bool(sequence_label) or rows_alone or node.op is banded_op._opoverload
    if grouped and (site.axes("query heads") or (not in_tiles and spelled_out)):
        key, value = (_repeated_heads(site, name, x) for name, x in (("key", key), ("value", value)))
        grouped = False
    if in_tiles:
        call = context_parallel.tiled_attention_call(site, sequence_label, (query, key, value), row_axes, shape)
        order = 0 if sequence_label else context_parallel.zigzag_order_ranks(node)
        return LocalCall("to_zigzag", (call, last - 1, order), {}) if order else call
    if causal and (key_axes or exactly or (probability and row_axes)):
        extent: dict[str, Any] = {"queries": shape[-2], "query_axes": axes_argument(row_axes)} if row_axes else {}
        extent |= {"keys": shape[-1], "key_axes": axes_argument(key_axes)} if key_axes else {}
        mask = LocalCall("causal_mask", (query, node.argument("key")), extent)
        causal = False
    if spelled_out:
        return _explicit_attention(site, (query, key, value), mask, shape, {last: key_axes, last - 1: row_axes})
    if probability:
        given = {"attn_mask": mask, "is_causal": causal, "scale": node.argument("scale"), "enable_gqa": grouped}
        axes = [axis for d in range(last) for axis in site.outputs[0].axes_of(d)]
        extra = {name: x for name, x in given.items() if x not in (None, False)}
        return LocalCall("dropout_attention", (query, key, value, probability, axes_argument(axes)), extra)
    return site.unchanged(key=key, value=value, attn_mask=mask, is_causal=causal, enable_gqa=grouped)


def _sequential_operand(site: Site, name: str, sequence_label: str) -> Any:
    """An operand in sequential order; zigzag is undone unless the operand is sharded in it."""
    x, order = site.node.argument(name), context_parallel.zigzag_order_ranks(site.node)
    if not order or sequence_label in context_parallel.SEQUENCE_SHARDED or (sequence_label and name == "query"):
        return x
    return LocalCall("from_zigzag", (x, len(site.graph.shape(x)) - 2, order), {})


def _repeated_heads(site: Site, name: str, x: Any) -> LocalCall:
    """``kv_heads``: of keys or values ``x``, the head for each local query head."""
    heads: list[Any] = [
        weights_shape(site.node, site.graph)[-3],
        axes_argument(_axes_from_end(site, "query", 3)),
        site.graph.shape(site.node.argument(name))[-3],
    ]
    if group_axes := _axes_from_end(site, name, 3):
        heads.append(axes_argument(group_axes))
    return LocalCall("kv_heads", (x, *heads), {})


def _sequence_label(site: Site) -> str:
    """The label of the chosen sequence strategy (ring, head chunks, zigzag queries), or ""."""
    return next(
        (label for label in (*context_parallel.SEQUENCE_SHARDED, context_parallel.ZIGZAG_QUERIES) if site.axes(label)),
        "",
    )


def _loses_mask_gradient(site: Site) -> bool:
    """Whether torch's op drops a learnt mask's gradient: some rank has no queries (torch 2.13)."""
    mask, out, last = site.node.positions.get("attn_mask"), site.outputs[0], site.mesh.size - 1
    if mask is None or not site.in_type(mask).grad:
        return False
    return any(out.chunk_of(d, n, last)[1] == 0 for d, n in enumerate(site.out_type().shape))


def _explicit_attention(
    site: Site, operands: tuple[Any, ...], mask: Any, shape: tuple[int, ...], rows_and_keys: dict[int, tuple[str, ...]]
) -> LocalCall:
    """The runtime's attention, which takes the sharding of the attention matrix."""
    given = {
        "attn_mask": mask,
        "dropout_p": site.node.argument("dropout_p") or None,
        "scale": site.node.argument("scale"),
        "batch": site.node.batch,
    }
    extra = {name: v for name, v in given.items() if v is not None}
    axes = {d: site.outputs[0].axes_of(d) for d in range(len(shape) - 2)} | rows_and_keys
    cuts = {d: axes_argument(a) for d, a in sorted(axes.items()) if a}
    return LocalCall("attention", operands, {**extra, "shape": shape, "cuts": cuts})


def _axes_from_end(site: Site, name: str, from_end: int) -> tuple[str, ...]:
    """Mesh axes that shard an operand's dim, counted from the end."""
    rank = len(site.in_type(site.node.positions[name]).shape)
    return site.axes_of(name, rank - from_end) if rank >= from_end else ()


def _attention_collectives(site: Site) -> tuple[InternalCollective, ...]:
    """Row maxima and sums over sharded keys; gathers of key heads that query heads need. Stated,
    not recorded: a ring's run takes some 20 ms, and a search would make dozens."""
    node, graph = site.node, site.graph
    found: tuple[InternalCollective, ...] = ()
    group_axes, key_axes = _axes_from_end(site, "key", 3), _axes_from_end(site, "key", 2)
    query_axes = _axes_from_end(site, "query", 3)
    if is_grouped(node, graph) and site.axes("query heads") and query_axes[: len(group_axes)] != group_axes:
        found = tuple(_head_gather(site, name, group_axes) for name in ("key", "value"))
        if graph.is_differentiable(node):
            found += tuple(replace(c, kind="reduce_scatter", phase="backward") for c in found)
    shape = weights_shape(node, graph)
    if label := _sequence_label(site):
        return found + context_parallel.sequence_collectives(site, label, *shape[-2:])
    axes = {d: site.outputs[0].axes_of(d) for d in range(len(shape) - 2)} | {
        len(shape) - 2: _axes_from_end(site, "query", 2)
    }
    rows = math.prod(chunk(int(n), site.mesh.size_of(axes[d]), 0)[1] for d, n in enumerate(shape[:-1]))
    if site.mesh.size_of(key_axes) == 1:
        return found
    size = float(rows * max(4, site.in_type(0).dtype.itemsize))
    phases = ("forward", "maxima"), ("forward", "sums"), ("backward", "gradient of the sums")
    sums = (InternalCollective("all_reduce", key_axes, size, phase, what) for phase, what in phases)
    return (*found, *sums) if site.grad else (*found, *itertools.islice(sums, 2))


def _head_gather(site: Site, name: str, axes: tuple[str, ...]) -> InternalCollective:
    """All-gather of the heads of key or value."""
    local, i = site.local_shape(name), site.node.positions[name]
    size = math.prod(local) * site.mesh.size_of(axes) * site.in_type(i).dtype.itemsize
    return InternalCollective("all_gather", axes, size, "forward", f"{name} heads")


def _attention_flops(node: Node, graph: Graph) -> float:
    """FLOPs of two products per visible pair of query and key."""
    shapes, weights = _operand_shapes(node, graph), weights_shape(node, graph)
    queries, keys = weights[-2:]
    pairs = context_parallel.band_of(node).pairs(int(queries), int(keys))
    return 2.0 * math.prod(weights[:-2]) * pairs * (shapes["query"][-1] + shapes["value"][-1])


def _is_fused(node: Node, types: Types) -> bool:
    """Whether no attention matrix is saved: a fused kernel or tiles of the runtime compute it."""
    if node.op is banded_op._opoverload:
        return True
    query, key, value, *mask = (types[name] for name in node.inputs)
    if (node.exact and node.argument("dropout_p", 0.0)) or any(m.grad for m in mask):
        return False
    heads = key.shape[:-2] == value.shape[:-2] and (node.argument("enable_gqa") or query.shape[:-2] == key.shape[:-2])
    return len(query.shape) == 4 and query.shape[-1] == key.shape[-1] == value.shape[-1] and bool(heads)


def _attention_saves(node: Node, types: Types) -> str | None:
    if _is_fused(node, types):
        return (
            "query key value attn_mask sinks result"
            if "sinks" in node.positions
            else "query key value attn_mask result"
        )
    query, key, value = (types[name].shape for name in node.inputs[:3])
    plain = query[:-2] == key[:-2] == value[:-2] and not node.argument("dropout_p", 0.0)
    return "query: value; key: value; attn_mask: value" if plain else None


def _attention_intermediates(node: Node, types: Types) -> tuple[TensorType, ...]:
    """Fused: log-sum-exp of every row. Otherwise the attention matrix and scaled operands."""
    query, key = (types[name] for name in node.inputs[:2])
    if _is_fused(node, types):
        exactly = node.exact and node.argument("dropout_p", 0.0)
        kept = [TensorType((*query.shape[:-1], key.shape[-2]), torch.bool)] if exactly else []
        return (TensorType(query.shape[:-1], torch.promote_types(query.dtype, torch.float32)), *kept)
    weights = TensorType((*query.shape[:-1], key.shape[-2]), query.dtype)
    return (weights, *([query] if key.grad else []), *([key] if query.grad else []))


ATTENTION_FACTS = Facts(
    saves=_attention_saves,
    intermediates=_attention_intermediates,
    draws=lambda given: given.get("dropout_p", 0.0) != 0,
    backward=2.0,  # three gradients: five products in the backward, two in the forward
)

_ATTENTION_NOTATION = (
    "... heads queries _, ... heads keys _, ... heads keys embed, ... queries keys -> ... heads queries embed"
)

RULES: tuple[Rule, ...] = tuple(
    Rule(
        op,
        _attention_strategies,
        _local_attention,
        _attention_flops,
        _ATTENTION_NOTATION,
        _attention_collectives,
        facts=ATTENTION_FACTS,
        named=named,
    )
    for op, named in ((aten.scaled_dot_product_attention.default, ""), (banded_op._opoverload, "banded_rows"))
)
