"""What a forward asks of torch: answered as in eager, where a trace has other modes and flags.

Is it compiled or exported? No: libraries have other programs for tracers, which round otherwise.
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
"""whether the code that is traced runs in inference mode; no trace does"""
without_grad: ContextVar[bool] = ContextVar("without_grad", default=False)
"""whether gradients are off where the forward begins, though those that it turns on itself are wanted"""

_autograd: ContextVar[tuple[bool, bool] | None] = ContextVar("autograd", default=None)
"""what :func:`autograd_modes` were where the code that is traced is called"""

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
"""what an export turns off: the module with the attribute ``enabled`` that says so too, and the question"""


_AUTOGRAD = (
    ("_is_fwd_grad_enabled", ((torch._C, "_is_fwd_grad_enabled"), (forward_ad, "_is_fwd_grad_enabled"))),
    (
        "_is_multithreading_enabled",
        ((torch._C, "_is_multithreading_enabled"), (torch.autograd, "is_multithreading_enabled")),
    ),
)
"""questions of torch._C about autograd's modes, and where they are asked"""


def autograd_modes() -> tuple[bool, bool]:
    """Whether forward-mode derivatives, and several threads in a backward, are on."""
    return torch._C._is_fwd_grad_enabled(), torch._C._is_multithreading_enabled()


@contextlib.contextmanager
def as_called(grad: bool, in_inference: bool) -> Iterator[None]:
    """Inside, nothing made is an inference tensor; traced forwards begin with gradients and hear of modes as said.

    What is saved for no backward of the caller's is not shown to hooks around the call: ``torch.utils.checkpoint`` counts.
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
    """Inside, no hooks see what is saved."""
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is None:
        return contextlib.nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


class AsInEager(Observer):
    """While in place, code outside of torch hears what eager says. ``asked``: whether anyone did if it is compiled."""

    asked = False
    answers = True
    """whether those who ask if it is compiled hear no"""

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
    """An attribute of a torch module that says ``now`` to others."""

    def __init__(self, original: Any, now: bool) -> None:
        self.original, self.now = original, now

    def __get__(self, module: Any, kind: Any) -> Any:
        return self.original.__get__(module, kind) if is_torchs(sys._getframe(1)) else self.now

    def __set__(self, module: Any, value: Any) -> None:
        self.original.__set__(module, value)


def _imported(replaced: dict[Any, Any]) -> Iterator[Patch]:
    """The same for names that the user's modules have imported."""
    by_id = {id(original): new for original, new in replaced.items()}
    for module in users_modules():
        names = vars(module).copy()
        if not by_id.keys().isdisjoint(map(id, names.values())):  # mostly it is, and this is the quick way to see it
            yield from ((module, name, by_id[id(value)]) for name, value in names.items() if id(value) in by_id)
