"""Reductions, scans (cumsum), counts, top-k, argmax and sort along tensor dims. Over a sharded dim
sums stay Partial, others gather one result, total or candidate per rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from autoshard.aten import aten
from autoshard.layout import I, P, Partial, Placement
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import LocalCall, axes_argument
from autoshard.passes.rules.base import (
    KEEPS_NOTHING,
    Dims,
    Factors,
    Facts,
    LocalFormOf,
    Rule,
    Site,
    Space,
    SpaceOf,
    broadcast,
    broadcast_shape,
    dims_argument,
    index_intermediates,
    indexed_dim_form,
    numbered_factors,
    positive,
    product_saves,
    reduced_dim_form,
    rules,
    same_shape_factors,
    sizes_of,
)

EMPTY_IS_NONE = (aten.any.dims, aten.all.dims)
"""ops that reduce nothing where ``dim`` is an empty list"""


def _reduced_dims(node: Node, graph: Graph) -> tuple[int, ...]:
    """Reduced dims: all of them if the op has no ``dim``, or, of most ops, an empty one."""
    rank = len(graph.shapes(node.inputs)[0])
    return dims_argument(node.argument("dim", None), rank, empty_is_all=node.op not in EMPTY_IS_NONE)


def _reduction(
    node: Node, graph: Graph, sharded: Placement | None, linear: bool = False, nonempty: bool = False
) -> Factors:
    """Factors of a reduction; ``sharded``: the result's placement over a sharded reduced dim."""
    shape = graph.shapes(node.inputs)[0]
    gone = _reduced_dims(node, graph)
    keep = bool(node.argument("keepdim", False))
    whole = () if sharded is not None else gone
    kept: Dims = tuple(None if d in gone else f"d{d}" for d in range(len(shape)) if keep or d not in gone)
    return Factors(
        (numbered_factors(shape, whole),),
        (kept,) * len(node.outputs),
        sizes_of(shape),
        nonempty=frozenset(f"d{d}" for d in gone) if nonempty else frozenset(),
        linear=((0,),) if linear else (),
        reduced={f"d{d}": sharded for d in gone} if sharded is not None else {},
    )


_sum_factors: SpaceOf = partial(_reduction, sharded=P, linear=True)
_nansum: SpaceOf = partial(_reduction, sharded=P)
_unsharded_reduction: SpaceOf = partial(_reduction, sharded=None)
_nonempty_reduction: SpaceOf = partial(_reduction, sharded=I, nonempty=True)


def _extreme_factors(op: str) -> SpaceOf:
    """max/min: Partial(op) without a gradient; an empty shard has no maximum."""

    def space(node: Node, graph: Graph) -> Factors:
        return _reduction(node, graph, I if graph.types[node.inputs[0]].grad else Partial(op), nonempty=True)

    return space


def _combined_factors(node: Node, graph: Graph) -> Factors:
    """Over a sharded dim a runtime function combines the ranks' results; the result is I."""
    type_ = graph.types[node.inputs[0]]
    return _reduction(node, graph, None if type_.dtype.is_complex else I)


def _variance_factors(node: Node, graph: Graph) -> Factors:
    """Variances, if there are more elements than ``correction``; otherwise inf or NaN."""
    type_ = graph.types[node.inputs[0]]
    known = not set(type_.unknown) & set(_reduced_dims(node, graph))
    defined = known and _reduced_count(node, graph) > _correction(node) and not type_.dtype.is_complex
    return _reduction(node, graph, I if defined else None)


def _norm_factors(node: Node, graph: Graph) -> Factors:
    order = _norm_order(node)
    return _reduction(node, graph, I, nonempty=order < 0 or math.isinf(order))


def _norm_order(node: Node) -> float:
    given = node.argument("p", node.argument("ord", None))
    return 2.0 if given is None else float(given)


def _correction(node: Node) -> float:
    """Subtracted from the count, 1 by default."""
    given = node.argument("correction", node.argument("unbiased", None))
    return 1 if given is None else float(given)


def _reduced_count(node: Node, graph: Graph) -> int:
    """Global number of elements per result."""
    shape = graph.shapes(node.inputs)[0]
    return math.prod(shape[d] for d in _reduced_dims(node, graph))


