"""Convolutions: sharded samples, channels, groups, and positions with halo exchange."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import Call, Local
from autoshard.passes.rules.base import Facts, Rule, Site, Types, rules
from autoshard.passes.rules.factors import Dims, Factors, inputs
from autoshard.passes.rules.windows import Sliding, cropped, cut, each, haloed, halos
from autoshard.runtime.transport.window import Window


def is_transposed(node: Node) -> bool:
    """Whether the weight is [in, out/groups, ...] instead of [out, in/groups, ...]."""
    if node.op is aten.convolution.default:
        return bool(node.argument("transposed"))
    return "transpose" in str(node.op)


def _convolution(node: Node, graph: Graph) -> Factors:
    """x [n, i, ...], weight [o, i, ...], bias [o]: sums over input channels, bias added once.

    Groups of channels are sharded as units. No rank may be empty: ATen has no empty kernels.
    """
    x, weight = graph.shape(node.argument("input")), graph.shape(node.argument("weight"))
    slidings = _slidings(node, graph)
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
        inputs(node, dims),
        ((*batch, outgoing, *spatial),),
        sizes,
        even=frozenset() if depthwise else frozenset({"groups"}),
        filled=frozenset({"i", "o", "groups", *(s.factor for s in slidings)}),
        addends=frozenset(bias),
        linear=((at["input"], *bias), (at["weight"], *bias)),
    )


def _padding(node: Node, kernel: tuple[int, ...]) -> list[tuple[int, int]]:
    """(before, after) for each position dim."""
    padding = node.argument("padding")
    if padding == "same":
        reaches = [d * (k - 1) for d, k in zip(each(node, "dilation", len(kernel)), kernel, strict=True)]
        return [(r // 2, r - r // 2) for r in reaches]
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    return [(p, p) for p in each(node, "padding", len(kernel))]


def _slidings(node: Node, graph: Graph) -> tuple[Sliding, ...]:
    """The windowed position dims."""
    x, kernel = graph.shape(node.argument("input")), graph.shape(node.argument("weight"))[2:]
    (y,), first = graph.shapes(node.outputs), len(x) - len(kernel)
    padding, dilation = _padding(node, kernel), each(node, "dilation", len(kernel))
    strides = each(node, "stride", len(kernel))
    return tuple(
        Sliding(
            first + d,
            x[first + d],
            y[first + d],
            Window(kernel[d], strides[d], padding[d][0], dilation[d], is_transposed(node)),
        )
        for d in range(len(kernel))
    )


def _local_convolution(site: Site) -> Call:
    node, groups = site.node, site.axes("groups")
    changes: dict[str, Any] = {"groups": Local(node.argument("groups"), groups)} if groups else {}
    slidings = _slidings(node, site.graph)
    if not (along := cut(site, slidings)):
        return site.unchanged(**changes)
    padding = _padding(node, site.graph.shape(node.argument("weight"))[2:])
    kept = [(0, 0) if s in along else p for s, p in zip(slidings, padding, strict=True)]
    x = haloed(site, node.argument("input"), along)
    if any(before != after for before, after in kept):
        x = Call(aten.constant_pad_nd.default, (x, [n for p in reversed(kept) for n in p]), {})
        kept = [(0, 0)] * len(kept)
    changes |= {"input": x, "padding": [before for before, _ in kept]}
    if is_transposed(node) and any(extra := each(node, "output_padding", len(slidings))):
        changes["output_padding"] = [0 if s in along else n for s, n in zip(slidings, extra, strict=True)]
    made = site.unchanged(**changes)
    if isinstance(node.argument("padding"), str):
        made = Call(getattr(aten, node.op._opname).default, made.args, made.kwargs)
    result: Call = cropped(site, made, along) if is_transposed(node) else made
    return result


def _convolution_flops(node: Node, graph: Graph) -> float:
    """2 · positions · kernel volume; positions of the input if transposed, else of the result."""
    weight = graph.shape(node.argument("weight"))
    moved = graph.shape(node.argument("input")) if is_transposed(node) else graph.shapes(node.outputs)[0]
    return 2.0 * math.prod(moved) * math.prod(weight[1:])


def _padded(node: Node, types: Types) -> TensorType | None:
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


def _saves(node: Node, types: Types) -> str:
    return "weight" if _padded(node, types) else "input weight"


def _intermediates(node: Node, types: Types) -> tuple[TensorType, ...]:
    padded = _padded(node, types)
    return (padded,) if padded else ()


CONVOLUTIONS = (
    "conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv3d.padding convolution.default "
    "conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input"
)

FACTS = Facts(saves=_saves, intermediates=_intermediates, addend="bias")

RULES: tuple[Rule, ...] = tuple(
    replace(rule, flops=_convolution_flops)
    for rule in rules(
        CONVOLUTIONS, _convolution, _local_convolution, "n i ..., o i ..., o -> n o ...", halos(_slidings), facts=FACTS
    )
)
