"""Losses: the samples cut, the classes cut, or both; softmax over a cut dim. "mean" divides by the global count."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from autoshard.layout import I, Shard
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import Call, Internal
from autoshard.passes.rules.base import Facts, Rule, Site, Types
from autoshard.passes.rules.factors import (
    Dims,
    Factors,
    argument,
    broadcast,
    input_shapes,
    numbered,
    output_shapes,
    positive,
    shape_of,
    sizes_of,
)
from autoshard.passes.rules.named import (
    broadcast_shape,
    inputs,
    local_shape,
    ops,
    positions,
    reductions,
    spell,
    unchanged,
    wide_bytes,
)

aten = torch.ops.aten

REDUCTIONS = ("none", "mean", "sum")


# --- cross entropy and negative log likelihood: [n, c, ...] or [c] ---


def _samples(node: Node, graph: Graph) -> Factors:
    """Samples and further positions are factors; so are the classes of operands that have them."""
    logits, target = shape_of(graph, argument(node, "self")), shape_of(graph, argument(node, "target"))
    class_dim = min(len(logits) - 1, 1)
    named: Dims = tuple("vocab" if d == class_dim else f"d{d}" for d in range(len(logits)))
    positions_only = tuple(f for f in named if f != "vocab")
    dims = {"self": named, "target": named if target == logits else positions_only, "weight": (None,)}
    result = positions_only if REDUCTIONS[argument(node, "reduction")] == "none" else ()
    sizes = {f: n for f, n in zip(named, logits, strict=True) if f is not None}
    return Factors(inputs(node, dims), (result,), sizes)


def _cross_entropy(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Samples: none → S, sum and mean → P. Classes: the result comes out whole (I) on every rank."""
    found = _samples(node, graph).strategies(node, graph)
    return tuple(replace(s, outputs=(I,)) if s.label == "vocab" else s for s in found)


def _cross_entropy_collectives(site: Site) -> tuple[Internal, ...]:
    """Maxima, then the sums packed; then the count that "mean" divides by. Nothing backward."""
    logits = site.in_type(0)
    class_dim = min(len(logits.shape) - 1, 1)
    local = local_shape(site, "self")
    samples = math.prod(n for d, n in enumerate(local) if d != class_dim) * wide_bytes(logits.dtype)
    class_axes = site.inputs[0].axes_of(class_dim)
    packed = _sums(site.node, site.graph)
    found = reductions(site, class_axes, samples, ("maxima",), ())
    found += reductions(site, class_axes, packed * samples, ("sum-exp and the target's logit",), ())
    return found + (() if site.in_type(1).dtype.is_floating_point else _nll_collectives(site))


def _nll_collectives(site: Site) -> tuple[Internal, ...]:
    """The count that "mean" divides by."""
    if REDUCTIONS[argument(site.node, "reduction")] != "mean":
        return ()
    weight = positions(site.node).get("weight", 0)
    return reductions(site, _batch_axes(site), wide_bytes(site.in_type(weight).dtype), ("count",), ())


def _batch_axes(site: Site) -> tuple[str, ...]:
    """Axes that cut the logits, but not their classes."""
    class_dim = min(len(site.in_type(0).shape) - 1, 1)
    placed = zip(site.mesh.axes, site.inputs[0].placements, strict=True)
    return tuple(a for a, p in placed if isinstance(p, Shard) and p.dim != class_dim)


def _sums(node: Node, graph: Graph) -> int:
    """Sums per sample that are all-reduced together."""
    logits, target = shape_of(graph, argument(node, "self")), shape_of(graph, argument(node, "target"))
    return 3 if argument(node, "label_smoothing") or target == logits else 2


