"""Parameters that a forward clamps through ``.data`` before it reads them (Gemma 3n).

The trace reads them unclamped: whoever runs the program clamps first, each rank its shard.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from autoshard.errors import CaptureError
from autoshard.passes.capture.observer import Answer, Call, Forward, Observer
from autoshard.passes.capture.repeats.observer import Repeats

CLAMPED = "autoshard_clamped"
"""key in a program's meta: clamped parameters and their bounds"""
Bounds = tuple[float | None, float | None]
"""(minimum, maximum); None: unbounded"""
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class Clamps(Observer):
    """Removes ``parameter.data.clamp_(low, high)`` from the trace if nothing read it before."""

    def __init__(self, repeats: Repeats) -> None:
        self.repeats = repeats
        self.numbers: dict[int, int] = {}
        """id of a parameter or of its ``.data`` → number of the parameter"""
        self.read: set[int] = set()
        self.aliases: list[Any] = []
        self.found: dict[int, Bounds] = {}

    def begin(self, forward: Forward) -> None:
        self.numbers = {id(p): n for n, p in enumerate(forward.parameters)}

    def before(self, call: Call) -> Answer | None:
        """Answers a clamp with its operand."""
        if call.func == _DATA and id(call.args[0]) in self.numbers:
            return self._data_of(call.args[0])
        numbers = {self.numbers[id(x)] for x in call.operands if id(x) in self.numbers}
        if call.func == torch.Tensor.clamp_ and (bounds := _bounds(call)) is not None and numbers:
            (number,) = numbers
            if number not in self.read and self.found.get(number, bounds) == bounds and not call.args[0].requires_grad:
                if self.repeats.members:  # repeats of a region have other parameters
                    raise CaptureError("parameters are clamped in place: every module is traced")
                self.found[number] = bounds
                return Answer(call.args[0], "a parameter is clamped before the program runs")
        self.read |= numbers
        return None

    def _data_of(self, parameter: torch.Tensor) -> Answer:
        alias = parameter.detach()
        self.aliases.append(alias)  # keeps its id unique
        self.numbers[id(alias)] = self.numbers[id(parameter)]
        return Answer(alias, "what .data reads is a detached alias, of which export loses track")


def clamped(observers: Iterable[Observer], model: nn.Module) -> dict[str, Bounds]:
    """Name of a clamped parameter → its bounds."""
    names = [name for name, _ in model.named_parameters()]
    return {names[number]: bounds for o in observers if isinstance(o, Clamps) for number, bounds in o.found.items()}


def _bounds(call: Call) -> Bounds | None:
    """Bounds of a clamp if they are plain numbers, else None."""
    given = dict(zip(("min", "max"), call.args[1:], strict=False)) | call.kwargs
    low, high = given.pop("min", None), given.pop("max", None)
    plain = all(x is None or isinstance(x, int | float) for x in (low, high))
    return None if given or not plain or (low is None and high is None) else (low, high)
