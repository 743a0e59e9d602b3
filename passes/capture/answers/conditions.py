"""``bool(tensor)`` if one branch handles errors: the other is traced, with a guard in the graph.

Libraries check arguments (``if labels.max() >= n: raise``, ``assert``) and overflow (``if not
torch.isfinite(x).all(): x = x.clamp(…)``). A trace without data has no truth value for either.
"""

from __future__ import annotations

import ast
import dis
import functools
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.frames import text_of
from autoshard.passes.capture.answers import checks
from autoshard.passes.capture.answers.loops import Loops
from autoshard.passes.capture.observer import Answer, Call, Observer, Patch, replacing

_UNIFORM = {
    torch.isfinite: True, torch.Tensor.isfinite: True, torch.isnan: False, torch.Tensor.isnan: False,
    torch.isinf: False, torch.Tensor.isinf: False,
}  # fmt: skip
"""function → its result's elements if all numbers are finite"""
_SAME = (torch.all, torch.Tensor.all, torch.any, torch.Tensor.any)
_NOT = (
    torch.logical_not,
    torch.Tensor.logical_not,
    torch.bitwise_not,
    torch.Tensor.bitwise_not,
    torch.Tensor.__invert__,
)
_OR = (torch.logical_or, torch.Tensor.logical_or, torch.bitwise_or, torch.Tensor.bitwise_or, torch.Tensor.__or__)
_AND = (torch.logical_and, torch.Tensor.logical_and, torch.bitwise_and, torch.Tensor.bitwise_and, torch.Tensor.__and__)


class Conditions(Observer):
    """Tracks tests for inf and NaN through a trace, and answers ``bool(tensor)``.

    Not in ``loops`` of unknown length, where the guard would apply to every iteration.
    """

    def __init__(self, loops: Loops) -> None:
        self.loops = loops
        self.uniform: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """tensor → value of all its elements if the tested numbers are finite"""

    def patches(self) -> Iterable[Patch]:
        yield replacing(torch.SymBool, "__bool__", self._number)
        yield torch, "_check_tensor_all_with", _check_all

    def before(self, call: Call) -> Answer | None:
        """The answer to ``bool(tensor)``, with a guard in the graph."""
        if call.func != torch.Tensor.__bool__ or self.loops.running or call.frame is None:
            return None
        tensor, frame = call.args[0], call.frame
        if (uniform := self.uniform.get(tensor)) is not None:
            answer = Answer(uniform, checks.FINITE)
        elif (wanted := unless_raised(frame)) is not None:
            answer = Answer(wanted, checks.FAILS)
        else:
            return None
        checks.holds(tensor if answer.value else tensor.logical_not(), f"{answer.because}: {text_of(frame)}", frame)
        return answer

    def after(self, call: Call, result: Any) -> Any:
        if isinstance(result, torch.Tensor) and result.dtype == torch.bool:
            self._follow(call.func, call, result)
        return result

    def _follow(self, func: Any, call: Call, result: torch.Tensor) -> None:
        if func in _UNIFORM:
            self.uniform[result] = _UNIFORM[func]
            return
        known = [self.uniform.get(x) for x in call.operands]
        if not known or None in known:
            return
        if func in _SAME:
            self.uniform[result] = bool(known[0])
        elif func in _NOT:
            self.uniform[result] = not known[0]
        elif func in _OR:
            self.uniform[result] = any(known)
        elif func in _AND:
            self.uniform[result] = all(known)

    def _number(self, original: Callable[[torch.SymBool], bool]) -> Callable[[torch.SymBool], bool]:
        """Wrapper of ``bool(number)``, which function modes do not see."""

        def truth(number: torch.SymBool) -> bool:
            try:
                return original(number)
            except GuardOnDataDependentSymNode:
                answer = None if self.loops.running else _truth_of_number(number, sys._getframe(1))
                if answer is None:
                    raise
                return bool(answer.value)

        return truth


def _check_all(kind: type, condition: torch.Tensor, message: Callable[[], str] | None = None) -> None:
    checks.holds(condition.all(), str(message() if message else checks.FAILS))


def _truth_of_number(number: torch.SymBool, frame: FrameType) -> Answer | None:
    """The answer to ``bool(number)`` of a data-dependent number, with a guard.

    Comparisons of a length with 0, 1 or 2 are answered as for a long one.
    """
    if get_proxy_mode() is None:  # inside an op: the graph would miss the guard
        return None
    if (wanted := unless_raised(frame)) is not None:
        answer = Answer(wanted, checks.FAILS)
    elif (many := _of_many(number)) is not None:
        answer = Answer(many, checks.LONG)
    else:
        return None
    holds = number if answer.value else torch.sym_not(number)
    checks.holds(holds, f"{answer.because}: {text_of(frame)}", frame)
    if answer.because == checks.LONG:
        checks.assume(holds)  # for a tensor's number this would fix a constant
    return answer


def _of_many(number: torch.SymBool) -> bool | None:
    """Truth of ``number`` for long lengths if it compares one with 0, 1 or 2, else None."""
    expression, shapes = number.node.expr, number.node.shape_env
    symbols = expression.free_symbols
    small = expression.is_Relational and any(side in (0, 1, 2) for side in expression.args)
    if not small or len(symbols) != 1 or not symbols <= shapes.size_like:
        return None
    values = {bool(expression.xreplace(dict.fromkeys(symbols, n))) for n in (2**10, 2**20 + 1, 2**30 + 3)}
    return values.pop() if len(values) == 1 else None


def unless_raised(frame: FrameType) -> bool | None:
    """The truth value that avoids the error if ``frame`` evaluates an assert or guards a raise."""
    line = frame.f_lineno
    tests = [
        (node.test, isinstance(node, ast.Assert))
        for node in _checks(frame.f_code.co_filename)
        if node.test.lineno <= line <= (node.test.end_lineno or line)
    ]
    if not tests:
        return None
    leaves = list(_leaves(*tests[-1]))
    if (span := _operand(frame.f_code, frame.f_lasti)) is not None:
        leaves = [(leaf, wanted) for leaf, wanted in leaves if _covers(leaf, span)]
    wanted = {wanted for _, wanted in leaves}
    return wanted.pop() if len(wanted) == 1 else None


@functools.cache
def _checks(file: str) -> tuple[ast.Assert | ast.If, ...]:
    """Every assert in ``file``, and every ``if`` whose body ends in ``raise``, without ``else``."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Assert | ast.If)]
    return tuple(n for n in found if isinstance(n, ast.Assert) or (isinstance(n.body[-1], ast.Raise) and not n.orelse))


def _leaves(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """(operand of and, or, not; its truth value for ``test`` to be ``wanted``), recursively."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _leaves(value, wanted)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _leaves(test.operand, not wanted)
    else:
        yield test, wanted


Span = tuple[tuple[int, int], tuple[int, int]]
"""((line, column) of the start, (line, column) of the end) in source text"""


def _operand(code: CodeType, offset: int) -> Span | None:
    """Source span of the value tested by the instruction at ``offset``; None before Python 3.11."""
    before = [i for i in dis.get_instructions(code) if i.offset < offset and i.opname != "EXTENDED_ARG"]
    place = getattr(before[-1], "positions", None) if before else None
    if place is None or None in place:
        return None
    return (place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)


def _covers(node: ast.expr, span: Span) -> bool:
    start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return start <= span[0] and span[1] <= end
