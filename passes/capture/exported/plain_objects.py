"""Plain objects and containers in a model's attributes, such as a configuration: what a forward reads, and keys of it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from enum import Enum
from types import SimpleNamespace
from typing import Any

from torch import nn

from autoshard.passes.capture.exported.pytrees import CONSTANT_TYPES, constant_key
from autoshard.passes.capture.exported.snapshots import (
    MAX_GUARDED_ELEMENTS,
    MODULE_REGISTRIES,
    NO_ATTRIBUTE,
    SNAPSHOT_DEPTH,
    container_length,
    items_or_attributes,
    own_attribute,
    take_snapshot,
)
from autoshard.passes.capture.observer import patched, replacement_patch

_CONTAINERS = (dict, list, tuple, set, frozenset)
_ALL_FIELDS = frozenset(("__dict__", "__getstate__", "__deepcopy__", "__reduce_ex__", "__copy__"))
"""names by which code reads every field of an object"""

FieldRead = tuple[type, str]
"""(class of a plain object, name that was read from it), or (class of a module, its attribute with a container)"""


def plain_objects(modules: Iterable[nn.Module]) -> list[Any]:
    """Objects of the user's classes that plain attributes of ``modules`` hold, outer ones first."""
    held = (x for m in modules for n, x in vars(m).items() if n not in MODULE_REGISTRIES)
    return [x for x, _ in take_snapshot(held) if _is_plain_object(x)]


def plain_containers(module: nn.Module) -> dict[str, Any]:
    """Attribute → dict or list of at most :data:`MAX_GUARDED_ELEMENTS` constants that it holds, if not empty."""
    return {
        n: x
        for n, x in vars(module).items()
        if isinstance(x, dict | list) and 0 < container_length(x) <= MAX_GUARDED_ELEMENTS and _is_constant(x)
    }


def _is_constant(x: Any, depth: int = 0) -> bool:
    """Whether ``x`` is a number, string or the like, or a container of these alone."""
    if not isinstance(x, _CONTAINERS) or depth == SNAPSHOT_DEPTH:
        return isinstance(x, CONSTANT_TYPES)
    held: Any = items_or_attributes(x)
    return all(_is_constant(y, depth + 1) for y in (held.values() if isinstance(held, dict) else held))


def _is_plain_object(x: Any) -> bool:
    kind = type(x)
    of_python = kind is SimpleNamespace or kind.__flags__ & 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class statement made it
    return bool(of_python) and kind.__module__.partition(".")[0] not in ("torch", "autoshard") and not issubclass(
        kind, (*_CONTAINERS, Enum, nn.Module)
    )  # fmt: skip


