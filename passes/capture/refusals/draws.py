"""Draws from Python's or NumPy's generator in a forward: refused, unless what is drawn decides nothing.

Layer dropout draws a number for every layer and compares it with a rate that is 0 most of the time.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import numpy as np
import torch

from autoshard.errors import CaptureError
from autoshard.passes.capture.observer import Observer, Patch, Refusals

UNIFORM = (
    (random, "random", "Python's random"), (random, "uniform", "Python's random"),
    (np.random, "random", "numpy's"), (np.random, "rand", "numpy's"), (np.random, "uniform", "numpy's"),
)  # fmt: skip
"""functions that draw a number from 0 to 1 when they are called without arguments, or with these bounds"""


class Draws(Observer):
    """Refuses them, and the torch generator's advance where export did not see the draw; puts the generators back."""

    def __init__(self, refuse: Refusals) -> None:
        self.refuse = refuse

    def patches(self) -> Iterable[Patch]:
        for module, name, generator in UNIFORM:
            yield module, name, _drawing(getattr(module, name), generator, self.refuse)

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        before = _states()
        try:
            with super().around():
                yield
            for name, state, now in zip(("Python's random", "numpy's", "torch's"), before, _states(), strict=True):
                if state != now:
                    raise CaptureError(_message(name))
        finally:
            _restore(before)


def _message(generator: str) -> str:
    return (
        f"the forward draws from or seeds {generator} generator outside of torch's random ops; the number would be a "
        "constant of the graph. Draw with torch (torch.rand), and seed outside the forward."
    )


def _drawing(original: Callable[..., Any], generator: str, refuse: Refusals) -> Callable[..., Any]:
    def draw(*args: Any, **kwargs: Any) -> Any:
        if args in ((), (0, 1)) and not kwargs:
            return Drawn(generator, refuse)
        return original(*args, **kwargs)

    return draw


def _states() -> tuple[Any, Any, Any]:
    """Of the generators of Python, NumPy and torch, comparable."""
    kind, keys, *rest = np.random.get_state()
    return random.getstate(), (kind, bytes(keys), *rest), bytes(torch.get_rng_state().numpy())  # type: ignore[arg-type]


def _restore(before: tuple[Any, Any, Any]) -> None:
    """Put the generators back to what :func:`_states` was."""
    python, (kind, keys, *rest), torch_state = before
    random.setstate(python)
    np.random.set_state((kind, np.frombuffer(keys, np.uint32), *rest))
    torch.set_rng_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))


class Drawn:
    """A number from 0 to 1 that is not known: comparisons say what holds for all of them, all else is refused."""

    def __init__(self, generator: str, refuse: Refusals) -> None:
        self.refuse, self.generator = refuse, generator

    def _used(self, *args: Any) -> NoReturn:
        raise self.refuse(_message(self.generator))

    def _less(self, other: Any) -> bool:
        """Whether it is less than ``other``; 0 and 1 themselves are as good as never drawn."""
        if isinstance(other, int | float) and not 0 < other < 1:
            return other >= 1
        raise self.refuse(_message(self.generator))

    def _greater(self, other: Any) -> bool:
        return not self._less(other)

    __lt__ = __le__ = _less
    __gt__ = __ge__ = _greater
    __eq__ = __ne__ = __bool__ = __float__ = __int__ = __index__ = __round__ = __neg__ = __abs__ = _used
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __pow__ = _used
    __rpow__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __array__ = __str__ = __repr__ = __format__ = _used
    __hash__ = None  # type: ignore[assignment]
