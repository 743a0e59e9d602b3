"""Convolutions, pooling and interpolation: samples and channels. Positions stay whole: they would need halos."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import torch

from autoshard.passes.ir import Graph, Node
from autoshard.passes.rules.base import Call, Local, Rule, Site, Strategy
from autoshard.passes.rules.factors import Dims, Factors, argument, input_shapes, output_shapes, shape_of
from autoshard.passes.rules.named import inputs, ops, positions, unchanged

aten = torch.ops.aten


def is_transposed(node: Node) -> bool:
    """Whether the weight is [in, out/groups, ...] instead of [out, in/groups, ...]."""
    if node.op is aten.convolution.default:
        return bool(argument(node, "transposed"))
    return "transpose" in str(node.op)


def _convolution(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """x [n, i, ...], weight [o, i, ...], bias [o]; the channels in are summed over, the bias is added once.

    With groups, whole groups of channels in and out go together. Every rank holds channels: ATen has no empty kernels.
    """
    x, weight = shape_of(graph, argument(node, "input")), shape_of(graph, argument(node, "weight"))
    spatial: Dims = (None,) * (len(weight) - 2)
    batch: Dims = ("n",) if len(x) == len(weight) else ()
    groups = argument(node, "groups")
    sizes = {"n": x[0], "groups": groups}
    incoming, outgoing = "groups", "groups"
    kernel: Dims = ("groups", None)
    if groups == 1:
        incoming, outgoing = "i", "o"
        kernel = ("i", "o") if is_transposed(node) else ("o", "i")
        sizes |= {"i": weight[0], "o": weight[1]} if is_transposed(node) else {"i": weight[1], "o": weight[0]}
    dims: dict[str, Dims] = {
        "input": (*batch, incoming, *spatial),
        "weight": (*kernel, *spatial),
        "bias": (outgoing,),
    }
    depthwise = groups == math.prod(x[-len(spatial) - 1 : -len(spatial)]) == output_shapes(node, graph)[0][len(batch)]
    at = positions(node)
    bias = (at["bias"],) if "bias" in at else ()
    return Factors(
        inputs(node, dims),
        ((*batch, outgoing, *spatial),),
        sizes,
        even=frozenset() if depthwise else frozenset({"groups"}),
        filled=frozenset({"i", "o", "groups"}),
        addends=frozenset(bias),
        linear=((at["input"], *bias), (at["weight"], *bias)),
    ).strategies(node, graph)


def _local_convolution(site: Site) -> Call:
    groups = argument(site.node, "groups")
    axes = site.axes("groups")
    return unchanged(site, groups=Local(groups, axes)) if axes else unchanged(site)


def _convolution_flops(node: Node, graph: Graph) -> float:
    """2 · positions · kernel volume: positions of the result, or of the input where it is transposed."""
    weight = shape_of(graph, argument(node, "weight"))
    moved = shape_of(graph, argument(node, "input")) if is_transposed(node) else output_shapes(node, graph)[0]
    return 2.0 * math.prod(moved) * math.prod(weight[1:])


def _leading(linear: bool) -> Callable[[Node, Graph], tuple[Strategy, ...]]:
    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        """Every dim but the positions, whose number the op's name tells. Every rank holds channels."""
        (shape,) = input_shapes(node, graph)
        found = re.search(r"([123])d", str(node.op))
        count = len(shape) - int(found.group(1) if found else 2)
        dims: Dims = tuple(f"d{d}" if d < count else None for d in range(len(shape)))
        sizes = {f"d{d}": shape[d] for d in range(count)}
        filled = frozenset(list(sizes) if count == 1 else list(sizes)[1:])
        linear_in = ((0,),) if linear else ()
        return Factors((dims,), (dims,) * len(node.outputs), sizes, filled=filled, linear=linear_in).strategies(
            node, graph
        )

    return strategies


CONVOLUTIONS = (
    "conv1d.default conv2d.default conv3d.default conv1d.padding conv2d.padding conv3d.padding convolution.default "
    "conv_transpose1d.default conv_transpose2d.input conv_transpose3d.input"
)
POOLS = (
    "max_pool1d.default max_pool2d.default max_pool3d.default max_pool1d_with_indices.default "
    "max_pool2d_with_indices.default max_pool3d_with_indices.default adaptive_max_pool1d.default "
    "adaptive_max_pool2d.default adaptive_max_pool3d.default"
)
LINEAR = (
    "avg_pool1d.default avg_pool2d.default avg_pool3d.default adaptive_avg_pool1d.default adaptive_avg_pool2d.default "
    "adaptive_avg_pool3d.default _adaptive_avg_pool2d.default _adaptive_avg_pool3d.default "
    "upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec upsample_linear1d.vec "
    "upsample_bilinear2d.vec upsample_trilinear3d.vec upsample_bicubic2d.vec upsample_nearest1d.default "
    "upsample_nearest2d.default upsample_nearest3d.default upsample_linear1d.default upsample_bilinear2d.default "
    "upsample_trilinear3d.default upsample_bicubic2d.default _upsample_nearest_exact1d.vec "
    "_upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec _upsample_bilinear2d_aa.vec "
    "_upsample_bicubic2d_aa.vec reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default "
    "replication_pad1d.default replication_pad2d.default replication_pad3d.default"
)

RULES: tuple[Rule, ...] = (
    *(
        Rule(op, _convolution, _local_convolution, _convolution_flops, "n i ..., o i ..., o -> n o ...")
        for op in ops(CONVOLUTIONS)
    ),
    *(Rule(op, _leading(False), notation="n c _ -> n c _") for op in ops(POOLS)),
    *(Rule(op, _leading(True), notation="n c _ -> n c _") for op in ops(LINEAR)),
)
