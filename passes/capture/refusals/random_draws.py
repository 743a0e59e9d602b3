"""Random draws outside torch (Python's, NumPy's, the system's) in a forward are refused.

Allowed: a uniform draw compared with 0 or 1, as in LayerDrop at its usual rate of 0.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import CellType, FunctionType
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import nn

from autoshard.errors import CaptureError
from autoshard.frames import frames_outwards, is_autoshard_file, is_standard_library_file, is_users_file
from autoshard.passes.capture.exported.snapshots import items_or_attributes
from autoshard.passes.capture.observer import ObservedCall, Observer, Patch, RefusalLog, replacement_patch

UNIFORM_DRAWS = (
    (random, "random", "Python's random"), (random, "uniform", "Python's random"),
    (np.random, "random", "numpy's"), (np.random, "rand", "numpy's"), (np.random, "uniform", "numpy's"),
)  # fmt: skip
"""(module, function, generator): draws from [0, 1] without arguments or with these bounds"""

ENTROPY_SOURCES = ((os, "urandom"), (random, "_urandom"))
"""functions behind ``uuid``, ``secrets`` and ``random.SystemRandom``"""


class NonTorchDraws(Observer):
    """Refuses draws outside torch, and torch draws that export missed; restores the generators."""

    def __init__(self, refuse: RefusalLog) -> None:
        self.refuse = refuse

    def before(self, call: ObservedCall) -> ObservedCall | None:
        """Drop ``generator=None``: with a generator argument, ops are other overloads."""
        if call.kwargs.get("generator", ...) is not None:
            return None
        return replace(call, kwargs={name: x for name, x in call.kwargs.items() if name != "generator"})

    def patches(self) -> Iterable[Patch]:
        for module, name, generator in UNIFORM_DRAWS:
            yield module, name, _returning_unknown(getattr(module, name), generator, self.refuse)
        yield replacement_patch(np.random, "default_rng", lambda make: _requiring_seed(make, 0, "a numpy", self.refuse))
        yield replacement_patch(
            random.Random, "__init__", lambda init: _requiring_seed(init, 1, "a Python", self.refuse)
        )
        for module, name in ENTROPY_SOURCES:
            yield replacement_patch(module, name, lambda read: _refusing_entropy(read, self.refuse))

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        before = _global_generator_states()
        try:
            with super().around():
                yield
            for name, state, now in zip(
                ("Python's random", "numpy's", "torch's"), before, _global_generator_states(), strict=True
            ):
                if state != now:
                    raise CaptureError(_draw_refusal(name))
        finally:
            _restore_generators(before)


@contextlib.contextmanager
def model_generators_unused(model: nn.Module) -> Iterator[None]:
    """Refuse advances of generators in the model or its code; restore the generators."""
    before = [(name, x, own, own.read(x)) for name, x, own in _model_generators(model)]
    drawn: list[str] = []
    try:
        yield
    finally:
        for name, x, own, state in before:
            if pickle.dumps(own.read(x)) != pickle.dumps(state):
                drawn.append(name)
                own.write(x, state)
    if drawn:
        raise CaptureError(_draw_refusal(drawn[0]))


class _GeneratorAccess(NamedTuple):
    """Functions that read and write the state of a generator."""

    read: Callable[[Any], Any]
    write: Callable[[Any, Any], None]


_GENERATOR_ACCESS_BY_CLASS = {
    random.Random: _GeneratorAccess(random.Random.getstate, random.Random.setstate),
    np.random.RandomState: _GeneratorAccess(np.random.RandomState.get_state, np.random.RandomState.set_state),
    np.random.Generator: _GeneratorAccess(
        lambda x: copy.deepcopy(x.bit_generator.state), lambda x, state: setattr(x.bit_generator, "state", state)
    ),
}
_GENERATOR_FREE_TYPES = (bool, int, float, complex, str, bytes, type(None), random.SystemRandom)
_MAX_SEARCHED_OBJECTS = 10_000
"""most objects searched for generators"""


def _access_for(x: Any) -> _GeneratorAccess | None:
    return next((own for kind, own in _GENERATOR_ACCESS_BY_CLASS.items() if isinstance(x, kind)), None)


def _model_generators(model: nn.Module) -> Iterator[tuple[str, Any, _GeneratorAccess]]:
    """(holder, generator, access) in attributes of the model, globals and closures of its code."""
    seen = {id(random._inst), id(np.random.mtrand._rand)}
    todo: list[tuple[str, Any]] = [(f"{type(m).__name__}'s own", x) for m in model.modules() for x in vars(m).values()]
    for kind in {type(m) for m in model.modules()}:
        if not kind.__module__.startswith("torch."):
            todo += [(f"{kind.__name__}'s own", f) for f in vars(kind).values()]
    while todo and len(seen) < _MAX_SEARCHED_OBJECTS:
        where, x = todo.pop()
        if id(x) in seen or isinstance(x, (torch.Tensor, nn.Module, type, *_GENERATOR_FREE_TYPES)):
            continue
        seen.add(id(x))
        if (own := _access_for(x)) is not None:
            yield where, x, own
        elif isinstance(x, FunctionType):
            todo += [(where, cell.cell_contents) for cell in x.__closure__ or () if _is_filled_cell(cell)]
            todo += [(where, value) for value in x.__globals__.values() if _access_for(value) is not None]
        elif (held := items_or_attributes(x)) is not None:
            todo += [(where, value) for value in (held.values() if isinstance(held, dict) else held)]


def _is_filled_cell(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # empty cell
        return False


def _draw_refusal(generator: str) -> str:
    return (
        f"the forward draws from or seeds {generator} generator outside torch's random ops, so the number "
        "would be a constant of the graph. Draw with torch (torch.rand), and seed outside the forward."
    )


def _returning_unknown(original: Callable[..., Any], generator: str, refuse: RefusalLog) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        if args in ((), (0, 1)) and not kwargs:
            return UnknownDraw(generator, refuse)
        return original(*args, **kwargs)

    return draw


def _requiring_seed(make: Callable[..., Any], seed: int, generator: str, refuse: RefusalLog) -> Callable[..., Any]:
    """``make``, refusing generators without a seed (argument number ``seed``) from user code."""

    def made(*args: Any, **kwargs: Any) -> Any:
        if (*args[seed:], *kwargs.values(), None)[0] is None and is_users_file(sys._getframe(1).f_code.co_filename):
            raise refuse(_draw_refusal(generator))
        return make(*args, **kwargs)

    return made


def _refusing_entropy(read: Callable[[int], bytes], refuse: RefusalLog) -> Callable[[int], bytes]:
    """``read``, refused if user code calls it, directly or through Python's library."""

    def reading(count: int) -> bytes:
        files = (f.f_code.co_filename for f in frames_outwards())
        if is_users_file(
            next((file for file in files if not (is_standard_library_file(file) or is_autoshard_file(file))), "")
        ):
            raise refuse(_draw_refusal("the system's"))
        return read(count)

    return reading


