"""Queries about torch's modes and flags, answered as in eager although a trace sets others.

``is_compiling()`` and ``is_exporting()`` are False: libraries' code for tracers rounds differently.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch._dynamo import external_utils
from torch.autograd import forward_ad

from autoshard.frames import is_ours, is_torchs, users_modules
from autoshard.passes.capture.observer import Observer, Patch

inference: ContextVar[bool] = ContextVar("inference", default=False)
"""whether the traced code is in inference mode in eager; traces never are"""
without_grad: ContextVar[bool] = ContextVar("without_grad", default=False)
"""whether gradients are off when the forward begins; it may turn them on itself"""

_autograd: ContextVar[tuple[bool, bool] | None] = ContextVar("autograd", default=None)
"""the caller's :func:`autograd_modes`"""

_TRACED = (
    *((torch.compiler, name) for name in ("is_compiling", "is_exporting", "is_dynamo_compiling")),
    *((owner, "is_compiling") for owner in (torch._utils, torch._dynamo, external_utils)),
)
_MODES = (
    (torch.backends.cudnn, torch._C, "_get_cudnn_enabled"),
    (torch.backends.mkldnn, torch._C, "_get_mkldnn_enabled"),
    (None, torch._C, "_get_nnpack_enabled"),
    *((None, owner, "is_autocast_cache_enabled") for owner in (torch, torch._C)),
)
"""modes that export turns off: (module with a flag ``enabled`` or None, owner, query function)"""

_AUTOGRAD = (
    ("_is_fwd_grad_enabled", ((torch._C, "_is_fwd_grad_enabled"), (forward_ad, "_is_fwd_grad_enabled"))),
    (
        "_is_multithreading_enabled",
        ((torch._C, "_is_multithreading_enabled"), (torch.autograd, "is_multithreading_enabled")),
    ),
)
"""(query of torch._C about autograd's modes, its aliases)"""


def autograd_modes() -> tuple[bool, bool]:
    """(forward-mode AD enabled, multithreaded backward enabled)"""
    return torch._C._is_fwd_grad_enabled(), torch._C._is_multithreading_enabled()


@contextlib.contextmanager
def as_called(grad: bool, in_inference: bool) -> Iterator[None]:
    """Inside, inference mode is off, and traced forwards see the caller's modes as given.

    Saved-tensor hooks are off, too: ``torch.utils.checkpoint`` counts tensors saved in the call.
    """
    tokens = without_grad.set(not grad), inference.set(in_inference), _autograd.set(autograd_modes())
    try:
        with torch.inference_mode(False), torch.set_grad_enabled(grad), unhooked():
            yield
    finally:
        without_grad.reset(tokens[0])
        inference.reset(tokens[1])
        _autograd.reset(tokens[2])


def unhooked() -> AbstractContextManager[Any]:
    """Disable saved-tensor hooks of the caller."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


class AsInEager(Observer):
    """Answers mode queries outside torch as in eager. ``asked``: is_compiling() was queried."""

    asked = False
    answers = True
    """whether is_compiling() is answered with False"""

    def patches(self) -> Iterable[Patch]:
        replaced = {getattr(torch.compiler, name): self._no(getattr(torch.compiler, name)) for _, name in _TRACED}
        for owner, name in _TRACED:
            yield owner, name, replaced.setdefault(getattr(owner, name), self._no(getattr(owner, name)))
        for owner in (torch, torch._C):
            original = owner.is_inference_mode_enabled
            replaced[original] = _answering(original, inference.get)
            yield owner, "is_inference_mode_enabled", replaced[original]
        for now, (name, places) in zip(_autograd.get() or autograd_modes(), _AUTOGRAD, strict=True):
            original = getattr(torch._C, name)
            replaced[original] = _answering(original, partial(bool, now))
            yield from ((owner, alias, replaced[original]) for owner, alias in places)
        for module, owner, name in _MODES:
            original, now = getattr(owner, name), getattr(owner, name)()
            replaced[original] = _answering(original, partial(bool, now))
            yield owner, name, replaced[original]
            if module is not None:
                yield type(module), "enabled", _Flag(vars(type(module))["enabled"], now)
        yield from _imported(replaced)

    def _no(self, original: Callable[[], bool]) -> Callable[[], bool]:
        def no() -> bool:
            asker = sys._getframe(1)
            if is_torchs(asker) or not self.answers:
                return original()
            self.asked = self.asked or not is_ours(asker.f_code.co_filename)
            return False

        return no


def _answering(original: Callable[[], bool], answer: Callable[[], bool]) -> Callable[[], bool]:
    return lambda: original() if is_torchs(sys._getframe(1)) else answer()


class _Flag:
    """Descriptor of a torch module's flag: reads ``now`` outside torch."""

    def __init__(self, original: Any, now: bool) -> None:
        self.original, self.now = original, now

    def __get__(self, module: Any, kind: Any) -> Any:
        return self.original.__get__(module, kind) if is_torchs(sys._getframe(1)) else self.now

    def __set__(self, module: Any, value: Any) -> None:
        self.original.__set__(module, value)


def _imported(replaced: dict[Any, Any]) -> Iterator[Patch]:
    """The same patches for names imported into user modules."""
    by_id = {id(original): new for original, new in replaced.items()}
    for module in users_modules():
        names = vars(module).copy()
        if not by_id.keys().isdisjoint(map(id, names.values())):  # fast path: usually disjoint
            yield from ((module, name, by_id[id(value)]) for name, value in names.items() if id(value) in by_id)
