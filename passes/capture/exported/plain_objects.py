"""Attributes that programs follow: those set later, configurations and containers. What a forward reads, and keys of it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from types import SimpleNamespace
from typing import Any

from torch import nn

from autoshard.passes.capture.exported.pytrees import CONSTANT_TYPES, constant_key
from autoshard.passes.capture.exported.snapshots import (
    HOOK_FLAGS,
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

SET_LATER = "_set_later"
"""key in a submodule's dict: attribute that a forward may read and that was set after compilation → (number of times,
(value before,), or () if there was none)"""
_NOTHING = frozenset[str]()

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
        if isinstance(x, dict | list)
        and n not in (*MODULE_REGISTRIES, *HOOK_FLAGS)
        and 0 < container_length(x) <= MAX_GUARDED_ELEMENTS
        and _is_constant(x)
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
    """Yields the fields of plain objects, and the containers in attributes of modules, that code inside reads."""
    read: set[FieldRead] = set()

    def observed(own: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(own)
        def get(self: Any, name: str) -> Any:
            kind: Any = type(self)
            if issubclass(kind, nn.Module):  # isinstance() would read an attribute
                found = own(self, name)
                if isinstance(found, dict | list) and name not in MODULE_REGISTRIES:
                    read.add((kind, name))
                return found
            read.add((kind, name))
            found, fields = own(self, name), own_attribute(self, "__dict__")
            if isinstance(fields, dict) and name not in fields and not _is_of_class(kind, name):
                read.add((kind, "__dict__"))  # another name of a field
            return found

        return get

    held = {m: plain_containers(m) for m in model.modules()}
    kinds = [*map(type, plain_objects(held)), *(type(m) for m, of in held.items() if of)]
    with contextlib.ExitStack() as stack:
        for kind in dict.fromkeys(kinds):
            try:
                stack.enter_context(patched([replacement_patch(kind, "__getattribute__", observed)]))
            except (TypeError, AttributeError):  # its class cannot be changed
                names = {n for m, of in held.items() if type(m) is kind for n in of}
                read |= {(kind, name) for name in names or ("__dict__",)}
        yield read


class AttributeGuards:
    """What programs follow, beside what it was when first seen: fields of plain objects and containers that they have
    read, and attributes of modules that users have set since (:data:`SET_LATER`)."""

    def __init__(
        self, modules: Mapping[str, nn.Module], read: dict[type, set[str]] | None = None, others: Collection[int] = ()
    ) -> None:
        """``modules``: by path; ``read``: what to guard; ``others``: ids of objects to leave out."""
        self.modules, self._left_out = {**modules}, others
        self.read: dict[type, set[str]] = defaultdict(set) if read is None else read
        self._guarded: list[tuple[Any, str, dict[str, Any], dict[str, tuple[Any, bool]], dict[str, Any]]] = []
        """(object or module, its name, attribute → key when first seen, → (value in the last call,
        whether it may change in place), changed one → key)"""
        self._others: list[Any] = []
        """values that are no constants: a key has their number"""
        self._numbers: dict[int, int] = {}
        """id → number, of those seen since the last deep copy"""
        self._set_later = [vars(m)[SET_LATER] for m in self.modules.values() if SET_LATER in vars(m)]
        self.note(())

    def note(self, read: Collection[FieldRead]) -> None:
        """Guard these fields, too, and objects that were set since."""
        for kind, name in read:
            self.read[kind].add(name)
        known = {*self._left_out, *(id(x) for x, *_ in self._guarded)}
        new = [(x, "", _fields(x)) for x in plain_objects(self.modules.values())]
        held = [(m, path, plain_containers(m)) for path, m in self.modules.items()]  # what is read is known later
        new += [(m, path, {n: y for n, y in of.items() if id(y) not in self._left_out}) for m, path, of in held if of]
        for x, path, of in new:
            if id(x) not in known:
                self._guard(x, path, {n: self._key(y) for n, y in of.items()})
                known.add(id(x))  # a module may have two paths

    def _guard(self, x: Any, path: str, first: dict[str, Any]) -> dict[str, Any]:
        named = path if isinstance(x, nn.Module) else f"{type(x).__name__} {len(self._guarded)}"
        self._guarded.append((x, named, first, {}, {}))
        return first

    def _note_set_later(self) -> None:
        firsts = {id(x): first for x, _, first, *_ in self._guarded}
        for path, m in self.modules.items():
            for name, (_, before) in vars(m)[SET_LATER].items():
                if id(m) not in firsts:
                    firsts[id(m)] = self._guard(m, path, {})
                if before and name not in firsts[id(m)]:
                    firsts[id(m)][name] = self._key(*before)

    def changes(self) -> list[tuple[str, str, Any]]:
        """(name of the object, attribute, key) of what programs follow and is not as it was, alike on all ranks."""
        if any(self._set_later):
            self._note_set_later()
        found, keys = [], dict[int, Any]()  # modules may share a container
        for x, named, first, seen, changed in self._guarded:
            names, fields, of_module = self.read.get(_class_of(x), _NOTHING), _fields(x), isinstance(x, nn.Module)
            if of_module:
                names = names & first.keys() | fields.get(SET_LATER, {}).keys()
            elif not _ALL_FIELDS.isdisjoint(names):
                names = fields.keys() | first.keys()
            for name in names:
                value = fields.get(name, NO_ATTRIBUTE)
                before, may_change = seen.get(name, (seen, False))
                if before is value and not may_change:
                    continue
                if (key := keys.get(id(value))) is None:
                    key = keys[id(value)] = None if value is NO_ATTRIBUTE else self._key(value)
                may_change = isinstance(value, _CONTAINERS)
                if may_change and of_module and before is not value:  # a long one is not read in every call
                    may_change = container_length(value) <= MAX_GUARDED_ELEMENTS
                seen[name] = value, may_change
                changed.pop(name, None)
                if key != first.get(name):
                    changed[name] = key
            found += [(named, name, key) for name, key in changed.items()]
        return sorted(found, key=lambda change: change[:2])

    @property
    def changed(self) -> list[tuple[Any, dict[str, Any]]]:
        """(object, changed field → key), as of the last :meth:`changes`."""
        return [(x, changed) for x, *_, changed in self._guarded if changed]

    def _key(self, x: Any, depth: int = 0) -> Any:
        if isinstance(x, CONSTANT_TYPES):
            return constant_key(x)
        if isinstance(x, Enum):
            return type(x), x.name
        if isinstance(x, _CONTAINERS) and depth < SNAPSHOT_DEPTH:
            held: Any = items_or_attributes(x)
            items = held.items() if isinstance(held, dict) else enumerate(held) if isinstance(held, list) else ()
            keys: list[Any] = [(self._key(n, depth + 1), self._key(y, depth + 1)) for n, y in items]
            return type(x), tuple(keys or sorted(repr(self._key(y, depth + 1)) for y in held))
        number = self._numbers.get(id(x))
        if number is None or self._others[number] is not x:  # ids of a deep copy differ
            number = next((n for n, y in enumerate(self._others) if y is x), len(self._others))
            if number == len(self._others):
                self._others.append(x)
            self._numbers[id(x)] = number
        return type(x), number


@functools.lru_cache(maxsize=1 << 12)
def _is_of_class(kind: Any, name: str) -> bool:
    return inspect.getattr_static(kind, name, NO_ATTRIBUTE) is not NO_ATTRIBUTE


def _class_of(x: Any) -> type:
    """Class of an object; of a part of a sharded module, the class of the user's module."""
    return vars(x).get("_original", type(x)) if isinstance(x, nn.Module) else type(x)


def _fields(x: Any) -> dict[str, Any]:
    held = vars(x) if isinstance(x, nn.Module) else items_or_attributes(x)
    return held if isinstance(held, dict) else {}
