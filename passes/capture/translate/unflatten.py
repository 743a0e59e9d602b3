"""Unflatten dims that views merge, so that each of them can be sharded.

A shard of a merged dim, such as batch · sequence, is contiguous in its outermost dim only. Three
rewrites: a chain of views that merges dims and splits them again becomes one permutation; a
linear layer on flattened rows becomes one on the unflattened operand; routers, experts and losses
that work row by row run on unflattened rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.canonicalize import remove_dead
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_refs
from autoshard.passes.rules.base import positive
from autoshard.runtime.operations.experts import experts_op
from autoshard.runtime.operations.losses import cross_entropy_op

DimFactors = tuple[tuple[int, ...], ...]
"""per dim the factors whose product it is, by number, outermost first; (): length 1"""
_RESHAPING_OPS = {aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.clone.default}
_PERMUTING_OPS: dict[Any, Callable[[Node, list[int]], Sequence[int]]] = {
    aten.permute.default: lambda node, dims: node.argument("dims"),
    aten.transpose.int: lambda node, dims: _swap_dims(dims, *(node.argument(name) for name in ("dim0", "dim1"))),
    aten.t.default: lambda node, dims: dims[::-1],
}
"""op → function (node, dims of the operand) → dims in the order of the result"""


def unmerge_views(graph: Graph) -> Graph:
    """``graph`` without chains of views that merge dims and split them again."""
    views, nodes, types, found = dict[str, _ViewChain](), list[Node](), dict(graph.types), False
    ops = _RESHAPING_OPS | _PERMUTING_OPS.keys()
    for node in graph.nodes:
        view = _view_chain_of(node, views, graph) if node.op in ops else None
        if view is not None:
            views[node.outputs[0]] = view
        if view is not None and view.steps > 1 and view.splits_merged_dims:
            nodes += _emit_view(node, view, types)
            found = True
        else:
            nodes.append(node)
    return remove_dead(replace(graph, nodes=tuple(nodes), types=types)) if found else graph


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

    @property
    def splits_merged_dims(self) -> bool:
        return self.mixed or not self.merged <= _adjacent_factors(self.after)

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
    types = [graph.types[name] for name in (*node.inputs, *node.outputs)]
    if any(t.unknown or 0 in t.shape for t in types):
        return None
    (operand,) = node.inputs
    view = views.get(operand)
    if view is None or view.checkpoint != node.checkpoint:
        view = _identity_view(operand, types[0], node.checkpoint)
    if node.op in _PERMUTING_OPS:
        rank = len(types[0].shape)
        return view.turned([positive(d, rank) for d in _PERMUTING_OPS[node.op](node, list(range(rank)))])
    return view.shaped(types[1].shape) or _identity_view(operand, types[0], node.checkpoint).shaped(types[1].shape)


def _identity_view(root: str, type_: TensorType, checkpoint: int) -> _ViewChain:
    lengths = [n for n in type_.shape if n != 1]
    numbers = itertools.count()
    dims = tuple(() if n == 1 else (next(numbers),) for n in type_.shape)
    return _ViewChain(root, checkpoint, tuple(lengths), dims, dims)


def _swap_dims(dims: list[int], a: int, b: int) -> list[int]:
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def _adjacent_factors(dims: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    return {pair for dim in dims for pair in itertools.pairwise(dim)}


def _emit_view(node: Node, view: _ViewChain, types: dict[str, TensorType]) -> Iterator[Node]:
    """``view`` as reshape (split), permutation, reshape (merge), without needless steps."""
    together = _adjacent_factors(view.before) & _adjacent_factors(view.after)
    later = {b for _, b in together}
    follows = dict(together)

    def length(factor: int) -> int:
        n = view.lengths[factor]
        return n * length(follows[factor]) if factor in follows else n

    order = [i for dim in view.before for i in dim if i not in later]
    turned = [order.index(i) for dim in view.after for i in dim if i not in later]
    of, result, ref = types[view.root], types[node.outputs[0]].shape, Ref(view.root)
    split = tuple(map(length, order))
    steps: list[tuple[Any, list[int], tuple[int, ...]]] = []
    if turned != sorted(turned):
        steps = [(aten.reshape.default, list(split), split)] if of.shape != split else []
        steps.append((aten.permute.default, turned, tuple(split[i] for i in turned)))
    if not steps or steps[-1][2] != result:
        steps.append((aten.reshape.default, list(result), result))
    for number, (op, given, shape) in enumerate(steps, 1):
        name = node.outputs[0] if number == len(steps) else f"{node.outputs[0]}_apart{number}"
        types[name] = replace(types.get(name, of), shape=shape)
        yield replace(node, name=name, op=op, args=(ref, given), kwargs={}, outputs=(name,), output_slots=(0,))
        ref = Ref(name)


def unflatten_linears(graph: Graph) -> Graph:
    """``graph`` with [b, s, k] → [b · s, k] @ [k, n] → [b, s, n], as in GPT-2, as one linear.

    A dim b · s could be sharded along s only if b is 1.
    """
    nodes, types, renamed = list[Node](), dict(graph.types), dict[str, str]()
    for node in graph.nodes:
        if node.op is aten.reshape.default and node.inputs[0] in renamed:
            renamed[node.outputs[0]] = node.inputs[0]
            continue
        if (whole := _unflattened_linear(node, graph)) is not None:
            weight, product, shape = whole
            (of,) = (types[name] for name in weight.inputs)
            types[weight.outputs[0]] = TensorType(of.shape[::-1], of.dtype, of.grad)
            types[node.outputs[0]] = replace(types[node.outputs[0]], shape=shape)
            renamed[node.outputs[0]] = node.outputs[0]
            nodes += [weight, product]
            continue
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes), types=types).renamed(renamed) if renamed else graph


def _unflattened_linear(node: Node, graph: Graph) -> tuple[Node, Node, tuple[int, ...]] | None:
    """(transpose of the weight, linear of the unflattened operand, its shape), or None."""
    if node.op is not aten.addmm.default or node.kwargs or not isinstance(node.args[1], Ref):
        return None
    bias, flat, weight = node.args
    producer, (out,) = graph.producers.get(flat.name), node.outputs
    if producer is None or producer.op is not aten.reshape.default or len(graph.shape(bias)) != 1:
        return None
    operand = producer.args[0]
    before, (rows, features) = graph.shape(operand), graph.shape(flat)
    shape = (*before[:-1], graph.shape(out)[-1])
    uses = graph.uses[out]
    if before[-1] != features or len(before) < 3 or rows != math.prod(before[:-1]) or out in graph.returned or not uses:
        return None
    if any(u.op is not aten.reshape.default or graph.shape(u.outputs[0]) != shape for u in uses):
        return None
    turned = f"{node.name}_weight"
    made = replace(node, name=turned, op=aten.t.default, args=(weight,), outputs=(turned,), output_slots=(0,))
    return made, replace(node, op=aten.linear.default, args=(operand, Ref(turned), bias)), shape


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
    return remove_dead(rows.written(wanted)) if wanted else graph


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
        before, after = (self.graph.types[name] for name in (*node.inputs, *node.outputs))
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
        types = [graph.types[name] for name in (*node.inputs, *node.outputs)]
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
        return (name for name in (*node.inputs, *node.outputs) if name in self.leading_dims)

    def written(self, wanted: set[str]) -> Graph:
        """The graph with ``wanted`` nodes on unflattened rows; the others read them flattened."""
        graph, nodes, types = self.graph, list[Node](), dict(self.graph.types)
        apart = dict[str, str]()
        """flat value → the unflattened one"""
        names = dict[str, str]()
        """value → its replacement in nodes that are not wanted"""
        for node in graph.nodes:
            (out, *_), source = node.outputs or ("",), node.inputs[0] if node.inputs else ""
            if node.name in wanted:
                for name in node.inputs[_PER_ROW_OPERANDS[node.op]] if node.op in _PER_ROW_OPERANDS else ():
                    if name not in apart:
                        of, apart[name] = graph.types[name], f"{name}_rows"
                        types[apart[name]] = replace(of, shape=(*self.leading_dims[source], *of.shape[1:]))
                        nodes.append(_reshape_node(node, names.get(name, name), apart[name], types))
                nodes.append(_rename_reads(self.made[node.name], names | apart))
                for name in self.leading_dims.keys() & node.outputs:
                    of = graph.types[name]
                    types[name] = replace(of, shape=(*self.leading_dims[name], *of.shape[1:]))
                    apart[name] = name
                    if self._is_read_flat(name, wanted):
                        names[name], types[f"{name}_flat"] = f"{name}_flat", of
                        nodes.append(_reshape_node(node, name, f"{name}_flat", types))
            elif node.name in self.ends and source in apart:
                names[out] = apart[source]
            else:
                nodes.append(_rename_reads(node, names))
                if out in self.starts:
                    shape = (*self.leading_dims[out], *types[out].shape[1:])
                    apart[out] = names.get(source, source)
                    if types[source].shape != shape:
                        types[f"{out}_rows"] = replace(types[out], shape=shape)
                        nodes.append(_reshape_node(node, apart[out], f"{out}_rows", types))
                        apart[out] = f"{out}_rows"
        given = replace(graph, nodes=()).renamed(names)
        return replace(given, nodes=tuple(nodes), types=types)

    def _is_read_flat(self, name: str, wanted: set[str]) -> bool:
        readers = self.graph.uses[name]
        return name in self.graph.returned or any(n.name not in wanted and n.name not in self.ends for n in readers)


def _rename_reads(node: Node, names: Mapping[str, str]) -> Node:
    found: Node = map_refs(node, lambda ref: Ref(names.get(ref.name, ref.name)))
    return found


def _reshape_node(node: Node, name: str, made: str, types: Mapping[str, TensorType]) -> Node:
    """A reshape of ``name`` to ``made``, with the metadata of ``node``."""
    args = (Ref(name), list(types[made].shape))
    return replace(node, name=made, op=aten.reshape.default, args=args, kwargs={}, outputs=(made,), output_slots=(0,))


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
