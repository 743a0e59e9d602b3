"""Chains of views that merge dims and split them again become one permutation.

nn.MultiheadAttention reshapes [t, b, h · d] to [t, b · h, d], transposes, and reshapes to
[b, h, t, d]. Of b · h only b could be sharded; of the permuted [t, b, h, d] every dim can.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.capture.translate.canonical import remove_dead
from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType
from autoshard.passes.rules.exact import SINGLE
from autoshard.passes.rules.factors import positive

Dims = tuple[tuple[int, ...], ...]
"""per dim the factors whose product it is, by number, outermost first; (): length 1"""
_RESHAPES = {aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim}
_COPIES = {aten.clone.default}
"""they set the memory order, on which sums in float32 islands depend: see ``exact.py``"""
_TURNS: dict[Any, Callable[[Node, list[int]], Sequence[int]]] = {
    aten.permute.default: lambda node, dims: node.argument("dims"),
    aten.transpose.int: lambda node, dims: _swapped(dims, *(node.argument(name) for name in ("dim0", "dim1"))),
    aten.t.default: lambda node, dims: dims[::-1],
}
"""op → function (node, dims of the operand) → dims in the order of the result"""


def apart(graph: Graph) -> Graph:
    """``graph`` without chains of views that merge dims and split them again."""
    views, nodes, types, found = dict[str, _View](), list[Node](), dict(graph.types), False
    ops = _RESHAPES | _TURNS.keys() | (set() if _has_islands(graph) else _COPIES)
    for node in graph.nodes:
        view = _viewed(node, views, graph) if node.op in ops else None
        if view is not None:
            views[node.outputs[0]] = view
        if view is not None and view.steps > 1 and view.undoes:
            nodes += _written(node, view, types)
            found = True
        else:
            nodes.append(node)
    return remove_dead(replace(graph, nodes=tuple(nodes), types=types)) if found else graph


def _has_islands(graph: Graph) -> bool:
    """Whether some op computes float32 from float64 values."""
    return graph.is_double and any(
        graph.types[n.outputs[0]].dtype in SINGLE and any(graph.types[x].dtype == torch.float64 for x in n.inputs)
        for n in graph.nodes
        if n.outputs
    )


@dataclass(frozen=True)
class _View:
    """A chain of views of ``root``, as factors of dims before and after."""

    root: str
    checkpoint: int
    lengths: tuple[int, ...]
    """factor number → length"""
    before: Dims
    """dims of the root"""
    after: Dims
    merged: frozenset[tuple[int, int]] = frozenset()
    """adjacent factors that an intermediate view merged, of different dims of the root"""
    mixed: bool = False
    """whether an intermediate view merged a dim with a part of another"""
    steps: int = 0

    @property
    def undoes(self) -> bool:
        return self.mixed or not self.merged <= _neighbours(self.after)

    def turned(self, order: Sequence[int]) -> _View:
        return replace(self, after=tuple(self.after[d] for d in order), steps=self.steps + 1)

    def shaped(self, shape: Sequence[int]) -> _View | None:
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
        new = {(a, b) for a, b in _neighbours(dims) if of_root[a] != of_root[b]}
        # A dim is mixed if only part of a source dim joins it: the rest is elsewhere.
        of_source = {i: d for d, dim in enumerate(found.after) for i in dim}
        mixed = any(
            len({of_source[i] for i in dim}) > 1 and not all({*found.after[of_source[i]]} <= {*dim} for i in dim)
            for dim in dims
        )
        return replace(
            found, after=tuple(dims), merged=found.merged | new, mixed=found.mixed or mixed, steps=found.steps + 1
        )

    def split(self, factor: int, outer: int) -> _View:
        """With ``factor`` split in two: the outer has this length, the inner the next number."""
        inner, lengths = len(self.lengths), list(self.lengths)
        lengths[factor : factor + 1] = [outer]
        lengths.append(self.lengths[factor] // outer)

        def both(dims: Dims) -> Dims:
            return tuple(tuple(i for f in dim for i in ((f, inner) if f == factor else (f,))) for dim in dims)

        merged = frozenset((inner if a == factor else a, b) for a, b in self.merged)
        return replace(self, lengths=tuple(lengths), before=both(self.before), after=both(self.after), merged=merged)


def _viewed(node: Node, views: dict[str, _View], graph: Graph) -> _View | None:
    """The chain of views that ends with ``node``; None where ``node`` cannot be part of one."""
    if len(node.inputs) != 1 or (node.op in _COPIES and not graph.returned.isdisjoint(node.outputs)):
        return None
    types = [graph.types[name] for name in (*node.inputs, *node.outputs)]
    if any(t.unknown or t.permuted or 0 in t.shape or (graph.is_double and t.dtype in SINGLE) for t in types):
        return None
    (operand,) = node.inputs
    view = views.get(operand)
    if view is None or view.checkpoint != node.checkpoint:
        view = _start(operand, types[0], node.checkpoint)
    if node.op in _TURNS:
        rank = len(types[0].shape)
        return view.turned([positive(d, rank) for d in _TURNS[node.op](node, list(range(rank)))])
    return view.shaped(types[1].shape) or _start(operand, types[0], node.checkpoint).shaped(types[1].shape)


def _start(root: str, type_: TensorType, checkpoint: int) -> _View:
    lengths = [n for n in type_.shape if n != 1]
    numbers = itertools.count()
    dims = tuple(() if n == 1 else (next(numbers),) for n in type_.shape)
    return _View(root, checkpoint, tuple(lengths), dims, dims)


def _swapped(dims: list[int], a: int, b: int) -> list[int]:
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def _neighbours(dims: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    return {pair for dim in dims for pair in itertools.pairwise(dim)}


def _written(node: Node, view: _View, types: dict[str, TensorType]) -> Iterator[Node]:
    """``view`` as reshape (split), permutation, reshape (merge), without needless steps."""
    together = _neighbours(view.before) & _neighbours(view.after)
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
