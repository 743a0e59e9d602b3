"""Dynamic lengths from an example of length 1, such as a KV cache after its first token.

A trace fixes a length of 1, since it broadcasts. A longer example's graph may serve it, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy  # type: ignore[import-untyped,unused-ignore]
import torch
import torch.utils._pytree as pytree

from autoshard.passes.capture.exported.arguments import Example
from autoshard.passes.ir.graph import Graph, Node, Ref
from autoshard.passes.ir.sizes import Size, size, symbol
from autoshard.passes.ir.walk import map_tree


def longer(graph: Graph, example: Example) -> Example | None:
    """The example with inputs extended along a dim of 1 that an output extends, or None."""
    leaves, spec = pytree.tree_flatten(example)
    results = [graph.types[out.name] for out in graph.outputs if isinstance(out, Ref)]
    grown = {(tuple(t.shape[:d]), tuple(t.shape[d + 1 :]), t.dtype) for t in results for d in range(len(t.shape))
             if int(t.shape[d]) > 1}  # fmt: skip
    lengths = {int(n) for x in leaves if isinstance(x, torch.Tensor) for n in x.shape}
    other = next(n for n in itertools.count(2) if n not in lengths)
    found = False
    for number, (name, leaf) in enumerate(zip(graph.flat_inputs, leaves, strict=True)):
        if name is None:
            continue
        shape, dtype = graph.types[name].shape, graph.types[name].dtype
        for dim, n in enumerate(shape):
            if n == 1 and (shape[:dim], shape[dim + 1 :], dtype) in grown:
                leaves[number] = leaf.new_zeros((*leaf.shape[:dim], other, *leaf.shape[dim + 1 :]))
                found = True
    return pytree.tree_unflatten(leaves, spec) if found else None


def from_one(one: Graph, more: Graph) -> Graph | None:
    """``more``, of a :func:`longer` example, if at length 1 it equals ``one``; else None."""
    ones = {x.name for x in more.symbols.read} - {x.name for x in one.symbols.read}
    least = {f"{name} >= 2" for name in ones}
    conditions = tuple(c for c in more.symbols.conditions if c not in least)
    at_one = {symbol(name): sympy.Integer(1) for name in ones}
    if not ones or not {*one.symbols.conditions} <= {*conditions} or not _is(one, more, at_one):
        return None
    return replace(more, symbols=replace(more.symbols, conditions=conditions))


def _is(one: Graph, more: Graph, values: Mapping[sympy.Symbol, sympy.Integer]) -> bool:
    """Whether ``more`` with symbols set to ``values`` equals ``one``, up to names of results."""
    theirs, ours = ([out for node in g.nodes for out in node.outputs] for g in (more, one))
    names = {i.name: i.name for i in more.inputs} | dict(zip(theirs, ours, strict=False))

    def at(item: Any) -> Any:
        if isinstance(item, Ref):
            return Ref(names[item.name])
        return size(item.expr.xreplace(values), item.example) if isinstance(item, Size) else item

    def node(x: Node, name: str) -> Node:
        outputs = tuple(names[out] for out in x.outputs)
        return replace(x, name=name, args=map_tree(x.args, at), kwargs=map_tree(x.kwargs, at), outputs=outputs)

    return (
        (len(one.nodes), len(ours), one.inputs) == (len(more.nodes), len(theirs), more.inputs)
        and one.nodes == tuple(node(b, a.name) for a, b in zip(one.nodes, more.nodes, strict=True))
        and all(
            one.types[n] == replace(more.types[m], shape=map_tree(more.types[m].shape, at)) for m, n in names.items()
        )
        and (one.outputs, one.out_spec, one.changed) == (map_tree(more.outputs, at), more.out_spec, more.changed)
        and one.mutations == {fqn: names[n] for fqn, n in more.mutations.items()}
        and all(torch.equal(x, more.constants[n]) for n, x in one.constants.items())
    )
