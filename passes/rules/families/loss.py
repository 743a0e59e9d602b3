"""Losses (CTC, too) and softmax: samples, classes or both sharded (vocabulary-parallel cross
entropy). "mean" divides by the global count. Also runtime functions that need full tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autoshard.aten import aten
from autoshard.layout import I, R, Shard
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
    broadcast,
    broadcast_shape,
    numbered_factors,
    operand_factors,
    reduced_dim_form,
    rules,
    same_shape_factors,
    sizes_of,
    unsharded_only,
)
from autoshard.runtime.operations.autograd_ops import function_op
from autoshard.runtime.operations.checks import exactly
from autoshard.runtime.operations.losses import cross_entropy_op, ctc_loss, linear_cross_entropy_op

REDUCTIONS = ("none", "mean", "sum")
CHUNKED_LOSS_ELEMENTS = 1 << 27
"""elements of local logits from which on cross entropy runs in chunks"""


# --- cross entropy and NLL: [n, c, ...] or [c]; our op: [..., c]; in chunks: features [..., k] ---

CLASSES_LAST, OF_LINEAR = cross_entropy_op, linear_cross_entropy_op


def class_dim_of(node: Node, graph: Graph) -> int:
    """The dim of the logits' classes, or of a linear layer's operand's features."""
    rank = len(graph.shape(node.argument("self")))
    return rank - 1 if node.op in (CLASSES_LAST, OF_LINEAR) else min(rank - 1, 1)


def _sample_factors(node: Node, graph: Graph) -> Factors:
    """Sample and position dims are factors, and the classes of operands that have them."""
    logits, target = graph.shape(node.argument("self")), graph.shape(node.argument("target"))
    class_dim = class_dim_of(node, graph)
    named: Dims = tuple("vocab" if d == class_dim else f"d{d}" for d in range(len(logits)))
    positions_only = tuple(f for f in named if f != "vocab")
    dims = {"self": named, "target": named if target == logits else positions_only, "weight": (None,)}
    result = positions_only if REDUCTIONS[node.argument("reduction")] == "none" else ()
    sizes = {f: n for f, n in zip(named, logits, strict=True) if f is not None}
    if node.op is OF_LINEAR:
        dims |= {"self": (*positions_only, None), "matrix": ("vocab", None), "bias": ("vocab",)}
        sizes["vocab"] = graph.shape(node.argument("matrix"))[0]
    return Factors(operand_factors(node, dims), (result,), sizes)


def _cross_entropy(node: Node, graph: Graph) -> Factors:
    """Samples: "none" → S, "sum" and "mean" → P. Sharded classes: the result is I."""
    return replace(_sample_factors(node, graph), reduced={"vocab": I})


def _chunked_cross_entropy(node: Node, graph: Graph) -> Space:
    """Also rows and classes sharded alike: ranks gather a chunk of the rows of each at a time."""
    found = _cross_entropy(node, graph)
    rows = graph.shape(node.argument("self"))[:-1] if REDUCTIONS[node.argument("reduction")] != "none" else ()
    gathered = []
    for d, n in enumerate(rows):
        at = {"self": Shard(d), "matrix": Shard(0), "bias": Shard(0)}
        others = frozenset((f"d{d}", *(gathered_label(e) for e in range(len(rows)) if e != d)))
        placed = tuple(at.get(name, R) for name in node.positions)
        gathered.append(Strategy(gathered_label(d), placed, (I,), n, True, divides=True, apart=others, joins="none"))
    return *found.strategies(node, graph), *gathered


def gathered_label(dim: int) -> str:
    """Label of the strategy that shards classes and, gathered in chunks, rows along ``dim``."""
    return f"vocab/d{dim}"


def gathered_rows(choice: Sequence[Strategy], ndim: int) -> int | None:
    """The dim of the rows that a choice gathers in chunks, if any; ``ndim``: of their operand."""
    labels = {s.label for s in choice}
    return next((d for d in range(ndim - 1) if gathered_label(d) in labels), None)


