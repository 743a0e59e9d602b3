"""State that a forward leaves in attributes of the model, and whether its next call reads it.

A program repeats the first call, despite counters, caches or growing lists. So the model is traced
again from the state left by the first call. If both graphs are equal, no forward reads the state.
State that grows in both calls is collected for code outside (a metric's batches): it is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from autoshard.errors import CaptureError
from autoshard.frames import is_users
from autoshard.passes.capture.exported.attributes import LEFT, untouched
from autoshard.passes.capture.exported.contents import (
    DEPTH,
    OF_PYTHON,
    Contents,
    advanced_to,
    held_in,
    put,
    size,
    taken,
    word,
)
from autoshard.passes.capture.refusals.outside import reading_outside
from autoshard.passes.ir.graph import Graph

Found = list[tuple[str, Any, dict[str, Any], dict[str, Any]]]
"""(path, nn.Module, class or Python module, its attributes, their :func:`_contents`)"""

_left: ContextVar[dict[str, tuple[dict[str, Any], str, Any, Contents]]] = ContextVar("left")
"""last trace: dotted name → (attributes of the module, attribute name, new value, its contents)"""
_grows: ContextVar[list[str]] = ContextVar("grows")
"""last trace: dotted names of attributes that grew"""

_LARGE = 256
"""largest global container (items) that is compared, nested ones included"""
_ALL = _LARGE**2
"""most items compared per global: scripts keep data sets there, in lists of lists"""

_PARAMETERS_AGAIN = ("_flat_weights", "_flat_weight_refs")
"""parameter lists of recurrent layers, which torch rebuilds whenever a trace replaces one"""
_HOLDERS = {"parameter": "_parameters", "buffer": "_buffers", "module": "_modules"}


@contextlib.contextmanager
def leaving(model: nn.Module) -> Iterator[None]:
    """Traces inside record state by :func:`leave`. Clears traced tensors from globals."""
    token, grows = _left.set({}), _grows.set([])
    before = [(place, dict(vars(place)), [(x, held_in(x)) for x in _containers(place)]) for place in _around(model)]
    try:
        yield
    finally:
        _left.reset(token)
        _grows.reset(grows)
        for place, names, contents in before:
            put([(x, held) for x, held in contents if _has_fake(x)])
            for name, x in dict(vars(place)).items():
                if isinstance(x, FakeTensor) and name in names:
                    setattr(place, name, names[name])
                elif isinstance(x, FakeTensor):
                    delattr(place, name)


def _containers(place: Any) -> Iterator[Any]:
    """Small containers among the attributes of a class or Python module."""
    return (x for x in vars(place).values() if isinstance(x, list | dict | set | deque) and size(x) <= _LARGE)


def _has_fake(x: Any) -> bool:
    held = held_in(x) or ()
    return any(
        isinstance(y, FakeTensor) for y in pytree.tree_leaves([*(held.values() if isinstance(held, dict) else held)])
    )


def as_found(model: nn.Module) -> Found:
    """Snapshot of attributes before a call: modules, their classes and Python modules."""
    modules = [(p, m, dict(vars(m)), {k: _contents(v) for k, v in vars(m).items()}) for p, m in model.named_modules()]
    return modules + [(place.__name__, place, dict(vars(place)), _small(vars(place))) for place in _around(model)]


def _around(model: nn.Module) -> Iterator[Any]:
    """User classes of the model's modules, and the Python modules that define them."""
    own = dict.fromkeys(type(module) for module in model.modules())
    kinds = dict.fromkeys(kind for each in own for kind in each.__mro__)
    yield from (kind for kind in kinds if _is_of_user(kind))
    yield from dict.fromkeys(sys.modules[kind.__module__] for kind in own if _is_of_user(kind))


def _is_of_user(kind: type) -> bool:
    return is_users(str(getattr(sys.modules.get(kind.__module__), "__file__", None) or "<"))


def _small(names: Mapping[str, Any]) -> dict[str, Any]:
    """Contents of globals or class attributes, without large containers and dunder names."""
    found = {}
    for name, x in names.items():
        is_container = isinstance(x, list | dict | set | deque)
        if (name.startswith("__") and name.endswith("__")) or (is_container and size(x) > _LARGE):
            continue
        known = is_container or type(x).__module__ in OF_PYTHON or _is_of_user(type(x))
        found[name] = _contents(x, DEPTH - 1 if known else 0, _LARGE, _ALL)
    return found


def check_made(before: Found) -> None:
    """Refuse a forward that creates parameters, buffers or modules: a program would repeat it."""
    for path, module, _, contents in before:
        if not isinstance(module, nn.Module):
            continue
        for kind, holder in _HOLDERS.items():
            had = {name for name, x in contents[holder] if x != _contents(None)}
            if made := [n for n, x in vars(module)[holder].items() if x is not None and n not in had]:
                name = f"{path}.{made[0]}" if path else made[0]
                raise CaptureError(
                    f"the forward makes the {kind} {name!r} in its first call. Make it in __init__, or call the model once "
                    "before compiling it."
                )


def leave(model: nn.Module, before: Found) -> None:
    """Record attributes that differ from ``before`` the call that has ended."""
    found, grows = _left.get(), _grows.get()
    found.clear()
    grows.clear()
    for path, module, old, contents in before:
        own = isinstance(module, nn.Module)
        now: Any = vars(module)
        inside = {} if own else _small(now)
        for name, value in now.items():
            if name in _HOLDERS.values() if own else name not in inside:
                continue
            if isinstance(module, nn.RNNBase) and name in _PARAMETERS_AGAIN:
                continue
            is_now = _contents(value) if own else inside[name]
            if name in old and is_now == contents.get(name):
                continue
            dotted = f"{path}.{name}" if path else name
            # State outside the model stays as the call left it.
            found[dotted] = (now if own else {}, name, value, taken([value]) if own else [])
            if _is_longer(is_now, contents.get(name)):
                grows.append(dotted)


