"""Normalisation: dims outside the statistics are independent; over dims inside, the ranks all-reduce sums."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from autoshard.layout import R
from autoshard.passes.ir import Graph, Node
from autoshard.passes.rules.base import Call, Local, Rule, Site, Strategy
from autoshard.passes.rules.factors import Dims, Factors, argument, numbered, shape_of, sizes_of
from autoshard.passes.rules.named import axes_of, inputs, ops, spell, unchanged

aten = torch.ops.aten


# --- layer norm and RMS norm: statistics over the last dims ---


def _last_dims(distributed: bool) -> object:
    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        """Leading dims; where ``distributed``, also the normalised ones."""
        type_ = graph.types[argument(node, "input").name]
        normalised = len(argument(node, "normalized_shape"))
        first = len(type_.shape) - normalised
        dims = numbered(type_.shape, () if distributed else range(first, len(type_.shape)))
        statistics = tuple(d if i < first else None for i, d in enumerate(dims))
        named = {"input": dims, "weight": dims[first:], "bias": dims[first:]}
        results = tuple(dims if slot == 0 else statistics for slot in node.output_slots)
        found = Factors(inputs(node, named), results, sizes_of(type_.shape)).strategies(node, graph)
        rows = math.prod(type_.shape[:first]) * max(4, type_.dtype.itemsize)
        costs = {f"d{d}": 2.0 * rows for d in range(first, len(type_.shape))}
        return tuple(replace(s, communication=costs.get(s.label, 0.0)) for s in found)

    return strategies


def _local_layer_norm(site: Site) -> Call:
    node, axes = site.node, _normalised_axes(site)
    if not axes:
        return unchanged(site)
    args = (argument(node, a) for a in ("input", "normalized_shape", "weight", "bias", "eps"))
    return Call("layer_norm", (*args, spell(axes)), {})


def _local_rms_norm(site: Site) -> Call:
    node, axes = site.node, _normalised_axes(site)
    if not axes:
        return unchanged(site)
    args = (argument(node, a) for a in ("input", "normalized_shape", "weight", "eps"))
    return Call("rms_norm", (*args, spell(axes)), {})


def _normalised_axes(site: Site) -> tuple[str, ...]:
    """Axes that cut any of the normalised dims."""
    rank = len(site.in_type(0).shape)
    dims = range(rank - len(argument(site.node, "normalized_shape")), rank)
    return tuple(a for d in dims for a in axes_of(site, "input", d))


# --- group norm ---


def _group_norm(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Samples, whole groups of channels, and positions (statistics over all ranks)."""
    type_ = graph.types[argument(node, "input").name]
    groups = argument(node, "num_groups")
    dims: Dims = ("n", "groups", *numbered(type_.shape)[2:])
    sizes = {**sizes_of(type_.shape), "n": type_.shape[0], "groups": groups}
    named: dict[str, Dims] = {"input": dims, "weight": ("groups",), "bias": ("groups",)}
    found = Factors(inputs(node, named), (dims,), sizes, even=frozenset({"groups"})).strategies(node, graph)
    bytes_ = 2.0 * type_.shape[0] * groups * max(4, type_.dtype.itemsize)
    return tuple(replace(s, communication=bytes_) if s.label in dims[2:] else s for s in found)


def _local_group_norm(site: Site) -> Call:
    node, shape = site.node, site.in_type(0).shape
    groups: int | Local = argument(node, "num_groups")
    count = math.prod(shape[1:]) // argument(node, "num_groups")
    if channel_axes := site.inputs[0].axes_of(1):
        groups = Local(argument(node, "num_groups"), channel_axes)
    axes = tuple(a for d in range(2, len(shape)) for a in site.inputs[0].axes_of(d))
    if not axes:
        return unchanged(site, num_groups=groups)
    x, weight, bias, eps = (argument(node, a) for a in ("input", "weight", "bias", "eps"))
    return Call("group_norm", (x, groups, weight, bias, eps, count, spell(axes)), {})


# --- batch norm: statistics over samples and positions ---


def _batch_norm(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Channels are independent. Samples and positions: global statistics in training, independent otherwise."""
    type_ = graph.types[argument(node, "input").name]
    dims = tuple("c" if d == 1 else f"d{d}" for d in range(len(type_.shape)))
    per_channel: Dims = ("c",)
    named = {name: per_channel for name in ("weight", "bias", "running_mean", "running_var")}
    shapes = [graph.types[name].shape for name in node.outputs]
    results = tuple(
        dims if slot == 0 else per_channel if shape else () for slot, shape in zip(node.output_slots, shapes, strict=True)
    )
    sizes = {**sizes_of(type_.shape), "c": type_.shape[1]}
    factors = Factors(
        inputs(node, {"input": dims, **named}), results, sizes, reduced={f: R for f in dims if f != "c"}
    )
    found = factors.strategies(node, graph)
    if not _trains(node):
        return found
    bytes_ = 2.0 * type_.shape[1] * max(4, type_.dtype.itemsize)
    return tuple(replace(s, communication=bytes_) if s.label in sizes and s.label != "c" else s for s in found)


def _trains(node: Node) -> bool:
    names = [a.name for a in node.op._schema.arguments]
    return "training" in names and bool(argument(node, "training"))


def _local_batch_norm(site: Site) -> Call:
    node, shape = site.node, site.in_type(0).shape
    axes = tuple(a for d in range(len(shape)) if d != 1 for a in site.inputs[0].axes_of(d))
    if not axes or not _trains(node):
        return unchanged(site)
    count = math.prod(shape) // shape[1]
    x, weight, bias, eps = (argument(node, a) for a in ("input", "weight", "bias", "eps"))
    if node.op is aten._native_batch_norm_legit.no_stats:
        return Call("batch_norm_no_stats", (x, weight, bias, eps, count, spell(axes)), {})
    running = (argument(node, a) for a in ("running_mean", "running_var", "momentum"))
    return Call("batch_norm", (x, weight, bias, *running, eps, count, spell(axes)), {})


def _instance_norm(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Samples and channels are independent; running statistics mix the samples."""
    shape = shape_of(graph, argument(node, "input"))
    dims: Dims = ("n", "c", *(None for _ in shape[2:]))
    named: dict[str, Dims] = {a: ("c",) for a in ("weight", "bias", "running_mean", "running_var")}
    sizes = {"c": shape[1]} if argument(node, "running_mean") is not None else {"n": shape[0], "c": shape[1]}
    return Factors(inputs(node, {"input": dims, **named}), (dims,), sizes).strategies(node, graph)


RULES: tuple[Rule, ...] = (
    Rule(aten.layer_norm.default, _last_dims(True), _local_layer_norm, notation="... d, d, d -> ... d"),
    Rule(aten.native_layer_norm.default, _last_dims(False), notation="... _, _, _ -> ... _, ... _, ... _"),
    Rule(aten.rms_norm.default, _last_dims(True), _local_rms_norm, notation="... d, d -> ... d"),
    Rule(aten._fused_rms_norm.default, _last_dims(False), notation="... _, _ -> ... _, ... _"),
    Rule(aten.group_norm.default, _group_norm, _local_group_norm, notation="n (groups _) ..., (groups _) -> n (groups _) ..."),
    *(
        Rule(op, _batch_norm, _local_batch_norm, notation="n c ..., c, c, c, c -> n c ..., c, c, c, c")
        for op in ops(
            "_native_batch_norm_legit_functional.default _native_batch_norm_legit.no_stats "
            "_native_batch_norm_legit_no_training.default"
        )
    ),
    Rule(aten.instance_norm.default, _instance_norm, notation="n c _, c, c, c, c -> n c _"),
)