def _spared_count(site: Site, c: InternalCollective) -> InternalCollective:
    """The count of "mean": with unsharded labels every rank counts all of them itself."""
    counts = set(c.axes) <= set(_batch_axes(site))
    return replace(c, what="count", spared=site.node.positions["target"]) if counts else c


def _batch_axes(site: Site) -> tuple[str, ...]:
    """Mesh axes that shard the logits, except their classes."""
    class_dim = class_dim_of(site.node, site.graph)
    operand = site.node.positions["target"] if site.node.op is OF_LINEAR else 0
    placed = zip(site.mesh.axes, site.inputs[operand].placements, strict=True)
    return tuple(a for a, p in placed if isinstance(p, Shard) and p.dim != class_dim)


def _local_classification(function: str) -> Callable[[Site], LocalCall]:
    """The op itself if shards are independent, else the runtime function."""

    def local(site: Site) -> LocalCall:
        node = site.node
        shape = site.in_type(0).shape
        class_dim = class_dim_of(node, site.graph)
        classes, class_axes = shape[class_dim], site.inputs[0].axes_of(class_dim)
        if node.op is OF_LINEAR:
            classes, class_axes = site.graph.shape(node.argument("matrix"))[0], site.axes_of("matrix", 0)
        batch_axes = _batch_axes(site)
        reduction = REDUCTIONS[node.argument("reduction")]
        pieces = node.op is OF_LINEAR or _is_chunked_loss(site)
        if not class_axes and not pieces and (reduction != "mean" or not batch_axes):
            return site.unchanged()
        extra: dict[str, Any] = {}
        for name, default in (("weight", None), ("ignore_index", -100), ("label_smoothing", 0.0)):
            if (given := node.argument(name, default)) != default:
                extra[name] = given
        if reduction != "mean":
            extra["reduction"] = reduction
        if class_axes or pieces:
            extra["classes"] = classes
        if class_axes:
            extra["class_axes"] = axes_argument(class_axes)
        if batch_axes and reduction == "mean":
            extra["batch_axes"] = axes_argument(batch_axes)
        if reduction == "mean" and site.in_type(1).dtype.is_floating_point:
            extra["counted"] = math.prod(shape) // shape[class_dim]
        return LocalCall(function, (node.argument("self"), node.argument("target")), extra)

    return local


def _is_chunked_loss(site: Site) -> bool:
    """Whether cross entropy runs in chunks, to save probabilities and gradients of logits' size."""
    integers = not site.in_type(1).dtype.is_floating_point
    large = math.prod(site.local_shape("self")) >= CHUNKED_LOSS_ELEMENTS
    known = site.node.op in (aten.cross_entropy_loss.default, CLASSES_LAST)
    return known and site.grad and integers and large and not site.in_micro_batch


def _cross_entropy_of_rows(site: Site) -> LocalCall:
    """Classes last, or a linear layer in chunks: cross entropy of flattened rows."""
    node, flat = site.node, aten.flatten.using_ints
    if node.op is OF_LINEAR and site.in_micro_batch:
        return site.unchanged()
    found = _local_classification("cross_entropy")(site)
    fn = aten.cross_entropy_loss.default if found.fn is CLASSES_LAST else found.fn
    logits, target, *others = found.args
    but_last = (0, -2) if site.in_type(1).dtype.is_floating_point else ()
    rows = LocalCall(flat, (logits, 0, -2), {})
    if node.op is OF_LINEAR:
        dtype, bias = node.argument("dtype"), node.argument("bias")
        chunks = node.argument("chunks")
        if not site.graph.symbols.read:  # at most one per row of the fullest rank
            chunks = max(1, min(chunks, math.prod(site.local_shape("self")[:-1])))
        extra = {"chunks": chunks} | ({"dtype": dtype} if dtype != site.in_type(0).dtype else {})
        if (dim := gathered_rows(site.choice, len(site.in_type(0).shape))) is not None:
            extra |= {"dim": dim, "axes": axes_argument(site.axes(gathered_label(dim)))}
        rows = LocalCall("chunked_logits", (logits, node.argument("matrix"), *[bias] * (bias is not None)), extra)
    call = LocalCall(fn, (rows, LocalCall(flat, (target, *but_last), {}), *others), found.kwargs)
    if REDUCTIONS[node.argument("reduction")] != "none":
        return call
    return LocalCall(aten.reshape.default, (call, site.local_sizes(site.outputs[0], site.out_type().shape)), {})


