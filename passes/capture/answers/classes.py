"""What a forward asks of classes: ``type(x)`` and ``isinstance(n, int)`` say what they say in eager.

In a trace tensors, parameters and numbers that depend on data or open lengths are of classes of the tracer's. What user code
means by the names ``type`` and ``isinstance`` is answered for these as for what they stand for.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autoshard.frames import is_users, users_modules
from autoshard.passes.capture.observer import Observer

_STAND_FOR: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
"""classes of numbers in a trace, and one of what they stand for"""


class Classes(Observer):
    """While in place, code of the user's hears of eager's classes: that of modules, and of ``model``'s own."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        asked = {"type": _Type, "isinstance": _isinstance}
        missing = [(names, name) for names in self._namespaces() for name in asked if name not in names]
        for names, name in missing:
            names[name] = asked[name]
        try:
            yield
        finally:
            for names, name in missing:
                names.pop(name, None)

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
        return nn.Parameter if isinstance(x, nn.Parameter) else torch.Tensor
    return _Type if kind is type else kind


@functools.wraps(builtins.isinstance)
def _isinstance(x: Any, classes: Any) -> bool:
    kind = type(x)
    return isinstance(x, classes) or (kind in _STAND_FOR and isinstance(_STAND_FOR[kind], classes))


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
