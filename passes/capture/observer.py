"""What a watched trace is made of: calls, answers to questions about values, and observers of both.

An observer is one concern of a trace, such as packed sequences. All have one interface; :mod:`watch` orders them.
"""

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

from autoshard.errors import CaptureError

Patch = tuple[Any, str, Any]
"""an owner, the name of an attribute, and what it is while a trace is watched"""


@dataclass(frozen=True)
class Answer:
    """What a question about a value is answered; ``because``: why, or what the check says that fails otherwise; "": no news."""

    value: Any
    because: str


@dataclass(frozen=True)
class Call:
    """``func(*args, **kwargs)`` by the code of ``frame``; None: it is in the body of a higher-order op."""

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    frame: FrameType | None
    watched: bool = False
    """whether the calls that it makes are observed in its stead"""

    @functools.cached_property
    def operands(self) -> list[torch.Tensor]:
        """The tensors among the arguments."""
        return [x for x in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(x, torch.Tensor)]

    @functools.cached_property
    def written(self) -> list[torch.Tensor]:
        """The tensors that it writes to."""
        name = getattr(self.func, "__name__", "")
        in_place = name.endswith("_") and not name.endswith("__")
        in_place = in_place or name in ("__setitem__", "__set__") or (name.startswith("__i") and name.endswith("__"))
        in_place = in_place and name not in ("__int__", "__index__", "__invert__", "__init__", "__iter__")
        given = self.args or tuple(self.kwargs.values())  # torch.nn.init hands all on by name
        targets = given[:1] if in_place or self.kwargs.get("inplace") is True else ()
        found = (*targets, *pytree.tree_leaves(self.kwargs.get("out")))
        return [x for x in found if isinstance(x, torch.Tensor)]

    def make(self) -> Any:
        """The result."""
        return self.func(*self.args, **self.kwargs)


@dataclass(frozen=True)
class Forward:
    """The tensors of a forward as they are traced."""

    inputs: list[Any]
    """leaves of the arguments"""
    parameters: list[torch.Tensor]
    buffers: list[tuple[torch.Tensor, torch.Tensor | None]]
    """as traced, and as the model has it"""
    trained: list[bool]
    """per leaf of the arguments whether the caller's requires a gradient"""
    own: dict[int, torch.Tensor]
    """id of a parameter or buffer of the model → what stands for it in the trace"""


class Observer:
    """One concern of a trace. Any method may raise :class:`CaptureError`."""

    def patches(self) -> Iterable[Patch]:
        """What stands in for attributes while the trace is watched."""
        return ()

    def around(self) -> AbstractContextManager[None]:
        """Around the whole trace."""
        return patched(self.patches())

    def begin(self, forward: Forward) -> None:
        """The traced forward begins."""

    def before(self, call: Call) -> Answer | Call | None:
        """The answer in place of a call, or another call in its place; None: it is made as it is."""

    def after(self, call: Call, result: Any) -> Any:
        """The result of a call that was made, or what stands for it."""
        return result

    def end(self, output: Any) -> None:
        """The traced forward has given ``output``."""

    def learn(self, error: Exception) -> bool:
        """Whether another trace may get past ``error``, which ended this one."""
        return False


class Refusals(Observer):
    """Called with a message, it is the error to raise. The first is raised after the trace where the model swallowed it."""

    first: CaptureError | None = None

    def __call__(self, message: str) -> CaptureError:
        self.first = self.first or CaptureError(message)
        return self.first

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        yield
        if self.first is not None:
            raise self.first


@contextlib.contextmanager
def patched(patches: Iterable[Patch]) -> Iterator[None]:
    """While inside, attributes are what ``patches`` say; afterwards what they were, and absent where they were."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in patches:
            undo = (setattr, owner, name, vars(owner)[name]) if name in vars(owner) else (delattr, owner, name)
            setattr(owner, name, value)
            stack.callback(*undo)
        yield


def replacing(owner: Any, name: str, make: Callable[[Any], Any]) -> Patch:
    """The patch that puts ``make(original)`` in the place of an attribute."""
    return owner, name, make(getattr(owner, name))