# --- softmax ---


def _over_dim(names: str, function: str) -> list[Rule]:
    """Rules of softmax-like ops, with the runtime's ``function`` over a sharded dim."""

    return rules(
        names,
        same_shape_factors,
        reduced_dim_form(function),
        "... -> ...",
        sends=True,
        facts=Facts(saves="result", chains=True, function=True),
    )


# --- elementwise and rowwise losses ---


def _elementwise_loss(node: Node, graph: Graph) -> Factors:
    """All operands broadcast; a reduced result lacks every factor, so it is P."""
    shapes = graph.shapes(node.inputs)
    shape = broadcast_shape(*shapes)
    dims = numbered_factors(shape)
    result = dims if REDUCTIONS[node.argument("reduction")] == "none" else ()
    return Factors(tuple(broadcast(s, shape, dims) for s in shapes), (result,), sizes_of(shape))


def _rowwise(node: Node, graph: Graph) -> Space:
    """Operands [n, ...], one loss per row; ``weight`` is per class."""
    shapes = graph.shapes(node.inputs)
    rows = shapes[0][0] if len(shapes[0]) == 2 else 0
    weight = node.positions.get("weight")
    batched = rows and all(s[:1] == (rows,) for i, s in enumerate(shapes) if i != weight)
    if not batched:
        return unsharded_only(node, graph)
    dims = tuple(("n" if i != weight else None, *(None,) * len(s))[: len(s)] for i, s in enumerate(shapes))
    return Factors(dims, (("n",) if REDUCTIONS[node.argument("reduction")] == "none" else (),), {"n": rows})


def _local_mean(count: Callable[[Site], int]) -> Callable[[Site], LocalCall]:
    """Reduced over sharded elements: the local sum, for "mean" over the global count."""

    def local(site: Site) -> LocalCall:
        reduction = REDUCTIONS[site.node.argument("reduction")]
        sharded = any(isinstance(p, Shard) for layout in site.inputs for p in layout.placements)
        if reduction == "none" or not sharded:
            return site.unchanged()
        total = _local_sum(site)
        return LocalCall(aten.div.Scalar, (total, count(site)), {}) if reduction == "mean" else total

    return local


def _local_sum(site: Site) -> LocalCall:
    """The op's sum; one op leaves the result for zero rows unset (torch 2.13)."""
    if site.node.op is aten.multi_margin_loss.default:
        return LocalCall(aten.sum.default, (site.unchanged(reduction=0),), {})
    return site.unchanged(reduction=2)


def _element_count(site: Site) -> int:
    return math.prod(broadcast_shape(*site.graph.shapes(site.node.inputs)))


def _row_count(site: Site) -> int:
    return site.in_type(0).shape[0]


def _has_classes(node: Node, types: Types) -> bool:
    """Whether targets are class indices without label smoothing."""
    target = types[node.inputs[node.positions["target"]]]
    return not target.dtype.is_floating_point and not node.argument("label_smoothing")


def _log_softmax(node: Node, types: Types) -> tuple[TensorType, ...]:
    return (replace(types[node.inputs[0]], grad=False), *_total_weight(node, types))


def _total_weight(node: Node, types: Types) -> tuple[TensorType, ...]:
    """The divisor of "mean"."""
    return (TensorType((), types[node.inputs[0]].dtype),)


def _linear_flops(node: Node, graph: Graph) -> float:
    return 2.0 * math.prod(graph.shape(node.argument("self"))) * graph.shape(node.argument("matrix"))[0]


def _loss_difference(node: Node, types: Types) -> tuple[TensorType, ...]:
    left, right = (types[name] for name in node.inputs)
    return (TensorType(broadcast_shape(left.shape, right.shape), left.dtype),)


