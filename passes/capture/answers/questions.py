"""``if`` on tensor values whose answer does not matter: branches give one program, or one raises.

Libraries branch on values to choose kernels or to check inputs. Every answer is traced.
If all give one program, it serves all inputs. A sequence that ends in the model's own ``raise`` is
ignored, as with ``torch._check``: those inputs are errors in eager.
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
"""(program, gradient flag per output tensor, path → dynamic input)"""

LIMIT = 16
"""most traces, and most questions per trace"""


class Answers(TorchFunctionMode):
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
        if func is torch.Tensor.__bool__:
            return self.ask(lambda: func(*args))
        return func(*args, **(kwargs or {}))

    def ask(self, original: Callable[[], bool]) -> bool:
        """The answer if the trace knows it, else the next given one."""
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
    """The program that ``trace()`` returns for all answers, or None if they matter."""
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
    """Whether ``error`` comes from a ``raise`` or ``assert`` in the model's code, as in eager."""
    tb: TracebackType | None = error.__traceback__ if error is not None else None
    while tb is not None and tb.tb_next is not None:
        tb = tb.tb_next
    if tb is None or isinstance(error, CaptureError) or not is_users(tb.tb_frame.f_code.co_filename):
        return False
    at = {i.offset: i.opname for i in dis.get_instructions(tb.tb_frame.f_code)}
    return at.get(tb.tb_lasti) == "RAISE_VARARGS"


def _key(traced: Exported) -> Any:
    """Comparison key of a program: nodes, signature, constants, gradient flags."""
    program, grads, _ = traced
    nodes = [(n.op, str(n.target), str(n.args), str(n.kwargs), str(n.meta.get("val"))) for n in program.graph.nodes]
    constants = {name: repr(c.tolist()) for name, c in program.constants.items() if isinstance(c, torch.Tensor)}
    return nodes, str(program.graph_signature), constants, grads
