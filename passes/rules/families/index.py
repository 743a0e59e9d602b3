"""Look-ups and writes by index tensors: index, gather, scatter, index_add and their kin. All dims
are factors, the indexed one too: look-ups then give partial sums, accumulating writes stay
local."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.program import LocalCall, axes_argument
from autoshard.passes.rules.base import (
    KEEPS_NOTHING,
    Dims,
    Factors,
    Facts,
    Rule,
    Site,
    Space,
    broadcast,
    broadcast_shape,
    indexed_dim_form,
    numbered_factors,
    positive,
    rules,
    sizes_of,
    unsharded_only,
    unsharded_strategies,
)
from autoshard.passes.rules.notation import rule
from autoshard.runtime.operations.indexing import PART_OF_BATCH


def _index_factors(
    source: Sequence[int], indices: Sequence[Ref | None], graph: Graph
) -> tuple[Dims, list[Dims], Dims, dict[str, int]]:
    """Advanced indexing: factors of source, index tensors (``i0, i1, …``, at the indexed dims if
    adjacent, else first) and result, and their lengths."""
    indexed = [d for d, ref in enumerate(indices) if ref is not None]
    shapes = [graph.shape(ref) for ref in indices if ref is not None]
    common = broadcast_shape(*shapes)
    names: Dims = tuple(f"i{k}" for k in range(len(common)))
    sizes = {f"i{k}": n for k, n in enumerate(common)}
    sizes |= sizes_of(source)
    before = numbered_factors(source)
    kept: Dims = tuple(f for d, f in enumerate(before) if d not in indexed)
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    at = indexed[0] if adjacent else 0
    return before, [broadcast(s, common, names) for s in shapes], kept[:at] + names + kept[at:], sizes


def _is_masked(indices: Sequence[Ref | None], graph: Graph) -> bool:
    """Whether a boolean mask selects, so that the result's length depends on the data."""
    return any(ref is not None and graph.types[ref.name].dtype in (torch.bool, torch.uint8) for ref in indices)


def _index(node: Node, graph: Graph) -> Space:
    indices = node.argument("indices")
    if _is_masked(indices, graph):
        return unsharded_only(node, graph)
    source = graph.shapes(node.inputs)[0]
    before, taken, result, sizes = _index_factors(source, indices, graph)
    return Factors((before, *taken), (result,), sizes, linear=((0,),))


def _local_index(site: Site) -> LocalCall:
    node, cuts = site.node, _sharded_indexed_dims(site)
    if not cuts:
        return site.unchanged()
    return LocalCall("sharded_index", (node.argument("self"), node.argument("indices"), cuts), {})


def _sharded_indexed_dims(site: Site) -> list[tuple[int, int, Any]]:
    """(dim, global length, axes) of every sharded indexed dim."""
    shape, layout = site.in_type(0).shape, site.inputs[0]
    indexed = [d for d, i in enumerate(site.node.argument("indices")) if i is not None]
    return [(d, shape[d], axes_argument(layout.axes_of(d))) for d in indexed if layout.axes_of(d)]


def _index_put(node: Node, graph: Graph) -> Space:
    """Accumulating: index dims are summed, each rank adds to a partial sum of the source, and over
    a sharded indexed dim to its chunk only."""
    indices, accumulate = node.argument("indices"), bool(node.argument("accumulate"))
    if _is_masked(indices, graph):
        return unsharded_only(node, graph)
    source = graph.shapes(node.inputs)[0]
    before, taken, written, sizes = _index_factors(source, indices, graph)
    written_shape = [sizes[f] for f in written if f is not None]
    values = broadcast(graph.shapes(node.inputs)[-1], written_shape, written)
    rows: list[Dims] = [before, *taken, values]
    sizes = {f: n for f, n in sizes.items() if accumulate or not f.startswith("i")}
    last = len(rows) - 1
    return Factors(tuple(rows), (before,), sizes, addends=frozenset({0}), linear=((0, last),))


def _local_index_put(site: Site) -> LocalCall:
    node, cuts = site.node, _sharded_indexed_dims(site)
    if not cuts:
        return site.unchanged()
    given = [node.argument(a) for a in ("self", "indices", "values", "accumulate")]
    return LocalCall("sharded_index_put", (*given, cuts), {})


def _index_select(node: Node, graph: Graph) -> Factors:
    source, index = graph.shapes(node.inputs)
    dim = positive(node.argument("dim"), len(source))
    dims = numbered_factors(source)
    result: Dims = (*dims[:dim], "i", *dims[dim + 1 :]) if source else ()
    sizes = sizes_of(source) | {"i": index[0] if index else 1}
    return Factors((dims, ("i",) * len(index)), (result,), sizes, linear=((0,),))


