"""What a forward asks of classes: ``type(x)`` and ``isinstance(n, int)`` say what they say in eager.

In a trace tensors, parameters and numbers that depend on data or open lengths are of classes of the tracer's. What user code
means by the name ``type`` is answered for these as for what they stand for, and so is ``x.__class__``, by which ``isinstance``,
``match`` and ``functools.singledispatch`` tell classes.
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
"""classes of numbers in a trace, and one of what they stand for"""
_ASKS_INSTANCE = type(nn.Parameter).__instancecheck__.__code__


class Classes(Observer):
    """While in place, code of the user's hears of eager's classes: that of modules, and of ``model``'s own."""

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
        """The global names of the user's code: of its modules, and of forwards that are in none, as of torch.hub."""
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
    """While inside, ``x.__class__`` of their instances is :func:`_class`, where user code asks.

    ``kind.__class__ = …`` would set the metaclass, so it goes by the dict of the class.
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
    """Python keeps what it found in classes until an attribute of theirs is set."""
    kind.__module__ = kind.__module__


def _asked_class(x: Any) -> type:
    frame = sys._getframe(1)
    # functools.singledispatch; isinstance of a class of parameters
    while (is_pythons(frame.f_code.co_filename) or frame.f_code is _ASKS_INSTANCE) and frame.f_back is not None:
        frame = frame.f_back
    asked_by_user = is_users(frame.f_code.co_filename) or frame.f_globals.get("__name__") == "__main__"
    return _class(x) if asked_by_user else type(x)


def _attribute(x: Any, name: str) -> Any:
    """What ``x`` has no attribute for: one that a user set on the parameter or buffer that it stands for."""
    known = vars(x).get("autoshard_of")
    if known is not None and (known.has(name) or is_users(sys._getframe(1).f_code.co_filename)):
        return known.attribute(name)
    raise AttributeError(
        f"{'Tensor' if known is None else class_of(known.of).__name__!r} object has no attribute {name!r}"
    )


def _set_class(x: Any, kind: type) -> None:
    object.__setattr__(x, "__class__", kind)


class _AsType(type):
    """What ``type`` can do beside making classes: it is called with an object, and is the class of classes."""

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
    """``type`` as user code has it while it is traced."""

    def __class_getitem__(cls, item: Any) -> Any:
        return type[item]


_Type.__module__, _Type.__name__, _Type.__qualname__ = "builtins", "type", "type"
