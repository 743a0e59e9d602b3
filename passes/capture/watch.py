"""The observer mode of a trace: every torch call of the forward passes a tuple of observers.

Export runs the forward once on tensors without data. It loses custom backwards, hooks, checkpoints
and Python's random draws, and cannot answer questions about values. An observer handles each.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoshard.frames import place_of
from autoshard.passes.capture.answers.conditions import Conditions
from autoshard.passes.capture.answers.known import Known
from autoshard.passes.capture.answers.loops import Learnt, Loops
from autoshard.passes.capture.answers.numbers import Numbers
from autoshard.passes.capture.answers.steering import Steering
from autoshard.passes.capture.exported.arguments import Example
from autoshard.passes.capture.observer import Answer, Call, Forward, Observer, Refusals
from autoshard.passes.capture.refusals.asked import Asked
from autoshard.passes.capture.refusals.default_dtype import DefaultDtype
from autoshard.passes.capture.refusals.draws import Draws
from autoshard.passes.capture.refusals.gradients import Gradients
from autoshard.passes.capture.refusals.outside import ReadsOutside
from autoshard.passes.capture.refusals.overlaps import Overlaps
from autoshard.passes.capture.repeats.observer import Repeats
from autoshard.passes.capture.substitutes.autocast import Autocast
from autoshard.passes.capture.substitutes.caches import Caches
from autoshard.passes.capture.substitutes.checkpoints import Checkpoints
from autoshard.passes.capture.substitutes.clamps import Clamps
from autoshard.passes.capture.substitutes.conversions import Conversions
from autoshard.passes.capture.substitutes.custom_functions import CustomFunctions
from autoshard.passes.capture.substitutes.experts import Experts
from autoshard.passes.capture.substitutes.flex import FlexAttention
from autoshard.passes.capture.substitutes.no_grad import NoGrad
from autoshard.passes.capture.substitutes.packed import PackedSequences
from autoshard.passes.capture.substitutes.rewritten import Rewritten
from autoshard.passes.capture.substitutes.scripted import Scripted

log = logging.getLogger("autoshard")


class Bodies(Observer):
    """Makes calls in bodies of higher-order ops: dynamo traces those, not later observers."""

    def before(self, call: Call) -> Answer | None:
        return Answer(call.make(), "it is in the body of a higher-order op") if call.frame is None else None


def concerns(
    training: bool, learnt: Learnt, numbers: Numbers, repeats: Repeats, example: Example | None = None
) -> tuple[Observer, ...]:
    """The observers of one trace, outermost first. ``example``: specialize on its integers.

    An outer observer sees a call first and its result last. Calls of repeated regions end at
    ``repeats``. Refusals precede answers, constant folding precedes truth values, and loops see
    calls as they are made. ``refusals`` exits first: its error precedes errors found at the end.
    """
    refusals, loops = Refusals(), Loops(learnt)
    steering = () if example is None else (Steering(example),)
    return (
        ReadsOutside(training, refusals), repeats, numbers, Draws(refusals), DefaultDtype(refusals), Caches(),
        PackedSequences(), Clamps(repeats), Gradients(training, refusals), CustomFunctions(training, refusals),
        Checkpoints(training, refusals),
        NoGrad(), Asked(refusals), Overlaps(refusals), Conversions(), Scripted(), FlexAttention(), Experts(), Autocast(),
        Bodies(),
        Known(bool(steering)), Conditions(loops), Rewritten(), *steering, loops, refusals,
    )  # fmt: skip


class Watch(TorchFunctionMode):
    """Torch-function mode around the traced forward; :meth:`active` surrounds the full trace."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        super().__init__()
        self.observers = observers
        self.befores = [o for o in observers if type(o).before is not Observer.before]
        self.afters = [o for o in reversed(observers) if type(o).after is not Observer.after]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = None if torch.compiler.is_dynamo_compiling() else sys._getframe(1)
        call = Call(func, args, kwargs or {}, frame)
        for observer in self.befores:
            found = observer.before(call)
            if isinstance(found, Answer):
                if frame is not None and found.because:
                    log.debug("%s: %s is answered: %s", place_of(frame), func, found.because)
                return found.value
            if found is not None:
                call = found
            if call.watched:
                with self:
                    return call.make()
        result = call.make()
        for observer in self.afters:
            result = observer.after(call, result)
        return result

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """All observers are active inside. A refusal that the model swallowed is raised on exit."""
        with contextlib.ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.around())
            yield

    def begin(self, forward: Forward) -> None:
        """The traced forward begins."""
        for observer in self.observers:
            observer.begin(forward)

    def end(self, output: Any) -> None:
        """The traced forward has returned ``output``."""
        for observer in self.observers:
            observer.end(output)

    def learn(self, error: Exception) -> bool:
        """Whether a new trace may avoid ``error``."""
        return any(observer.learn(error) for observer in self.observers)
