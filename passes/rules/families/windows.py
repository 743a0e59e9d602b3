"""Sliding windows: convolution, pooling, interpolation and mirrored pads. Samples and channels are
factors, and positions where neighbouring ranks exchange halos."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import Local, LocalCall, axes_argument
from autoshard.passes.ir.sizes import Size
from autoshard.passes.rules.base import (
    KEEPS_NOTHING,
    Dims,
    Factors,
    Facts,
    Rule,
    Site,
    SpaceOf,
    Types,
    index_intermediates,
    operand_factors,
    rules,
)
from autoshard.runtime.transport.window import Halo, Window, halo_of


@dataclass(frozen=True, slots=True)
class SlidingDim:
    """One windowed dim of the first operand and of the result, with its global lengths."""

    dim: int
    size: int
    to: int
    window: Window

    @property
    def factor(self) -> str:
        """The factor's name in the rule."""
        return f"d{self.dim}"

    @property
    def fixed(self) -> bool:
        """Whether both lengths are static, so that the halo exchange can be planned."""
        return not isinstance(self.size, Size) and not isinstance(self.to, Size)

    def axes(self, site: Site) -> tuple[str, ...]:
        """Mesh axes that shard the dim, outer to inner."""
        return site.inputs[0].axes_of(self.dim)

    def halo(self, site: Site) -> Halo:
        """The positions that each rank reads, and its halo exchange."""
        ranks = tuple(site.mesh.size_of(a) for a in self.axes(site))
        return halo_of(self.window, self.size, self.to, ranks)

    def call(self, function: str, site: Site, x: Any, **more: Any) -> LocalCall:
        """A call of the runtime on ``x``; of the window, fields that differ from the defaults."""
        form = {k: v for k, v in self.window._asdict().items() if v != getattr(Window(), k)}
        where = {"axes": axes_argument(self.axes(site)), "window": LocalCall("Window", (), form)}
        return LocalCall(function, (x,), {"dim": self.dim, **more, **where})


def sharded_windows(site: Site, slidings: Sequence[SlidingDim]) -> tuple[SlidingDim, ...]:
    """The windowed dims that some mesh axis shards."""
    return tuple(s for s in slidings if site.mesh.size_of(s.axes(site)) > 1)


def with_halo(site: Site, x: Any, slidings: Sequence[SlidingDim], fill: float = 0.0) -> Any:
    """``x`` with halo: the positions that this rank's results read."""
    for s in slidings:
        halo = s.halo(site)
        if halo.reads == halo.exchange.held:
            continue
        extra = {"fill": fill} if fill != 0.0 and halo.reads != halo.exchange.wanted else {}
        x = s.call("halo", site, x, size=s.size, to=s.to, **extra)
    return x


def cropped_results(site: Site, y: Any, slidings: Sequence[SlidingDim]) -> Any:
    """Results of a transposed op, cropped where the operand with its halo makes more."""
    for s in slidings:
        halo, window = s.halo(site), s.window
        made = [(n - 1) * window.stride + window.reach + 1 for _, n in halo.reads]
        if made == [n for _, n in halo.results] and not any(map(window.surplus, halo.results)):
            continue
        y = s.call("crop", site, y, to=s.to)
    return y