def _gather_factors(shapes: Sequence[Sequence[int]], dim: int, inner: str | None) -> tuple[list[Dims], dict[str, int]]:
    """Factors of gather and scatter: dims of equal length in source, index and values; the latter
    two have ``inner`` in ``dim``."""
    first = shapes[0]
    equal = [d for d, n in enumerate(first) if d == dim or all(s[d] == n for s in shapes if s)]
    dims: Dims = tuple(f"d{d}" if d in equal else None for d in range(len(first)))
    taken: Dims = tuple(inner if d == dim else f for d, f in enumerate(dims))
    sizes = {f"d{d}": first[d] for d in equal}
    if inner is not None and shapes[1]:
        sizes[inner] = min(s[dim] for s in shapes[1:] if s)
        if any(s[dim] != sizes[inner] for s in shapes[1:]):
            del sizes[inner]
    return [dims, *(taken if s else () for s in shapes[1:])], sizes


def _gather(node: Node, graph: Graph) -> Space:
    source, index = graph.shapes(node.inputs)
    if not source or not index:
        return unsharded_strategies(2, 1)
    (dims, taken), sizes = _gather_factors((source, index), positive(node.argument("dim"), len(source)), "i")
    return Factors((dims, taken), (taken,), sizes, linear=((0,),))


def _scatter(node: Node, graph: Graph, adds: bool) -> Space:
    """Adding, index dims are summed; otherwise unsharded. Linear in source and values."""
    shapes = graph.shapes(node.inputs)
    if not all(shapes):
        return unsharded_only(node, graph)
    dims, sizes = _gather_factors(shapes, positive(node.argument("dim"), len(shapes[0])), "i" if adds else None)
    return Factors(tuple(dims), (dims[0],), sizes, addends=_accumulated_operand(adds), linear=_linear_write(node))


def _index_add(node: Node, graph: Graph, adds: bool) -> Space:
    """index_add sums over the index; index_copy and index_fill keep it unsharded."""
    shapes = graph.shapes(node.inputs)
    source, index = shapes[:2]
    if not source or not index:
        return unsharded_only(node, graph)
    dim = positive(node.argument("dim"), len(source))
    dims, inner = numbered_factors(source), "i" if adds else None
    values: Dims = (*dims[:dim], inner, *dims[dim + 1 :])
    rows = (dims, (inner,), *(values if s else () for s in shapes[2:]))
    sizes = sizes_of(source) | {"i": index[0]}
    return Factors(rows, (dims,), sizes, addends=_accumulated_operand(adds), linear=_linear_write(node))


def _accumulated_operand(adds: bool) -> frozenset[int]:
    """Operand 0 as addend, if the op adds to it."""
    return frozenset({0}) if adds else frozenset()


def _linear_write(node: Node) -> tuple[tuple[int, ...], ...]:
    """A write is linear in source and values, unless it writes a nonzero constant."""
    constant = node.argument("value", 0)
    if not isinstance(constant, Ref) and constant != 0:
        return ()
    return ((0, 2),) if len(node.inputs) == 3 else ((0,),)


def _take_factors(node: Node, graph: Graph) -> Factors:
    """``take``: the source is unsharded, every index dim is a factor."""
    source, index = graph.shapes(node.inputs)
    names: Dims = tuple(f"i{k}" for k in range(len(index)))
    sizes = {f"i{k}": n for k, n in enumerate(index)}
    return Factors(((None,) * len(source), names), (names,), sizes, linear=((0,),))


def _one_hot(node: Node, graph: Graph) -> Factors:
    (shape,) = graph.shapes(node.inputs)
    names = numbered_factors(shape)
    return Factors((names,), ((*names, None),), sizes_of(shape))


def _bucketize(node: Node, graph: Graph) -> Factors:
    """``bucketize``: boundaries are unsharded, every dim of the values is a factor."""
    (result,) = graph.shapes(node.outputs)
    names = numbered_factors(result)
    inputs: tuple[Dims, ...] = (names, (None,)) if len(node.inputs) == 2 else ((None,),)
    return Factors(inputs, (names,), sizes_of(result))


def _scatter_reduce(node: Node, graph: Graph) -> Space:
    """Only a sum that includes the source is shardable over the index."""
    adds = node.argument("reduce") == "sum" and node.argument("include_self")
    found = _scatter(node, graph, adds)
    if not isinstance(found, Factors):
        return found
    dim = f"d{positive(node.argument('dim'), len(graph.shapes(node.inputs)[0]))}"
    linear = found.linear if adds or node.argument("reduce") == "mean" else ()
    return replace(found, sizes={f: n for f, n in found.sizes.items() if f != dim}, linear=linear)


