"""Pytree registration of user classes among arguments and outputs: dataclasses, KV caches, …"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import types
from collections.abc import Collection, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.snapshots import (
    NO_ATTRIBUTE,
    items_or_attributes,
    own_attribute,
    reachable_objects,
)
from autoshard.torch_private.dispatch import DispatchModeKey, active_dispatch_mode, without_dispatch_modes

_OPAQUE_TYPES = (nn.Module, type, types.FunctionType, types.MethodType, types.ModuleType)
_SYMBOLIC_NUMBERS = torch.SymInt, torch.SymFloat, torch.SymBool
_ATOMIC_TYPES = frozenset(
    (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, *_SYMBOLIC_NUMBERS)
)
"""leaf types without tensors; a symbolic length refers to its trace, but counts as a leaf"""


def flatten_registered(tree: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """Leaves and structure of ``tree``, after registering the classes of objects in it."""
    while True:
        leaves, spec = pytree.tree_flatten(tree)
        if not any(_is_unregistered(x) for x in leaves):
            return leaves, spec
        register_types(leaves)


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """:func:`flatten_registered` of ``(args, kwargs)``, cached without containers."""
    leaves = [*args, *kwargs.values()]
    if LEAF_ARGUMENT_TYPES.issuperset(map(type, leaves)) and not torch.compiler.is_compiling():  # it skips caches
        return leaves, _flat_call_spec(len(args), tuple(kwargs))
    return flatten_registered((args, kwargs))


def in_signature_order(forward: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments in the order of ``forward``'s signature, so that equal calls flatten
    equally; entries of ``**kwargs`` come last, in the given order, which a forward may read."""
    if len(kwargs) < 2:
        return kwargs
    names = _parameter_names(getattr(forward, "__func__", forward))
    return {**{n: kwargs[n] for n in names if n in kwargs}, **kwargs}


@functools.lru_cache(maxsize=1 << 6)
def _parameter_names(function: Any) -> tuple[str, ...]:
    """Parameter names of a function, without ``*args`` and ``**kwargs``."""
    with contextlib.suppress(TypeError, ValueError):
        return tuple(n for n, p in inspect.signature(function).parameters.items() if p.kind not in _VARIADIC)
    return ()


_VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
CONSTANT_TYPES = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, type(None))
"""of values that :func:`constant_key` compares"""
LEAF_ARGUMENT_TYPES = frozenset((Tensor, bool, int, float, str, type(None)))


def constant_key(x: Any) -> tuple[type, Any]:
    """Comparison key of a constant: in Python True == 1, 0.0 == -0.0, and NaN != NaN."""
    if isinstance(x, float | complex):
        return type(x), (float if isinstance(x, float) else complex).__repr__(x)
    if isinstance(x, dict):
        return type(x), {n: constant_key(item) for n, item in x.items()}
    if isinstance(x, list | tuple):
        return type(x), tuple(map(constant_key, list.__iter__(x) if isinstance(x, list) else tuple.__iter__(x)))
    return type(x), x


@functools.lru_cache(maxsize=1 << 6)
def _flat_call_spec(count: int, names: tuple[str, ...]) -> pytree.TreeSpec:
    """The structure of a call with ``count`` positional arguments and keywords ``names``."""
    return pytree.tree_structure(((None,) * count, dict.fromkeys(names)))


def _is_unregistered(leaf: Any) -> bool:
    """Whether the class of a leaf must be registered. Refuses objects that cannot be inspected."""
    try:
        if isinstance(leaf, Tensor) or type(leaf) in _ATOMIC_TYPES:
            return False
        return _is_kv_cache(type(leaf)) or _holds_tensor(leaf, set())
    except Exception as error:  # a user's class may raise anything, even for __class__
        raise CaptureError(
            f"an object of class {type(leaf).__name__} among the arguments or outputs cannot be inspected: reading "
            f"its type or contents raises {type(error).__name__}. Pass tensors, or an object without that error."
        ) from error


def register_types(tree: Any) -> None:
    """Register with pytree the class of every object in ``tree`` that holds tensors, and empty KV
    caches of transformers. Attributes with tensors become children, others constants of the
    structure."""
    for leaf in pytree.tree_leaves(tree):
        if _is_unregistered(leaf):
            if type(leaf) not in pytree.SUPPORTED_NODES:
                _register_class(type(leaf))
            register_types(list(object_attributes(leaf).values()))


def check_output_objects(output: Any, given: Collection[int]) -> None:
    """Refuse modules, and functions that hold tensors or modules, in an output: they are the
    trace's. ``given``: ids of objects among the arguments, which may be returned."""
    inside = [x for x in reachable_objects([output], given) if id(x) not in given]
    for x in inside:
        held = reachable_objects([x], given) if isinstance(x, (*_OPAQUE_TYPES, functools.partial)) else ()
        if any(isinstance(y, Tensor | nn.Module) for y in held):
            raise CaptureError(
                f"the forward returns an object that holds a {type(x).__name__} with tensors or modules of the model, "
                "which a program cannot return. Return tensors"
            )


