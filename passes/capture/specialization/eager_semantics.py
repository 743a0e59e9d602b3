"""Queries about classes, modes and compilation, answered in a trace as in eager. User code sees
eager's classes in ``type(x)``, ``isinstance``, ``match`` and ``singledispatch``.
``torch.compiler.is_compiling()`` is False: libraries' programs for tracers round differently."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.frames import is_autoshard_file, is_standard_library_file, is_torch_frame, is_users_file, users_modules
from autoshard.passes.capture.exported.tensor_attributes import eager_tensor_class
from autoshard.passes.capture.observer import Observer, Patch, patched
from autoshard.torch_private.autograd import top_saved_tensors_hooks
from autoshard.torch_private.capture import (
    AUTOGRAD_MODES,
    BACKEND_MODES,
    COMPILING_QUERIES,
    INFERENCE_QUERIES,
    autograd_modes,
)
from autoshard.torch_private.fake import FakeTensor

_PLAIN_NUMBERS: dict[type, Any] = {torch.SymInt: 0, torch.SymFloat: 0.0, torch.SymBool: False}
"""class of symbolic numbers → a plain number of the eager class"""
_INSTANCE_CHECK_CODE = type(nn.Parameter).__instancecheck__.__code__


class EagerClasses(Observer):
    """Shows eager's classes to user code: in user modules and in ``model``'s own forwards."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        asked = [names for names in self._namespaces() if "type" not in names]
        for names in asked:
            names["type"] = _EagerType
        try:
            with (
                _eager_classes_for(FakeTensor, *_PLAIN_NUMBERS),
                patched([(FakeTensor, "__getattr__", _user_attribute)]),
            ):
                yield
        finally:
            for names in asked:
                names.pop("type", None)

    def _namespaces(self) -> Iterator[dict[str, Any]]:
        """Globals of user modules, and of forwards outside any module, as from torch.hub."""
        found = [vars(module) for module in users_modules()]
        for kind in {kind for module in self.model.modules() for kind in type(module).__mro__}:
            names = getattr(vars(kind).get("forward"), "__globals__", None)
            if names is not None and is_users_file(str(names.get("__file__", ""))):
                found.append(names)
        yield from {id(names): names for names in found}.values()


def _eager_class(x: Any) -> type:
    kind = type(x)
    if kind in _PLAIN_NUMBERS:
        return type(_PLAIN_NUMBERS[kind])
    if kind is FakeTensor:
        known = vars(x).get("autoshard_of")
        return eager_tensor_class(x if known is None else known.of)
    return _EagerType if kind in (type, _EagerTypeMeta) else kind


@contextlib.contextmanager
def _eager_classes_for(*kinds: type) -> Iterator[None]:
    """While inside, ``x.__class__`` of instances of ``kinds`` is :func:`_eager_class` for user
    code. Writes to the dict of the class: ``kind.__class__ = …`` would set the metaclass."""
    namespaces = [gc.get_referents(vars(kind))[0] for kind in kinds]
    try:
        for kind, names in zip(kinds, namespaces, strict=True):
            names["__class__"] = property(_class_for_caller, _assign_class)
            _invalidate_lookups(kind)
        yield
    finally:
        for kind, names in zip(kinds, namespaces, strict=True):
            names.pop("__class__", None)
            _invalidate_lookups(kind)


def _invalidate_lookups(kind: type) -> None:
    """Clear Python's cache of lookups in a class, by setting an attribute."""
    kind.__module__ = kind.__module__


def _class_for_caller(x: Any) -> type:
    frame = sys._getframe(1)
    # skip frames of functools.singledispatch and of isinstance for parameter classes
    while (
        is_standard_library_file(frame.f_code.co_filename) or frame.f_code is _INSTANCE_CHECK_CODE
    ) and frame.f_back is not None:
        frame = frame.f_back
    asked_by_user = is_users_file(frame.f_code.co_filename) or frame.f_globals.get("__name__") == "__main__"
    return _eager_class(x) if asked_by_user else type(x)


def _user_attribute(x: Any, name: str) -> Any:
    """``__getattr__`` of traced tensors: an attribute set by the user on the original tensor."""
    known = vars(x).get("autoshard_of")
    if known is not None and (known.has(name) or is_users_file(sys._getframe(1).f_code.co_filename)):
        return known.attribute(name)
    raise AttributeError(
        f"{'Tensor' if known is None else eager_tensor_class(known.of).__name__!r} object has no attribute {name!r}"
    )


def _assign_class(x: Any, kind: type) -> None:
    object.__setattr__(x, "__class__", kind)


