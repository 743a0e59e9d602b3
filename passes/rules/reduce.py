"""Reductions and scans over tensor dims."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoshard.layout import P, Partial, Placement
from autoshard.passes.ir import Graph, Node
from autoshard.passes.rules.base import Call, LocalFormOf, Rule, Site, Strategy
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
from autoshard.passes.rules.named import broadcast_shape

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


def _histc(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Counts per bin, between given limits: every element counts by itself."""
    (shape,) = input_shapes(node, graph)
    ranged = argument(node, "min") != argument(node, "max")
    return Factors((numbered(shape, () if ranged else range(len(shape))),), ((None,),), sizes_of(shape)).strategies(
        node, graph
    )


def _whole(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    return _reduction(node, graph, None)


def _extreme(op: str) -> Callable[[Node, Graph], tuple[Strategy, ...]]:
    """max/min: Partial(op) where no gradient is asked; no rank may hold an empty shard, it has no maximum."""

    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        free = not graph.types[node.inputs[0]].grad
        return _reduction(node, graph, Partial(op) if free else None, filled=True)

    return strategies


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


def _along_others(node: Node, graph: Graph, linear: bool = False) -> tuple[Strategy, ...]:
    """Ops that keep the shape of every result but for ``dim``, which must be whole."""
    shapes = input_shapes(node, graph)
    rank = len(shapes[0])
    gone = set(dims_argument(argument(node, "dim"), rank)) if argument(node, "dim") is not None else set(range(rank))
    dims = numbered(shapes[0], gone)
    outputs = tuple(dims if len(graph.types[o].shape) == rank else () for o in node.outputs)
    groups = (tuple(range(len(shapes))),) if linear else ()
    return Factors((dims,) * len(shapes), outputs, sizes_of(shapes[0]), linear=groups).strategies(node, graph)


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


def _scan(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    return _along_others(node, graph)


def _linear_scan(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    return _along_others(node, graph, linear=True)


def _kth(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """topk/kthvalue/mode: results keep the other dims; with ``keepdim`` False ``dim`` is gone."""
    shape = input_shapes(node, graph)[0]
    dim = positive(argument(node, "dim"), len(shape))
    kept = numbered(shape, (dim,))

    def result(name: str) -> Dims:
        return kept if len(graph.types[name].shape) == len(shape) else kept[:dim] + kept[dim + 1 :]

    return Factors((kept,), tuple(map(result, node.outputs)), sizes_of(shape)).strategies(node, graph)


def _table(names: str, strategies: Callable[[Node, Graph], tuple[Strategy, ...]], note: str) -> list[Rule]:
    """Rules of all functional overloads ``packet.overload`` in ``names``."""
    rules = []
    for name in names.split():
        packet, overload = name.split(".")
        rules.append(Rule(getattr(getattr(aten, packet), overload), strategies, _LOCAL.get(name), notation=note))
    return rules


_LOCAL: Mapping[str, LocalFormOf] = {"mean.default": _mean_local, "mean.dim": _mean_local}

RULES: tuple[Rule, ...] = (
    *_table("sum.default sum.dim_IntList mean.default mean.dim", _sum, "reduced dims dropped, summed"),
    *_table("nansum.default", _nansum, "reduced dims dropped"),
    *_table("histc.default", _histc, "counts summed"),
    *_table("amax.default max.default", _extreme("max"), "reduced dims dropped, max"),
    *_table("amin.default min.default", _extreme("min"), "reduced dims dropped, min"),
    *_table(
        "any.default any.dim any.dims all.default all.dim all.dims prod.default prod.dim_int var.default var.dim "
        "var.correction std.default std.dim std.correction var_mean.default var_mean.dim var_mean.correction "
        "std_mean.default std_mean.dim std_mean.correction logsumexp.default norm.ScalarOpt_dim norm.Scalar "
        "linalg_vector_norm.default argmax.default argmin.default max.dim min.dim median.default median.dim "
        "nanmedian.default nanmedian.dim aminmax.default count_nonzero.dim_IntList count_nonzero.default "
        "nanmean.default norm.ScalarOpt_dim_dtype linalg_norm.default frobenius_norm.dim quantile.scalar "
        "nanquantile.scalar",
        _whole,
        "reduced dims whole",
    ),
    *_table("cumsum.default", _linear_scan, "dim whole"),
    *_table("cumprod.default cummax.default cummin.default logcumsumexp.default", _scan, "dim whole"),
    *_table("sort.default sort.stable argsort.default argsort.stable topk.default", _kth, "dim whole"),
    *_table("cosine_similarity.default", _paired, "dim whole"),
    *_table("linalg_cross.default", _paired, "dim whole"),
    *_table("kthvalue.default mode.default", _kth, "dim whole"),
)
