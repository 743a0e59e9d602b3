"""Mutated arguments: containers that a forward changes, such as a KV cache that it fills. If eager
returns an argument object, so does the program, updated. Entries written to a dict that is not
returned become extra outputs, stored after the call. Other mutations are refused if they add
tensors, else warned about."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from autoshard.errors import CaptureError, RuntimeMismatchError
from autoshard.passes.capture.exported.pytrees import object_attributes

log = logging.getLogger("autoshard")
_NO_ITEM = object()

ContainerPath = tuple[Any, ...]
"""dict keys, item indices and attribute names, outermost first"""
ReturnedObjects = tuple[tuple[ContainerPath, ContainerPath], ...]
"""(path of an object in ``(args, kwargs)``, its path in the output), for every place"""
RETURNED_KEY = "autoshard_returned"
"""key of :data:`ReturnedObjects` in an exported program's meta"""
ChangedDicts = tuple[tuple[ContainerPath, tuple[Any, ...], Any], ...]
"""(path of a dict in ``(args, kwargs)``, removed keys, structure of the dict of added entries)"""
CHANGED_KEY = "autoshard_changed"
"""key in an exported program's meta: paths and removed keys of mutated dicts"""
_RESULT_TYPES = (Tensor, bool, int, float, str, type(None), torch.SymInt)
"""leaf types that a program can return"""


class MutatedArguments:
    """Argument containers before a traced call, compared with their state after it."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        found = _containers_with_paths((tuple(args), kwargs), ())
        # (1,): kwargs, made by Python
        self.before = {path: (x, dict(_keyed_items(x))) for path, x in found if len(path) > 1}
        self.tensors = {
            id(t): t for _, inside in self.before.values() for x in inside.values() for t in _tensors_inside(x)
        }
        self.changed: dict[ContainerPath, tuple[tuple[Any, ...], dict[Any, Any]]] = {}
        """path of a mutated dict that is not returned → (removed keys, added entries)"""

    def returned(self, output: Any) -> ReturnedObjects:
        """The outermost argument objects that ``output`` contains; records :attr:`changed` dicts.
        Other objects: :class:`CaptureError` if one got new tensors, a warning if it changed
        otherwise."""
        places: dict[int, ContainerPath] = {}
        for path, (value, _) in self.before.items():
            places.setdefault(id(value), path)
        found = [(places[id(x)], path) for path, x in _containers_with_paths(output, (), places) if id(x) in places]
        for path, (value, had) in self.before.items():
            if any(path[: len(outer)] == outer for outer, _ in found):
                continue
            now = dict(_keyed_items(value))
            changed = [key for key in {**had, **now} if now.get(key, _NO_ITEM) is not had.get(key, _NO_ITEM)]
            made = [key for key in changed if any(id(t) not in self.tensors for t in _tensors_inside(now.get(key)))]
            gained = {key: now[key] for key in changed if key in now}
            if (
                changed
                and isinstance(value, dict)
                and all(isinstance(x, _RESULT_TYPES) for x in pytree.tree_leaves(gained))
            ):
                self.changed[path] = tuple(key for key in changed if key not in now), gained
            elif changed:
                _report_lost_change(value, (made or changed)[0], path, bool(made))
        return tuple(found)


def split_output_spec(spec: Any, where: Sequence[tuple[ContainerPath, tuple[Any, ...]]]) -> tuple[Any, ChangedDicts]:
    """Split ``spec`` into the structures of the model's output and of entries added to dicts."""
    if not where:
        return spec, ()
    own, gained = spec.children()
    return own, tuple((*place, of) for place, of in zip(where, gained.children(), strict=True))


def update_caller_objects(
    returned: ReturnedObjects, changed: ChangedDicts, arguments: Any, output: Any, gained: Iterable[Any]
) -> Any:
    """``output`` with the caller's own objects, updated; ``gained``: leaves to add to its dicts."""
    if not (returned or changed):
        return output
    rest = iter(gained)
    taken = [pytree.tree_unflatten(list(itertools.islice(rest, spec.num_leaves)), spec) for _, _, spec in changed]
    dicts = [_value_at(arguments, path) for path, _, _ in changed]  # looked up before any changes
    if dicts:
        _check_passed_once(dicts, arguments)
    own: dict[int, Any] = {}
    for given, made in returned:
        into, new = _value_at(arguments, given), _value_at(output, made)
        filled = any(x is into for x in own.values())  # it is in several places of the output
        own[id(new)] = into
        if filled:
            continue
        if isinstance(into, dict):
            into.clear()
            _set_items(into, new)
        elif isinstance(into, list):
            into[:] = new
        else:
            for name, value in object_attributes(new).items():
                object.__setattr__(into, name, value)
    for mapping, (_, lost, _), new in zip(dicts, changed, taken, strict=True):
        _set_items(mapping, new)
        for key in lost:
            del mapping[key]
    return pytree.tree_map(lambda x: own.get(id(x), x), output, is_leaf=lambda x: id(x) in own) if own else output


def _check_passed_once(dicts: Sequence[Any], arguments: Any) -> None:
    """Refuse a mutated dict that is passed twice: a program has a copy per place."""
    places = Counter(id(x) for _, x in _containers_with_paths(arguments, ()))
    if twice := [x for x in dicts if places[id(x)] > 1]:
        raise RuntimeMismatchError(
            f"the forward changes a {type(twice[0]).__name__} that is passed twice, so the "
            "second place would miss the change. Pass it once, or pass a copy."
        )


def _set_items(mapping: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    """``mapping.update(items)``, which transformers' outputs refuse."""
    for key in items:
        mapping[key] = items[key]


def _keyed_items(value: Any) -> Iterator[tuple[Any, Any]]:
    """(key, item) pairs of a container; none for anything else."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif _is_pytree_object(value):
        yield from object_attributes(value).items()


def _is_pytree_object(value: Any) -> bool:
    return type(value) in pytree.SUPPORTED_NODES and not isinstance(value, list | tuple | dict)


def _containers_with_paths(
    value: Any, path: ContainerPath, known: Collection[int] = ()
) -> Iterator[tuple[ContainerPath, Any]]:
    """(path, object) of every list, dict and object in ``value``; ``known`` ids are not entered."""
    if isinstance(value, list | dict) or _is_pytree_object(value):
        yield path, value
        if id(value) in known:
            return
    for key, item in _keyed_items(value):
        yield from _containers_with_paths(item, (*path, key), known)


def _tensors_inside(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    for _, item in _keyed_items(value):
        yield from _tensors_inside(item)


def _value_at(value: Any, path: ContainerPath) -> Any:
    for key in path:
        value = value[key] if isinstance(value, dict | list | tuple) else getattr(value, key)
    return value


def _report_lost_change(value: Any, key: Any, path: ContainerPath, made: bool) -> None:
    """Report a lost mutation: an error if new tensors are lost (``made``), else a warning."""
    kind, name = type(value).__name__, ".".join(map(str, path[1:]))
    name = repr(name) if path[0] else f"number {name}"
    does = "puts a new tensor into" if made else "changes"
    said = f"the forward {does} {key!r} of its argument {name} (a {kind}), which it does not return"
    if not made:
        log.warning("%s: the caller's object stays unchanged. Return it if the caller reads it after the call.", said)
    else:
        raise CaptureError(f"{said}: the caller would not see it. Return the {kind}.")
