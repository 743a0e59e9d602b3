"""Reductions over tensor dims: sum, mean, max, variance, norms."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from autoshard.aten import aten
from autoshard.layout import I, P, Partial, Placement
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Internal, spell
from autoshard.passes.rules.base import CollectivesOf, Facts, LocalFormOf, Rule, Site, SpaceOf, each_other, rules
from autoshard.passes.rules.factors import (
    Dims,
    Factors,
    broadcast,
    broadcast_shape,
    dims_argument,
    numbered,
    positive,
    sizes_of,
    wide_bytes,
)


def _reduced_dims(node: Node, graph: Graph) -> tuple[int, ...]:
    """Reduced dims: all of them if the op has no ``dim``."""
    return dims_argument(node.argument("dim", None), len(graph.shapes(node.inputs)[0]))


def _reduction(
    node: Node, graph: Graph, sharded: Placement | None, linear: bool = False, filled: bool = False
) -> Factors:
    """Factors of a reduction; ``sharded``: the result's placement over a sharded reduced dim."""
    shape = graph.shapes(node.inputs)[0]
    gone = _reduced_dims(node, graph)
    keep = bool(node.argument("keepdim", False))
    whole = () if sharded is not None else gone
    kept: Dims = tuple(None if d in gone else f"d{d}" for d in range(len(shape)) if keep or d not in gone)
    return Factors(
        (numbered(shape, whole),),
        (kept,) * len(node.outputs),
        sizes_of(shape),
        filled=frozenset(f"d{d}" for d in gone) if filled else frozenset(),
        linear=((0,),) if linear else (),
        reduced={f"d{d}": sharded for d in gone} if sharded is not None else {},
    )


_sum: SpaceOf = partial(_reduction, sharded=P, linear=True)
_nansum: SpaceOf = partial(_reduction, sharded=P)
_whole: SpaceOf = partial(_reduction, sharded=None)
_filled: SpaceOf = partial(_reduction, sharded=I, filled=True)


def _extreme(op: str) -> SpaceOf:
    """max/min: Partial(op) without a gradient; an empty shard has no maximum."""

    def space(node: Node, graph: Graph) -> Factors:
        return _reduction(node, graph, I if graph.types[node.inputs[0]].grad else Partial(op), filled=True)

    return space


def _combined(node: Node, graph: Graph) -> Factors:
    """Over a sharded dim a runtime function combines the ranks' results; the result is I."""
    type_ = graph.types[node.inputs[0]]
    return _reduction(node, graph, None if type_.dtype.is_complex else I)


def _moments(node: Node, graph: Graph) -> Factors:
    """Variances, if there are more elements than ``correction``; otherwise inf or NaN."""
    type_ = graph.types[node.inputs[0]]
    known = not set(type_.unknown) & set(_reduced_dims(node, graph))
    defined = known and _count(node, graph) > _correction(node) and not type_.dtype.is_complex
    return _reduction(node, graph, I if defined else None)


def _norm(node: Node, graph: Graph) -> Factors:
    order = _order(node)
    return _reduction(node, graph, I, filled=order < 0 or math.isinf(order))


def _order(node: Node) -> float:
    """The norm's order, 2 by default."""
    given = node.argument("p", node.argument("ord", None))
    return 2.0 if given is None else float(given)


def _correction(node: Node) -> float:
    """Subtracted from the count, 1 by default."""
    given = node.argument("correction", node.argument("unbiased", None))
    return 1 if given is None else float(given)


def _count(node: Node, graph: Graph) -> int:
    """Global number of elements per result."""
    shape = graph.shapes(node.inputs)[0]
    return math.prod(shape[d] for d in _reduced_dims(node, graph))


def _reduced_axes(site: Site) -> tuple[str, ...]:
    """Mesh axes that shard any reduced dim."""
    return tuple(a for d in _reduced_dims(site.node, site.graph) for a in site.inputs[0].axes_of(d))


Extra = Callable[[Site], Mapping[str, Any]]
"""keyword arguments of a runtime function besides tensor, dims and axes"""


def _local(function: str, extra: Extra = lambda site: {}) -> LocalFormOf:
    """The runtime function over a sharded reduced dim, else the op itself."""

    def local(site: Site) -> Call:
        node, axes = site.node, _reduced_axes(site)
        if not axes:
            return site.unchanged()
        kwargs = {"dims": list(_reduced_dims(node, site.graph)), **extra(site), "axes": spell(axes)}
        if node.argument("keepdim", False):
            kwargs["keepdim"] = True
        return Call(function, (node.argument("self"),), kwargs)

    return local


def _local_extreme(function: str) -> LocalFormOf:
    """Without a gradient the op itself, with Partial results."""
    shared = _local(
        function, lambda site: {} if site.node.op in (aten.amax.default, aten.amin.default) else {"nan": True}
    )
    return lambda site: shared(site) if site.in_type(0).grad else site.unchanged()


def _cast(site: Site) -> dict[str, Any]:
    """The op's working dtype, if it is not the operand's."""
    dtype = site.out_type().dtype
    return {} if dtype == site.in_type(0).dtype else {"dtype": dtype}


def _with_order(site: Site) -> dict[str, Any]:
    dtype = site.node.argument("dtype", None)
    return {"order": _order(site.node), **({} if dtype is None else {"dtype": dtype})}


def _with_count(site: Site) -> dict[str, Any]:
    correction = _correction(site.node)
    changed = {} if correction == 1 else {"correction": correction}
    return {"count": _count(site.node, site.graph), **changed}


