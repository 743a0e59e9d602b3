"""Views, repeats and permutations: ops that rearrange elements and compute nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Local, LocalCall
from autoshard.passes.ir.sizes import gcd
from autoshard.passes.rules.base import (
    KEEPS_NOTHING,
    Factors,
    Facts,
    LocalFormOf,
    Rule,
    Site,
    broadcast,
    dims_argument,
    numbered_factors,
    positive,
    rules,
    sizes_of,
    with_facts,
)
from autoshard.passes.rules.families.factory import factory_strategies
from autoshard.torch_private.ops import OpOverload


def view_groups(source: Sequence[int], result: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Smallest groups of dims with equal products, left to right, without dims of length 1.
    >>> view_groups((2, 12, 5), (2, 3, 4, 5))
    [((0,), (0,)), ((1,), (1, 2)), ((2,), (3,))]"""
    if 0 in source:
        return []
    a = [d for d, n in enumerate(source) if n != 1]
    b = [d for d, n in enumerate(result) if n != 1]
    groups: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    while a and b:
        left, right = [a.pop(0)], [b.pop(0)]
        m, n = source[left[0]], result[right[0]]
        while m != n:
            shorter = m < n
            if not (a if shorter else b):  # symbolic products, not provably equal
                return groups
            if shorter:
                left.append(a.pop(0))
                m *= source[left[-1]]
            else:
                right.append(b.pop(0))
                n *= result[right[-1]]
        groups.append((tuple(left), tuple(right)))
    return groups


def view_factors(source: Sequence[int], result: Sequence[int]) -> Factors:
    """Per group the outermost dims of both sides; compound groups need equal chunks."""
    before: list[str | None] = [None] * len(source)
    after: list[str | None] = [None] * len(result)
    sizes: dict[str, int] = {}
    even = set()
    for left, right in view_groups(source, result):
        factor = f"d{right[0]}"
        before[left[0]] = after[right[0]] = factor
        sizes[factor] = gcd(source[left[0]], result[right[0]])
        if len(left) + len(right) > 2:
            even.add(factor)
    return Factors((tuple(before),), (tuple(after),), sizes, frozenset(even), linear=((0,),))


def _reshape_factors(node: Node, graph: Graph) -> Factors:
    (result,) = graph.shapes(node.outputs)
    found = view_factors(graph.shapes(node.inputs)[0], result)
    if len(node.inputs) == 1:
        return found
    return Factors((found.inputs[0], found.outputs[0]), found.outputs, found.sizes, found.even, linear=((0,),))


def _local_result_shape(site: Site) -> list[int | Local]:
    return site.local_sizes(site.outputs[0], site.out_type().shape)


def _with_local_shape(op: OpOverload) -> LocalFormOf:
    """Local form: ``op`` on the first operand with the result's local shape."""

    def local(site: Site) -> LocalCall:
        return LocalCall(op, (site.node.args[0], _local_result_shape(site)), {})

    return local


def _unflatten(site: Site) -> LocalCall:
    rank = len(site.in_type(0).shape)
    dim = positive(site.node.argument("dim"), rank)
    sizes = _local_result_shape(site)
    return site.unchanged(sizes=sizes[dim : dim + len(sizes) - rank + 1])


def _squeeze(site: Site) -> LocalCall:
    """Only dims of global length 1: a chunk of length 1 stays."""
    shape = site.in_type(0).shape
    asked = dims_argument(site.node.argument("dim", None), len(shape), empty_is_all=False)
    return LocalCall(aten.squeeze.dims, (site.node.args[0], [d for d in asked if d < len(shape) and shape[d] == 1]), {})


def _view_dtype(node: Node, graph: Graph) -> Factors:
    """A view as another dtype: the last dim is unsharded if its length changes."""
    (source,), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    dims = numbered_factors(source, () if source == result else (len(source) - 1,))
    return Factors((dims,), (dims,), sizes_of(source))


def _expand(node: Node, graph: Graph) -> Factors:
    return replace(factory_strategies(node, graph), linear=((0,),))


def _repeat(node: Node, graph: Graph) -> Factors:
    """A dim is a factor if it is repeated once, or had length 1."""
    (source,), (result,) = graph.shapes(node.inputs), graph.shapes(node.outputs)
    padded = (1,) * (len(result) - len(source)) + tuple(source)
    after = tuple(f"d{d}" if a in (1, n) else None for d, (a, n) in enumerate(zip(padded, result, strict=True)))
    return Factors((broadcast(source, result, after),), (after,), sizes_of(result), linear=((0,),))


def _repeat_local(site: Site) -> LocalCall:
    (source, result) = site.in_type(0).shape, site.out_type().shape
    padded = (1,) * (len(result) - len(source)) + tuple(source)
    repeats = [local if a == 1 else n // a if a else 1
               for local, a, n in zip(_local_result_shape(site), padded, result, strict=True)]  # fmt: skip
    return LocalCall(aten.repeat.default, (site.node.args[0], repeats), {})


