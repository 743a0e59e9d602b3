"""Retries of a trace that asks about tensor values: with all answers, then the example's. If all
answers (but those that end in the model's own ``raise``) give the same program, it serves all
inputs. Libraries ask to choose kernels or to check inputs."""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from autoshard.errors import CaptureError
from autoshard.frames import calling_frame, is_users_file
from autoshard.passes.capture.exported.snapshots import AttributeWriteError
from autoshard.passes.capture.exported.symbolic_shapes import DynamicInput
from autoshard.passes.capture.observer import patched, replacement_patch
from autoshard.passes.capture.refusals.errors import is_data_dependent

TracedProgram = tuple[ExportedProgram, list[bool] | None, Mapping[str, DynamicInput]]
"""(program, gradient flag per output tensor, path → dynamic input)"""

MAX_ANSWERS = 16
"""most traces, and most questions per trace"""


class ScriptedAnswers(TorchFunctionMode):
    """Answers the model's questions about tensor truth: ``given`` in order, then False."""

    def __init__(self, given: tuple[bool, ...]) -> None:
        super().__init__()
        self.given = given
        self.asked = 0

    @property
    def all(self) -> tuple[bool, ...]:
        """All answers so far."""
        return (*self.given, *[False] * self.asked)[: self.asked]

    def number(self, original: Callable[[torch.SymBool], bool]) -> Callable[[torch.SymBool], bool]:
        """Wrapper of ``bool(number)``, which function modes do not see."""
        return lambda symbol: self.ask(lambda: original(symbol))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__bool__:
            return self.ask(lambda: func(*args))
        return func(*args, **(kwargs or {}))

    def ask(self, original: Callable[[], bool]) -> bool:
        """The answer if the trace knows it, else the next given one."""
        try:
            return original()
        except Exception as error:
            if not is_data_dependent(error) or not _is_model_asking() or self.asked == MAX_ANSWERS:
                raise
        self.asked += 1
        return self.all[-1]


def _is_model_asking() -> bool:
    frame = calling_frame()
    return frame is not None and is_users_file(frame.f_code.co_filename)


def answer_independent(trace: Callable[[], TracedProgram]) -> TracedProgram | None:
    """The program that ``trace()`` returns for all answers, or None if they matter."""
    found: TracedProgram | None = None
    pending: list[tuple[bool, ...]] = [()]
    for _ in range(MAX_ANSWERS):
        given = pending.pop()
        try:
            answers = ScriptedAnswers(given)
            with answers, patched([replacement_patch(torch.SymBool, "__bool__", answers.number)]):
                result = trace()
        except CaptureError as error:
            if not _is_model_raise(error.__cause__):
                return None
        else:
            if found is not None and _program_key(result) != _program_key(found):
                return None
            found = found or result
        pending += [(*answers.all[:i], True) for i in range(len(given), answers.asked)]
        if not pending:
            return found
    return None


def _is_model_raise(error: BaseException | None) -> bool:
    """Whether ``error`` comes from a ``raise`` or ``assert`` in the model's code, as in eager."""
    tb: TracebackType | None = error.__traceback__ if error is not None else None
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None or isinstance(error, CaptureError) or not is_users_file(tb.tb_frame.f_code.co_filename):
        return False
    at = {i.offset: i.opname for i in dis.get_instructions(tb.tb_frame.f_code)}
    return at.get(tb.tb_lasti) == "RAISE_VARARGS"


def _program_key(traced: TracedProgram) -> Any:
    """Comparison key of a program: nodes, signature, constants, gradient flags."""
    program, grads, _ = traced
    nodes = [(n.op, str(n.target), str(n.args), str(n.kwargs), str(n.meta.get("val"))) for n in program.graph.nodes]
    constants = {name: repr(c.tolist()) for name, c in program.constants.items() if isinstance(c, Tensor)}
    return nodes, str(program.graph_signature), constants, grads


@dataclass(frozen=True)
class TraceRetry:
    """A fallback for a failed trace."""

    applies: Callable[[CaptureError], bool]
    """whether it may help against the first trace's error"""
    export: Callable[[], TracedProgram | None]
    """traces; None: no program"""
    says: str
    """prefix of its error message"""


def trace_with_retries(first: Callable[[], TracedProgram], *retries: TraceRetry) -> TracedProgram:
    """The program of ``first``, else of the first of ``retries`` that applies and succeeds."""
    try:
        return first()
    except AttributeWriteError:
        raise
    except CaptureError as error:
        failed = error
    for retry in retries:
        try:
            found = retry.export() if retry.applies(failed) else None
        except CaptureError as error:
            if str(error) == str(failed):
                continue
            raise CaptureError(f"{failed}\n{retry.says}: {error}") from error
        if found is not None:
            return found
    raise failed


def is_value_question(error: CaptureError) -> bool:
    """Whether ``error`` arose from a question about a tensor's value."""
    return is_data_dependent(error.__cause__ or error)
