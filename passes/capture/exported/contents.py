"""Snapshots of attributes: the contents of nested containers and objects, recorded and restored."""

from __future__ import annotations

import warnings
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from types import CellType, FunctionType, GeneratorType, MemberDescriptorType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from autoshard.frames import is_ours

DEPTH = 4
"""levels of nested containers and objects in a snapshot"""

Contents = list[tuple[Any, Any]]
"""(container or object, its contents at the time, see :func:`held_in`), outer ones first"""

NOTHING = object()
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_NO_STATE = ("builtins", "functools", "torch")
"""packages whose callables are functions without state"""
_REGISTERED = ("_parameters", "_buffers", "_modules")
"""dicts of a module in which a trace replaces the tensors itself"""
OF_PYTHON = ("builtins", "itertools", "_collections")
"""modules of Python's own functions, generators and iterators"""


def held_in(x: Any) -> dict[Any, Any] | list[Any] | set[Any] | None:
    """A copy of a container's items or an object's attributes; None for anything else.

    Methods of user classes are bypassed: ``__iter__`` or ``__len__`` may raise, or return tensors.
    """
    if type(x) is dict:  # most common
        return x.copy()
    if type(x) in _PLAIN or isinstance(x, torch.Tensor | nn.Module | type | ModuleType):
        return None
    if isinstance(x, dict):
        return dict(OrderedDict.items(x) if isinstance(x, OrderedDict) else dict.items(x))
    kinds: Any = (list, tuple, deque, set, frozenset)
    if (kind := next((kind for kind in kinds if isinstance(x, kind)), None)) is not None:
        return (set if kind in kinds[3:] else list)(kind.__iter__(x))
    if callable(x) and type(x).__module__.partition(".")[0] in _NO_STATE:
        return None
    attributes, slots = own(x, "__dict__"), _slots(type(x))
    if not isinstance(attributes, dict):
        if not slots:
            return None
        attributes = {}
    return {**{name: y for name in slots if (y := own(x, name)) is not NOTHING}, **attributes}


def size(x: Any) -> int:
    """Number of items of a container, bypassing a user's ``__len__``."""
    kind: Any = next(kind for kind in (list, dict, set, deque) if isinstance(x, kind))
    return int(kind.__len__(x))


def word(x: Any) -> tuple[type, str] | None:
    """(class, repr) of a number or string, for comparison; None for anything else."""
    kind: Any = next((kind for kind in type(x).__mro__ if kind in _PLAIN), None)
    return None if kind is None else (type(x), kind.__repr__(x))


def own(x: Any, name: str) -> Any:
    """An attribute of the object itself, without ``__getattr__``, in which proxies may raise."""
    try:
        return object.__getattribute__(x, name)
    except Exception:
        return NOTHING


def _slots(kind: type) -> tuple[str, ...]:
    """Names of attributes in ``__slots__`` of Python classes."""
    found = _SLOTS.get(kind)
    if found is None:
        slotted = [c for c in kind.__mro__ if "__slots__" in vars(c)]
        names = (name for c in slotted for name, x in vars(c).items() if isinstance(x, MemberDescriptorType))
        found = _SLOTS[kind] = tuple(names)
    return found


_SLOTS: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()
"""class → :func:`_slots`"""


def advanced_to(x: Any) -> Any:
    """Position of an iterator or generator, or state of a function; None for anything else."""
    if isinstance(x, FunctionType) and not is_ours(x.__code__.co_filename):
        return [*map(_in_cell, x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, vars(x)]
    if isinstance(x, GeneratorType):
        frame = x.gi_frame
        return [None] if frame is None else [frame.f_lasti, x.gi_yieldfrom, *frame.f_locals.values()]
    if not isinstance(x, Iterator) or type(x).__module__ not in OF_PYTHON:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, since Python 3.12
        try:
            return list(x.__reduce__())[1:]
        except TypeError:  # cannot be pickled: its position is unknown
            return None


def _in_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def taken(roots: Iterable[Any]) -> Contents:
    """Snapshot of ``roots`` and everything reachable within :data:`DEPTH` levels."""
    found: dict[int, tuple[Any, Any]] = {}
    level = list(roots)
    for _ in range(DEPTH):
        new = [(x, held) for x in level if id(x) not in found and (held := held_in(x)) is not None]
        found.update((id(x), (x, held)) for x, held in new)
        level = [y for _, held in new for y in (held.values() if isinstance(held, dict) else held)]
    return list(found.values())


def put(contents: Contents) -> None:
    """Restore a snapshot in place; unchanged holders are not touched."""
    for holder, held in contents:
        if isinstance(holder, tuple | frozenset) or (type(holder) is dict and not holder and not held):
            continue
        now = held_in(holder)
        if type(now) is type(held) and [*map(id, _flat(now))] == [*map(id, _flat(held))]:
            continue
        if isinstance(holder, list):
            list.__setitem__(holder, slice(None), held)
        elif isinstance(holder, deque):
            deque.clear(holder)
            deque.extend(holder, held)
        elif isinstance(holder, set):
            set.clear(holder)
            set.update(holder, held)
        else:
            slots = () if isinstance(holder, dict) else _slots(type(holder))
            for name in slots:
                if name in held:
                    object.__setattr__(holder, name, held[name])
                elif own(holder, name) is not NOTHING:
                    object.__delattr__(holder, name)
            attributes: Any = holder if isinstance(holder, dict) else own(holder, "__dict__")
            if not isinstance(attributes, dict):
                continue
            kind: Any = OrderedDict if isinstance(attributes, OrderedDict) else dict
            kind.clear(attributes)
            kind.update(attributes, {name: x for name, x in held.items() if name not in slots})


def stand_in_for(model: nn.Module, by: Mapping[int, Any]) -> None:
    """Replace tensors and modules in attributes of the model's modules, also ids used as keys.

    ``by``: id → replacement. So a forward finds entries that it looks up by identity.
    """

    def now(x: Any) -> Any:
        if type(x) in (tuple, frozenset):
            made = [now(y) for y in x]
            return x if all(a is b for a, b in zip(made, x, strict=True)) else type(x)(made)
        return by.get(id(x), x)

    def key(x: Any) -> Any:
        return id(by[x]) if type(x) is int and x in by else now(x)

    each = [(vars(m), n, x) for m in model.modules() for n, x in vars(m).items() if n not in _REGISTERED]
    for attributes, name, x in each:
        attributes[name] = now(x)
    for holder, held in taken(x for _, _, x in each):
        if isinstance(held, dict):
            put([(holder, {key(x): now(y) for x, y in held.items()})])
        else:
            put([(holder, type(held)(map(key if isinstance(held, set) else now, held)))])


def _flat(held: Any) -> Iterator[Any]:
    return (x for pair in held.items() for x in pair) if isinstance(held, dict) else iter(held)