def _permuted(order: Callable[[Node, int], Sequence[int]]) -> Callable[[Node, Graph], Factors]:
    """A permutation of dims; ``order(node, rank)``: the source dim of each result dim."""

    def factors(node: Node, graph: Graph) -> Factors:
        (shape,) = graph.shapes(node.inputs)
        dims = numbered_factors(shape)
        return Factors((dims,), (tuple(dims[d] for d in order(node, len(shape))),), sizes_of(shape), linear=((0,),))

    return factors


def _swap(first: str, second: str) -> Callable[[Node, int], Sequence[int]]:
    def order(node: Node, rank: int) -> Sequence[int]:
        dims = list(range(rank))
        a, b = positive(node.argument(first), rank), positive(node.argument(second), rank)
        if rank:
            dims[a], dims[b] = dims[b], dims[a]
        return dims

    return order


def _reverse(last: int | None) -> Callable[[Node, int], Sequence[int]]:
    """Last two dims swapped, or all dims reversed."""
    return lambda node, rank: range(rank)[::-1] if last is None else [*range(rank)[:-2], *range(rank)[-2:][::-1]]


def _moved_dims(node: Node, rank: int) -> Sequence[int]:
    source = [node.argument("source")] if isinstance(node.argument("source"), int) else node.argument("source")
    to = [node.argument("destination")] if isinstance(node.argument("destination"), int) else None
    moved = {
        positive(t, rank): positive(s, rank) for s, t in zip(source, to or node.argument("destination"), strict=True)
    }
    rest = iter(d for d in range(rank) if d not in moved.values())
    return [moved[d] if d in moved else next(rest) for d in range(rank)]


def _repeat_interleave(node: Node, graph: Graph) -> Factors:
    """Every element ``n`` times in place: equal chunks stay aligned."""
    (source,) = graph.shapes(node.inputs)
    dim = node.argument("dim")
    if dim is None:
        return Factors(((None,) * len(source),), ((None,),), {}, linear=((0,),))
    dims = numbered_factors(source)
    where = f"d{positive(dim, len(source))}"
    return Factors((dims,), (dims,), sizes_of(source), frozenset({where}), linear=((0,),))


def _repeat_interleave_local(site: Site) -> LocalCall:
    """Without ``output_size``, which is global."""
    args, kwargs = site.node.with_arguments(output_size=None)
    return LocalCall(site.node.op, args, {k: v for k, v in kwargs.items() if k != "output_size"})


VIEW_NOTATION = "leading factors of equal products"
_RESHAPES: dict[str, Any] = {
    "view.default": aten.view.default,
    "reshape.default": aten.reshape.default,
    "view_as.default": aten.view.default,
    "reshape_as.default": aten.reshape.default,
    "view_copy.default": aten.view_copy.default,
}

VIEWED = Facts(saves="", view=True)

RULES: tuple[Rule, ...] = (
    *rules(
        "_unsafe_view.default",
        _reshape_factors,
        _with_local_shape(aten._unsafe_view.default),
        VIEW_NOTATION,
        facts=VIEWED,
    ),
    *with_facts(
        KEEPS_NOTHING,
        (
            *(
                r
                for name, op in _RESHAPES.items()
                for r in rules(name, _reshape_factors, _with_local_shape(op), VIEW_NOTATION)
            ),
            *rules(
                "flatten.using_ints ravel.default unsqueeze.default unsqueeze_copy.default",
                _reshape_factors,
                None,
                VIEW_NOTATION,
            ),
            *rules("view.dtype", _view_dtype, None, "elements"),
            *rules("unflatten.int", _reshape_factors, _unflatten, VIEW_NOTATION),
            *rules(
                "squeeze.default squeeze.dim squeeze.dims squeeze_copy.default squeeze_copy.dim squeeze_copy.dims",
                _reshape_factors,
                _squeeze,
                VIEW_NOTATION,
            ),
            *rules(
                "expand.default expand_copy.default expand_as.default broadcast_to.default",
                _expand,
                _with_local_shape(aten.expand.default),
                "new dims are factors",
            ),
            *rules("repeat.default tile.default", _repeat, _repeat_local, "dims repeated once"),
            *rules("repeat_interleave.self_int", _repeat_interleave, _repeat_interleave_local, "dims, evenly"),
            *rules(
                "transpose.int transpose_copy.int swapdims.default",
                _permuted(_swap("dim0", "dim1")),
                None,
                "a permutation",
            ),
            *rules("swapaxes.default", _permuted(_swap("axis0", "axis1")), None, "a permutation"),
            *rules("t.default t_copy.default numpy_T.default", _permuted(_reverse(None)), None, "a permutation"),
            *rules("mT.default", _permuted(_reverse(2)), None, "a permutation"),
            *rules(
                "permute.default permute_copy.default",
                _permuted(lambda n, r: [positive(d, r) for d in n.argument("dims")]),
                None,
                "…",
            ),
            *rules("movedim.int movedim.intlist", _permuted(_moved_dims), None, "a permutation"),
        ),
    ),
)
