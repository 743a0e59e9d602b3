"""Look-ups and writes by index tensors.

Index dims and dims beside the indexed one are factors as usual. The indexed dim is one too: each rank serves the
part it holds, so that a look-up gives summands and an adding write stays in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from autoshard.passes.ir.assignment import Strategy
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.program import Call
from autoshard.passes.rules.base import Facts, Rule, Site
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
    whole,
)
from autoshard.passes.rules.named import axes_of, broadcast_shape, spell
from autoshard.passes.rules.notation import rule

aten = torch.ops.aten


def _index_factors(
    source: Sequence[int], indices: Sequence[Ref | None], graph: Graph
) -> tuple[Dims, list[Dims], Dims, dict[str, int]]:
    """Advanced indexing: factors of the source, of each index tensor, of the result, and their lengths.

    Index dims (broadcast together) are factors ``i0, i1, …``, source dims are ``d0, d1, …``. The index
    dims stand where the indexed dims were if those are adjacent, else first.
    """
    indexed = [d for d, ref in enumerate(indices) if ref is not None]
    shapes = [shape_of(graph, ref) for ref in indices if ref is not None]
    common = broadcast_shape(*shapes)
    names: Dims = tuple(f"i{k}" for k in range(len(common)))
    sizes = {f"i{k}": n for k, n in enumerate(common)}
    sizes |= sizes_of(source)
    before = numbered(source)
    kept: Dims = tuple(f for d, f in enumerate(before) if d not in indexed)
    adjacent = indexed == list(range(indexed[0], indexed[-1] + 1))
    at = indexed[0] if adjacent else 0
    return before, [broadcast(s, common, names) for s in shapes], kept[:at] + names + kept[at:], sizes


def _is_masked(indices: Sequence[Ref | None], graph: Graph) -> bool:
    """Whether a boolean mask selects: how many elements it takes is known only at run time."""
    return any(ref is not None and graph.types[ref.name].dtype in (torch.bool, torch.uint8) for ref in indices)


def _index(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    indices = argument(node, "indices")
    if _is_masked(indices, graph):
        return whole(len(node.inputs), len(node.outputs))
    source = input_shapes(node, graph)[0]
    before, taken, result, sizes = _index_factors(source, indices, graph)
    return Factors((before, *taken), (result,), sizes, linear=((0,),)).strategies(node, graph)


def _local_index(site: Site) -> Call:
    node, cuts = site.node, _cuts(site)
    if not cuts:
        return Call(node.op, node.args, node.kwargs)
    return Call("sharded_index", (argument(node, "self"), argument(node, "indices"), cuts), {})


def _cuts(site: Site) -> list[tuple[int, int, Any]]:
    """(dim, global length, axes) of every indexed dim that is cut."""
    shape, layout = site.in_type(0).shape, site.inputs[0]
    indexed = [d for d, i in enumerate(argument(site.node, "indices")) if i is not None]
    return [(d, shape[d], spell(layout.axes_of(d))) for d in indexed if layout.axes_of(d)]


def _index_put(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Accumulating, index dims are summed: each rank adds its own values to a summand of the source.

    Where an indexed dim is cut, each rank writes what falls into its part.
    """
    indices, accumulate = argument(node, "indices"), bool(argument(node, "accumulate"))
    if _is_masked(indices, graph):
        return whole(len(node.inputs), len(node.outputs))
    source = input_shapes(node, graph)[0]
    before, taken, written, sizes = _index_factors(source, indices, graph)
    written_shape = [sizes[f] for f in written if f is not None]
    values = broadcast(input_shapes(node, graph)[-1], written_shape, written)
    rows: list[Dims] = [before, *taken, values]
    sizes = {f: n for f, n in sizes.items() if accumulate or not f.startswith("i")}
    last = len(rows) - 1
    return Factors(tuple(rows), (before,), sizes, addends=frozenset({0}), linear=((0, last),)).strategies(node, graph)


def _local_index_put(site: Site) -> Call:
    node, cuts = site.node, _cuts(site)
    if not cuts:
        return Call(node.op, node.args, node.kwargs)
    given = [argument(node, a) for a in ("self", "indices", "values", "accumulate")]
    return Call("sharded_index_put", (*given, cuts), {})


