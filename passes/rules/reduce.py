"""Reductions and scans over tensor dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.layout import I, P, Partial, Placement
from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Call, Internal
from autoshard.passes.rules.base import UNKNOWN, CollectivesOf, Facts, LocalFormOf, Rule, Site, StrategiesOf, each_other
from autoshard.passes.rules.factors import (
    Dims,
    Factors,
    argument,
    broadcast,
    dims_argument,
    input_shapes,
    numbered,
    output_shapes,
    positive,
    sizes_of,
)
from autoshard.passes.rules.named import broadcast_shape, gathered, local_shape, ops, reductions, spell, wide_bytes

aten = torch.ops.aten


def _reduced_dims(node: Node, graph: Graph) -> tuple[int, ...]:
    """Dims that a reduction removes: all of them where it takes no ``dim``."""
    rank = len(input_shapes(node, graph)[0])
    names = [a.name for a in node.op._schema.arguments]
    return dims_argument(argument(node, "dim") if "dim" in names else None, rank)


def _reduction(
    node: Node, graph: Graph, sharded: Placement | None, linear: bool = False, filled: bool = False
) -> tuple[Strategy, ...]:
    """Strategies of a reduction; ``sharded``: what the result is where a reduced dim is sharded (None: never is)."""
    shape = input_shapes(node, graph)[0]
    gone = _reduced_dims(node, graph)
    names = [a.name for a in node.op._schema.arguments]
    keep = bool(argument(node, "keepdim")) if "keepdim" in names else False
    whole = () if sharded is not None else gone
    kept: Dims = tuple(None if d in gone else f"d{d}" for d in range(len(shape)) if keep or d not in gone)
    return Factors(
        (numbered(shape, whole),),
        (kept,) * len(node.outputs),
        sizes_of(shape),
        filled=frozenset(f"d{d}" for d in gone) if filled else frozenset(),
        linear=((0,),) if linear else (),
        reduced={f"d{d}": sharded for d in gone} if sharded is not None else {},
    ).strategies(node, graph)


def _sum(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    return _reduction(node, graph, P, linear=True)


def _nansum(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    return _reduction(node, graph, P)


def _whole(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    return _reduction(node, graph, None)


def _extreme(op: str) -> StrategiesOf:
    """max/min: Partial(op) where no gradient is asked; no rank may hold an empty shard, it has no maximum."""

    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        free = not graph.types[node.inputs[0]].grad
        return _reduction(node, graph, Partial(op) if free else I, filled=True)

    return strategies


def _combined(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Over a cut dim a runtime function combines what the ranks have; its result is whole on every rank."""
    type_ = graph.types[node.inputs[0]]
    return _reduction(node, graph, None if type_.dtype.is_complex else I)