def _global_generator_states() -> tuple[Any, Any, Any]:
    """Comparable states of the global generators of Python, NumPy and torch."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, bytes(keys), *rest), bytes(torch.get_rng_state().numpy())  # type: ignore[arg-type]


def _restore_generators(before: tuple[Any, Any, Any]) -> None:
    """Restore the global generators to ``before``, a result of :func:`_global_generator_states`."""
    python, (kind, keys, *rest), torch_state = before
    random.setstate(python)
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))


class UnknownDraw:
    """An unknown number in [0, 1]. Allows only comparisons with one outcome for all of [0, 1]."""

    def __init__(self, generator: str, refuse: RefusalLog) -> None:
        self.refuse, self.generator = refuse, generator

    def _used(self, *args: Any) -> NoReturn:
        raise self.refuse(_draw_refusal(self.generator))

    def _less(self, other: Any) -> bool:
        """Whether it is less than ``other``, ignoring that 0 or 1 itself may be drawn."""
        if isinstance(other, int | float) and not 0 < other < 1:
            return other >= 1
        raise self.refuse(_draw_refusal(self.generator))

    def _greater(self, other: Any) -> bool:
        return not self._less(other)

    __lt__ = __le__ = _less
    __gt__ = __ge__ = _greater
    __eq__ = __ne__ = __bool__ = __float__ = __int__ = __index__ = __round__ = __neg__ = __abs__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _used
    __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __array__ = __str__ = __repr__ = __format__ = _used
    __hash__ = None  # type: ignore[assignment]
