"""Outputs and arguments of any class: registered with pytree, so that their tensors are found and put back."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

_OPAQUE = (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)


def register_types(tree: Any) -> None:
    """Register the class of every object in ``tree`` that holds tensors and that pytree does not know.

    Dataclasses, caches and the like: their attributes with tensors become children, the others are kept as they are.
    So does the class of a transformers cache that is still empty: the forward fills it, and gives it back.
    """
    for leaf in pytree.tree_leaves(tree):
        if not isinstance(leaf, torch.Tensor) and (_is_cache(leaf) or _holds_tensor(leaf, set())):
            if type(leaf) not in pytree.SUPPORTED_NODES:
                _register(type(leaf))
            register_types(list(_attributes(leaf).values()))


def flattened(tree: Any) -> tuple[list[Any], Any]:
    """The leaves of ``tree`` and its structure: in every call as they are after a capture, with all types registered."""
    leaves, spec = pytree.tree_flatten(tree)
    if all(isinstance(x, torch.Tensor) or type(x) in _PLAIN for x in leaves):
        return leaves, spec
    register_types(tree)
    return pytree.tree_flatten(tree)


_PLAIN = (int, float, bool, str, type(None))


def _attributes(value: Any) -> dict[str, Any]:
    names = [f.name for f in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    return {**{n: getattr(value, n) for n in names}, **getattr(value, "__dict__", {})}


def _is_cache(value: Any) -> bool:
    """Whether it is a cache of transformers, or one of its layers."""
    return any(c.__module__ == "transformers.cache_utils" for c in type(value).__mro__)


def _is_child(value: Any, of_cache: bool) -> bool:
    """Whether an attribute becomes a child. ``of_cache``: whether the forward may fill what is empty."""
    if of_cache and (isinstance(value, list | dict) or _is_cache(value)):
        return True
    return _holds_tensor(value, set())


def _holds_tensor(value: Any, seen: set[int]) -> bool:
    if isinstance(value, torch.Tensor):
        return True
    if id(value) in seen or isinstance(value, _OPAQUE):
        return False
    seen.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, dict):
        inside = value.values()
    elif isinstance(value, list | tuple | set):
        inside = value
    elif hasattr(value, "__dict__") or dataclasses.is_dataclass(value):
        inside = _attributes(value).values()
    return any(_holds_tensor(item, seen) for item in inside)


@dataclasses.dataclass(frozen=True, eq=True)
class _Context:
    """Which attributes are children, and all other attributes."""

    names: tuple[str, ...]
    others: dict[str, Any] = dataclasses.field(hash=False)


def _register(cls: type) -> None:
    def split(value: Any) -> tuple[list[Any], _Context]:
        attributes = _attributes(value)
        names = tuple(n for n, v in attributes.items() if _is_child(v, _is_cache(value)))
        others = {n: v for n, v in attributes.items() if n not in names}
        return [attributes[n] for n in names], _Context(names, others)

    def split_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], _Context]:
        children, context = split(value)
        return [(pytree.GetAttrKey(n), c) for n, c in zip(context.names, children, strict=True)], context

    def join(children: Iterable[Any], context: _Context) -> Any:
        value: Any = object.__new__(cls)
        for name, child in (*context.others.items(), *zip(context.names, children, strict=True)):
            object.__setattr__(value, name, child)
        return value

    pytree.register_pytree_node(cls, split, join, flatten_with_keys_fn=split_with_keys)
