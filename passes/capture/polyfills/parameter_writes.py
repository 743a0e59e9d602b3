"""Parameters changed by the forward: clamps through ``.data`` (Gemma 3n), and ``module.to(...)``.
The trace reads clamped parameters as they are; whoever runs the program clamps them first, each
rank its shard. Conversions run in every call, since export cannot replace a parameter."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

from autoshard.errors import CaptureError
from autoshard.passes.capture.observer import ObservedCall, Observer, ObserverAnswer, Patch, TracedForward
from autoshard.passes.capture.shared_regions.observer import SharedRegions

CLAMPED_KEY = "autoshard_clamped"
"""key in a program's meta: clamped parameters and their bounds"""
ClampBounds = tuple[float | None, float | None]
"""(minimum, maximum); None: unbounded"""
_DATA_GETTER = Tensor.data.__get__  # type: ignore[attr-defined]


class ParameterClamps(Observer):
    """Removes ``parameter.data.clamp_(low, high)`` from the trace if nothing read it before."""

    def __init__(self, repeats: SharedRegions) -> None:
        self.repeats = repeats
        self.numbers: dict[int, int] = {}
        """id of a parameter or of its ``.data`` → number of the parameter"""
        self.read: set[int] = set()
        self.aliases: list[Any] = []
        self.found: dict[int, ClampBounds] = {}

    def begin(self, forward: TracedForward) -> None:
        self.numbers = {id(p): n for n, p in enumerate(forward.parameters)}

    def before(self, call: ObservedCall) -> ObserverAnswer | None:
        """Answers a clamp with its operand."""
        if call.func == _DATA_GETTER and id(call.args[0]) in self.numbers:
            return self._data_of(call.args[0])
        numbers = {self.numbers[id(x)] for x in call.operands if id(x) in self.numbers}
        if call.func == Tensor.clamp_ and (bounds := _clamp_bounds(call)) is not None and numbers:
            (number,) = numbers
            if number not in self.read and self.found.get(number, bounds) == bounds and not call.args[0].requires_grad:
                if self.repeats.members:  # repeats of a region have other parameters
                    raise CaptureError("parameters are clamped in place: every module is traced")
                self.found[number] = bounds
                return ObserverAnswer(call.args[0], "a parameter is clamped before the program runs")
        self.read |= numbers
        return None

    def _data_of(self, parameter: Tensor) -> ObserverAnswer:
        alias = parameter.detach()
        self.aliases.append(alias)  # keeps its id unique
        self.numbers[id(alias)] = self.numbers[id(parameter)]
        return ObserverAnswer(alias, ".data gives a detached alias that export does not track")


def clamped_parameters(observers: Iterable[Observer], model: nn.Module) -> dict[str, ClampBounds]:
    """Name of a clamped parameter → its bounds."""
    names = [name for name, _ in model.named_parameters()]
    return {
        names[number]: bounds for o in observers if isinstance(o, ParameterClamps) for number, bounds in o.found.items()
    }


def _clamp_bounds(call: ObservedCall) -> ClampBounds | None:
    """Bounds of a clamp if they are plain numbers, else None."""
    given = dict(zip(("min", "max"), call.args[1:], strict=False)) | call.kwargs
    low, high = given.pop("min", None), given.pop("max", None)
    plain = all(x is None or isinstance(x, int | float) for x in (low, high))
    return None if given or not plain or (low is None and high is None) else (low, high)


log = logging.getLogger("autoshard")


class ModuleConversions(Observer):
    """Converts parameters and buffers per call. Tensor conversions are traced as usual."""

    def patches(self) -> Iterable[Patch]:
        yield nn.Module, "_apply", _convert_per_call


def _convert_per_call(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    for module in self.modules() if recurse else (self,):
        for tensors in (module._parameters, module._buffers):
            for name, before in [(n, t) for n, t in tensors.items() if t is not None]:
                after = fn(before)
                if (before.dtype, before.device) == (after.dtype, after.device):
                    continue
                log.warning(
                    "the forward converts %r of a %s to %s. The compiled module repeats this in every call and keeps it in %s. "
                    "To store it converted, convert the module before compiling.",
                    name, type(module).__name__, after.dtype, before.dtype,
                )  # fmt: skip
                tensors[name] = after  # type: ignore[assignment]
    return self
