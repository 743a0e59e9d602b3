"""What attributes hold, in containers and objects within each other: taken down, and put back."""

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
"""containers and objects within each other that are looked into"""

Contents = list[tuple[Any, Any]]
"""containers and objects, each with what it held: see :func:`held_in`"""

NOTHING = object()
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
_NO_STATE = ("builtins", "functools", "torch")
"""where what can be called is a function"""
_REGISTERED = ("_parameters", "_buffers", "_modules")
"""of a module, where a trace itself puts what stands for its tensors"""
OF_PYTHON = ("builtins", "itertools", "_collections")
"""where Python's own functions, generators and iterators are"""


def held_in(x: Any) -> dict[Any, Any] | list[Any] | set[Any] | None:
    """A copy of what a container holds, or of an object's attributes; None: nothing that is looked into.

    A user's class is not asked: its own ``__iter__`` or ``__len__`` may raise, or return tensors.
    """
    if type(x) is dict:  # most are these
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
    """How many items a container holds, whatever its class says."""
    kind: Any = next(kind for kind in (list, dict, set, deque) if isinstance(x, kind))
    return int(kind.__len__(x))


def word(x: Any) -> tuple[type, str] | None:
    """A number or text as its class and what it is, to be compared; None for anything else."""
    kind: Any = next((kind for kind in type(x).__mro__ if kind in _PLAIN), None)
    return None if kind is None else (type(x), kind.__repr__(x))


def own(x: Any, name: str) -> Any:
    """An attribute of an object itself, not what ``__getattr__`` makes up: proxies raise any error there."""
    try:
        return object.__getattribute__(x, name)
    except Exception:
        return NOTHING


def _slots(kind: type) -> tuple[str, ...]:
    """The attributes that classes written in Python keep in ``__slots__``."""
    found = _SLOTS.get(kind)
    if found is None:
        slotted = [c for c in kind.__mro__ if "__slots__" in vars(c)]
        names = (name for c in slotted for name, x in vars(c).items() if isinstance(x, MemberDescriptorType))
        found = _SLOTS[kind] = tuple(names)
    return found


_SLOTS: WeakKeyDictionary[type, tuple[str, ...]] = WeakKeyDictionary()
"""what is known of classes"""


def advanced_to(x: Any) -> Any:
    """Where an iterator or generator is, or what a function keeps, as something that is looked into; None for anything else."""
    if isinstance(x, FunctionType) and not is_ours(x.__code__.co_filename):
        return [*map(_in_cell, x.__closure__ or ()), x.__defaults__, x.__kwdefaults__, vars(x)]
    if isinstance(x, GeneratorType):
        frame = x.gi_frame
        return [None] if frame is None else [frame.f_lasti, x.gi_yieldfrom, *frame.f_locals.values()]
    if not isinstance(x, Iterator) or type(x).__module__ not in OF_PYTHON:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # itertools' own, as of Python 3.12
        try:
            return list(x.__reduce__())[1:]
        except TypeError:  # of what cannot be pickled, the next is not known without taking it
            return None


def _in_cell(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def taken(roots: Iterable[Any]) -> Contents:
    """All that these hold, the ``roots`` themselves among it; outer ones first."""
    found: dict[int, tuple[Any, Any]] = {}
    level = list(roots)
    for _ in range(DEPTH):
        new = [(x, held) for x in level if id(x) not in found and (held := held_in(x)) is not None]
        found.update((id(x), (x, held)) for x, held in new)
        level = [y for _, held in new for y in (held.values() if isinstance(held, dict) else held)]
    return list(found.values())


def put(contents: Contents) -> None:
    """Have each hold this; what does already is not touched."""
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
    """In the attributes of its modules, put what stands for a tensor or module in its place; in keys also the id of it.

    ``by``: what stands for it, by its id. What a forward looks up by identity is found so.
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