def object_attributes(value: Any) -> dict[str, Any]:
    """Attributes of an object by name, including dataclass fields in ``__slots__``."""
    named = {n: x for n in _dataclass_field_names(type(value)) if (x := own_attribute(value, n)) is not NO_ATTRIBUTE}
    attributes = own_attribute(value, "__dict__")
    return {**named, **attributes} if isinstance(attributes, dict) else named


def _dataclass_field_names(kind: type) -> tuple[str, ...]:
    known = next((vars(c)[_DATACLASS_FIELDS] for c in kind.__mro__ if _DATACLASS_FIELDS in vars(c)), None)
    return tuple(f.name for f in dataclasses.fields(kind)) if isinstance(known, dict) else ()


_DATACLASS_FIELDS = "__dataclass_fields__"


def _is_kv_cache(kind: type) -> bool:
    """Whether ``kind`` is a KV cache class of transformers, or a layer of one."""
    found = _KV_CACHE_CLASSES.get(kind)
    if found is None:
        found = _KV_CACHE_CLASSES[kind] = any(c.__module__ == "transformers.cache_utils" for c in kind.__mro__)
    return found


_KV_CACHE_CLASSES: WeakKeyDictionary[type, bool] = WeakKeyDictionary()
"""class → :func:`_is_kv_cache`: every decoding step asks for its cache's classes"""


def _is_child(value: Any, of_cache: bool) -> bool:
    """Whether an attribute becomes a child. ``of_cache``: empty containers do, too."""
    if isinstance(value, Tensor):
        return True
    if type(value) in _ATOMIC_TYPES:
        return False
    if of_cache and (isinstance(value, list | dict) or _is_kv_cache(type(value))):
        return True
    return _holds_tensor(value, set())


def _holds_tensor(value: Any, seen: set[int]) -> bool:
    if isinstance(value, Tensor):
        return True
    if type(value) in _ATOMIC_TYPES or id(value) in seen or isinstance(value, _OPAQUE_TYPES):
        return False
    seen.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, dict | list | tuple | set):
        held = items_or_attributes(value) or ()
        inside = held.values() if isinstance(held, dict) else held
    else:
        inside = object_attributes(value).values()
    return any(_holds_tensor(item, seen) for item in inside)


@dataclasses.dataclass(frozen=True, eq=False)
class _ObjectSpec:
    """Pytree context of an object: names of its children, and the other attributes (constants)."""

    names: tuple[str, ...]
    others: dict[str, Any]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _ObjectSpec):
            return False
        return self.names == other.names and constant_key(self.others) == constant_key(other.others)

    def __hash__(self) -> int:
        return hash(self.names)


_COUNTER_ATTRIBUTES = frozenset({"cumulative_length", "cumulative_length_int", "batch_size"})
"""Python counters of KV caches: as constants they would give every length its own program"""
_LENGTH_DIM = 4
"""the dim that holds a counter: no other cache tensor has it, so its length equals no other"""


def _count_as_length(count: Any, device: Any) -> Any:
    """A counter as the length of an empty tensor, since lengths may be dynamic."""
    if isinstance(count, Tensor) or not isinstance(count, int | torch.SymInt):
        return count
    if not isinstance(count, int) or any(active_dispatch_mode(mode) is not None for mode in _TRACING_MODES):
        return _tensor_of_length.__wrapped__(count, device)
    with without_dispatch_modes():
        return _tensor_of_length(count, device)


_TRACING_MODES = DispatchModeKey.FUNCTIONAL, DispatchModeKey.PROXY


@functools.lru_cache(maxsize=1 << 6)  # cached: export knows its arguments by identity
def _tensor_of_length(count: Any, device: Any) -> Tensor:
    return torch.empty((*[0] * _LENGTH_DIM, count), dtype=torch.bool, device=device)


def _count_from_length(child: Any) -> Any:
    return child.shape[_LENGTH_DIM] if isinstance(child, Tensor) and child.ndim > _LENGTH_DIM else child


def _register_class(cls: type) -> None:
    of_cache = _is_kv_cache(cls)

    def split(value: Any) -> tuple[list[Any], _ObjectSpec]:
        attributes = object_attributes(value)
        if of_cache and (counted := attributes.keys() & _COUNTER_ATTRIBUTES):
            attributes |= {n: _count_as_length(attributes[n], attributes.get("device")) for n in counted}
        children: dict[str, Any] = {}
        others: dict[str, Any] = {}
        for name, attribute in attributes.items():
            (children if _is_child(attribute, of_cache) else others)[name] = attribute
        return [*children.values()], _ObjectSpec(tuple(children), others)

    def split_with_keys(value: Any) -> tuple[list[tuple[Any, Any]], _ObjectSpec]:
        children, context = split(value)
        return [(pytree.GetAttrKey(n), c) for n, c in zip(context.names, children, strict=True)], context

    def join(children: Iterable[Any], context: _ObjectSpec) -> Any:
        value: Any = object.__new__(cls)
        for name, child in (*context.others.items(), *zip(context.names, children, strict=True)):
            object.__setattr__(value, name, child if name not in _COUNTER_ATTRIBUTES else _count_from_length(child))
        return value

    pytree.register_pytree_node(cls, split, join, flatten_with_keys_fn=split_with_keys)