def per_position_dim(node: Node, name: str, count: int) -> list[int]:
    """A per-dim argument as one int per position dim; an absent stride equals the kernel size."""
    if name not in [a.name for a in node.op._schema.arguments]:
        return [1] * count
    value = node.argument(name)
    value = [value] if isinstance(value, int) else list(value)
    return value * (count // len(value)) if value else per_position_dim(node, "kernel_size", count)


SlidingDimsOf = Callable[[Node, Graph], tuple[SlidingDim, ...]]


def is_transposed(node: Node) -> bool:
    """Whether the weight is [in, out/groups, ...] instead of [out, in/groups, ...]."""
    if node.op is aten.convolution.default:
        return bool(node.argument("transposed"))
    return "transpose" in str(node.op)


def _convolution(node: Node, graph: Graph) -> Factors:
    """x [n, i, ...], weight [o, i, ...], bias [o]: sums over input channels, bias added once.
    Groups of channels are sharded as units. No rank may be empty: ATen has no empty kernels."""
    x, weight = graph.shape(node.argument("input")), graph.shape(node.argument("weight"))
    slidings = _convolution_windows(node, graph)
    spatial: Dims = tuple(s.factor for s in slidings)
    kernel_dims: Dims = (None,) * len(spatial)
    batch: Dims = ("n",) if len(x) == len(weight) else ()
    groups = node.argument("groups")
    sizes = {"n": x[0], "groups": groups} | {s.factor: s.to for s in slidings if s.fixed}
    incoming, outgoing = "groups", "groups"
    kernel: Dims = ("groups", None)
    if groups == 1:
        incoming, outgoing = "i", "o"
        kernel = ("i", "o") if is_transposed(node) else ("o", "i")
        sizes |= {"i": weight[0], "o": weight[1]} if is_transposed(node) else {"i": weight[1], "o": weight[0]}
    dims: dict[str, Dims] = {
        "input": (*batch, incoming, *spatial),
        "weight": (*kernel, *kernel_dims),
        "bias": (outgoing,),
    }
    depthwise = groups == math.prod(x[-len(spatial) - 1 : -len(spatial)]) == graph.shapes(node.outputs)[0][len(batch)]
    at = node.positions
    bias = (at["bias"],) if "bias" in at else ()
    return Factors(
        operand_factors(node, dims),
        ((*batch, outgoing, *spatial),),
        sizes,
        even=frozenset() if depthwise else frozenset({"groups"}),
        nonempty=frozenset({"i", "o", "groups", *(s.factor for s in slidings)}),
        addends=frozenset(bias),
        linear=((at["input"], *bias), (at["weight"], *bias)),
    )


def _position_padding(node: Node, kernel: tuple[int, ...]) -> list[tuple[int, int]]:
    """(before, after) for each position dim."""
    padding = node.argument("padding")
    if padding == "same":
        reaches = [d * (k - 1) for d, k in zip(per_position_dim(node, "dilation", len(kernel)), kernel, strict=True)]
        return [(r // 2, r - r // 2) for r in reaches]
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    return [(p, p) for p in per_position_dim(node, "padding", len(kernel))]


def _convolution_windows(node: Node, graph: Graph) -> tuple[SlidingDim, ...]:
    x, kernel = graph.shape(node.argument("input")), graph.shape(node.argument("weight"))[2:]
    (y,), first = graph.shapes(node.outputs), len(x) - len(kernel)
    padding, dilation = _position_padding(node, kernel), per_position_dim(node, "dilation", len(kernel))
    strides = per_position_dim(node, "stride", len(kernel))
    return tuple(
        SlidingDim(
            first + d,
            x[first + d],
            y[first + d],
            Window(kernel[d], strides[d], padding[d][0], dilation[d], is_transposed(node)),
        )
        for d in range(len(kernel))
    )


def _local_convolution(site: Site) -> LocalCall:
    node, groups = site.node, site.axes("groups")
    changes: dict[str, Any] = {"groups": Local(node.argument("groups"), groups)} if groups else {}
    slidings = _convolution_windows(node, site.graph)
    if not (along := sharded_windows(site, slidings)):
        return site.unchanged(**changes)
    padding = _position_padding(node, site.graph.shape(node.argument("weight"))[2:])
    kept = [(0, 0) if s in along else p for s, p in zip(slidings, padding, strict=True)]
    x = with_halo(site, node.argument("input"), along)
    if any(before != after for before, after in kept):
        x = LocalCall(aten.constant_pad_nd.default, (x, [n for p in reversed(kept) for n in p]), {})
        kept = [(0, 0)] * len(kept)
    changes |= {"input": x, "padding": [before for before, _ in kept]}
    if is_transposed(node) and any(extra := per_position_dim(node, "output_padding", len(slidings))):
        changes["output_padding"] = [0 if s in along else n for s, n in zip(slidings, extra, strict=True)]
    made = site.unchanged(**changes)
    if isinstance(node.argument("padding"), str):
        made = LocalCall(getattr(aten, node.op._opname).default, made.args, made.kwargs)
    return cropped_results(site, made, along) if is_transposed(node) else made


def _convolution_flops(node: Node, graph: Graph) -> float:
    """2 · positions · kernel volume; positions of the input if transposed, else of the result."""
    weight = graph.shape(node.argument("weight"))
    moved = graph.shape(node.argument("input")) if is_transposed(node) else graph.shapes(node.outputs)[0]
    return 2.0 * math.prod(moved) * math.prod(weight[1:])


def _padded_input(node: Node, types: Types) -> TensorType | None:
    """The padded copy of the input that asymmetric "same" padding saves."""
    if node.argument("padding") != "same":
        return None
    x, weight = (types[name] for name in node.inputs[:2])
    total = [d * (n - 1) for d, n in zip(node.argument("dilation"), weight.shape[2:], strict=False)]
    total = total * (len(weight.shape) - 2) if len(total) == 1 else total
    if all(n % 2 == 0 for n in total):
        return None
    lead = len(x.shape) - len(total)
    return TensorType((*x.shape[:lead], *(n + t % 2 for n, t in zip(x.shape[lead:], total, strict=True))), x.dtype)


def _convolution_saves(node: Node, types: Types) -> str:
    return "weight" if _padded_input(node, types) else "input weight"


def _padded_intermediates(node: Node, types: Types) -> tuple[TensorType, ...]:
    padded = _padded_input(node, types)
    return (padded,) if padded else ()


CONVOLUTION_NAMES = (
    "conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv3d.padding convolution.default "
    "conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input"
)

CONVOLUTION_FACTS = Facts(saves=_convolution_saves, intermediates=_padded_intermediates, addend="bias")

CONVOLUTION_RULES: tuple[Rule, ...] = tuple(
    replace(rule, flops=_convolution_flops)
    for rule in rules(
        CONVOLUTION_NAMES,
        _convolution,
        _local_convolution,
        "n i ..., o i ..., o -> n o ...",
        sends=True,
        facts=CONVOLUTION_FACTS,
    )
)


def _positions(node: Node, rank: int) -> range:
    """The position dims; the op's name has their number."""
    found = re.search(r"([123])d", str(node.op))
    return range(rank - int(found.group(1) if found else 2), rank)


def _pool_factors(slidings: SlidingDimsOf, linear: bool) -> SpaceOf:
    def strategies(node: Node, graph: Graph) -> Factors:
        """All dims but positions, and windowed positions; no empty channels and results."""
        shape, result = graph.shapes(node.inputs)[0], graph.shapes(node.outputs)[0]
        first = _positions(node, len(shape)).start
        sizes = {f"d{d}": shape[d] for d in range(first)} | {s.factor: s.to for s in slidings(node, graph) if s.fixed}
        summed = [d for d in range(first, len(shape)) if _is_mean(node, result)]
        sizes |= {f"d{d}": shape[d] for d in summed}
        dims: Dims = tuple(f"d{d}" if f"d{d}" in sizes else None for d in range(len(shape)))
        kept: Dims = tuple(None if d in summed else f for d, f in enumerate(dims))
        nonempty = frozenset(sizes) - {f"d{d}" for d in (*range(first - 1), *summed)}
        linear_in = ((0,),) if linear else ()
        outputs = (kept,) * len(node.outputs)
        return Factors((dims,), outputs, sizes, nonempty=nonempty, linear=linear_in)

    return strategies


def _no_windows(node: Node, graph: Graph) -> tuple[SlidingDim, ...]:
    return ()


# --- windows of one size ---


def _pool_windows(node: Node, graph: Graph) -> tuple[SlidingDim, ...]:
    """Position dims of max_pool and avg_pool; not if indices into the plane are used."""
    shape, result = graph.shapes(node.inputs)[0], graph.shapes(node.outputs)[0]
    if node.output_slots != (0,):
        return ()
    dims = _positions(node, len(shape))
    names = ("kernel_size", "stride", "padding", "dilation")
    windows = zip(*(per_position_dim(node, name, len(dims)) for name in names), strict=True)
    return tuple(SlidingDim(d, shape[d], result[d], Window(*w)) for d, w in zip(dims, windows, strict=True))


def _unpadded(site: Site, along: Sequence[SlidingDim], x: Any) -> LocalCall:
    """The pool of ``x``, which already includes the padding along ``along``."""
    dims = _positions(site.node, len(site.in_type(0).shape))
    padding = per_position_dim(site.node, "padding", len(dims))
    apart = {s.dim for s in along}
    kept = [0 if d in apart else p for d, p in zip(dims, padding, strict=True)]
    return site.unchanged(self=x, padding=kept)


def _local_max(site: Site) -> LocalCall:
    along = sharded_windows(site, _pool_windows(site.node, site.graph))
    if not along:
        return site.unchanged()
    dtype = site.in_type(0).dtype
    lowest = -math.inf if dtype.is_floating_point else torch.iinfo(dtype).min
    return _unpadded(site, along, with_halo(site, site.node.argument("self"), along, lowest))


def _local_average(site: Site) -> LocalCall:
    """Windows that reach outside the operand divide by fewer positions."""
    node = site.node
    along = sharded_windows(site, _pool_windows(node, site.graph))
    if not along:
        return site.unchanged()
    result = _unpadded(site, along, with_halo(site, node.argument("self"), along))
    if node.argument("divisor_override", None) is not None:
        return result
    for s in along:
        kernel, stride, padding = s.window[:3]
        counted = padding if node.argument("count_include_pad") else 0
        last = (s.to - 1) * stride - padding + kernel
        if padding > counted or last > s.size + counted:
            extra = {"counted": counted} if counted else {}
            result = s.call("average", site, result, size=s.size, to=s.to, **extra)
    return result


# --- adaptive pools with equal windows ---


def _adaptive_windows(node: Node, graph: Graph) -> tuple[SlidingDim, ...]:
    """Position dims of an adaptive pool with equal windows that do not overlap."""
    shape, result = graph.shapes(node.inputs)[0], graph.shapes(node.outputs)[0]
    if node.output_slots != (0,):
        return ()
    equal = (d for d in _positions(node, len(shape)) if result[d] > 1 and shape[d] % result[d] == 0)
    return tuple(SlidingDim(d, shape[d], result[d], Window(k, k)) for d in equal for k in (shape[d] // result[d],))


def _is_mean(node: Node, result: Sequence[int]) -> bool:
    """Whether an adaptive average covers all positions, so that ranks make partial sums."""
    return "adaptive_avg" in str(node.op) and all(result[d] == 1 for d in _positions(node, len(result)))


def _local_adaptive(site: Site) -> LocalCall:
    node, shape, result = site.node, site.in_type(0).shape, site.out_type().shape
    dims = _positions(node, len(shape))
    if _is_mean(node, result):
        if not any(site.inputs[0].axes_of(d) for d in dims):
            return site.unchanged()
        total = LocalCall(aten.sum.dim_IntList, (node.argument("self"), list(dims), True), {})
        return LocalCall(aten.div.Scalar, (total, math.prod(shape[d] for d in dims)), {})
    along = sharded_windows(site, _adaptive_windows(node, site.graph))
    if not along:
        return site.unchanged()
    axes = {s.dim: s.axes(site) for s in along}
    size = [Local(result[d], axes[d]) if d in axes else result[d] for d in dims]
    return site.unchanged(self=with_halo(site, node.argument("self"), along), output_size=size)


# --- nearest-neighbour interpolation ---


def _nearest_windows(node: Node, graph: Graph) -> tuple[SlidingDim, ...]:
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
    return tuple(SlidingDim(d, shape[d], result[d], Window(n, n, transposed=True)) for d, n in repeated)


def _local_repeated(site: Site) -> LocalCall:
    node, slidings = site.node, _nearest_windows(site.node, site.graph)
    along = sharded_windows(site, slidings)
    if not along:
        return site.unchanged()
    x = with_halo(site, node.argument("input" if node.op._overloadname == "vec" else "self"), along)
    op = getattr(aten, node.op._opname).vec
    return cropped_results(site, LocalCall(op, (x, None, [float(s.window.stride) for s in slidings]), {}), along)


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
MIRROR_PADS = (
    "reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default "
    "replication_pad1d.default replication_pad2d.default replication_pad3d.default"
)


def _adaptive_saves(node: Node, types: Types) -> str:
    """A mean over all positions saves nothing."""
    named = node.op not in (aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool3d.default)
    return "" if named and all(n == 1 for n in node.argument("output_size")) else "self"


MAXIMA = Facts("self result1", index_intermediates)
AVERAGES = Facts(saves="self")
ADAPTIVE_MEANS = Facts(saves=_adaptive_saves)

_SLIDING, _UNSHARDED_POSITIONS = "n c ... -> n c ...", "n c _ -> n c _"

POOL_RULES: tuple[Rule, ...] = (
    *rules(
        MAX_POOLS,
        _pool_factors(_pool_windows, False),
        _local_max,
        _SLIDING,
        sends=True,
        facts=MAXIMA,
    ),
    *rules(
        AVERAGE_POOLS,
        _pool_factors(_pool_windows, True),
        _local_average,
        _SLIDING,
        sends=True,
        facts=AVERAGES,
    ),
    *rules(
        ADAPTIVE_MAX,
        _pool_factors(_adaptive_windows, False),
        _local_adaptive,
        _SLIDING,
        sends=True,
        facts=MAXIMA,
    ),
    *rules(
        ADAPTIVE_AVERAGE,
        _pool_factors(_adaptive_windows, True),
        _local_adaptive,
        _SLIDING,
        sends=True,
        facts=ADAPTIVE_MEANS,
    ),
    *rules(
        NEAREST,
        _pool_factors(_nearest_windows, True),
        _local_repeated,
        _SLIDING,
        sends=True,
        facts=KEEPS_NOTHING,
    ),
    *rules(SMOOTH, _pool_factors(_no_windows, True), None, _UNSHARDED_POSITIONS, facts=KEEPS_NOTHING),
    *rules(MIRROR_PADS, _pool_factors(_no_windows, True), None, _UNSHARDED_POSITIONS, facts=AVERAGES),
)


RULES: tuple[Rule, ...] = (*CONVOLUTION_RULES, *POOL_RULES)
