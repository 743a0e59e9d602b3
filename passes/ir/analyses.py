"""Cached analyses of a graph or a node: computed once, whichever passes ask."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, wraps
from operator import is_
from typing import Any, Concatenate, ParamSpec, TypeVar

from autoshard.passes.ir.graph import Graph, Node, Ref, TensorType, map_refs

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
Entry = TypeVar("Entry", covariant=True)


def cached_per_graph(
    find: Callable[Concatenate[Graph, Arguments], Answer],
) -> Callable[Concatenate[Graph, Arguments], Answer]:
    """``find``, cached on the graph by its positional arguments, which must be hashable; not with
    dynamic lengths, whose conditions each caller must record."""

    @wraps(find)
    def found(graph: Graph, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
        if graph.symbols.read or kwargs:
            return find(graph, *args, **kwargs)
        key = (find, *args)
        if key not in graph.known:
            graph.known[key] = find(graph, *args, **kwargs)
        return graph.known[key]

    return found


def cached_per_node(
    find: Callable[[Node, Mapping[str, TensorType]], Answer],
) -> Callable[[Node, Mapping[str, TensorType]], Answer]:
    """``find``, cached on the node for the last types of its operands and results."""

    @wraps(find)
    def found(node: Node, types: Mapping[str, TensorType], /) -> Answer:
        of = [types[name] for name in node.values]
        before, answer = node.known.get(find, ((), None))
        if len(before) != len(of) or not all(map(is_, before, of)):
            answer = find(node, types)
            if all(type(n) is int for t in of for n in t.shape):
                node.known[find] = of, answer
        return answer

    return found


class LazySequence(Sequence[Entry]):
    """Entries that ``find`` gives when they are first read, such as runner-ups of a search."""

    def __init__(self, find: Callable[[], Sequence[Entry]]) -> None:
        self._find = find

    @cached_property
    def found(self) -> tuple[Entry, ...]:
        return tuple(self._find())

    @property
    def is_found(self) -> bool:
        """Whether they were read."""
        return "found" in vars(self)

    def __getitem__(self, index: Any) -> Any:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def __eq__(self, other: object) -> bool:
        return self.found == (other.found if isinstance(other, LazySequence) else other)

    def __hash__(self) -> int:
        return hash(self.found)

    def __repr__(self) -> str:
        return repr(self.found)

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (self.found,)


class _OperandSlot(int):
    """Placeholder of a value in a :func:`node_signature`: its number among the operands."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


@cached_per_node
def node_signature(node: Node, types: Mapping[str, TensorType]) -> Any:
    """A key that is equal for nodes with the same strategies at the same cost."""
    numbers: dict[str, _OperandSlot] = {}

    def place(ref: Ref) -> _OperandSlot:
        return numbers.setdefault(ref.name, _OperandSlot(len(numbers)))

    given = [place(x) if type(x) is Ref else map_refs(x, place) for x in node.args]
    return (
        node.op,
        repr((given, map_refs(dict(node.kwargs), place) if node.kwargs else {})),
        *(types[name] for name in (*numbers, *node.outputs)),
    )


def interned_types(types: Mapping[str, TensorType]) -> dict[str, TensorType]:
    """``types`` with equal types interned, so that comparisons succeed by identity."""
    found: dict[TensorType, TensorType] = {}
    plain = {n: t.number is None and all(type(length) is int for length in t.shape) for n, t in types.items()}
    return {name: found.setdefault(t, t) if plain[name] else t for name, t in types.items()}


def values_made_of(graph: Graph, values: Iterable[str]) -> frozenset[str]:
    """``values``, and what is computed from them alone."""
    found = set(values)
    for node in graph.nodes:
        if node.inputs and found.issuperset(node.inputs):
            found.update(node.outputs)
    return frozenset(found)


def values_reached(graph: Graph, values: Iterable[str]) -> frozenset[str]:
    """``values``, and what depends on any of them."""
    found = set(values)
    for node in graph.nodes:
        if not found.isdisjoint(node.inputs):
            found.update(node.outputs)
    return frozenset(found)


@cached_per_graph
def outputs_reached(graph: Graph) -> dict[str, int]:
    """Value → bit mask of the outputs whose gradient reaches it. A value with ``type.grad`` may get
    none (its readers detach it, or the loss does not depend on it); its gradient is None
    then."""
    found: dict[str, int] = dict.fromkeys(graph.types, 0)
    for i, out in enumerate(graph.outputs):
        if isinstance(out, Ref) and graph.types[out.name].grad:
            found[out.name] |= 1 << i
    for node in reversed(graph.nodes):
        for name in node.inputs:
            found[name] |= functools.reduce(operator.or_, (found[o] for o in node.outputs if graph.types[o].grad), 0)
    return found