def _nll(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    found: tuple[Strategy, ...] = _samples(node, graph).strategies(node, graph)
    return found


def _local_classification(function: str) -> Callable[[Site], Call]:
    """The op itself where every rank's part stands for itself, else the runtime function."""

    def local(site: Site) -> Call:
        node = site.node
        shape = site.in_type(0).shape
        class_dim = min(len(shape) - 1, 1)
        class_axes = site.inputs[0].axes_of(class_dim)
        batch_axes = _batch_axes(site)
        reduction = REDUCTIONS[argument(node, "reduction")]
        if not class_axes and (reduction != "mean" or not batch_axes):
            return unchanged(site)
        extra: dict[str, Any] = {}
        for name, default in (("weight", None), ("ignore_index", -100), ("label_smoothing", 0.0)):
            if any(a.name == name for a in node.op._schema.arguments) and argument(node, name) != default:
                extra[name] = argument(node, name)
        if reduction != "mean":
            extra["reduction"] = reduction
        extra["classes"] = shape[class_dim]
        if class_axes:
            extra["class_axes"] = spell(class_axes)
        if batch_axes and reduction == "mean":
            extra["batch_axes"] = spell(batch_axes)
        if reduction == "mean" and site.in_type(1).dtype.is_floating_point:
            extra["samples"] = math.prod(shape) // shape[class_dim]
        return Call(function, (argument(node, "self"), argument(node, "target")), extra)

    return local


# --- softmax ---


def _softmax(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Every dim is a factor; over ``dim`` the ranks all-reduce maxima and sums."""
    type_ = graph.types[node.inputs[0]]
    dims = numbered(type_.shape)
    return Factors((dims,), (dims,), sizes_of(type_.shape)).strategies(node, graph)


def _softmax_collectives(site: Site) -> tuple[Internal, ...]:
    type_ = site.in_type(0)
    if not type_.shape:
        return ()
    dim = positive(argument(site.node, "dim"), len(type_.shape))
    rows = math.prod(n for d, n in enumerate(local_shape(site, "self")) if d != dim)
    size = rows * wide_bytes(site.out_type().dtype)
    return reductions(site, site.inputs[0].axes_of(dim), size, ("maxima", "sums"), ("gradient of the sums",))


def _local_softmax(function: str) -> Callable[[Site], Call]:
    def local(site: Site) -> Call:
        node = site.node
        dim = positive(argument(node, "dim"), len(site.in_type(0).shape))
        axes = site.inputs[0].axes_of(dim)
        if not axes:
            return unchanged(site)
        dtype = site.out_type().dtype
        extra = {"dtype": dtype} if dtype != site.in_type(0).dtype else {}
        return Call(function, (node.args[0], dim, spell(axes)), extra)

    return local


# --- losses that go element by element, and row by row ---


def _elementwise(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """All operands broadcast; with a reduction the result lacks every factor, so it is P."""
    shapes = input_shapes(node, graph)
    shape = broadcast_shape(*shapes)
    dims = numbered(shape)
    result = dims if REDUCTIONS[argument(node, "reduction")] == "none" else ()
    return Factors(tuple(broadcast(s, shape, dims) for s in shapes), (result,), sizes_of(shape)).strategies(node, graph)


def _rowwise(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Operands [n, ...] with a loss per row; ``weight`` is per class."""
    shapes = input_shapes(node, graph)
    rows = shapes[0][0] if len(shapes[0]) == 2 else 0
    weight = positions(node).get("weight")
    dims = tuple(_first_dim(s, rows if i != weight else 0) for i, s in enumerate(shapes))
    batched = rows and all(s[:1] == (rows,) for i, s in enumerate(shapes) if i != weight)
    result: Dims = ("n",) if REDUCTIONS[argument(node, "reduction")] == "none" else ()
    results = result if batched else (None,) * len(output_shapes(node, graph)[0])
    return Factors(dims, (results,), {"n": rows} if batched else {}).strategies(node, graph)


def _first_dim(shape: tuple[int, ...], rows: int) -> Dims:
    return tuple("n" if d == 0 and rows else None for d in range(len(shape)))


def _local_mean(count: Callable[[Site], int]) -> Callable[[Site], Call]:
    """Where the loss reduces over sharded elements: the local sum, for "mean" over the global count."""

    def local(site: Site) -> Call:
        reduction = REDUCTIONS[argument(site.node, "reduction")]
        sharded = any(isinstance(p, Shard) for layout in site.inputs for p in layout.placements)
        if reduction == "none" or not sharded:
            return unchanged(site)
        total = _local_sum(site)
        return Call(aten.div.Scalar, (total, count(site)), {}) if reduction == "mean" else total

    return local


def _local_sum(site: Site) -> Call:
    """The op's own sum, but for one that leaves the result for no rows unset (torch 2.13)."""
    if site.node.op is aten.multi_margin_loss.default:
        return Call(aten.sum.default, (unchanged(site, reduction=0),), {})
    return unchanged(site, reduction=2)


def _elements(site: Site) -> int:
    return math.prod(broadcast_shape(*input_shapes(site.node, site.graph)))


def _rows(site: Site) -> int:
    return site.in_type(0).shape[0]


def _has_classes(node: Node, types: Types) -> bool:
    """Whether targets are classes without smoothing, not probabilities."""
    target = types[node.inputs[positions(node)["target"]]]
    return not target.dtype.is_floating_point and not argument(node, "label_smoothing")


def _log_softmax(node: Node, types: Types) -> tuple[TensorType, ...]:
    return (replace(types[node.inputs[0]], grad=False), *_total_weight(node, types))


def _total_weight(node: Node, types: Types) -> tuple[TensorType, ...]:
    """What "mean" divides by."""
    return (TensorType((), types[node.inputs[0]].dtype),)


def _difference(node: Node, types: Types) -> tuple[TensorType, ...]:
    left, right = (types[name] for name in node.inputs)
    return (TensorType(broadcast_shape(left.shape, right.shape), left.dtype),)


ELEMENTWISE: dict[str, Facts] = {
    "mse_loss.default smooth_l1_loss.default huber_loss.default soft_margin_loss.default": Facts(saves="self target"),
    "l1_loss.default": Facts(saves="", intermediates=_difference),
    "kl_div.default": Facts(lambda node, types: None if argument(node, "log_target") else "target; target: self"),
    "binary_cross_entropy.default": Facts(saves="self target weight"),
    "binary_cross_entropy_with_logits.default": Facts(saves="self target weight pos_weight"),
    "poisson_nll_loss.default margin_ranking_loss.default hinge_embedding_loss.default": Facts(),
}
ROWWISE: dict[str, Facts] = {
    "cosine_embedding_loss.default triplet_margin_loss.default": Facts(),
    "multi_margin_loss.default": Facts(saves="self target weight"),
}
SOFTMAX = Facts(saves="result")

RULES: tuple[Rule, ...] = (
    Rule(
        aten.cross_entropy_loss.default,
        _cross_entropy,
        _local_classification("cross_entropy"),
        notation="n vocab ..., n ..., _ -> n ... (none), P (sum, mean); vocab: I",
        collectives=_cross_entropy_collectives,
        facts=Facts(lambda node, types: "target weight" if _has_classes(node, types) else None, _log_softmax),
    ),
    *(
        Rule(
            op,
            _nll,
            _local_classification("nll_loss"),
            notation="n vocab ..., n ..., _ -> n ... (none), P (sum, mean)",
            collectives=_nll_collectives,
            facts=Facts("self target weight", _total_weight),
        )
        for op in ops("nll_loss_nd.default nll_loss.default nll_loss2d.default")
    ),
    *(
        Rule(op, _softmax, _local_softmax(name), None, "... -> ...", _softmax_collectives, facts=SOFTMAX)
        for name, names in (
            ("softmax", "softmax.int _softmax.default"),
            ("log_softmax", "log_softmax.int _log_softmax.default"),
            ("safe_softmax", "_safe_softmax.default"),
        )
        for op in ops(names)
    ),
    *(
        Rule(op, _elementwise, _local_mean(_elements), notation="..., ... -> ... (none), P", facts=facts)
        for names, facts in ELEMENTWISE.items()
        for op in ops(names)
    ),
    *(
        Rule(op, _rowwise, _local_mean(_rows), notation="n _, n ... -> n (none), P", facts=facts)
        for names, facts in ROWWISE.items()
        for op in ops(names)
    ),
)
