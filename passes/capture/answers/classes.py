"""Class queries of user code: ``type(x)`` and ``isinstance(n, int)`` answer as in eager.

Traced tensors, parameters and symbolic numbers have classes of the tracer. User code sees eager's
classes, through the name ``type`` and through ``x.__class__``, which ``isinstance``, ``match`` and
``functools.singledispatch`` read.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autoshard.frames import is_pythons, is_users, users_modules
from autoshard.passes.capture.exported.attached import class_of
from autoshard.passes.capture.observer import Observer, patched

_STAND_FOR: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
"""class of symbolic numbers → a plain number of the eager class"""
_ASKS_INSTANCE = type(nn.Parameter).__instancecheck__.__code__


class Classes(Observer):
    """Shows eager's classes to user code: in user modules and in ``model``'s own forwards."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        asked = [names for names in self._namespaces() if "type" not in names]
        for names in asked:
            names["type"] = _Type
        try:
            with _classes_of(FakeTensor, *_STAND_FOR), patched([(FakeTensor, "__getattr__", _attribute)]):
                yield
        finally:
            for names in asked:
                names.pop("type", None)

    def _namespaces(self) -> Iterator[dict[str, Any]]:
        """Globals of user modules, and of forwards outside any module, as from torch.hub."""
        found = [vars(module) for module in users_modules()]
        for kind in {kind for module in self.model.modules() for kind in type(module).__mro__}:
            names = getattr(vars(kind).get("forward"), "__globals__", None)
            if names is not None and is_users(str(names.get("__file__", ""))):
                found.append(names)
        yield from {id(names): names for names in found}.values()


def _class(x: Any) -> type:
    kind = type(x)
    if kind in _STAND_FOR:
        return type(_STAND_FOR[kind])
    if kind is FakeTensor:
        known = vars(x).get("autoshard_of")
        return class_of(x if known is None else known.of)
    return _Type if kind in (type, _AsType) else kind


@contextlib.contextmanager
def _classes_of(*kinds: type) -> Iterator[None]:
    """While inside, ``x.__class__`` of instances of ``kinds`` is :func:`_class` for user code.

    Writes to the dict of the class: ``kind.__class__ = …`` would set the metaclass.
    """
    namespaces = [gc.get_referents(vars(kind))[0] for kind in kinds]
    try:
        for kind, names in zip(kinds, namespaces, strict=True):
            names["__class__"] = property(_asked_class, _set_class)
            _forget_lookups(kind)
        yield
    finally:
        for kind, names in zip(kinds, namespaces, strict=True):
            names.pop("__class__", None)
            _forget_lookups(kind)


def _forget_lookups(kind: type) -> None:
    """Clear Python's cache of lookups in a class, by setting an attribute."""
    kind.__module__ = kind.__module__


def _asked_class(x: Any) -> type:
    frame = sys._getframe(1)
    # skip frames of functools.singledispatch and of isinstance for parameter classes
    while (is_pythons(frame.f_code.co_filename) or frame.f_code is _ASKS_INSTANCE) and frame.f_back is not None:
        frame = frame.f_back
    asked_by_user = is_users(frame.f_code.co_filename) or frame.f_globals.get("__name__") == "__main__"
    return _class(x) if asked_by_user else type(x)


def _attribute(x: Any, name: str) -> Any:
    """``__getattr__`` of traced tensors: an attribute set by the user on the original tensor."""
    known = vars(x).get("autoshard_of")
    if known is not None and (known.has(name) or is_users(sys._getframe(1).f_code.co_filename)):
        return known.attribute(name)
    raise AttributeError(
        f"{'Tensor' if known is None else class_of(known.of).__name__!r} object has no attribute {name!r}"
    )


def _set_class(x: Any, kind: type) -> None:
    object.__setattr__(x, "__class__", kind)


class _AsType(type):
    """Metaclass of the stand-in for ``type``: ``type(x)``, and instance checks of classes."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is _Type:
            return _class(*args) if len(args) == 1 and not kwargs else type(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, type) if cls is _Type else super().__instancecheck__(x)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type) if cls is _Type else super().__subclasscheck__(kind)

    def __eq__(cls, other: object) -> bool:
        return other is cls or (cls is _Type and other is type)

    def __hash__(cls) -> int:
        return hash(type) if cls is _Type else super().__hash__()


class _Type(type, metaclass=_AsType):
    """``type`` as user code sees it in a trace."""

    def __class_getitem__(cls, item: Any) -> Any:
        return type[item]


_Type.__module__, _Type.__name__, _Type.__qualname__ = "builtins", "type", "type"