def _is_longer(now: Any, before: Any) -> bool:
    """Whether :func:`_contents` has grown at any depth, or is a full deque that moved on."""
    if isinstance(now, frozenset) and isinstance(before, frozenset):
        return now > before
    if not (isinstance(now, tuple) and isinstance(before, tuple)) or len(now) < len(before):
        return False
    changed = [(x, y) for x, y in zip(now, before, strict=False) if x != y]
    is_moved = len(now) > 1 and bool(changed) and now[:-1] == before[1:]  # a deque that is full
    return len(now) > len(before) or is_moved or any(_is_longer(x, y) for x, y in changed)


def check_second_call(model: nn.Module, graph: Graph, again: Callable[[], Graph]) -> None:
    """Refuse a forward whose second call differs or whose state grows in both calls.

    ``again`` traces the model, here as the first call left it. ``graph``: of the first call.
    """
    left, grows = dict(_left.get()), list(_grows.get())
    if not left:
        return
    with untouched(model), reading_outside():
        stand_in = _StandIns()
        for attributes, name, value, contents in left.values():
            attributes[name] = stand_in(value)
            put([(holder, stand_in.in_held(held)) for holder, held in contents])
        failed = None
        try:
            same = _calls(again()) == _calls(graph)
        except Exception as error:
            same, failed = False, error
        grows = [name for name in grows if name in _grows.get()]
    if not same:
        raise SecondCallError(left, graph) from failed
    if grows:
        raise CaptureError(
            f"the forward adds to {', '.join(map(repr, grows))} in every call, which its program does not: what is collected "
            "there would be lost. Return it from the forward, and collect it (or update the metric) outside."
        )


class SecondCallError(CaptureError):
    """The second call computes something else. ``left``: state after the first, by dotted name."""

    def __init__(self, left: Mapping[str, tuple[dict[str, Any], str, Any, Contents]], graph: Graph) -> None:
        self.left, self.written = tuple(left), tuple(graph.mutations)
        self.places = [(attributes, name) for attributes, name, *_ in left.values()]
        """(attributes of the module, {} for classes and globals; attribute name)"""
        super().__init__(
            f"the forward leaves {', '.join(map(repr, left))} behind in the model, and its next call computes something else "
            "for it: a program is of one call. Keep what counts in a buffer that is there from the beginning; where the "
            "first call alone fills it, call the model once before compiling."
        )


class _StandIns:
    """Meta tensors in place of those left by a traced call, marked as no state of the model."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __call__(self, x: Any) -> Any:
        """``x``, with traced tensors replaced."""
        if isinstance(x, FakeTensor):
            left = torch.empty(tuple(map(int, x.shape)), dtype=x.dtype, device="meta")
            setattr(left, LEFT, True)
            return self.found.setdefault(id(x), (x, left))[1]
        if not isinstance(x, tuple) or pytree.tree_is_leaf(x):  # such as a user's tuple class
            return x
        return pytree.tree_map(self, x, is_leaf=lambda y: y is not x)

    def in_held(self, held: Any) -> Any:
        """Contents of a container or object, with traced tensors replaced."""
        return {k: self(v) for k, v in held.items()} if isinstance(held, dict) else type(held)(map(self, held))


def _calls(graph: Graph) -> tuple[Any, ...]:
    """Comparison key of a graph's computation, with values numbered: dead code uses up names."""
    values = itertools.chain((i.name for i in graph.inputs), *(n.outputs for n in graph.nodes))
    names = {name: str(i) for i, name in enumerate(values)}
    as_numbered = graph.renamed(names)
    nodes = [(str(n.op), repr(n.args), repr(n.kwargs), len(n.outputs)) for n in as_numbered.nodes]
    inputs = [(i.kind, _bytes(graph.constants[i.name]) if i.kind == "constant" else i.fqn) for i in graph.inputs]
    return inputs, nodes, repr(as_numbered.outputs), dict(as_numbered.mutations)


def _bytes(x: torch.Tensor) -> Any:
    """Dtype, shape and bytes of a constant; the tensor itself if it has no data."""
    if x.is_meta or isinstance(x, FakeTensor):
        return x
    return x.dtype, x.shape, x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


class _Same:
    """Comparison by identity. Keeps the object alive, so that no other reuses its id."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.x is self.x

    def __hash__(self) -> int:
        return id(self.x)


def _contents(x: Any, depth: int = DEPTH, large: int = sys.maxsize, room: int = sys.maxsize) -> Any:
    """Comparison key of an attribute: values of numbers and strings, else identity and contents.

    Containers of more than ``large`` items, or more than ``room`` in total, compare by identity.
    """
    if (known := word(x)) is not None:
        return known
    held = advanced_to(x) if depth > 1 else None
    is_place = held is not None
    if not is_place:
        held = held_in(x) if depth else None
    if held is None or len(held) > large or len(held) > room:
        return _Same(x)
    inside = partial(_contents, depth=depth - 1, large=large, room=room // (len(held) or 1))
    if is_place:
        return _Same(x), tuple(map(inside, held))
    if isinstance(held, set):
        return frozenset(map(_Same, held))
    if isinstance(held, list):
        return tuple(map(inside, held))
    items = tuple((k if isinstance(k, str) else _Same(k), inside(v)) for k, v in held.items())
    return items if isinstance(x, dict) else (_Same(x), items)
