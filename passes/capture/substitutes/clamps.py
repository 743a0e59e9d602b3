"""Parameters that a forward clamps in place before it reads them, behind autograd's back (Gemma 3n).

The trace reads them as they are: whoever runs the program clamps them first, each rank what it holds.
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
"""the key under which a program's graph module says which parameters are clamped"""
Bounds = tuple[float | None, float | None]
"""the least and the greatest that a value may be; None: there is none"""
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]


class Clamps(Observer):
    """Takes ``parameter.data.clamp_(low, high)`` out of the trace, of parameters that nothing has read before."""

    def __init__(self, repeats: Repeats) -> None:
        self.repeats = repeats
        self.numbers: dict[int, int] = {}
        """tensor → the number of the parameter that it is, or is the data of"""
        self.read: set[int] = set()
        self.aliases: list[Any] = []
        self.found: dict[int, Bounds] = {}

    def begin(self, forward: Forward) -> None:
        self.numbers = {id(p): n for n, p in enumerate(forward.parameters)}

    def before(self, call: Call) -> Answer | None:
        """A clamp is answered with what it clamps."""
        if call.func == _DATA and id(call.args[0]) in self.numbers:
            return self._data_of(call.args[0])
        numbers = {self.numbers[id(x)] for x in call.operands if id(x) in self.numbers}
        if call.func == torch.Tensor.clamp_ and (bounds := _bounds(call)) is not None and numbers:
            (number,) = numbers
            if number not in self.read and self.found.get(number, bounds) == bounds and not call.args[0].requires_grad:
                if self.repeats.members:  # copies of a module have parameters of their own
                    raise CaptureError("parameters are clamped in place: every module is traced")
                self.found[number] = bounds
                return Answer(call.args[0], "a parameter is clamped before the program runs")
        self.read |= numbers
        return None

    def _data_of(self, parameter: torch.Tensor) -> Answer:
        alias = parameter.detach()
        self.aliases.append(alias)  # its id stays its own
        self.numbers[id(alias)] = self.numbers[id(parameter)]
        return Answer(alias, "what .data reads is a detached alias, of which export loses track")


def clamped(observers: Iterable[Observer], model: nn.Module) -> dict[str, Bounds]:
    """Name of a parameter → its bounds, as a trace has found them."""
    names = [name for name, _ in model.named_parameters()]
    return {names[number]: bounds for o in observers if isinstance(o, Clamps) for number, bounds in o.found.items()}


def _bounds(call: Call) -> Bounds | None:
    """Those of a clamp that are numbers."""
    given = dict(zip(("min", "max"), call.args[1:], strict=False)) | call.kwargs
    low, high = given.pop("min", None), given.pop("max", None)
    plain = all(x is None or isinstance(x, int | float) for x in (low, high))
    return None if given or not plain or (low is None and high is None) else (low, high)
