"""Chains of views that merge dims and split them again, as a permutation of dims that stay apart.

nn.MultiheadAttention sees [t, b, h · d] as [t, b · h, d], turns that, and sees it as [b, h, t, d]: in between b alone could be
cut. Every dim of [t, b, h, d], permuted, can be.
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
"""per dim the numbers of the factors that it is the product of, outermost first; (): its length is 1"""
_RESHAPES = {aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim}
_COPIES = {aten.clone.default}
"""in a float64 model they order dims in memory, as float32 islands may feel: see ``exact.py``"""
_TURNS: dict[Any, Callable[[Node, list[int]], Sequence[int]]] = {
    aten.permute.default: lambda node, dims: node.argument("dims"),
    aten.transpose.int: lambda node, dims: _swapped(dims, *(node.argument(name) for name in ("dim0", "dim1"))),
    aten.t.default: lambda node, dims: dims[::-1],
}
"""op → (node, dims of its operand) → these in the order of the result"""


def apart(graph: Graph) -> Graph:
    """``graph`` in which no chain of views merges dims that it splits again."""
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
    """Whether float32 is computed of float64 values."""
    return graph.is_double and any(
        graph.types[n.outputs[0]].dtype in SINGLE and any(graph.types[x].dtype == torch.float64 for x in n.inputs)
        for n in graph.nodes
        if n.outputs
    )


@dataclass(frozen=True)
class _View:
    """What a chain of views makes of ``root``: its dims as products of factors, and these in another order."""

    root: str
    checkpoint: int
    lengths: tuple[int, ...]
    """of the factors by number"""
    before: Dims
    """of the root"""
    after: Dims
    merged: frozenset[tuple[int, int]] = frozenset()
    """factors of different dims of the root that stood beside each other in one dim on the way"""
    mixed: bool = False
    """whether a dim and a part of another became one on the way"""
    steps: int = 0

    @property
    def undoes(self) -> bool:
        return self.mixed or not self.merged <= _neighbours(self.after)

    def turned(self, order: Sequence[int]) -> _View:
        return replace(self, after=tuple(self.after[d] for d in order), steps=self.steps + 1)

    def shaped(self, shape: Sequence[int]) -> _View | None:
        """The same elements in another shape; None where a dim is no product of factors, or parts of them."""
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
        # A dim that others join in part: what is left of it stands elsewhere.
        of_source = {i: d for d, dim in enumerate(found.after) for i in dim}
        mixed = any(
            len({of_source[i] for i in dim}) > 1 and not all({*found.after[of_source[i]]} <= {*dim} for i in dim)
            for dim in dims
        )
        return replace(
            found, after=tuple(dims), merged=found.merged | new, mixed=found.mixed or mixed, steps=found.steps + 1
        )

    def split(self, factor: int, outer: int) -> _View:
        """With ``factor`` as two, the outer one of this length; the other gets the next number."""
        inner, lengths = len(self.lengths), list(self.lengths)
        lengths[factor : factor + 1] = [outer]
        lengths.append(self.lengths[factor] // outer)

        def both(dims: Dims) -> Dims:
            return tuple(tuple(i for f in dim for i in ((f, inner) if f == factor else (f,))) for dim in dims)

        merged = frozenset((inner if a == factor else a, b) for a, b in self.merged)
        return replace(self, lengths=tuple(lengths), before=both(self.before), after=both(self.after), merged=merged)


def _viewed(node: Node, views: dict[str, _View], graph: Graph) -> _View | None:
    """What ``node`` makes of the root of its operand."""
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
    """``view`` in the place of ``node``: a split of the root's dims, a permutation, and a merge, as far as it has these."""
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
