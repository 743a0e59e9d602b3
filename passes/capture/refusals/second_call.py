"""What a forward leaves behind in attributes of the model, and whether its next call reads that.

A counter, a first call that fills a cache, a list that grows: a program is of the first call and would go on as that. So a
forward that leaves something is traced again as it left the model. Where both graphs are the same, nobody reads it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.attributes import LEFT, untouched
from autoshard.passes.capture.refusals.outside import reading_outside
from autoshard.passes.ir.graph import Graph

Found = list[tuple[str, nn.Module, dict[str, Any], dict[str, Any]]]
"""path, module, its attributes, and what is in them: see :func:`_contents`"""

_left: ContextVar[dict[str, tuple[nn.Module, dict[str, Any]]]] = ContextVar("left")
"""of the last trace: dotted name → the module, and its attributes of which that is one"""

_HOLDERS = {"parameter": "_parameters", "buffer": "_buffers", "module": "_modules"}
_DEPTH = 4
"""containers and objects within each other that are looked into"""


@contextlib.contextmanager
def leaving() -> Iterator[None]:
    """Traces inside tell what their forward leaves, by :func:`leave`."""
    token = _left.set({})
    try:
        yield
    finally:
        _left.reset(token)


def as_found(model: nn.Module) -> Found:
    """The attributes of ``model`` before a call."""
    return [(p, m, dict(vars(m)), {k: _contents(v) for k, v in vars(m).items()}) for p, m in model.named_modules()]


def check_made(before: Found) -> None:
    """Refuse a forward that makes parameters, buffers or modules: its program would make them in every call."""
    for path, module, _, contents in before:
        for kind, holder in _HOLDERS.items():
            had = {name for name, x in contents[holder] if x != _contents(None)}
            if made := [n for n, x in vars(module)[holder].items() if x is not None and n not in had]:
                name = f"{path}.{made[0]}" if path else made[0]
                raise CaptureError(
                    f"the forward makes the {kind} {name!r} in its first call. Make it in __init__, or call the model once "
                    "before compiling it."
                )


def leave(model: nn.Module, before: Found) -> None:
    """Note what is otherwise than ``before`` the call that has ended."""
    found = _left.get()
    found.clear()
    for path, module, old, contents in before:
        now = vars(module)
        for name, value in now.items():
            if name in _HOLDERS.values() or (name in old and _contents(value) == contents[name]):
                continue
            value = (
                copy.copy(value) if isinstance(value, dict | list | set) else value
            )  # what it holds is put back after a trace
            found[f"{path}.{name}" if path else name] = (module, {name: value})


def check_second_call(model: nn.Module, graph: Graph, again: Callable[[], Graph]) -> None:
    """Refuse a forward of which ``again``, traced as the first call left the model, is another than ``graph``."""
    left = dict(_left.get())
    if not left:
        return
    with untouched(model), reading_outside():
        for module, attributes in left.values():
            vars(module).update(pytree.tree_map_only(FakeTensor, _stand_in, attributes))
        try:
            same = _calls(again()) == _calls(graph)
        except Exception:
            same = False
    if not same:
        raise CaptureError(
            f"the forward leaves {', '.join(map(repr, left))} behind in the model, and its next call computes something else "
            "for it: a program is of one call. Keep what counts in a buffer that is there from the beginning; where the "
            "first call alone fills it, call the model once before compiling."
        )


def _stand_in(x: torch.Tensor) -> torch.Tensor:
    """For a tensor that a traced call left: it has no data, and is no state that the model had."""
    left = torch.empty(tuple(map(int, x.shape)), dtype=x.dtype, device="meta")
    setattr(left, LEFT, True)
    return left


def _calls(graph: Graph) -> tuple[Any, ...]:
    """What a graph computes, to be compared."""
    nodes = [(str(n.op), repr(n.args), repr(n.kwargs), n.outputs) for n in graph.nodes]
    constants = {
        name: x if x.is_meta or isinstance(x, FakeTensor) else x.tolist() for name, x in graph.constants.items()
    }
    return graph.inputs, nodes, repr(graph.outputs), dict(graph.mutations), repr(constants)


class _Same:
    """An object, equal to itself alone; it is kept, so that no other takes its place in memory."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.x is self.x

    def __hash__(self) -> int:
        return id(self.x)


def _contents(x: Any, depth: int = _DEPTH) -> Any:
    """What is in an attribute, to be compared: values of numbers and words, the identity of all else, and what these hold."""
    if isinstance(x, bool | int | float | complex | str | bytes | type(None)):
        return type(x), repr(x)
    if isinstance(x, torch.Tensor | nn.Module | type) or callable(x) or not depth:
        return _Same(x)
    if isinstance(x, dict):
        return tuple((k if isinstance(k, str) else _Same(k), _contents(v, depth - 1)) for k, v in x.items())
    if isinstance(x, list | tuple):
        return tuple(_contents(v, depth - 1) for v in x)
    if isinstance(x, set | frozenset):
        return frozenset(map(_Same, x))
    held = getattr(x, "__dict__", None)
    return _Same(x), _contents(held, depth - 1) if isinstance(held, dict) else None