@contextlib.contextmanager
def recording_fields(model: nn.Module) -> Iterator[set[FieldRead]]:
    """Yields the fields of plain objects that code inside reads."""
    read: set[FieldRead] = set()

    def observed(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def get(self: Any, name: str) -> Any:
            read.add((type(self), name))
            found = own(self, name)
            fields: Any = own_attribute(self, "__dict__")
            kind: Any = type(self)
            if isinstance(fields, dict) and name not in fields and not _is_of_class(kind, name):
                read.add((type(self), "__dict__"))  # another name of a field
            return found

        return get

    def container_observed(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def get(self: Any, name: str) -> Any:
            found = own(self, name)
            if isinstance(found, dict | list) and name not in MODULE_REGISTRIES:
                read.add((type(self), name))
            return found

        return get

    kinds = [(type(x), observed) for x in plain_objects(model.modules())]
    kinds += [(type(m), container_observed) for m in model.modules() if plain_containers(m)]
    with contextlib.ExitStack() as stack:
        for kind, seen in dict.fromkeys(kinds):
            try:
                stack.enter_context(patched([replacement_patch(kind, "__getattribute__", seen)]))
            except (TypeError, AttributeError):  # its class cannot be changed
                held = {n for m in model.modules() if type(m) is kind for n in plain_containers(m)}
                read |= {(kind, name) for name in held or ("__dict__",)}
        yield read


class FieldGuards:
    """The fields of plain objects and the containers that programs have read, beside what they were when first seen."""

    def __init__(
        self, modules: Iterable[nn.Module], read: dict[type, set[str]] | None = None, others: Collection[int] = ()
    ) -> None:
        """``read``: what to guard; ``others``: ids of objects to leave out."""
        self.modules, self._left_out = [*modules], others
        self.read: dict[type, set[str]] = defaultdict(set) if read is None else read
        self._objects: list[tuple[Any, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
        """(object or module, field → key when first seen, → value in the last call, changed field → key)"""
        self._others: dict[int, tuple[int, Any]] = {}
        """id → (number, value) of values that are no constants: a key has their number"""
        self.note(())

    def note(self, read: Collection[FieldRead]) -> None:
        """Guard these fields, too, and objects that were set since."""
        for kind, name in read:
            self.read[kind].add(name)
        known = {*self._left_out, *(id(x) for x, *_ in self._objects)}
        new = [(x, _fields(x)) for x in plain_objects(self.modules)]
        held = [(m, plain_containers(m)) for m in self.modules if _class_of(m) in self.read]
        new += [(m, {n: y for n, y in of.items() if id(y) not in self._left_out}) for m, of in held if of]
        new = [(x, of) for x, of in new if id(x) not in known]
        self._objects += [(x, {n: self._key(y) for n, y in of.items()}, {}, {}) for x, of in new]

    def changes(self) -> list[tuple[str, str, Any]]:
        """(object, field, key) of each field read by a program that is not as it was, alike on all ranks."""
        found, keys = [], dict[int, Any]()  # modules may share a container
        for number, (x, first, seen, changed) in enumerate(self._objects):
            if not (names := self.read.get(_class_of(x))):
                continue
            fields = _fields(x)
            names = {n for n in names if n in first} if isinstance(x, nn.Module) else names
            for name in names if _ALL_FIELDS.isdisjoint(names) else {*fields, *first}:
                value = fields.get(name, NO_ATTRIBUTE)
                if seen.get(name, seen) is value and not isinstance(value, _CONTAINERS):
                    continue
                if (key := keys.get(id(value))) is None:
                    key = keys[id(value)] = None if value is NO_ATTRIBUTE else self._key(value)
                seen[name] = value
                changed.pop(name, None)
                if key != first.get(name):
                    changed[name] = key
            found += [(f"{type(x).__name__} {number}", name, changed[name]) for name in sorted(changed)]
        return found

    @property
    def changed(self) -> list[tuple[Any, dict[str, Any]]]:
        """(object, changed field → key), as of the last :meth:`changes`."""
        return [(x, changed) for x, _, _, changed in self._objects if changed]

    def _key(self, x: Any, depth: int = 0) -> Any:
        if isinstance(x, CONSTANT_TYPES):
            return constant_key(x)
        if isinstance(x, _CONTAINERS) and depth < SNAPSHOT_DEPTH:
            held: Any = items_or_attributes(x)
            items = held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ()
            keys: list[Any] = [(self._key(n, depth + 1), self._key(y, depth + 1)) for n, y in items]
            return type(x), tuple(keys or sorted(repr(self._key(y, depth + 1)) for y in held))
        return type(x), self._others.setdefault(id(x), (len(self._others), x))[0]


@functools.lru_cache(maxsize=1 << 12)
def _is_of_class(kind: Any, name: str) -> bool:
    return inspect.getattr_static(kind, name, NO_ATTRIBUTE) is not NO_ATTRIBUTE


def _class_of(x: Any) -> type:
    """Class of an object; of a part of a sharded module, the class of the user's module."""
    return vars(x).get("_original", type(x)) if isinstance(x, nn.Module) else type(x)


def _fields(x: Any) -> dict[str, Any]:
    held = vars(x) if isinstance(x, nn.Module) else items_or_attributes(x)
    return held if isinstance(held, dict) else {}
