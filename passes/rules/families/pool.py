"""Pooling, interpolation, mirrored pads: sharded samples, channels, and windowed positions."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Local, spell
from autoshard.passes.rules.base import NOTHING, Facts, Rule, Site, SpaceOf, Types, indices, rules
from autoshard.passes.rules.factors import Dims, Factors
from autoshard.passes.rules.windows import Sliding, SlidingsOf, cropped, cut, each, haloed, halos
from autoshard.runtime.transport.window import Window


def _positions(node: Node, rank: int) -> range:
    """The position dims; the op's name has their number."""
    found = re.search(r"([123])d", str(node.op))
    return range(rank - int(found.group(1) if found else 2), rank)


def _along(slidings: SlidingsOf, linear: bool) -> SpaceOf:
    def strategies(node: Node, graph: Graph) -> Factors:
        """All dims but positions, and windowed positions; no empty channels and results."""
        shape, result = graph.shapes(node.inputs)[0], graph.shapes(node.outputs)[0]
        first = _positions(node, len(shape)).start
        sizes = {f"d{d}": shape[d] for d in range(first)} | {s.factor: s.to for s in slidings(node, graph) if s.fixed}
        summed = [d for d in range(first, len(shape)) if _is_mean(node, result)]
        sizes |= {f"d{d}": shape[d] for d in summed}
        dims: Dims = tuple(f"d{d}" if f"d{d}" in sizes else None for d in range(len(shape)))
        kept: Dims = tuple(None if d in summed else f for d, f in enumerate(dims))
        filled = frozenset(sizes) - {f"d{d}" for d in (*range(first - 1), *summed)}
        linear_in = ((0,),) if linear else ()
        outputs = (kept,) * len(node.outputs)
        return Factors((dims,), outputs, sizes, filled=filled, linear=linear_in)

    return strategies


def _none(node: Node, graph: Graph) -> tuple[Sliding, ...]:
    return ()


# --- windows of one size ---


def _windows(node: Node, graph: Graph) -> tuple[Sliding, ...]:
    """Position dims of max_pool and avg_pool; not if indices into the plane are used."""
    shape, result = graph.shapes(node.inputs)[0], graph.shapes(node.outputs)[0]
    if node.output_slots != (0,):
        return ()
    dims = _positions(node, len(shape))
    names = ("kernel_size", "stride", "padding", "dilation")
    windows = zip(*(each(node, name, len(dims)) for name in names), strict=True)
    return tuple(Sliding(d, shape[d], result[d], Window(*w)) for d, w in zip(dims, windows, strict=True))


def _unpadded(site: Site, along: Sequence[Sliding], x: Any) -> Call:
    """The pool of ``x``, which already includes the padding along ``along``."""
    dims = _positions(site.node, len(site.in_type(0).shape))
    padding = each(site.node, "padding", len(dims))
    apart = {s.dim for s in along}
    kept = [0 if d in apart else p for d, p in zip(dims, padding, strict=True)]
    return site.unchanged(self=x, padding=kept)


def _local_max(site: Site) -> Call:
    along = cut(site, _windows(site.node, site.graph))
    if not along:
        return site.unchanged()
    dtype = site.in_type(0).dtype
    lowest = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    return _unpadded(site, along, haloed(site, site.node.argument("self"), along, lowest))


def _local_average(site: Site) -> Call:
    """Windows that reach outside the operand divide by fewer positions."""
    node = site.node
    along = cut(site, _windows(node, site.graph))
    if not along:
        return site.unchanged()
    result = _unpadded(site, along, haloed(site, node.argument("self"), along))
    if node.argument("divisor_override", None) is not None:
        return result
    for s in along:
        kernel, stride, padding = s.window[:3]
        counted = padding if node.argument("count_include_pad") else 0
        last = (s.to - 1) * stride - padding + kernel
        if padding > counted or last > s.size + counted:
            where = {"dim": s.dim, "size": s.size, "to": s.to, "kernel": kernel, "stride": stride, "padding": padding}
            result = Call("average", (result,), {**where, "counted": counted, "axes": spell(s.axes(site))})
    return result


# --- adaptive pools with equal windows ---


