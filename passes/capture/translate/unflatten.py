"""Unflatten dims that views merge, so that each of them can be sharded.
A shard of a merged dim, such as batch · sequence, is contiguous in its outermost dim only. Three
rewrites: a chain of views that merges dims and splits them again becomes one permutation; a
linear layer on flattened rows becomes one on the unflattened operand; routers, experts and losses
that work row by row run on unflattened rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_refs
from autoshard.passes.ir.patterns import Bindings, Matcher, permutation_of
from autoshard.passes.ir.rewrite import NodeBuilder, rewrite
from autoshard.passes.rules.base import positive
from autoshard.runtime.operations.experts import experts_op
from autoshard.runtime.operations.losses import cross_entropy_op

DimFactors = tuple[tuple[int, ...], ...]
"""per dim the factors whose product it is, by number, outermost first; (): length 1"""
_RESHAPING_OPS = {aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.clone.default}


def unmerge_views(graph: Graph) -> Graph:
    """``graph`` without chains of views that merge dims and split them again."""
    views = dict[str, _ViewChain]()

    def unmerged(build: NodeBuilder, node: Node) -> bool:
        moves = node.op in _RESHAPING_OPS or permutation_of(node, graph) is not None
        view = _view_chain_of(node, views, graph) if moves else None
        if view is None:
            return False
        views[node.outputs[0]] = view
        split = view.steps > 1 and (view.mixed or not view.merged <= _adjacent_factors(view.after))
        if split:
            _build_view(build, view)
        return split

    return rewrite(graph, unmerged)


@dataclass(frozen=True)
class _ViewChain:
    """A chain of views of ``root``, as factors of dims before and after."""

    root: str
    checkpoint: int
    lengths: tuple[int, ...]
    """factor number → length"""
    before: DimFactors
    """dims of the root"""
    after: DimFactors
    merged: frozenset[tuple[int, int]] = frozenset()
    """adjacent factors that an intermediate view merged, of different dims of the root"""
    mixed: bool = False
    """whether an intermediate view merged a dim with a part of another"""
    steps: int = 0

    def turned(self, order: Sequence[int]) -> _ViewChain:
        return replace(self, after=tuple(self.after[d] for d in order), steps=self.steps + 1)

    def shaped(self, shape: Sequence[int]) -> _ViewChain | None:
        """The chain with a reshape; None where a dim is no product of factors, split if needed."""
        found, dims, left = self, list[tuple[int, ...]](), [i for dim in self.after for i in dim]
        for length in shape:
            dim: list[int] = []
            while length != 1:
                first = found.lengths[left[0]] if left else 0
                if not first or (length % first != 0 and first % length != 0):
                    return None
                if length % first != 0:
                    found = found.split(left[0], length)
                    left.insert(1, len(found.lengths) - 1)
                    first = length
                dim.append(left.pop(0))
                length //= first
            dims.append(tuple(dim))
        of_root = {i: d for d, dim in enumerate(found.before) for i in dim}
        new = {(a, b) for a, b in _adjacent_factors(dims) if of_root[a] != of_root[b]}
        # A dim is mixed if only part of a source dim joins it: the rest is elsewhere.
        of_source = {i: d for d, dim in enumerate(found.after) for i in dim}
        mixed = any(
            len({of_source[i] for i in dim}) > 1 and not all({*found.after[of_source[i]]} <= {*dim} for i in dim)
            for dim in dims
        )
        return replace(
            found, after=tuple(dims), merged=found.merged | new, mixed=found.mixed or mixed, steps=found.steps + 1
        )

    def split(self, factor: int, outer: int) -> _ViewChain:
        """With ``factor`` split in two: the outer has this length, the inner the next number."""
        inner, lengths = len(self.lengths), list(self.lengths)
        lengths[factor : factor + 1] = [outer]
        lengths.append(self.lengths[factor] // outer)

        def both(dims: DimFactors) -> DimFactors:
            return tuple(tuple(i for f in dim for i in ((f, inner) if f == factor else (f,))) for dim in dims)

        merged = frozenset((inner if a == factor else a, b) for a, b in self.merged)
        return replace(self, lengths=tuple(lengths), before=both(self.before), after=both(self.after), merged=merged)


def _view_chain_of(node: Node, views: dict[str, _ViewChain], graph: Graph) -> _ViewChain | None:
    """The chain of views that ends with ``node``; None where ``node`` cannot be part of one."""
    if len(node.inputs) != 1 or (node.op is aten.clone.default and not graph.returned.isdisjoint(node.outputs)):
        return None
    types = [graph.types[name] for name in node.values]
    if any(t.unknown or 0 in t.shape for t in types):
        return None
    (operand,) = node.inputs
    view = views.get(operand)
    if view is None or view.checkpoint != node.checkpoint:
        view = _identity_view(operand, types[0], node.checkpoint)
    if (order := permutation_of(node, graph)) is not None:
        return view.turned(order)
    return view.shaped(types[1].shape) or _identity_view(operand, types[0], node.checkpoint).shaped(types[1].shape)


def _identity_view(root: str, type_: TensorType, checkpoint: int) -> _ViewChain:
    lengths = [n for n in type_.shape if n != 1]
    numbers = itertools.count()
    dims = tuple(() if n == 1 else (next(numbers),) for n in type_.shape)
    return _ViewChain(root, checkpoint, tuple(lengths), dims, dims)


def _adjacent_factors(dims: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    return {pair for dim in dims for pair in itertools.pairwise(dim)}


def _build_view(build: NodeBuilder, view: _ViewChain) -> None:
    """``view`` as reshape (split), permutation, reshape (merge), without needless steps."""
    together = _adjacent_factors(view.before) & _adjacent_factors(view.after)
    later = {b for _, b in together}
    follows = dict(together)

    def length(factor: int) -> int:
        n = view.lengths[factor]
        return n * length(follows[factor]) if factor in follows else n

    order = [i for dim in view.before for i in dim if i not in later]
    turned = [order.index(i) for dim in view.after for i in dim if i not in later]
    value, shape, result = Ref(view.root), tuple(map(length, order)), build.graph.shape(build.place.outputs[0])
    if turned == sorted(turned):
        build.finish(aten.reshape.default, value, list(result))
        return
    if build.shape(value) != shape:
        value = build(aten.reshape.default, value, list(shape))
    if tuple(shape[i] for i in turned) == result:
        build.finish(aten.permute.default, value, turned)
    else:
        build.finish(aten.reshape.default, build(aten.permute.default, value, turned), list(result))


def unflatten_linears(graph: Graph) -> Graph:
    """``graph`` with [b, s, k] → [b · s, k] @ [k, n] → [b, s, n] as one linear (GPT-2)."""
    matcher, unflattened = Matcher(graph), set[str]()

    def linear(build: NodeBuilder, node: Node) -> bool:
        if node.op is aten.reshape.default and node.inputs[0] in unflattened:
            build.renamed[node.outputs[0]] = node.inputs[0]
            return True
        found = matcher.match(_FLAT_LINEAR, Ref(node.outputs[0])) if node.op is aten.addmm.default else None
        shape = None if found is None else _restored_shape(node, found, graph)
        if found is None or shape is None:
            return False
        (out,) = node.outputs
        build.finish(aten.linear.default, found["rows"], build(aten.t.default, found["weight"]), found["bias"])
        build.types[out] = replace(build.types[out], shape=shape)
        unflattened.add(out)
        return True

    return rewrite(graph, linear)


_FLAT_LINEAR = "addmm(bias, (flat := reshape(rows)), weight)"


def _restored_shape(node: Node, found: Bindings, graph: Graph) -> tuple[int, ...] | None:
    """The shape of the linear of the unflattened rows, if all readers restore it."""
    (out,), before, (rows, features) = node.outputs, graph.shape(found["rows"]), graph.shape(found["flat"])
    shape, uses = (*before[:-1], graph.shape(out)[-1]), graph.uses[out]
    if before[-1] != features or len(before) < 3 or rows != math.prod(before[:-1]) or out in graph.returned:
        return None
    restored = all(u.op is aten.reshape.default and graph.shape(u.outputs[0]) == shape for u in uses)
    return shape if uses and restored and len(graph.shape(found["bias"])) == 1 else None


LeadingDims = tuple[int, ...]
"""lengths of the leading dims that rows were flattened from"""

ROUTED_EXPERTS = experts_op._opoverload
_ROW_LOSSES = {aten.cross_entropy_loss.default: cross_entropy_op}
"""loss of [rows, classes] → the same loss of [..., classes]"""
_PER_ROW_OPERANDS = {ROUTED_EXPERTS: slice(1, 3), **dict.fromkeys(_ROW_LOSSES, slice(1, 2))}
"""ops that want unflattened rows → their operands that follow: ids and weights, labels"""
_FULL_REDUCTIONS = {aten.sum.default, aten.mean.default}
"""reductions over all elements, which shapes do not change"""
_ROW_WISE_OPS = {aten.linear.default, aten.matmul.default, aten.layer_norm.default, aten.rms_norm.default}
"""ops of rows and a matrix, or weights of features"""
_LIKE_FACTORIES = {aten.zeros_like.default, aten.ones_like.default, aten.full_like.default}
_ROW_ELEMENTWISE = {*_LIKE_FACTORIES, aten._to_copy.default, aten.detach.default, aten.dropout.default}
"""elementwise ops without torch's pointwise tag"""
_OPS_ALONG_DIMS = frozenset(
    (
        "softmax.int log_softmax.int topk.default sum.dim_IntList mean.dim amax.default argmax.default cumsum.default "
        "gather.default scatter.src scatter.value sort.default argsort.default unsqueeze.default squeeze.dim logsumexp.default"
    ).split()
)
"""ops along dims of their first operand"""