def _reduced_axes(site: Site) -> tuple[str, ...]:
    """Mesh axes that shard any reduced dim."""
    return tuple(a for d in _reduced_dims(site.node, site.graph) for a in site.inputs[0].axes_of(d))


Extra = Callable[[Site], Mapping[str, Any]]
"""keyword arguments of a runtime function besides tensor, dims and axes"""


def _local_reduction(function: str, extra: Extra = lambda site: {}) -> LocalFormOf:
    """The runtime function over a sharded reduced dim, else the op itself."""

    def local(site: Site) -> LocalCall:
        node, axes = site.node, _reduced_axes(site)
        if not axes:
            return site.unchanged()
        kwargs = {"dims": list(_reduced_dims(node, site.graph)), **extra(site), "axes": axes_argument(axes)}
        if node.argument("keepdim", False):
            kwargs["keepdim"] = True
        return LocalCall(function, (node.argument("self"),), kwargs)

    return local


def _local_extreme(function: str) -> LocalFormOf:
    """Without a gradient the op itself, with Partial results."""
    shared = _local_reduction(
        function, lambda site: {} if site.node.op in (aten.amax.default, aten.amin.default) else {"nan": True}
    )
    return lambda site: shared(site) if site.in_type(0).grad else site.unchanged()


def _cast(site: Site) -> dict[str, Any]:
    """The op's working dtype, if it is not the operand's."""
    dtype = site.out_type().dtype
    return {} if dtype == site.in_type(0).dtype else {"dtype": dtype}


def _with_order(site: Site) -> dict[str, Any]:
    dtype = site.node.argument("dtype", None)
    return {"order": _norm_order(site.node), **({} if dtype is None else {"dtype": dtype})}


def _with_count(site: Site) -> dict[str, Any]:
    correction = _correction(site.node)
    changed = {} if correction == 1 else {"correction": correction}
    return {"count": _reduced_count(site.node, site.graph), **changed}


def _mean_local(site: Site) -> LocalCall:
    """Over a sharded dim: the local sum over the global count."""
    node = site.node
    shape = site.in_type(0).shape
    gone = _reduced_dims(node, site.graph)
    if not any(site.inputs[0].axes_of(d) for d in gone):
        return site.unchanged()
    count = math.prod(shape[d] for d in gone)
    dtype = node.argument("dtype")
    kwargs: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    total = LocalCall(aten.sum.dim_IntList, (node.args[0], list(gone), bool(node.argument("keepdim", False))), kwargs)
    return LocalCall(aten.div.Scalar, (total, count), {})