def _bytes(site: Site) -> float:
    """Bytes of the local result."""
    gone = _reduced_dims(site.node, site.graph)
    rows = math.prod(n for d, n in enumerate(site.local_shape("self")) if d not in gone)
    dtype = site.out_type().dtype
    return rows * (wide_bytes(dtype) if dtype.is_floating_point else dtype.itemsize)


def _gathers(what: str) -> CollectivesOf:
    return lambda site: site.gathered(_reduced_axes(site), _bytes(site), what, "I")


def _logsumexp_collectives(site: Site) -> tuple[Internal, ...]:
    return site.reductions(_reduced_axes(site), _bytes(site), ("maxima", "sums"), ())


def _extreme_collectives(site: Site) -> tuple[Internal, ...]:
    """The extremes, and counts of equal elements that share a gradient."""
    axes, type_, size = _reduced_axes(site), site.in_type(0), _bytes(site)
    exact = size * site.out_type().dtype.itemsize / wide_bytes(site.out_type().dtype)
    found = site.gathered(axes, exact, "extremes", "I")
    return found + (site.reductions(axes, size, ("equal elements",), ()) if type_.grad else ())


def _free_extreme_collectives(site: Site) -> tuple[Internal, ...]:
    return _extreme_collectives(site) if site.in_type(0).grad else ()


def _norm_collectives(site: Site) -> tuple[Internal, ...]:
    return _extreme_collectives(site) if math.isinf(_order(site.node)) else _gathers("norms")(site)


def _moments_collectives(site: Site) -> tuple[Internal, ...]:
    """Means, then squares; in the backward the gradient of the means."""
    squared = 0 in site.node.output_slots
    return site.reductions(
        _reduced_axes(site), _bytes(site), ("sums", "squares"), ("gradient of the means",) if squared else ()
    )


def _mean_local(site: Site) -> Call:
    """Over a sharded dim: the local sum over the global count."""
    node = site.node
    shape = site.in_type(0).shape
    gone = _reduced_dims(node, site.graph)
    if not any(site.inputs[0].axes_of(d) for d in gone):
        return site.unchanged()
    count = math.prod(shape[d] for d in gone)
    dtype = node.argument("dtype")
    kwargs: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    total = Call(aten.sum.dim_IntList, (node.args[0], list(gone), bool(node.argument("keepdim", False))), kwargs)
    return Call(aten.div.Scalar, (total, count), {})


def _paired(node: Node, graph: Graph) -> Factors:
    """``cosine_similarity``, cross product: operands broadcast, ``dim`` is unsharded."""
    shapes, (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    common = broadcast_shape(*shapes)
    dim = positive(node.argument("dim"), len(common))
    names = numbered(common, (dim,))
    kept = names if len(result) == len(common) else names[:dim] + names[dim + 1 :]
    return Factors(tuple(broadcast(s, common, names) for s in shapes), (kept,), sizes_of(common))


_WHOLE, _DROPPED = "reduced dims whole", "reduced dims dropped"


def _combining(
    names: str,
    space: SpaceOf,
    local: LocalFormOf,
    collectives: CollectivesOf,
    saves: str = "self result",
    function: bool = False,
) -> list[Rule]:
    """Reductions that a runtime function combines over sharded dims."""
    return rules(
        names, space, local, f"{_DROPPED}, combined", collectives, sized=False, facts=Facts(saves, function=function)
    )


SUM = Facts(saves="", rounding="sum")
BOTH = Facts(saves="self result")

RULES: tuple[Rule, ...] = (
    *rules("sum.default sum.dim_IntList", _sum, None, f"{_DROPPED}, summed", facts=SUM),
    *rules("mean.default mean.dim", _sum, _mean_local, f"{_DROPPED}, summed", facts=SUM),
    *rules("nansum.default", _nansum, None, _DROPPED, facts=Facts(saves="self")),
    *rules("count_nonzero.dim_IntList count_nonzero.default", _nansum, None, _DROPPED, facts=Facts(saves="")),
    *_combining("amax.default max.default", _extreme("max"), _local_extreme("amax"), _free_extreme_collectives),
    *_combining("amin.default min.default", _extreme("min"), _local_extreme("amin"), _free_extreme_collectives),
    *_combining(
        "aminmax.default",
        _filled,
        _local("aminmax"),
        lambda site: _extreme_collectives(site) * 2,
        "self result result1",
    ),
    *_combining("any.default any.dim any.dims", _combined, _local("any"), _gathers("results"), ""),
    *_combining("all.default all.dim all.dims", _combined, _local("all"), _gathers("results"), ""),
    *_combining("prod.default prod.dim_int", _combined, _local("prod", _cast), _gathers("products")),
    *_combining("logsumexp.default", _combined, _local("logsumexp", _cast), _logsumexp_collectives, function=True),
    *(
        rule
        for n, saves in (("var", "self"), ("std", "self result"), ("var_mean", "self"), ("std_mean", "self result"))
        for rule in _combining(
            f"{n}.default {n}.dim {n}.correction", _moments, _local(n, _with_count), _moments_collectives, saves
        )
    ),
    *_combining(
        "linalg_vector_norm.default norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype "
        "frobenius_norm.dim",
        _norm,
        _local("vector_norm", _with_order),
        _norm_collectives,
    ),
    *rules("median.default nanmedian.default linalg_norm.default", _whole, None, _WHOLE, facts=BOTH),
    *rules("nanmean.default quantile.scalar nanquantile.scalar", _whole, None, _WHOLE),
    *rules("cosine_similarity.default", _paired, None, "dim whole"),
    *rules("linalg_cross.default", _paired, None, "dim whole", facts=Facts(each_other("self", "other"))),
)