def _searchsorted(node: Node, graph: Graph) -> Factors:
    """The sorted dim is unsharded; leading dims are shared if the sequence has them."""
    shapes, (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    names = numbered_factors(result)
    sequence: Dims = (*(names[:-1] if len(shapes[0]) > 1 else ()), None)
    others = [names if len(s) == len(result) else (None,) * len(s) for s in shapes[1:2]]
    sorters = [sequence] * (len(shapes) - 1 - len(others))
    return Factors((sequence, *others, *sorters), (names,), sizes_of(result))


def _isin(node: Node, graph: Graph) -> Factors:
    shape, test = graph.shapes(node.inputs)
    names = numbered_factors(shape)
    return Factors((names, (None,) * len(test)), (names,), sizes_of(shape))


SAVES_INDICES = Facts(saves="indices")
SAVES_INDEX = Facts(saves="index", looks_up=True)
SCATTERED = Facts(saves="index")
_WRITES, _REPLACES = partial(_scatter, adds=False), partial(_index_add, adds=False)


def _part_of_batch(node: Node, graph: Graph) -> Factors:
    """A micro-batch's chunk: its dim is unsharded, other dims are factors."""
    (shape,) = graph.shapes(node.inputs)
    dims = tuple(None if d == node.argument("dim") else f"d{d}" for d in range(len(shape)))
    sizes = {f: n for f, n in zip(dims, shape, strict=True) if f is not None}
    return Factors((dims,), (dims,), sizes, linear=((0,),))


RULES: tuple[Rule, ...] = (
    Rule(
        PART_OF_BATCH,
        _part_of_batch,
        lambda site: LocalCall("part_of_batch", site.node.args, {}),
        notation="dim unsharded",
        facts=KEEPS_NOTHING,
    ),
    *rules(
        "index.Tensor",
        _index,
        _local_index,
        "indexed dims summed",
        facts=replace(SAVES_INDICES, looks_up=True),
    ),
    *rules("_unsafe_index.Tensor", _index, _local_index, "indexed dims summed", facts=SAVES_INDICES),
    *rules(
        "index_put.default _unsafe_index_put.default",
        _index_put,
        _local_index_put,
        "indexed dims sharded",
        facts=SAVES_INDICES,
    ),
    *rules(
        "index_select.default",
        _index_select,
        indexed_dim_form("sharded_index_select", "index"),
        "dim summed",
        facts=SAVES_INDEX,
    ),
    *rules(
        "gather.default",
        _gather,
        indexed_dim_form("sharded_gather", "index"),
        "dim summed",
        facts=replace(SAVES_INDEX, saves="self index"),
    ),
    *rules("scatter.src", _WRITES, indexed_dim_form("sharded_scatter", "index", "src"), "dim sharded", facts=SCATTERED),
    *rules(
        "scatter.value", _WRITES, indexed_dim_form("sharded_scatter", "index", "value"), "dim sharded", facts=SCATTERED
    ),
    *rules(
        "scatter_add.default",
        partial(_scatter, adds=True),
        indexed_dim_form("sharded_scatter_add", "index", "src"),
        "index dim summed",
        facts=Facts(saves="src: index"),
    ),
    *rules("scatter_reduce.two", _scatter_reduce, None, "dim unsharded", facts=Facts(saves="self index src result")),
    *rules(
        "index_add.default",
        partial(_index_add, adds=True),
        indexed_dim_form("sharded_index_add", "index", "source", "alpha"),
        "index summed",
        facts=Facts(saves="source: index source"),
    ),
    *rules(
        "index_copy.default",
        _REPLACES,
        indexed_dim_form("sharded_index_copy", "index", "source"),
        "dim sharded",
        facts=Facts(saves="index; source: source"),
    ),
    *rules(
        "index_fill.int_Scalar index_fill.int_Tensor",
        _REPLACES,
        indexed_dim_form("sharded_index_fill", "index", "value"),
        "dim sharded",
        facts=SCATTERED,
    ),
    *rules("take.default", _take_factors, None, "source unsharded", facts=Facts(saves="self index")),
    *rules("one_hot.default", _one_hot, None, "... -> ... _", facts=KEEPS_NOTHING),
    *rules("bucketize.Tensor", _bucketize, None, "boundaries unsharded", facts=KEEPS_NOTHING),
    *rules("isin.Tensor_Tensor", _isin, None, "..., (test) -> ...", facts=KEEPS_NOTHING),
    rule(aten.isin.Tensor_Scalar, "... -> ...", facts=KEEPS_NOTHING),
    *rules("searchsorted.Tensor", _searchsorted, None, "... _, ... n -> ... n", facts=KEEPS_NOTHING),
)
