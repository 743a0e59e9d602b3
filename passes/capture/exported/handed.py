"""Objects among the arguments that a forward changes, such as a cache of transformers that it fills and gives back.

A call is made of tensors: the trace has objects of its own, and so has every result. What is handed in and comes out as one
object in eager is one object to the caller of a program, too. What a forward puts into a dict that does not come out are
further outputs, which are put there; any other object that is changed and does not come out would be lost.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree

from autoshard.errors import CaptureError, RuntimeMismatchError
from autoshard.passes.capture.exported.trees import attributes_of

log = logging.getLogger("autoshard")
_NOTHING = object()

Path = tuple[Any, ...]
"""keys of dicts, numbers of items and names of attributes, from the outside in"""
Returned = tuple[tuple[Path, Path], ...]
"""where an object is in ``(args, kwargs)``, and where in the output: every place"""
RETURNED = "autoshard_returned"
"""under which name an exported program knows them"""
Changed = tuple[tuple[Path, tuple[Any, ...], Any], ...]
"""where a dict is in ``(args, kwargs)``, which keys it loses, and the structure of a dict of what it gains"""
CHANGED = "autoshard_changed"
"""under which name an exported program knows where such dicts are, and which keys they lose"""
_RESULTS = (torch.Tensor, bool, int, float, str, type(None), torch.SymInt)
"""what a program can give back"""


class Handed:
    """The arguments of a traced call, before it: :meth:`returned` after it."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        found = _containers((tuple(args), kwargs), ())
        self.before = {
            path: (x, dict(_inside(x))) for path, x in found if len(path) > 1
        }  # (1,): kwargs, made by Python
        self.tensors = {id(t): t for _, inside in self.before.values() for x in inside.values() for t in _tensors(x)}
        self.changed: dict[Path, tuple[tuple[Any, ...], dict[Any, Any]]] = {}
        """where a dict is that does not come out again: the keys that it loses, and what it gains"""

    def returned(self, output: Any) -> Returned:
        """The outermost objects that come out again; of other dicts notes what has :attr:`changed`.

        Raises :class:`CaptureError` for other objects that got new tensors, and warns where they are changed without new
        ones, as by ``pop()``.
        """
        places: dict[int, Path] = {}
        for path, (value, _) in self.before.items():
            places.setdefault(id(value), path)
        found = [(places[id(x)], path) for path, x in _containers(output, (), places) if id(x) in places]
        for path, (value, had) in self.before.items():
            if any(path[: len(outer)] == outer for outer, _ in found):
                continue
            now = dict(_inside(value))
            changed = [key for key in {**had, **now} if now.get(key, _NOTHING) is not had.get(key, _NOTHING)]
            made = [key for key in changed if any(id(t) not in self.tensors for t in _tensors(now.get(key)))]
            gained = {key: now[key] for key in changed if key in now}
            if changed and isinstance(value, dict) and all(isinstance(x, _RESULTS) for x in pytree.tree_leaves(gained)):
                self.changed[path] = tuple(key for key in changed if key not in now), gained
            elif changed:
                _lost(value, (made or changed)[0], path, bool(made))
        return tuple(found)


def of_dicts(spec: Any, where: Sequence[tuple[Path, tuple[Any, ...]]]) -> tuple[Any, Changed]:
    """The structure of a model's own output, and of what dicts gain, in that of both, ``spec``."""
    if not where:
        return spec, ()
    own, gained = spec.children()
    return own, tuple((*place, of) for place, of in zip(where, gained.children(), strict=True))


def give_back(returned: Returned, changed: Changed, arguments: Any, output: Any, gained: Iterable[Any]) -> Any:
    """``output`` with the caller's own objects in it, which take what those of the program hold.

    ``gained``: the leaves of what the caller's dicts gain.
    """
    if not (returned or changed):
        return output
    rest = iter(gained)
    taken = [pytree.tree_unflatten(list(itertools.islice(rest, spec.num_leaves)), spec) for _, _, spec in changed]
    dicts = [_at(arguments, path) for path, _, _ in changed]  # before any of them is changed
    if dicts:
        _check_apart(dicts, arguments)
    own: dict[int, Any] = {}
    for given, made in returned:
        into, new = _at(arguments, given), _at(output, made)
        filled = any(x is into for x in own.values())  # it comes out in several places
        own[id(new)] = into
        if filled:
            continue
        if isinstance(into, dict):
            into.clear()
            _put(into, new)
        elif isinstance(into, list):
            into[:] = new
        else:
            for name, value in attributes_of(new).items():
                object.__setattr__(into, name, value)
    for mapping, (_, lost, _), new in zip(dicts, changed, taken, strict=True):
        _put(mapping, new)
        for key in lost:
            del mapping[key]
    return pytree.tree_map(lambda x: own.get(id(x), x), output, is_leaf=lambda x: id(x) in own) if own else output


def _check_apart(dicts: Sequence[Any], arguments: Any) -> None:
    """Refuse one of ``dicts``, which the forward changes, that is an argument in two places: a program has two of it."""
    places = Counter(id(x) for _, x in _containers(arguments, ()))
    if twice := [x for x in dicts if places[id(x)] > 1]:
        raise RuntimeMismatchError(
            f"the forward changes a {type(twice[0]).__name__} that is among its arguments twice: one place would not see what "
            "is done to the other. Hand it in once, or a copy."
        )


def _put(mapping: dict[Any, Any], items: Mapping[Any, Any]) -> None:
    """One after another: transformers' outputs refuse ``update``."""
    for key in items:
        mapping[key] = items[key]


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    """What a container holds, by key; nothing of anything else."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list | tuple):
        yield from enumerate(value)
    elif _is_object(value):
        yield from attributes_of(value).items()


def _is_object(value: Any) -> bool:
    return type(value) in pytree.SUPPORTED_NODES and not isinstance(value, list | tuple | dict)


def _containers(value: Any, path: Path, known: Collection[int] = ()) -> Iterator[tuple[Path, Any]]:
    """Every list, dict and object in ``value``, and where it is; not what is inside of those that are ``known`` by id."""
    if isinstance(value, list | dict) or _is_object(value):
        yield path, value
        if id(value) in known:
            return
    for key, item in _inside(value):
        yield from _containers(item, (*path, key), known)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """A tensor, or those in a container."""
    if isinstance(value, torch.Tensor):
        yield value
    for _, item in _inside(value):
        yield from _tensors(item)


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key] if isinstance(value, dict | list | tuple) else getattr(value, key)
    return value


def _lost(value: Any, key: Any, path: Path, made: bool) -> None:
    """``made``: new tensors are lost, not only what became of the caller's own."""
    kind, name = type(value).__name__, ".".join(map(str, path[1:]))
    name = repr(name) if path[0] else f"number {name}"
    does = "puts a new tensor into" if made else "changes"
    said = f"the forward {does} {key!r} of its argument {name} (a {kind}), which it does not return"
    if not made:
        log.warning("%s: the caller's stays as it was. Return it where it is read after the call.", said)
    else:
        raise CaptureError(f"{said}: the caller would not see it. Return the {kind}.")
