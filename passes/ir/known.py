"""Caches of analyses of a graph, or of a node with its types."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from operator import is_
from typing import Any, Concatenate, ParamSpec, TypeVar

from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_refs

P = ParamSpec("P")
T = TypeVar("T")


def known_of_graph(find: Callable[Concatenate[Graph, P], T]) -> Callable[Concatenate[Graph, P], T]:
    """``find``, cached on the graph by its positional arguments, which must be hashable.

    With dynamic lengths nothing is cached: each caller must record the conditions that arise.
    """

    @wraps(find)
    def found(graph: Graph, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if graph.symbols.read or kwargs:
            return find(graph, *args, **kwargs)
        key = (find, *args)
        if key not in graph.known:
            graph.known[key] = find(graph, *args, **kwargs)
        answer: T = graph.known[key]
        return answer

    return found


def known_of_node(find: Callable[[Node, Mapping[str, TensorType]], T]) -> Callable[[Node, Mapping[str, TensorType]], T]:
    """``find``, cached on the node for the last types of its operands and results."""

    @wraps(find)
    def found(node: Node, types: Mapping[str, TensorType], /) -> T:
        of = [types[name] for name in (*node.inputs, *node.outputs)]
        before, answer = node.known.get(find, ((), None))
        if len(before) != len(of) or not all(map(is_, before, of)):
            answer = find(node, types)
            if all(type(n) is int for t in of for n in t.shape):
                node.known[find] = of, answer
        known: T = answer
        return known

    return found


class _Place(int):
    """Placeholder of a value in a :func:`signature`: its number among the operands."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


@known_of_node
def signature(node: Node, types: Mapping[str, TensorType]) -> Any:
    """A key that is equal for nodes with the same strategies at the same cost."""
    numbers: dict[str, _Place] = {}

    def place(ref: Ref) -> _Place:
        return numbers.setdefault(ref.name, _Place(len(numbers)))

    given = [place(x) if type(x) is Ref else map_refs(x, place) for x in node.args]
    return (
        node.op,
        repr((given, map_refs(dict(node.kwargs), place) if node.kwargs else {})),
        *(types[name] for name in (*numbers, *node.outputs)),
    )


def one_of_each(types: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """``types`` with equal types interned, so that comparisons succeed by identity."""
    found: dict[TensorType, TensorType] = {}
    plain = {n: t.number is None and all(type(length) is int for length in t.shape) for n, t in types.items()}
    return {name: found.setdefault(t, t) if plain[name] else t for name, t in types.items()}
