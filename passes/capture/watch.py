"""The observer mode of a trace: every torch call of the forward passes a tuple of observers, one
per thing that export loses or cannot answer: custom backwards, hooks, checkpoints, Python's
random draws, questions about values."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from autoshard.frames import frame_location_text
from autoshard.passes.capture.exported.example_inputs import Example
from autoshard.passes.capture.observer import ObservedCall, Observer, ObserverAnswer, RefusalLog, TracedForward
from autoshard.passes.capture.polyfills.autograd_functions import CustomAutogradFunctions
from autoshard.passes.capture.polyfills.autograd_regions import ActivationCheckpoints, GradModeMarks
from autoshard.passes.capture.polyfills.mixed_precision import AutocastDecompositions
from autoshard.passes.capture.polyfills.moe_modules import TransformersExperts
from autoshard.passes.capture.polyfills.packed_sequences import PackedSequences
from autoshard.passes.capture.polyfills.parameter_writes import ModuleConversions, ParameterClamps
from autoshard.passes.capture.polyfills.torch_functions import FlexAttention, Polyfills
from autoshard.passes.capture.polyfills.wrapped_functions import LruCaches, ScriptFunctions
from autoshard.passes.capture.refusals.aliasing import OverlappingWrites
from autoshard.passes.capture.refusals.random_draws import NonTorchDraws
from autoshard.passes.capture.refusals.untraceable_calls import (
    AutogradSideEffects,
    DefaultDtypeChanges,
    OutsideTensors,
    TensorIdentityQueries,
)
from autoshard.passes.capture.shared_regions.observer import SharedRegions
from autoshard.passes.capture.specialization.known_values import ConstantFolding, IntegerSpecialization
from autoshard.passes.capture.specialization.loops import LoopFindings, NonzeroLoops
from autoshard.passes.capture.specialization.scalars import ScalarConversions, TruthValues

log = logging.getLogger("autoshard")


class HigherOrderBodies(Observer):
    """Makes calls in bodies of higher-order ops: dynamo traces those, not later observers."""

    def before(self, call: ObservedCall) -> ObserverAnswer | None:
        return ObserverAnswer(call.make(), "it is inside a higher-order op") if call.frame is None else None


def trace_observers(
    training: bool,
    findings: LoopFindings,
    numbers: ScalarConversions,
    repeats: SharedRegions,
    example: Example | None = None,
) -> tuple[Observer, ...]:
    """The observers of one trace, outermost first: an outer one sees a call first and its result
    last. ``example``: specialize on its integers. Calls of repeated regions end at ``repeats``.
    Refusals precede answers, and ``refusals`` exits first: its error precedes errors found at
    the end."""
    refusals, loops = RefusalLog(), NonzeroLoops(findings)
    steering = () if example is None else (IntegerSpecialization(example),)
    return (
        OutsideTensors(training, refusals), repeats, numbers, NonTorchDraws(refusals), DefaultDtypeChanges(refusals),
        LruCaches(), PackedSequences(), ParameterClamps(repeats), AutogradSideEffects(training, refusals),
        CustomAutogradFunctions(training, refusals), ActivationCheckpoints(training, refusals), GradModeMarks(),
        TensorIdentityQueries(refusals), OverlappingWrites(refusals), ModuleConversions(), ScriptFunctions(), FlexAttention(),
        TransformersExperts(), AutocastDecompositions(), HigherOrderBodies(), ConstantFolding(bool(steering)),
        TruthValues(loops), Polyfills(), *steering, loops, refusals,
    )  # fmt: skip


class ObserverMode(TorchFunctionMode):
    """Torch-function mode around the traced forward; :meth:`active` surrounds the full trace."""

    def __init__(self, observers: tuple[Observer, ...]) -> None:
        super().__init__()
        self.observers = observers
        self.befores = [o for o in observers if type(o).before is not Observer.before]
        self.afters = [o for o in reversed(observers) if type(o).after is not Observer.after]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = None if torch.compiler.is_dynamo_compiling() else sys._getframe(1)
        call = ObservedCall(func, args, kwargs or {}, frame)
        for observer in self.befores:
            found = observer.before(call)
            if isinstance(found, ObserverAnswer):
                if frame is not None and found.reason:
                    log.debug("%s: %s is answered: %s", frame_location_text(frame), func, found.reason)
                return found.value
            if found is not None:
                call = found
            if call.observes_inner:
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

    def begin(self, forward: TracedForward) -> None:
        for observer in self.observers:
            observer.begin(forward)

    def end(self, output: Any) -> None:
        """The traced forward has returned ``output``."""
        for observer in self.observers:
            observer.end(output)

    def learn(self, error: Exception) -> bool:
        """Whether a new trace may avoid ``error``."""
        return any(observer.learn(error) for observer in self.observers)
