"""One walk over nested arguments, and one map of them: whoever looks into a call does it through these."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any


class Applied:
    """Something with arguments: an operation of a graph, or a call on local tensors. Its subclasses are dataclasses."""

    __slots__ = ()

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def walk(tree: Any) -> Iterator[Any]:
    """Everything in nested tuples, lists, dicts (their values) and calls, in order; a call stands before its arguments."""
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
    """Class → how the parts of its objects are reached; None: they have none."""

    def __missing__(self, cls: type) -> type | None:
        kinds = {Applied: Applied, tuple: list, list: list, Mapping: dict}
        self[cls] = next((kind for base, kind in kinds.items() if issubclass(cls, base)), None)
        return self[cls]


_KINDS = _Kinds()


def map_tree(tree: Any, f: Callable[[Any], Any]) -> Any:
    """``tree`` with everything that :func:`walk` finds replaced by ``f`` of it; a call's arguments come first."""
    kind = _KINDS[type(tree)]
    if kind is None:
        return f(tree)
    if kind is Applied:
        call: Any = tree
        return f(replace(call, args=map_tree(tree.args, f), kwargs=map_tree(tree.kwargs, f)))
    if kind is list:
        return type(tree)([map_tree(item, f) for item in tree])
    return {k: map_tree(item, f) for k, item in tree.items()}
