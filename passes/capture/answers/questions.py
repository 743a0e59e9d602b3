"""``if`` on the values of a tensor, where the answer does not matter: both programs are the same, or one is an error.

Libraries ask such questions to choose between kernels, or to check their inputs. A trace cannot know the answer, so
every sequence of answers is traced. A program that all of them give serves all inputs. As with ``torch._check``, a
sequence that ends in the model's own ``raise`` is left out: those inputs are errors in eager.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from autoshard.errors import CaptureError
from autoshard.frames import asker, is_users
from autoshard.passes.capture.exported.lengths import Open
from autoshard.passes.capture.observer import patched, replacing
from autoshard.passes.capture.refusals.explain import is_data_dependent

Exported = tuple[ExportedProgram, list[bool] | None, Mapping[str, Open]]
"""a program, which of its outputs need a gradient, and its inputs whose lengths are open"""

LIMIT = 16
"""traces, and questions in one trace"""


class Answers(TorchFunctionMode):
    """While active, questions of the model's code are answered: ``given`` in order, then no."""

    def __init__(self, given: tuple[bool, ...]) -> None:
        super().__init__()
        self.given = given
        self.asked = 0

    @property
    def all(self) -> tuple[bool, ...]:
        """Every answer so far."""
        return (*self.given, *[False] * self.asked)[: self.asked]

    def number(self, original: Callable[[torch.SymBool], bool]) -> Callable[[torch.SymBool], bool]:
        """``bool(number)``, which no mode for torch functions sees."""
        return lambda symbol: self.ask(lambda: original(symbol))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__bool__:
            return self.ask(lambda: func(*args))
        return func(*args, **(kwargs or {}))

    def ask(self, original: Callable[[], bool]) -> bool:
        """The answer that the trace knows, else the next one that is given."""
        try:
            return original()
        except Exception as error:
            if not is_data_dependent(error) or not _asked_by_the_model() or self.asked == LIMIT:
                raise
        self.asked += 1
        return self.all[-1]


def _asked_by_the_model() -> bool:
    frame = asker()
    return frame is not None and is_users(frame.f_code.co_filename)


def indifferent(trace: Callable[[], Exported]) -> Exported | None:
    """What ``trace()`` gives whatever the answers are, or None where they matter."""
    found: Exported | None = None
    pending: list[tuple[bool, ...]] = [()]
    for _ in range(LIMIT):
        given = pending.pop()
        try:
            answers = Answers(given)
            with answers, patched([replacing(torch.SymBool, "__bool__", answers.number)]):
                result = trace()
        except CaptureError as error:
            if not _is_the_models(error.__cause__):
                return None
        else:
            if found is not None and _key(result) != _key(found):
                return None
            found = found or result
        pending += [(*answers.all[:i], True) for i in range(len(given), answers.asked)]
        if not pending:
            return found
    return None


def _is_the_models(error: BaseException | None) -> bool:
    """Whether a ``raise`` or ``assert`` in the model's code made ``error``: eager would raise it too."""
    tb: TracebackType | None = error.__traceback__ if error is not None else None
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None or isinstance(error, CaptureError) or not is_users(tb.tb_frame.f_code.co_filename):
        return False
    at = {i.offset: i.opname for i in dis.get_instructions(tb.tb_frame.f_code)}
    return at.get(tb.tb_lasti) == "RAISE_VARARGS"


def _key(traced: Exported) -> Any:
    """Equal for programs that compute the same in the same way."""
    program, grads, _ = traced
    nodes = [(n.op, str(n.target), str(n.args), str(n.kwargs), str(n.meta.get("val"))) for n in program.graph.nodes]
    constants = {name: repr(c.tolist()) for name, c in program.constants.items() if isinstance(c, torch.Tensor)}
    return nodes, str(program.graph_signature), constants, grads