ELEMENTWISE: dict[str, Facts] = {
    "mse_loss.default smooth_l1_loss.default huber_loss.default soft_margin_loss.default": Facts(saves="self target"),
    "l1_loss.default": Facts(saves="", intermediates=_loss_difference),
    "kl_div.default": Facts(lambda node, types: None if node.argument("log_target") else "target; target: self"),
    "binary_cross_entropy.default": Facts(saves="self target weight"),
    "binary_cross_entropy_with_logits.default": Facts(saves="self target weight pos_weight"),
    "poisson_nll_loss.default margin_ranking_loss.default hinge_embedding_loss.default": Facts(),
}
ROWWISE: dict[str, Facts] = {
    "cosine_embedding_loss.default triplet_margin_loss.default": Facts(),
    "multi_margin_loss.default": Facts(saves="self target weight"),
}

CROSS_ENTROPY = Facts(
    lambda node, types: "target weight" if _has_classes(node, types) else None,
    _log_softmax,
    chains=True,
    function=True,
)

LOSS_RULES: tuple[Rule, ...] = (
    *rules(
        "cross_entropy_loss.default",
        _cross_entropy,
        _local_classification("cross_entropy"),
        "n vocab ..., n ..., _ -> n ... (none), P (sum, mean); vocab: I",
        sends=True,
        annotate=_spared_count,
        facts=CROSS_ENTROPY,
    ),
    Rule(
        CLASSES_LAST,
        _cross_entropy,
        _cross_entropy_of_rows,
        None,
        "... vocab, ..., _ -> ... (none), P (sum, mean); vocab: I",
        sends=True,
        annotate=_spared_count,
        facts=CROSS_ENTROPY,
    ),
    Rule(
        OF_LINEAR,
        _chunked_cross_entropy,
        _cross_entropy_of_rows,
        _linear_flops,
        "... _, ..., vocab _, vocab, _ -> ... (none), P (sum, mean); vocab: I",
        sends=True,
        annotate=_spared_count,
        facts=Facts(saves="self target matrix bias weight"),
    ),
    *rules(
        "nll_loss_nd.default nll_loss.default nll_loss2d.default",
        _sample_factors,
        _local_classification("nll_loss"),
        "n vocab ..., n ..., _ -> n ... (none), P (sum, mean)",
        sends=True,
        annotate=_spared_count,
        facts=Facts("self target weight", _total_weight, chains=True),
    ),
    *_over_dim("softmax.int _softmax.default", "softmax"),
    *_over_dim("log_softmax.int _log_softmax.default", "log_softmax"),
    *_over_dim("_safe_softmax.default", "safe_softmax"),
    *(
        rule
        for names, facts in ELEMENTWISE.items()
        for rule in rules(
            names,
            _elementwise_loss,
            _local_mean(_element_count),
            "..., ... -> ... (none), P",
            facts=replace(facts, chains=True),
        )
    ),
    *(
        rule
        for names, facts in ROWWISE.items()
        for rule in rules(names, _rowwise, _local_mean(_row_count), "n _, n ... -> n (none), P", facts=facts)
    ),
)


def _ctc_samples(node: Node, graph: Graph) -> Space:
    """Samples, if the targets are rows of one tensor."""
    log_probs, targets, inputs, lengths = graph.shapes(node.inputs)
    if (len(log_probs), len(targets), len(inputs), len(lengths)) != (3, 2, 1, 1):
        return unsharded_only(node, graph)
    return Factors(((None, "n", None), ("n", None), ("n",), ("n",)), (("n",),), {"n": log_probs[1]})


OPAQUE_RULES: tuple[Rule, ...] = (
    Rule(
        ctc_loss._opoverload,
        _ctc_samples,
        notation="_ n _, n _, n, n -> n",
        facts=Facts("log_probs targets input_lengths target_lengths"),
    ),
    Rule(exactly._opoverload, unsharded_only, notation="unsharded", facts=Facts(saves="", effect=True)),
    Rule(function_op._opoverload, unsharded_only, notation="unsharded"),
)


RULES: tuple[Rule, ...] = (*LOSS_RULES, *OPAQUE_RULES)