def _filled(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    return _reduction(node, graph, I, filled=True)


def _moments(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Variances of more elements than ``correction``; of fewer they are infinite or NaN, and so is the gradient."""
    type_ = graph.types[node.inputs[0]]
    known = not set(type_.unknown) & set(_reduced_dims(node, graph))
    defined = known and _count(node, graph) > _correction(node) and not type_.dtype.is_complex
    return _reduction(node, graph, I if defined else None)


def _norm(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    order = _order(node)
    return _reduction(node, graph, I, filled=order < 0 or math.isinf(order))


def _order(node: Node) -> float:
    """Which norm; 2 where none is named."""
    names = {a.name for a in node.op._schema.arguments} & {"p", "ord"}
    given = argument(node, names.pop()) if names else None
    return 2.0 if given is None else float(given)


def _correction(node: Node) -> float:
    """What is subtracted from the count: 1 by default."""
    names = [a.name for a in node.op._schema.arguments]
    given = argument(node, "correction" if "correction" in names else "unbiased")
    return 1 if given is None else float(given)


def _count(node: Node, graph: Graph) -> int:
    """Elements that are reduced to one, globally."""
    shape = input_shapes(node, graph)[0]
    return math.prod(shape[d] for d in _reduced_dims(node, graph))


def _reduced_axes(site: Site) -> tuple[str, ...]:
    """Axes that cut any of the reduced dims."""
    return tuple(a for d in _reduced_dims(site.node, site.graph) for a in site.inputs[0].axes_of(d))


Extra = Callable[[Site], Mapping[str, Any]]
"""arguments of a runtime function beside the tensor, the dims and the axes"""


def _local(function: str, extra: Extra = lambda site: {}) -> LocalFormOf:
    """The runtime function where a reduced dim is cut, else the op itself."""

    def local(site: Site) -> Call:
        node, axes = site.node, _reduced_axes(site)
        if not axes:
            return Call(node.op, node.args, node.kwargs)
        kwargs = {"dims": list(_reduced_dims(node, site.graph)), **extra(site), "axes": spell(axes)}
        if any(a.name == "keepdim" for a in node.op._schema.arguments) and argument(node, "keepdim"):
            kwargs["keepdim"] = True
        return Call(function, (argument(node, "self"),), kwargs)

    return local


def _local_extreme(function: str) -> LocalFormOf:
    """Without a gradient the op itself, whose results are Partial."""
    shared = _local(
        function, lambda site: {} if site.node.op in (aten.amax.default, aten.amin.default) else {"nan": True}
    )
    return lambda site: shared(site) if site.in_type(0).grad else Call(site.node.op, site.node.args, site.node.kwargs)


def _cast(site: Site) -> dict[str, Any]:
    """The dtype in which the op works, where that is not the operand's."""
    dtype = site.out_type().dtype
    return {} if dtype == site.in_type(0).dtype else {"dtype": dtype}


def _with_order(site: Site) -> dict[str, Any]:
    node = site.node
    dtype = argument(node, "dtype") if any(a.name == "dtype" for a in node.op._schema.arguments) else None
    return {"order": _order(node), **({} if dtype is None else {"dtype": dtype})}


def _with_count(site: Site) -> dict[str, Any]:
    correction = _correction(site.node)
    changed = {} if correction == 1 else {"correction": correction}
    return {"count": _count(site.node, site.graph), **changed}


def _bytes(site: Site) -> float:
    """Bytes of one rank's result."""
    gone = _reduced_dims(site.node, site.graph)
    rows = math.prod(n for d, n in enumerate(local_shape(site, "self")) if d not in gone)
    dtype = site.out_type().dtype
    return rows * (wide_bytes(dtype) if dtype.is_floating_point else dtype.itemsize)


def _gathers(what: str) -> CollectivesOf:
    return lambda site: gathered(site, _reduced_axes(site), _bytes(site), what, "I")


def _logsumexp_collectives(site: Site) -> tuple[Internal, ...]:
    return reductions(site, _reduced_axes(site), _bytes(site), ("maxima", "sums"), ())


def _extreme_collectives(site: Site) -> tuple[Internal, ...]:
    """The extremes, and how many elements share the gradient of each."""
    axes, type_, size = _reduced_axes(site), site.in_type(0), _bytes(site)
    exact = size * site.out_type().dtype.itemsize / wide_bytes(site.out_type().dtype)
    found = gathered(site, axes, exact, "extremes", "I")
    return found + (reductions(site, axes, size, ("equal elements",), ()) if type_.grad else ())


def _free_extreme_collectives(site: Site) -> tuple[Internal, ...]:
    return _extreme_collectives(site) if site.in_type(0).grad else ()


def _both_extremes_collectives(site: Site) -> tuple[Internal, ...]:
    return _extreme_collectives(site) * 2


def _norm_collectives(site: Site) -> tuple[Internal, ...]:
    return _extreme_collectives(site) if math.isinf(_order(site.node)) else _gathers("norms")(site)


def _moments_collectives(site: Site) -> tuple[Internal, ...]:
    """Means first, then squares; backward, the gradient of the means under the squares."""
    squared = 0 in site.node.output_slots
    return reductions(
        site, _reduced_axes(site), _bytes(site), ("sums", "squares"), ("gradient of the means",) if squared else ()
    )


def _mean_local(site: Site) -> Call:
    """Where a reduced dim is sharded: the local sum over the global count."""
    node = site.node
    shape = site.in_type(0).shape
    gone = _reduced_dims(node, site.graph)
    if not any(site.inputs[0].axes_of(d) for d in gone):
        return Call(node.op, node.args, node.kwargs)
    count = math.prod(shape[d] for d in gone)
    dtype = argument(node, "dtype")
    kwargs: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    keep = node.op is aten.mean.dim and argument(node, "keepdim")
    total = Call(aten.sum.dim_IntList, (node.args[0], list(gone), bool(keep)), kwargs)
    return Call(aten.div.Scalar, (total, count), {})


def _paired(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """``cosine_similarity``: two operands that broadcast, compared along a whole ``dim`` that goes."""
    shapes, (result,) = input_shapes(node, graph), output_shapes(node, graph)
    common = broadcast_shape(*shapes)
    dim = positive(argument(node, "dim"), len(common))
    names = numbered(common, (dim,))
    kept = names if len(result) == len(common) else names[:dim] + names[dim + 1 :]
    return Factors(tuple(broadcast(s, common, names) for s in shapes), (kept,), sizes_of(common)).strategies(
        node, graph
    )


@dataclass(frozen=True)
class _Form:
    """A reduction over cut dims by a function of the runtime."""

    names: str
    strategies: StrategiesOf
    local: LocalFormOf
    collectives: CollectivesOf
    saves: str = "self result"


_FORMS = (
    _Form("amax.default max.default", _extreme("max"), _local_extreme("amax"), _free_extreme_collectives),
    _Form("amin.default min.default", _extreme("min"), _local_extreme("amin"), _free_extreme_collectives),
    _Form("aminmax.default", _filled, _local("aminmax"), _both_extremes_collectives, "self result result1"),
    _Form("any.default any.dim any.dims", _combined, _local("any"), _gathers("results"), ""),
    _Form("all.default all.dim all.dims", _combined, _local("all"), _gathers("results"), ""),
    _Form("prod.default prod.dim_int", _combined, _local("prod", _cast), _gathers("products")),
    _Form("logsumexp.default", _combined, _local("logsumexp", _cast), _logsumexp_collectives),
    *(
        _Form(f"{n}.default {n}.dim {n}.correction", _moments, _local(n, _with_count), _moments_collectives, saves)
        for n, saves in (("var", "self"), ("std", "self result"), ("var_mean", "self"), ("std_mean", "self result"))
    ),
    _Form(
        "linalg_vector_norm.default norm.Scalar norm.ScalarOpt_dim norm.ScalarOpt_dim_dtype norm.ScalarOpt_dtype "
        "frobenius_norm.dim",
        _norm,
        _local("vector_norm", _with_order),
        _norm_collectives,
    ),
)


def _table(names: str, strategies: StrategiesOf, note: str, facts: Facts) -> list[Rule]:
    """Rules of all functional overloads ``packet.overload`` in ``names``."""
    rules = []
    for name in names.split():
        packet, overload = name.split(".")
        rules.append(
            Rule(getattr(getattr(aten, packet), overload), strategies, _LOCAL.get(name), notation=note, facts=facts)
        )
    return rules


_LOCAL: Mapping[str, LocalFormOf] = {"mean.default": _mean_local, "mean.dim": _mean_local}

SUM = Facts(saves="", rounding="sum")
BOTH = Facts(saves="self result")

RULES: tuple[Rule, ...] = (
    *_table("sum.default sum.dim_IntList mean.default mean.dim", _sum, "reduced dims dropped, summed", SUM),
    *_table("nansum.default", _nansum, "reduced dims dropped", Facts(saves="self")),
    *_table("count_nonzero.dim_IntList count_nonzero.default", _nansum, "reduced dims dropped", Facts(saves="")),
    *(
        Rule(
            op,
            form.strategies,
            form.local,
            None,
            "reduced dims dropped, combined",
            form.collectives,
            sized=False,
            facts=Facts(form.saves),
        )
        for form in _FORMS
        for op in ops(form.names)
    ),
    *_table("median.default nanmedian.default linalg_norm.default", _whole, "reduced dims whole", BOTH),
    *_table("nanmean.default quantile.scalar nanquantile.scalar", _whole, "reduced dims whole", UNKNOWN),
    *_table("cosine_similarity.default", _paired, "dim whole", UNKNOWN),
    *_table("linalg_cross.default", _paired, "dim whole", Facts(each_other("self", "other"))),
)
