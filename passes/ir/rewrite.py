"""Rewriting a graph: nodes built in the place of others, their types inferred on meta tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import sympy  # type: ignore[import-untyped,unused-ignore]
import torch
import torch.utils._pytree as pytree

from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_tree, refs, walk
from autoshard.passes.ir.patterns import op_name
from autoshard.passes.ir.sizes import Size
from autoshard.torch_private.ops import OpOverload

Types = Mapping[str, TensorType]


def run_on_meta(op: Any, args: Any, kwargs: Any, types: Types, grads: bool = False, factor: int = 1) -> Any:
    """The op's result on meta tensors of these types, which require gradients where ``grads``.
    ``factor``: by which dynamic lengths differ from those of the example."""

    def tensor(item: Any) -> Any:
        if isinstance(item, torch.device):
            return torch.device("meta")
        if not isinstance(item, Ref):
            return _scaled(item, factor)
        of = types[item.name]
        if of.number is not None:
            return of.number
        shape = [_scaled(n, factor) for n in of.shape]
        return torch.empty(shape, dtype=of.dtype, device="meta", requires_grad=grads and of.grad)

    args, kwargs = map_tree(args, tensor), map_tree(dict(kwargs), tensor)
    if any(a.name == "device" for a in op._schema.arguments):
        kwargs["device"] = torch.device("meta")
    return op(*args, **kwargs)


def result_type(op: OpOverload, args: Any, kwargs: Any, types: Types) -> TensorType:
    """The type of the op's first result. Dynamic lengths are those of an operand or an argument."""
    of, tree = [types[ref.name] for ref in refs((args, kwargs))], (args, dict(kwargs))
    result, *_ = pytree.tree_leaves(run_on_meta(op, args, kwargs, types))
    sizes = [n for n in (*walk(tree), *(n for t in of for n in t.shape)) if isinstance(n, Size)]
    shape = tuple(result.shape)
    if sizes:  # run once more: what changed is one of the dynamic lengths
        other, *_ = pytree.tree_leaves(run_on_meta(op, args, kwargs, types, factor=2))
        shape = tuple(_length(n, m, sizes) for n, m in zip(shape, other.shape, strict=True))
    grad = (result.is_floating_point() or result.is_complex()) and any(t.grad for t in of)
    return TensorType(shape, result.dtype, grad)


def _scaled(n: Any, factor: int) -> Any:
    """A length where those of the inputs are ``factor`` times the example's."""
    if not isinstance(n, Size) or factor == 1:
        return int(n) if isinstance(n, Size) else n
    return int(n.expr.xreplace({s: sympy.Integer(x * factor) for s, x in n.example.items()}))


def _length(n: int, scaled: int, sizes: list[Size]) -> int:
    """The length that is ``n`` in the example, and ``scaled`` with other lengths."""
    return n if n == scaled else next(s for s in sizes if int(s) == n and _scaled(s, 2) == scaled)


class NodeBuilder:
    """Builds nodes in the place of a node, whose module, source and checkpoint they share."""

    def __init__(self, graph: Graph) -> None:
        self.graph, self.types, self.nodes = graph, dict(graph.types), list[Node]()
        self.place: Node = None  # type: ignore[assignment]
        """the node that is replaced"""
        self.renamed: dict[str, str] = {}
        """value that is read no longer → the value that is read instead"""
        self.dropped: set[str] = set()
        """names of nodes that are left out, such as random ones that another draws for"""

    def __call__(self, op: OpOverload, *args: Any, name: str = "", **kwargs: Any) -> Ref:
        """The result of a new node, called ``name``, or after ``place`` and the op."""
        stem, number = name or f"{self.place.name}_{op_name(op)}", 1
        name = stem
        while name in self.types:
            number += 1
            name = f"{stem}_{number}"
        self.types[name] = result_type(op, args, kwargs, self.types)
        made = replace(self.place, name=name, op=op, args=args, kwargs=kwargs, outputs=(name,), output_slots=(0,))
        self.nodes.append(made)
        return Ref(name)

    def finish(self, op: OpOverload, *args: Any, **kwargs: Any) -> None:
        """Add the node that gives the results of ``place``."""
        self.nodes.append(replace(self.place, op=op, args=args, kwargs=kwargs))

    def shape(self, value: Ref) -> tuple[int, ...]:
        return self.types[value.name].shape


def rewrite(graph: Graph, form: Callable[[NodeBuilder, Node], bool | None]) -> Graph:
    """``graph`` with each node for which ``form`` returns True replaced by what it built."""
    build = NodeBuilder(graph)
    for node in graph.nodes:
        build.place = node
        if not form(build, node):
            build.nodes.append(node)
    nodes = tuple(node for node in build.nodes if node.name not in build.dropped)
    if nodes == graph.nodes:
        return graph
    defined = {i.name for i in graph.inputs}.union(*(node.outputs for node in nodes))
    made = replace(graph, nodes=nodes, types={name: t for name, t in build.types.items() if name in defined})
    return made.renamed(build.renamed) if build.renamed else made
