"""Normalisation: other dims are independent; over normalised dims ranks all-reduce statistics."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from autoshard.aten import aten
from autoshard.layout import R
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import Local, LocalCall, axes_argument
from autoshard.passes.rules.base import (
    Dims,
    Factors,
    Facts,
    Rule,
    Site,
    SpaceOf,
    Types,
    numbered_factors,
    operand_factors,
    rules,
    sizes_of,
)

# --- layer norm and RMS norm: statistics over the last dims ---


def _last_dims(distributed: bool) -> SpaceOf:
    def strategies(node: Node, graph: Graph) -> Factors:
        """Leading dims; the normalised ones only if ``distributed``."""
        type_ = graph.types[node.argument("input").name]
        normalised = len(node.argument("normalized_shape"))
        first = len(type_.shape) - normalised
        dims = numbered_factors(type_.shape, () if distributed else range(first, len(type_.shape)))
        statistics = tuple(d if i < first else None for i, d in enumerate(dims))
        named = {"input": dims, "weight": dims[first:], "bias": dims[first:]}
        results = tuple(dims if slot == 0 else statistics for slot in node.output_slots)
        return Factors(operand_factors(node, named), results, sizes_of(type_.shape))

    return strategies


def _local_last_dims(site: Site) -> LocalCall:
    node, axes = site.node, _normalised_axes(site)
    if not axes:
        return site.unchanged()
    names = ("input", "normalized_shape", "weight", *(() if "rms" in str(node.op) else ("bias",)), "eps")
    return LocalCall(node.op._opname, (*map(node.argument, names), axes_argument(axes)), {})


def _normalised_axes(site: Site) -> tuple[str, ...]:
    """Mesh axes that shard any normalised dim."""
    rank = len(site.in_type(0).shape)
    dims = range(rank - len(site.node.argument("normalized_shape")), rank)
    return tuple(a for d in dims for a in site.axes_of("input", d))


# --- group norm ---


def _group_norm_factors(node: Node, graph: Graph) -> Factors:
    """Factors: samples, groups of channels, and positions (with all-reduced statistics)."""
    type_ = graph.types[node.argument("input").name]
    groups = node.argument("num_groups")
    dims: Dims = ("n", "groups", *numbered_factors(type_.shape)[2:])
    sizes = {**sizes_of(type_.shape), "n": type_.shape[0], "groups": groups}
    named: dict[str, Dims] = {"input": dims, "weight": ("groups",), "bias": ("groups",)}
    return Factors(operand_factors(node, named), (dims,), sizes, even=frozenset({"groups"}))


def _local_group_norm(site: Site) -> LocalCall:
    node, shape = site.node, site.in_type(0).shape
    groups: int | Local = node.argument("num_groups")
    count = math.prod(shape[1:]) // node.argument("num_groups")
    if channel_axes := site.inputs[0].axes_of(1):
        groups = Local(node.argument("num_groups"), channel_axes)
    axes = tuple(a for d in range(2, len(shape)) for a in site.inputs[0].axes_of(d))
    if not axes:
        return site.unchanged(num_groups=groups)
    x, weight, bias, eps = (node.argument(a) for a in ("input", "weight", "bias", "eps"))
    return LocalCall("group_norm", (x, groups, weight, bias, eps, count, axes_argument(axes)), {})


# --- batch norm: statistics over samples and positions ---


def _batch_norm_factors(node: Node, graph: Graph) -> Factors:
    """Channels are independent; samples and positions share statistics in training."""
    type_ = graph.types[node.argument("input").name]
    dims = tuple("c" if d == 1 else f"d{d}" for d in range(len(type_.shape)))
    per_channel: Dims = ("c",)
    named = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), per_channel)
    shapes = [graph.types[name].shape for name in node.outputs]
    results = tuple(
        dims if slot == 0 else per_channel if shape else ()
        for slot, shape in zip(node.output_slots, shapes, strict=True)
    )
    sizes = {**sizes_of(type_.shape), "c": type_.shape[1]}
    return Factors(
        operand_factors(node, {"input": dims, **named}),
        results,
        sizes,
        # ATen's backward crashes on an empty shard
        nonempty=frozenset({"c"}) if _trains(node) else frozenset(sizes),
        reduced={f: R for f in dims if f != "c"},
    )


def _trains(node: Node) -> bool:
    return bool(node.argument("training", False))


def _local_batch_norm(site: Site) -> LocalCall:
    node, shape = site.node, site.in_type(0).shape
    axes = tuple(a for d in range(len(site.in_type(0).shape)) if d != 1 for a in site.inputs[0].axes_of(d))
    if not axes or not _trains(node):
        return site.unchanged()
    count = math.prod(shape) // shape[1]
    x, weight, bias, eps = (node.argument(a) for a in ("input", "weight", "bias", "eps"))
    if node.op is aten._native_batch_norm_legit.no_stats:
        return LocalCall("batch_norm_no_stats", (x, weight, bias, eps, count, axes_argument(axes)), {})
    running = (node.argument(a) for a in ("running_mean", "running_var", "momentum"))
    return LocalCall("batch_norm", (x, weight, bias, *running, eps, count, axes_argument(axes)), {})


def _instance_norm(node: Node, graph: Graph) -> Factors:
    """Samples and channels are independent; running statistics are only read here."""
    shape = graph.shape(node.argument("input"))
    dims: Dims = ("n", "c", *(None for _ in shape[2:]))
    named: dict[str, Dims] = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), ("c",))
    sizes = {"n": shape[0], "c": shape[1]}
    nonempty = frozenset({"n", "c"})  # ATen fails on zero samples or channels
    return Factors(operand_factors(node, {"input": dims, **named}), (dims,), sizes, nonempty=nonempty)


_RMS = "... d, d -> ... d"
_LAYER = "... d, d, d -> ... d"
_GROUP = "n (groups _) ..., (groups _), (groups _) -> n (groups _) ..."
_BATCH = "n c ..., c, c, c, c -> n c ..., c, c, c, c"


def _norm_statistics(shape: Sequence[int], node: Node, types: Types) -> tuple[TensorType, ...]:
    """Mean and reciprocal standard deviation, of ``shape``, where they are not used results."""
    dtype = torch.promote_types(types[node.inputs[0]].dtype, torch.float32)
    return tuple(TensorType(tuple(shape), dtype) for slot in (1, 2) if slot not in node.output_slots)


def _row_shape(node: Node, types: Types) -> tuple[int, ...]:
    """The input's shape with ones in place of normalised dims."""
    shape, count = types[node.inputs[0]].shape, len(node.argument("normalized_shape"))
    return (*shape[: len(shape) - count], *(1,) * count)