def _broadcast_pair(node: Node, graph: Graph) -> Factors:
    """``cosine_similarity``, cross product: operands broadcast, ``dim`` is unsharded."""
    shapes, (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    common = broadcast_shape(*shapes)
    dim = positive(node.argument("dim"), len(common))
    names = numbered_factors(common, (dim,))
    kept = names if len(result) == len(common) else names[:dim] + names[dim + 1 :]
    return Factors(tuple(broadcast(s, common, names) for s in shapes), (kept,), sizes_of(common))


_DIMS_UNSHARDED, _DIMS_DROPPED = "reduced dims unsharded", "reduced dims dropped"


def _combining(
    names: str,
    space: SpaceOf,
    local: LocalFormOf,
    saves: str = "self result",
    function: bool = False,
) -> list[Rule]:
    """Reductions that a runtime function combines over sharded dims."""
    return rules(
        names,
        space,
        local,
        f"{_DIMS_DROPPED}, combined",
        sends=True,
        sized=False,
        facts=Facts(saves, function=function),
    )


SAVES_SELF_AND_RESULT = Facts(saves="self result")

REDUCTION_RULES: tuple[Rule, ...] = (
    *rules("sum.default sum.dim_IntList", _sum_factors, None, f"{_DIMS_DROPPED}, summed", facts=KEEPS_NOTHING),
    *rules("mean.default mean.dim", _sum_factors, _mean_local, f"{_DIMS_DROPPED}, summed", facts=KEEPS_NOTHING),
    *rules("nansum.default", _nansum, None, _DIMS_DROPPED, facts=Facts(saves="self")),
    *rules("count_nonzero.dim_IntList count_nonzero.default", _nansum, None, _DIMS_DROPPED, facts=Facts(saves="")),
    *_combining("amax.default max.default", _extreme_factors("max"), _local_extreme("amax")),
    *_combining("amin.default min.default", _extreme_factors("min"), _local_extreme("amin")),
    *_combining("aminmax.default", _nonempty_reduction, _local_reduction("aminmax"), "self result result1"),
    *_combining("any.default any.dim any.dims", _combined_factors, _local_reduction("any"), ""),
    *_combining("all.default all.dim all.dims", _combined_factors, _local_reduction("all"), ""),
    *_combining("prod.default prod.dim_int", _combined_factors, _local_reduction("prod", _cast)),
    *_combining("logsumexp.default", _combined_factors, _local_reduction("logsumexp", _cast), function=True),
    *(
        rule
        for n, saves in (("var", "self"), ("std", "self result"), ("var_mean", "self"), ("std_mean", "self result"))
        for rule in _combining(
            f"{n}.default {n}.dim {n}.correction", _variance_factors, _local_reduction(n, _with_count), saves
        )
    ),
    *_combining(
        "linalg_vector_norm.default norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype "
        "frobenius_norm.dim",
        _norm_factors,
        _local_reduction("vector_norm", _with_order),
    ),
    *rules(
        "median.default nanmedian.default linalg_norm.default",
        _unsharded_reduction,
        None,
        _DIMS_UNSHARDED,
        facts=SAVES_SELF_AND_RESULT,
    ),
    *rules("nanmean.default quantile.scalar nanquantile.scalar", _unsharded_reduction, None, _DIMS_UNSHARDED),
    *rules("cosine_similarity.default", _broadcast_pair, None, "dim unsharded"),
    *rules("linalg_cross.default", _broadcast_pair, None, "dim unsharded", facts=Facts(product_saves("self", "other"))),
)


def _scan_rule(
    function: str, space: SpaceOf = same_shape_factors, saves: str = "self result", positions: bool = False
) -> list[Rule]:
    return rules(
        f"{function}.default",
        space,
        (indexed_dim_form if positions else reduced_dim_form)(function),
        "... -> ...",
        sends=True,
        sized=False,
        facts=Facts(saves, index_intermediates if positions else None),
    )


SCAN_RULES: tuple[Rule, ...] = (
    *_scan_rule("cumsum", lambda node, graph: replace(same_shape_factors(node, graph), linear=((0,),)), saves=""),
    *_scan_rule("cumprod"),
    *_scan_rule("logcumsumexp"),
    *_scan_rule("cummax", saves="self result1", positions=True),
    *_scan_rule("cummin", saves="self result1", positions=True),
)


def _histc(node: Node, graph: Graph) -> Factors:
    """Counts per bin within given limits."""
    (shape,) = graph.shapes(node.inputs)
    ranged = node.argument("min") != node.argument("max")
    return Factors((numbered_factors(shape, () if ranged else range(len(shape))),), ((None,),), sizes_of(shape))


def _bincount(node: Node, graph: Graph) -> Factors:
    """Counts, or sums of weights, per integer value."""
    shapes = graph.shapes(node.inputs)
    linear = ((1,),) if len(shapes) == 2 else ()
    return Factors((("d0",),) * len(shapes), ((None,),), sizes_of(shapes[0]), linear=linear)


def _local_bincount(site: Site) -> LocalCall:
    axes = site.inputs[0].axes_of(0)
    if not axes:
        return site.unchanged()
    x, weights, least = (site.node.argument(a) for a in ("self", "weights", "minlength"))
    return LocalCall("bincount", (x, weights, least, axes_argument(axes)), {})


COUNT_RULES: tuple[Rule, ...] = (
    *rules("histc.default", _histc, None, "counts summed", facts=KEEPS_NOTHING),
    *rules(
        "bincount.default",
        _bincount,
        _local_bincount,
        "n, n -> _",
        sends=True,
        sized=False,
        facts=KEEPS_NOTHING,
    ),
)


Strategies = SpaceOf


def _ordered_factors(distributed: bool) -> Strategies:
    """Other dims are kept; over a sharded ordered dim the result is I on every rank."""

    def strategies(node: Node, graph: Graph) -> Space:
        (shape,) = graph.shapes(node.inputs)
        if node.argument("dim") is None:
            return _flat_factors(node, graph)
        dim = positive(node.argument("dim"), max(1, len(shape)))
        kept = numbered_factors(shape, (dim,))

        def result(name: str) -> Dims:
            return kept if len(graph.types[name].shape) == len(shape) else kept[:dim] + kept[dim + 1 :]

        source = numbered_factors(shape) if distributed else kept
        outputs = tuple(map(result, node.outputs))
        return Factors((source,), outputs, sizes_of(shape), reduced={f"d{dim}": I})

    return strategies


def _flat_factors(node: Node, graph: Graph) -> Factors:
    """``argmax()`` over all elements; every rank needs some, flat indices need all lengths."""
    (shape,) = graph.shapes(node.inputs)
    sizes = {} if graph.types[node.inputs[0]].unknown else sizes_of(shape)
    result: Dims = (None,) * len(graph.types[node.outputs[0]].shape)
    whole = dict.fromkeys(sizes, I)
    return Factors((numbered_factors(shape),), (result,), sizes, reduced=whole, nonempty=frozenset(sizes))


def _local_topk(site: Site) -> LocalCall:
    dim, axes = site.sharded_dim
    if not axes:
        return site.unchanged()
    node = site.node
    extra = {} if node.argument("largest") else {"largest": False}
    size = site.in_type(0).shape[dim]
    return LocalCall("topk", (node.argument("self"), node.argument("k"), dim, size, axes_argument(axes)), extra)


def _local_arg_extreme(function: str) -> Callable[[Site], LocalCall]:
    """``max.dim`` and its kin, and ``argmax`` with or without a dim."""

    def local(site: Site) -> LocalCall:
        node, shape = site.node, site.in_type(0).shape
        x = node.argument("self")
        if node.argument("dim") is None:
            cuts = [(d, axes_argument(a)) for d in range(len(shape)) if (a := site.inputs[0].axes_of(d))]
            if not cuts:
                return site.unchanged()
            found = LocalCall(f"flat_{function}", (x, list(shape), cuts, axes_argument(_all_axes(site))), {})
            kept = len(site.out_type().shape)
            return LocalCall(aten.view.default, (found, [1] * kept), {}) if kept else found
        dim, axes = site.sharded_dim
        if not axes:
            return site.unchanged()
        extra: dict[str, Any] = {"keepdim": True} if node.argument("keepdim") else {}
        return LocalCall(function, (x, dim, shape[dim], axes_argument(axes)), extra)

    return local


def _all_axes(site: Site) -> tuple[str, ...]:
    layout = site.inputs[0]
    return tuple(a for d in range(len(site.in_type(0).shape)) for a in layout.axes_of(d))


_NOTE = "... -> ..., dim unsharded"

TOPK_FACTS = Facts("result1", index_intermediates)
PICKED = Facts("result1", index_intermediates)

_best: Callable[..., list[Rule]] = partial(rules, notation=_NOTE, sends=True, sized=False)

RANKING_RULES: tuple[Rule, ...] = (
    *_best("topk.default", _ordered_factors(True), _local_topk, facts=TOPK_FACTS),
    *_best("max.dim", _ordered_factors(True), _local_arg_extreme("max_dim"), facts=PICKED),
    *_best("min.dim", _ordered_factors(True), _local_arg_extreme("min_dim"), facts=PICKED),
    *_best("argmax.default", _ordered_factors(True), _local_arg_extreme("argmax"), facts=KEEPS_NOTHING),
    *_best("argmin.default", _ordered_factors(True), _local_arg_extreme("argmin"), facts=KEEPS_NOTHING),
    *rules("sort.default sort.stable", _ordered_factors(False), notation="dim unsharded", facts=TOPK_FACTS),
    *rules(
        "kthvalue.default mode.default median.dim nanmedian.dim",
        _ordered_factors(False),
        notation="dim unsharded",
        facts=PICKED,
    ),
    *rules("argsort.default argsort.stable", _ordered_factors(False), notation="dim unsharded", facts=KEEPS_NOTHING),
)


RULES: tuple[Rule, ...] = (*REDUCTION_RULES, *SCAN_RULES, *COUNT_RULES, *RANKING_RULES)