def unflatten_rows(graph: Graph) -> Graph:
    """``graph`` with row-wise ops on unflattened rows where experts, losses, reshapes want it."""
    rows = _RowAnalysis(graph)
    wanted = rows.kept()
    return rows.written(wanted) if wanted else graph


class _RowAnalysis:
    """Finds flat rows, their leading dims, and the ops that can run on unflattened ones."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.leading_dims: dict[str, LeadingDims] = {}
        self.starts: dict[str, str] = {}
        """flattened value → source of its reshape, whose trailing dims may differ"""
        self.made: dict[str, Node] = {}
        """node name → the node on unflattened rows"""
        self.ends: set[str] = set()
        """names of reshapes that restore the leading dims"""
        for node in graph.nodes:
            if (lead := self._flattened(node)) is not None:
                self.leading_dims[node.outputs[0]] = lead
                self.starts[node.outputs[0]] = node.inputs[0]
            elif (lead := self._lead(node)) is not None and (made := self._apart(node, lead)) is not None:
                self.made[node.name] = made
                self.leading_dims |= dict.fromkeys((name for name in node.outputs if graph.shape(name)), lead)
            elif lead is not None and self._is_back(node, lead):
                self.ends.add(node.name)

    def _flattened(self, node: Node) -> LeadingDims | None:
        """The leading dims that reshape ``node`` merges into one."""
        if node.op is not aten.reshape.default or len(node.inputs) != 1:
            return None
        before, after = (self.graph.types[name] for name in node.values)
        if before.unknown or not after.shape:
            return None
        same = len(before.shape) - len(after.shape) + 1
        leading_dims = (before.shape[:count] for count in (same, *range(2, len(before.shape) + 1)) if count > 1)
        several = (lead for lead in leading_dims if len([n for n in lead if n != 1]) > 1)
        return next((lead for lead in several if math.prod(lead) == after.shape[0]), None)

    def _lead(self, node: Node) -> LeadingDims | None:
        """The common leading dims of the rows that ``node`` reads."""
        found = {self.leading_dims[name] for name in node.inputs if name in self.leading_dims}
        return found.pop() if len(found) == 1 else None

    def _is_back(self, node: Node, lead: LeadingDims) -> bool:
        if node.op is not aten.reshape.default or len(node.inputs) != 1:
            return False
        return self.graph.shape(node.outputs[0]) == (*lead, *self.graph.shape(node.inputs[0])[1:])

    def _apart(self, node: Node, lead: LeadingDims) -> Node | None:
        """``node`` on unflattened rows, if it works row by row; else None."""
        graph, rows = self.graph, math.prod(lead)
        types = [graph.types[name] for name in node.values]
        made = [graph.types[name] for name in node.outputs]
        if node.order or not made or any(t.unknown for t in types):
            return None
        if node.op in _FULL_REDUCTIONS:
            return node
        if any(t.shape[:1] != (rows,) for t in made) and node.op not in _ROW_LOSSES:
            return None
        if node.op in _PER_ROW_OPERANDS:  # its other operands of rows get reshaped
            weights = node.inputs[_PER_ROW_OPERANDS[node.op].stop :]
            apart = node.inputs[0] in self.leading_dims and self.leading_dims.keys().isdisjoint(weights)
            return replace(node, op=_ROW_LOSSES.get(node.op, node.op)) if apart else None
        if node.op in _ROW_WISE_OPS:
            matrices = all(name not in self.leading_dims and len(graph.shape(name)) < 3 for name in node.inputs[1:])
            return node if matrices and node.inputs[0] in self.leading_dims else None
        if torch.Tag.pointwise in node.op.tags or node.op in _ROW_ELEMENTWISE:
            return node if self._is_aligned(node) else None
        first, *others = node.inputs
        if first not in self.leading_dims or not all(name in self.leading_dims for name in others):
            return None
        shape, (result, *_) = graph.shape(first), (t.shape for t in made)
        if node.op is aten.reshape.default and not others:
            return replace(node, args=(node.args[0], [*lead, *result[1:]]))
        if node.op is aten.expand.default and len(result) == len(shape) and not others:
            return replace(node, args=(node.args[0], [*lead, *result[1:]]), kwargs={})
        return _shift_dims(node, len(shape), len(lead) - 1)

    def _is_aligned(self, node: Node) -> bool:
        """Whether operands other than rows are broadcast along the dim of rows."""
        rank = len(self.graph.shape(node.outputs[0]))
        shapes = {name: self.graph.shape(name) for name in node.inputs}
        return all(
            len(shape) == rank
            if name in self.leading_dims
            else len(shape) < rank or (len(shape) == rank and shape[0] == 1)
            for name, shape in shapes.items()
        )

    def kept(self) -> set[str]:
        """Names of nodes connected by rows to experts, losses or restoring reshapes."""
        by_name = {node.name: node for node in self.graph.nodes}
        back = {by_name[name].inputs[0] for name in self.ends}
        open_ = [n for n in self.made if by_name[n].op in _PER_ROW_OPERANDS or not back.isdisjoint(by_name[n].outputs)]
        found = set(open_)
        while open_:
            for value in self._shared(by_name[open_.pop()]):
                producer = self.graph.producers.get(value)
                near = [*self.graph.uses[value], *([producer] if producer is not None else [])]
                new = {n.name for n in near if n.name in self.made} - found
                found |= new
                open_ += new
        return found

    def _shared(self, node: Node) -> Iterator[str]:
        return (name for name in node.values if name in self.leading_dims)

    def written(self, wanted: set[str]) -> Graph:
        """The graph with ``wanted`` nodes on unflattened rows; the others read them flattened."""
        graph, build = self.graph, NodeBuilder(self.graph)
        apart = dict[str, str]()
        """flat value → the unflattened one"""
        names = dict[str, str]()
        """value → its replacement in nodes that are not wanted"""

        def reshaped(name: str, shape: Sequence[int]) -> str:
            return build(aten.reshape.default, Ref(name), list(shape)).name

        for node in graph.nodes:
            build.place = node
            (out, *_), source = node.outputs or ("",), node.inputs[0] if node.inputs else ""
            if node.name in wanted:
                for name in node.inputs[_PER_ROW_OPERANDS[node.op]] if node.op in _PER_ROW_OPERANDS else ():
                    if name not in apart:
                        shape = (*self.leading_dims[source], *graph.shape(name)[1:])
                        apart[name] = reshaped(names.get(name, name), shape)
                build.nodes.append(_rename_reads(self.made[node.name], names | apart))
                for name in self.leading_dims.keys() & node.outputs:
                    of = graph.types[name]
                    build.types[name] = replace(of, shape=(*self.leading_dims[name], *of.shape[1:]))
                    apart[name] = name
                    if self._is_read_flat(name, wanted):
                        names[name] = reshaped(name, of.shape)
            elif node.name in self.ends and source in apart:
                names[out] = apart[source]
            else:
                build.nodes.append(_rename_reads(node, names))
                if out in self.starts:
                    shape, apart[out] = (*self.leading_dims[out], *graph.shape(out)[1:]), names.get(source, source)
                    if graph.shape(source) != shape:
                        apart[out] = reshaped(apart[out], shape)
        given = replace(graph, nodes=()).renamed(names)
        return replace(given, nodes=tuple(build.nodes), types=build.types)

    def _is_read_flat(self, name: str, wanted: set[str]) -> bool:
        readers = self.graph.uses[name]
        return name in self.graph.returned or any(n.name not in wanted and n.name not in self.ends for n in readers)


def _rename_reads(node: Node, names: Mapping[str, str]) -> Node:
    return map_refs(node, lambda ref: Ref(names.get(ref.name, ref.name)))


def _shift_dims(node: Node, rank: int, more: int) -> Node | None:
    """``node`` with its dims shifted by ``more`` leading dims; None if it acts along rows."""
    if str(node.op).removeprefix("aten.") not in _OPS_ALONG_DIMS:
        return None
    given = node.argument("dim")
    dims = given if isinstance(given, list | tuple) else [given]
    rank += node.op is aten.unsqueeze.default
    if not dims or any(not isinstance(d, int) or positive(d, rank) == 0 for d in dims):
        return None
    moved: list[Any] = [d if d < 0 else d + more for d in dims]
    if moved == list(dims):
        return node
    args, kwargs = node.with_arguments(dim=moved if isinstance(given, list | tuple) else moved[0])
    return replace(node, args=args, kwargs=kwargs)