def _divisions(node: Node, graph: Graph) -> tuple[Sliding, ...]:
    """Position dims of an adaptive pool with equal windows that do not overlap."""
    shape, result = graph.shapes(node.inputs)[0], graph.shapes(node.outputs)[0]
    if node.output_slots != (0,):
        return ()
    equal = (d for d in _positions(node, len(shape)) if result[d] > 1 and shape[d] % result[d] == 0)
    return tuple(Sliding(d, shape[d], result[d], Window(k, k)) for d in equal for k in (shape[d] // result[d],))


def _is_mean(node: Node, result: Sequence[int]) -> bool:
    """Whether an adaptive average covers all positions, so that ranks make partial sums."""
    return "adaptive_avg" in str(node.op) and all(result[d] == 1 for d in _positions(node, len(result)))


def _local_adaptive(site: Site) -> Call:
    node, shape, result = site.node, site.in_type(0).shape, site.out_type().shape
    dims = _positions(node, len(shape))
    if _is_mean(node, result):
        if not any(site.inputs[0].axes_of(d) for d in dims):
            return site.unchanged()
        total = Call(aten.sum.dim_IntList, (node.argument("self"), list(dims), True), {})
        return Call(aten.div.Scalar, (total, math.prod(shape[d] for d in dims)), {})
    along = cut(site, _divisions(node, site.graph))
    if not along:
        return site.unchanged()
    axes = {s.dim: s.axes(site) for s in along}
    size = [Local(result[d], axes[d]) if d in axes else result[d] for d in dims]
    return site.unchanged(self=haloed(site, node.argument("self"), along), output_size=size)


# --- nearest-neighbour interpolation ---


def _repeats(node: Node, graph: Graph) -> tuple[Sliding, ...]:
    """Positions repeated by powers of two: source indices round alike on every rank."""
    shape, result = graph.shapes(node.inputs)[0], graph.shapes(node.outputs)[0]
    dims = _positions(node, len(shape))
    times = [result[d] // shape[d] for d in dims]
    given = [node.argument(a.name) for a in node.op._schema.arguments if a.name.startswith("scale")]
    scales = (given[0] if node.op._overloadname == "vec" else given) or [None] * len(dims)
    exact = all(
        result[d] == n * shape[d] and n.bit_count() == 1 and scale in (None, n)
        for d, n, scale in zip(dims, times, scales, strict=True)
    )
    repeated = zip(dims, times, strict=True) if exact else ()
    return tuple(Sliding(d, shape[d], result[d], Window(n, n, transposed=True)) for d, n in repeated)


def _local_repeated(site: Site) -> Call:
    node, slidings = site.node, _repeats(site.node, site.graph)
    along = cut(site, slidings)
    if not along:
        return site.unchanged()
    x = haloed(site, node.argument("input" if node.op._overloadname == "vec" else "self"), along)
    op = getattr(aten, node.op._opname).vec
    result: Call = cropped(site, Call(op, (x, None, [float(s.window.stride) for s in slidings]), {}), along)
    return result


MAX_POOLS = (
    "max_pool1d.default max_pool2d.default max_pool3d.default max_pool1d_with_indices.default "
    "max_pool2d_with_indices.default max_pool3d_with_indices.default"
)
AVERAGE_POOLS = "avg_pool1d.default avg_pool2d.default avg_pool3d.default"
ADAPTIVE_MAX = "adaptive_max_pool1d.default adaptive_max_pool2d.default adaptive_max_pool3d.default"
ADAPTIVE_AVERAGE = (
    "adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default "
    "_adaptive_avg_pool2d.default _adaptive_avg_pool3d.default"
)
NEAREST = (
    "upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_nearest1d.default "
    "upsample_nearest2d.default upsample_nearest3d.default _upsample_nearest_exact1d.vec "
    "_upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec"
)
SMOOTH = (
    "upsample_linear1d.vec upsample_bilinear2d.vec upsample_trilinear3d.vec upsample_bicubic2d.vec "
    "upsample_linear1d.default upsample_bilinear2d.default upsample_trilinear3d.default upsample_bicubic2d.default "
    "_upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec"
)
PADDED = (
    "reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default "
    "replication_pad1d.default replication_pad2d.default replication_pad3d.default"
)


def _saves(node: Node, types: Types) -> str:
    """A mean over all positions saves nothing."""
    named = node.op not in (aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
    return "" if named and all(n == 1 for n in node.argument("output_size")) else "self"


MAXIMA = Facts("self result1", indices)
AVERAGES = Facts(saves="self")
MEANS = Facts(saves=_saves)

_SLIDING, _WHOLE = "n c ... -> n c ...", "n c _ -> n c _"

RULES: tuple[Rule, ...] = (
    *rules(MAX_POOLS, _along(_windows, False), _local_max, _SLIDING, halos(_windows), facts=MAXIMA),
    *rules(AVERAGE_POOLS, _along(_windows, True), _local_average, _SLIDING, halos(_windows), facts=AVERAGES),
    *rules(ADAPTIVE_MAX, _along(_divisions, False), _local_adaptive, _SLIDING, halos(_divisions), facts=MAXIMA),
    *rules(ADAPTIVE_AVERAGE, _along(_divisions, True), _local_adaptive, _SLIDING, halos(_divisions), facts=MEANS),
    *rules(NEAREST, _along(_repeats, True), _local_repeated, _SLIDING, halos(_repeats), facts=NOTHING),
    *rules(SMOOTH, _along(_none, True), None, _WHOLE, facts=NOTHING),
    *rules(PADDED, _along(_none, True), None, _WHOLE, facts=AVERAGES),
)
