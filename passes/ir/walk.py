"""Walk and map nested arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any


class Applied:
    """Base of dataclasses with arguments: operations of a graph, calls on local tensors."""

    __slots__ = ()

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def walk(tree: Any) -> Iterator[Any]:
    """The leaves of nested tuples, lists and dicts, in order; a call, then its arguments."""
    found: list[Any] = []
    _visit(tree, found)
    return iter(found)


def _visit(tree: Any, found: list[Any]) -> None:
    kind = _KINDS[type(tree)]
    if kind is None:
        found.append(tree)
    elif kind is Applied:
        found.append(tree)
        _visit(tree.args, found)
        _visit(tree.kwargs, found)
    else:
        for item in tree if kind is list else tree.values():
            _visit(item, found)


class _Kinds(dict[type, type | None]):
    """Class → how to reach the items of its objects; None: a leaf."""

    def __missing__(self, cls: type) -> type | None:
        kinds = {Applied: Applied, tuple: list, list: list, Mapping: dict}
        self[cls] = next((kind for base, kind in kinds.items() if issubclass(cls, base)), None)
        return self[cls]


_KINDS = _Kinds()


def map_tree(tree: Any, f: Callable[[Any], Any]) -> Any:
    """``tree`` with ``f`` applied to all that :func:`walk` finds, to arguments before calls."""
    kind = _KINDS[type(tree)]
    if kind is None:
        return f(tree)
    if kind is Applied:
        call: Any = tree
        return f(replace(call, args=map_tree(tree.args, f), kwargs=map_tree(tree.kwargs, f)))
    if kind is list:
        return type(tree)([map_tree(item, f) for item in tree])
    return {k: map_tree(item, f) for k, item in tree.items()}