def _rms_intermediates(node: Node, types: Types) -> tuple[TensorType, ...]:
    """Reciprocal root for the input's gradient, normalised input for the weight's."""
    x, *weight = (types[name] for name in node.inputs)
    kept = _norm_statistics(_row_shape(node, types), node, types)[:1] if 1 not in node.output_slots and x.grad else ()
    return (*kept, *(TensorType(x.shape, x.dtype) for w in weight if w.grad))


def _instance_intermediates(node: Node, types: Types) -> tuple[TensorType, ...]:
    """Statistics and copies of weight and running statistics, per sample and channel."""
    x, copies = types[node.inputs[0]], len({"weight", "running_mean", "running_var"} & set(node.positions))
    return (TensorType((x.shape[0] * x.shape[1],), x.dtype),) * (copies + 2 * bool(node.argument("use_input_stats")))


LAYER_NORM = Facts(
    "input weight bias result1 result2",
    lambda n, types: _norm_statistics(_row_shape(n, types), n, types),
    chains=True,
    function=True,
)
RMS_NORM = Facts("input: input weight result1", _rms_intermediates, chains=True, function=True)
GROUP_NORM = Facts(
    "input weight",
    lambda n, types: _norm_statistics((types[n.inputs[0]].shape[0], n.argument("num_groups")), n, types),
    chains=True,
    function=True,
)
BATCH_NORM = Facts(
    "input weight running_mean running_var result1 result2",
    lambda n, types: _norm_statistics((types[n.inputs[0]].shape[1],), n, types) if _trains(n) else (),
    function=True,
)
INSTANCE_NORM = Facts("input", _instance_intermediates, function=True)

RULES: tuple[Rule, ...] = (
    *rules("layer_norm.default", _last_dims(True), _local_last_dims, _LAYER, sends=True, facts=LAYER_NORM),
    *rules(
        "native_layer_norm.default", _last_dims(False), None, "... _, _, _ -> ... _, ... _, ... _", facts=LAYER_NORM
    ),
    *rules("rms_norm.default", _last_dims(True), _local_last_dims, _RMS, sends=True, facts=RMS_NORM),
    *rules("_fused_rms_norm.default", _last_dims(False), None, "... _, _ -> ... _, ... _", facts=RMS_NORM),
    *rules("group_norm.default", _group_norm_factors, _local_group_norm, _GROUP, sends=True, facts=GROUP_NORM),
    *rules(
        "_native_batch_norm_legit_functional.default _native_batch_norm_legit.no_stats "
        "_native_batch_norm_legit_no_training.default",
        _batch_norm_factors,
        _local_batch_norm,
        _BATCH,
        sends=True,
        facts=BATCH_NORM,
    ),
    *rules("instance_norm.default", _instance_norm, None, "n c _, c, c, c, c -> n c _", facts=INSTANCE_NORM),
)
