"""Observers (tracing hooks): their interface, the calls that they see, the answers that they give.
An observer handles one concern, such as packed sequences. :mod:`watch` orders them. Guards are
assertions in the graph behind answers; their errors name the user's line."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from autoshard.errors import CaptureError
from autoshard.frames import frame_location_text, users_frame
from autoshard.torch_private.ops import assert_async

GUARD_MODEL_CHECK = "the model's check of its values fails"
Patch = tuple[Any, str, Any]
"""monkey patch: owner, attribute name, value during the trace"""


@dataclass(frozen=True)
class ObserverAnswer:
    """Result in place of a call. ``reason``: for logs and the guard's message; "": not logged."""

    value: Any
    reason: str


def guard_true(condition: Tensor | torch.SymBool, message: str, frame: FrameType | None = None) -> None:
    """Assert ``condition`` in every call; the RuntimeError has ``frame``'s line and ``message``."""
    if isinstance(condition, torch.SymBool):
        condition = torch.scalar_tensor(torch.sym_ite(condition, 1, 0), dtype=torch.int64)
    assert_async(condition, f"{frame_location_text(frame or users_frame())}: {message}")


@dataclass(frozen=True)
class ObservedCall:
    """``func(*args, **kwargs)``, called from ``frame`` (None: in the body of a higher-order op)."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    frame: FrameType | None
    observes_inner: bool = False
    """whether observers see the calls that ``func`` makes instead of its own"""

    @functools.cached_property
    def operands(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, Tensor)]

    @functools.cached_property
    def written(self) -> list[Tensor]:
        """Tensors written in place: the target of ``x.op_()``, ``inplace=True`` or ``out=``."""
        name = getattr(self.func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        in_place = in_place or name in ("__setitem__", "__set__") or (name.startswith("__i") and name.endswith("__"))
        in_place = in_place and name not in ("__int__", "__index__", "__invert__", "__init__", "__iter__")
        given = self.args or tuple(self.kwargs.values())  # torch.nn.init passes keywords
        targets = given[:1] if in_place or self.kwargs.get("inplace") is True else ()
        found = (*targets, *pytree.tree_leaves(self.kwargs.get("out")))
        return [x for x in found if isinstance(x, Tensor)]

    def make(self) -> Any:
        return self.func(*self.args, **self.kwargs)


@dataclass(frozen=True)
class TracedForward:
    """Tensors of the traced forward: inputs, parameters, buffers."""

    inputs: list[Any]
    """leaves of the arguments"""
    parameters: list[Tensor]
    buffers: list[tuple[Tensor, Tensor | None]]
    """(traced tensor, buffer of the model)"""
    trained: list[bool]
    """per leaf of the arguments: whether the caller's tensor requires a gradient"""
    own: dict[int, Tensor]
    """id of a parameter or buffer of the model → its replacement in the trace"""


class Observer:
    """One concern of a trace. Any method may raise :class:`CaptureError`."""

    def patches(self) -> Iterable[Patch]:
        """Monkey patches active during the trace."""
        return ()

    def around(self) -> AbstractContextManager[None]:
        """Context manager around the full trace."""
        return patched(self.patches())

    def begin(self, forward: TracedForward) -> None:
        """The traced forward begins."""

    def before(self, call: ObservedCall) -> ObserverAnswer | ObservedCall | None:
        """An answer or another call in place of ``call``; None: make it unchanged."""

    def after(self, call: ObservedCall, result: Any) -> Any:
        """``result``, or a replacement of it."""
        return result

    def end(self, output: Any) -> None:
        """The traced forward has returned ``output``."""

    def learn(self, error: Exception) -> bool:
        """Whether a new trace may avoid ``error``, which ended this one."""
        return False


class RefusalLog(Observer):
    """Makes errors from messages. The first is raised after the trace if the model swallowed it."""

    first: CaptureError | None = None

    def __call__(self, message: str, kind: type[CaptureError] = CaptureError) -> CaptureError:
        self.first = self.first or kind(message)
        return self.first

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        yield
        if self.first is not None:
            raise self.first


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """Apply ``patches`` while inside; then restore old values, and delete added attributes."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            undo = (setattr, owner, name, vars(owner)[name]) if name in vars(owner) else (delattr, owner, name)
            setattr(owner, name, value)
            stack.callback(*undo)
        yield


def replacement_patch(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """The patch that replaces an attribute by ``make(original)``."""
    return owner, name, make(getattr(owner, name))
