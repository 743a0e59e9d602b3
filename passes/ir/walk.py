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
    if isinstance(tree, Applied):
        yield tree
        yield from walk(tree.args)
        yield from walk(tree.kwargs)
    elif isinstance(tree, tuple | list):
        for item in tree:
            yield from walk(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from walk(item)
    else:
        yield tree


def map_tree(tree: Any, f: Callable[[Any], Any]) -> Any:
    """``tree`` with everything that :func:`walk` finds replaced by ``f`` of it; a call's arguments come first."""
    if isinstance(tree, Applied):
        call: Any = tree
        return f(replace(call, args=map_tree(tree.args, f), kwargs=map_tree(tree.kwargs, f)))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tree(item, f) for item in tree)
    if isinstance(tree, Mapping):
        return {k: map_tree(item, f) for k, item in tree.items()}
    return f(tree)