def _index_select(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    source, index = input_shapes(node, graph)
    dim = positive(argument(node, "dim"), len(source))
    dims = numbered(source)
    result: Dims = (*dims[:dim], "i", *dims[dim + 1 :]) if source else ()
    sizes = sizes_of(source) | {"i": index[0] if index else 1}
    return Factors((dims, ("i",) * len(index)), (result,), sizes, linear=((0,),)).strategies(node, graph)


def _along_cut(name: str, *arguments: str) -> Callable[[Site], Call]:
    """The runtime function ``name`` where the indexed dim is cut: ``arguments``, then its length and its axes."""

    def local(site: Site) -> Call:
        node = site.node
        shape = site.in_type(0).shape
        dim = positive(argument(node, "dim"), len(shape))
        axes = axes_of(site, "self", dim) if shape else ()
        if not axes:
            return Call(node.op, node.args, node.kwargs)
        given = [dim if a == "dim" else argument(node, a) for a in arguments]
        return Call(name, (*given, shape[dim], spell(axes)), {})

    return local


def _along(shapes: Sequence[Sequence[int]], dim: int, inner: str | None) -> tuple[list[Dims], dict[str, int]]:
    """Factors of source, index (and values) of gather and scatter: dims on which all of them have equal length.

    Index and values carry ``inner`` in ``dim``.
    """
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


def _gather(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    source, index = input_shapes(node, graph)
    if not source or not index:
        return whole(2, 1)
    (dims, taken), sizes = _along((source, index), positive(argument(node, "dim"), len(source)), "i")
    return Factors((dims, taken), (taken,), sizes, linear=((0,),)).strategies(node, graph)


def _scatter(adds: bool) -> Callable[[Node, Graph], tuple[Strategy, ...]]:
    """Adding, the index dim is summed; replacing, it is whole. Linear in source and values together."""

    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        shapes = input_shapes(node, graph)
        if not all(shapes):
            return whole(len(shapes), 1)
        dim = positive(argument(node, "dim"), len(shapes[0]))
        dims, sizes = _along(shapes, dim, "i" if adds else None)
        constant = argument(node, "value") if len(shapes) == 2 else 0
        group = (0, 2) if len(shapes) == 3 else (0,)
        addends = frozenset({0}) if adds else frozenset[int]()
        linear = (group,) if constant == 0 else ()
        return Factors(tuple(dims), (dims[0],), sizes, addends=addends, linear=linear).strategies(node, graph)

    return strategies


def _index_add(adds: bool) -> Callable[[Node, Graph], tuple[Strategy, ...]]:
    """index_add (summed over the index), index_copy and index_fill (index whole)."""

    def strategies(node: Node, graph: Graph) -> tuple[Strategy, ...]:
        shapes = input_shapes(node, graph)
        source, index = shapes[0], shapes[1]
        if not source or not index:
            return whole(len(shapes), 1)
        dim = positive(argument(node, "dim"), len(source))
        dims, inner = numbered(source), "i" if adds else None
        values: Dims = (*dims[:dim], inner, *dims[dim + 1 :])
        sizes = sizes_of(source) | {"i": index[0]}
        rest = tuple(values if s else () for s in shapes[2:])
        fills = any(a.name == "value" for a in node.op._schema.arguments) and not isinstance(
            argument(node, "value"), Ref
        )
        linear = () if fills and argument(node, "value") != 0 else ((0, 2) if len(shapes) == 3 else (0,),)
        return Factors(
            (dims, (inner,), *rest), (dims,), sizes, addends=frozenset({0}) if adds else frozenset(), linear=linear
        ).strategies(node, graph)

    return strategies


def _take_along_flat(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """``take``: the source is whole, every index dim is a factor."""
    source, index = input_shapes(node, graph)
    names: Dims = tuple(f"i{k}" for k in range(len(index)))
    sizes = {f"i{k}": n for k, n in enumerate(index)}
    return Factors(((None,) * len(source), names), (names,), sizes, linear=((0,),)).strategies(node, graph)


def _one_hot(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    (shape,) = input_shapes(node, graph)
    names: Dims = tuple(f"d{d}" for d in range(len(shape)))
    return Factors((names,), ((*names, None),), {f"d{d}": n for d, n in enumerate(shape)}).strategies(node, graph)


def _bucketize(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """``bucketize``: boundaries are whole, every dim of the values is a factor."""
    shapes, (result,) = input_shapes(node, graph), output_shapes(node, graph)
    names: Dims = tuple(f"d{d}" for d in range(len(result)))
    values = names if len(shapes) == 2 else ()
    inputs = (values, (None,)) if len(shapes) == 2 else ((None,),)
    return Factors(inputs, (names,), {f"d{d}": n for d, n in enumerate(result)}).strategies(node, graph)


def _scatter_reduce(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """Only a sum that includes the source splits over the index."""
    adds = argument(node, "reduce") == "sum" and argument(node, "include_self")
    found = _scatter(adds=adds)(node, graph)
    dim = f"d{positive(argument(node, 'dim'), max(1, len(input_shapes(node, graph)[0])))}"
    linear = adds or argument(node, "reduce") == "mean"
    return tuple(s for s in found if s.label != dim and (linear or not s.label.startswith("P")))


def _searchsorted(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    """The sorted dim is whole; leading dims are shared where the sequence has them."""
    shapes, (result,) = input_shapes(node, graph), output_shapes(node, graph)
    names = numbered(result)
    sequence: Dims = (*(names[:-1] if len(shapes[0]) > 1 else ()), None)
    others = [names if len(s) == len(result) else (None,) * len(s) for s in shapes[1:2]]
    sorters = [sequence] * (len(shapes) - 1 - len(others))
    return Factors((sequence, *others, *sorters), (names,), sizes_of(result)).strategies(node, graph)


def _isin(node: Node, graph: Graph) -> tuple[Strategy, ...]:
    shape, test = input_shapes(node, graph)
    names = numbered(shape)
    return Factors((names, (None,) * len(test)), (names,), sizes_of(shape)).strategies(node, graph)


INDICES = Facts(saves="indices")
INDEX = Facts(saves="index", rounding="exact")
SCATTERED = Facts(saves="index")
NUMBERS = Facts(saves="")

RULES: tuple[Rule, ...] = (
    Rule(
        aten.index.Tensor,
        _index,
        _local_index,
        notation="indexed dims summed",
        facts=replace(INDICES, rounding="exact"),
    ),
    Rule(aten._unsafe_index.Tensor, _index, _local_index, notation="indexed dims summed", facts=INDICES),
    *(
        Rule(op, _index_put, _local_index_put, notation="indexed dims cut", facts=INDICES)
        for op in (aten.index_put.default, aten._unsafe_index_put.default)
    ),
    Rule(
        aten.index_select.default,
        _index_select,
        _along_cut("sharded_index_select", "self", "dim", "index"),
        notation="dim summed",
        facts=INDEX,
    ),
    Rule(
        aten.gather.default,
        _gather,
        _along_cut("sharded_gather", "self", "dim", "index"),
        notation="dim summed",
        facts=replace(INDEX, saves="self index"),
    ),
    *(
        Rule(
            op,
            _scatter(adds=False),
            _along_cut("sharded_scatter", "self", "dim", "index", value),
            notation="dim cut",
            facts=SCATTERED,
        )
        for op, value in ((aten.scatter.src, "src"), (aten.scatter.value, "value"))
    ),
    Rule(
        aten.scatter_add.default,
        _scatter(adds=True),
        _along_cut("sharded_scatter_add", "self", "dim", "index", "src"),
        notation="index dim summed",
        facts=Facts(saves="src: index"),
    ),
    Rule(aten.scatter_reduce.two, _scatter_reduce, notation="dim whole", facts=Facts(saves="self index src result")),
    Rule(
        aten.index_add.default,
        _index_add(adds=True),
        _along_cut("sharded_index_add", "self", "dim", "index", "source", "alpha"),
        notation="index summed",
        facts=Facts(saves="source: index source"),
    ),
    *(
        Rule(
            op, _index_add(adds=False), _along_cut(name, "self", "dim", "index", value), notation="dim cut", facts=facts
        )
        for op, name, value, facts in (
            (aten.index_copy.default, "sharded_index_copy", "source", Facts(saves="index; source: source")),
            (aten.index_fill.int_Scalar, "sharded_index_fill", "value", SCATTERED),
            (aten.index_fill.int_Tensor, "sharded_index_fill", "value", SCATTERED),
        )
    ),
    Rule(aten.take.default, _take_along_flat, notation="source whole", facts=Facts(saves="self index")),
    Rule(aten.one_hot.default, _one_hot, notation="... -> ... _", facts=NUMBERS),
    Rule(aten.bucketize.Tensor, _bucketize, notation="boundaries whole", facts=NUMBERS),
    Rule(aten.isin.Tensor_Tensor, _isin, notation="..., (test) -> ...", facts=NUMBERS),
    rule(aten.isin.Tensor_Scalar, "... -> ...", facts=NUMBERS),
    Rule(aten.searchsorted.Tensor, _searchsorted, notation="... _, ... n -> ... n", facts=NUMBERS),
)