class _EagerTypeMeta(type):
    """Metaclass of the stand-in for ``type``: ``type(x)``, and instance checks of classes."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is _EagerType:
            return _eager_class(*args) if len(args) == 1 and not kwargs else type(*args, **kwargs)
        return super().__call__(*args, **kwargs)

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, type) if cls is _EagerType else super().__instancecheck__(x)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, type) if cls is _EagerType else super().__subclasscheck__(kind)

    def __eq__(cls, other: object) -> bool:
        return other is cls or (cls is _EagerType and other is type)

    def __hash__(cls) -> int:
        return hash(type) if cls is _EagerType else super().__hash__()


class _EagerType(type, metaclass=_EagerTypeMeta):
    """``type`` as user code sees it in a trace."""

    def __class_getitem__(cls, item: Any) -> Any:
        return type[item]


_EagerType.__module__, _EagerType.__name__, _EagerType.__qualname__ = "builtins", "type", "type"


eager_inference_mode: ContextVar[bool] = ContextVar("inference", default=False)
"""whether the traced code is in inference mode in eager; traces never are"""
grad_off_at_start: ContextVar[bool] = ContextVar("without_grad", default=False)
"""whether gradients are off when the forward begins; it may turn them on itself"""

_caller_autograd_modes: ContextVar[tuple[bool, bool] | None] = ContextVar("autograd", default=None)
"""the caller's :func:`autograd_modes`"""


@contextlib.contextmanager
def with_caller_modes(grad: bool, in_inference: bool) -> Iterator[None]:
    """Inside, inference mode is off, traced forwards see the caller's modes, and saved-tensor hooks
    are off (``torch.utils.checkpoint`` counts tensors saved in the call)."""
    tokens = (
        grad_off_at_start.set(not grad),
        eager_inference_mode.set(in_inference),
        _caller_autograd_modes.set(autograd_modes()),
    )
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(grad), without_saved_hooks():
            yield
    finally:
        grad_off_at_start.reset(tokens[0])
        eager_inference_mode.reset(tokens[1])
        _caller_autograd_modes.reset(tokens[2])


def without_saved_hooks() -> AbstractContextManager[Any]:
    """Disable saved-tensor hooks of the caller."""
    if top_saved_tensors_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_unpacked_as_saved, _unpacked_as_saved)


def _unpacked_as_saved(x: Tensor) -> Tensor:
    return x


class EagerModes(Observer):
    """Answers mode queries outside torch as in eager. ``asked``: is_compiling() was queried."""

    asked = False
    answers = True
    """whether is_compiling() is answered with False"""

    def patches(self) -> Iterable[Patch]:
        replaced = {
            getattr(torch.compiler, name): self._no(getattr(torch.compiler, name)) for _, name in COMPILING_QUERIES
        }
        for owner, name in COMPILING_QUERIES:
            yield owner, name, replaced.setdefault(getattr(owner, name), self._no(getattr(owner, name)))
        for owner, name in INFERENCE_QUERIES:
            original = getattr(owner, name)
            replaced[original] = _with_eager_answer(original, eager_inference_mode.get)
            yield owner, name, replaced[original]
        for now, places in zip(_caller_autograd_modes.get() or autograd_modes(), AUTOGRAD_MODES, strict=True):
            original = getattr(*places[0])
            replaced[original] = _with_eager_answer(original, partial(bool, now))
            yield from ((owner, alias, replaced[original]) for owner, alias in places)
        for module, owner, name in BACKEND_MODES:
            original, now = getattr(owner, name), getattr(owner, name)()
            replaced[original] = _with_eager_answer(original, partial(bool, now))
            yield owner, name, replaced[original]
            if module is not None:
                yield type(module), "enabled", _EagerModeFlag(vars(type(module))["enabled"], now)
        yield from _patched_imports(replaced)

    def _no(self, original: Callable[[], bool]) -> Callable[[], bool]:
        def no() -> bool:
            asker = sys._getframe(1)
            if is_torch_frame(asker) or not self.answers:
                return original()
            self.asked = self.asked or not is_autoshard_file(asker.f_code.co_filename)
            return False

        return no


def _with_eager_answer(original: Callable[[], bool], answer: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: original() if is_torch_frame(sys._getframe(1)) else answer()


class _EagerModeFlag:
    """Descriptor of a torch module's flag: reads ``now`` outside torch."""

    def __init__(self, original: Any, now: bool) -> None:
        self.original, self.now = original, now

    def __get__(self, module: Any, kind: Any) -> Any:
        return self.original.__get__(module, kind) if is_torch_frame(sys._getframe(1)) else self.now

    def __set__(self, module: Any, value: Any) -> None:
        self.original.__set__(module, value)


def _patched_imports(replaced: dict[Any, Any]) -> Iterator[Patch]:
    """The same patches for names imported into user modules."""
    by_id = {id(original): new for original, new in replaced.items()}
    for module in users_modules():
        names = vars(module).copy()
        if not by_id.keys().isdisjoint(map(id, names.values())):  # fast path: usually disjoint
            yield from ((module, name, by_id[id(value)]) for name, value in names.items() if id(value) in by_id)
