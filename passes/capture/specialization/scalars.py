"""Python scalars of tensors in a trace. ``int`` and ``float`` must return plain numbers, so the
calling function is traced again with ``item()``, which stays symbolic. ``bool`` is answered,
with a guard in the graph, where one branch handles errors: checks that raise, and tests for
overflow (``if not torch.isfinite(x).all()``)."""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import gc
import inspect
import linecache
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.frames import is_users_file, source_line, traceback_frames
from autoshard.passes.capture.observer import (
    GUARD_MODEL_CHECK,
    ObservedCall,
    Observer,
    ObserverAnswer,
    Patch,
    guard_true,
    replacement_patch,
)
from autoshard.passes.capture.refusals.errors import is_data_dependent
from autoshard.passes.capture.specialization.loops import NonzeroLoops
from autoshard.runtime.operations.checks import TOO_SHORT
from autoshard.torch_private.ops import check


class _ScalarType(type):
    """Stand-in for ``int`` or ``float``; symbolic numbers are instances, too."""

    original: type
    symbol: type
    read: Callable[[Any], Any]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], Tensor | torch.SymInt | torch.SymFloat):
            return cls.read(args[0].item() if isinstance(args[0], Tensor) else args[0])
        return cls.original(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.original | cls.symbol)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.original)

    def __eq__(cls, other: object) -> bool:
        return other is cls.original or other is cls

    def __hash__(cls) -> int:
        return hash(cls.original)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.original, name)


class _SymbolicInt(metaclass=_ScalarType):
    original, symbol, read = int, torch.SymInt, staticmethod(torch.sym_int)


class _SymbolicFloat(metaclass=_ScalarType):
    original, symbol, read = float, torch.SymFloat, staticmethod(torch.sym_float)


_SCALAR_PREFIX = "_autoshard_"
SCALAR_STAND_INS: dict[str, _ScalarType] = {"int": _SymbolicInt, "float": _SymbolicFloat}


@dataclass
class ScalarConversions(Observer):
    """Functions in which a trace needed a tensor as an ``int`` or ``float``."""

    functions_by_code: dict[CodeType, tuple[dict[str, Any], list[FunctionType]]] = field(default_factory=dict)
    """code → (its globals, functions that run it)"""

    def learn(self, error: BaseException | None) -> bool:
        """Whether ``error`` revealed a new function, so that another trace may avoid it."""
        known = len(self.functions_by_code)
        while error is not None:
            frames = [f for f, _ in traceback_frames(error.__traceback__) if _is_model_code(f.f_code.co_filename)]
            if (
                frames
                and is_data_dependent(error)
                and not SCALAR_STAND_INS.keys().isdisjoint(frames[-1].f_code.co_names)
            ):
                self.functions_by_code[frames[-1].f_code] = frames[-1].f_globals, _functions_running(frames[-1])
            error = error.__context__
        return len(self.functions_by_code) > known

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """While inside, ``int`` and ``float`` read tensors in the known functions."""
        with contextlib.ExitStack() as stack:
            for code, (names, functions) in self.functions_by_code.items():
                if _has_method_named_alike(code):  # x.float(): names share one table
                    for name, stand_in in SCALAR_STAND_INS.items():
                        if name not in names:
                            names[name] = stand_in
                            stack.callback(names.pop, name, None)
                    continue
                renamed = tuple(_SCALAR_PREFIX + n if n in SCALAR_STAND_INS else n for n in code.co_names)
                for function in functions:
                    function.__code__ = code.replace(co_names=renamed)
                    stack.callback(setattr, function, "__code__", code)
                for name, stand_in in SCALAR_STAND_INS.items():
                    names[_SCALAR_PREFIX + name] = stand_in
                    stack.callback(names.pop, _SCALAR_PREFIX + name, None)
            yield


def _is_model_code(filename: str) -> bool:
    """Whether ``int(tensor)`` in this file counts as the model's, also in torch's batch norm."""
    return is_users_file(filename) or filename == inspect.getfile(torch.nn.modules.batchnorm)


def _has_method_named_alike(code: CodeType) -> bool:
    reads = ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR")
    return any(i.opname in reads and i.argval in SCALAR_STAND_INS for i in dis.get_instructions(code))


def _functions_running(frame: FrameType) -> list[FunctionType]:
    """Functions that run the frame's code, by gc and by name: ``gc.freeze()`` hides objects."""
    code, owner = frame.f_code, frame.f_locals.get("self")
    looked_up = [vars(cls).get(code.co_name) for cls in type(owner).__mro__] + [frame.f_globals.get(code.co_name)]
    found = {id(f): f for f in (*gc.get_referrers(code), *looked_up) if isinstance(f, FunctionType)}
    return [f for f in found.values() if f.__code__ is code]


_FINITENESS_TESTS = {
    torch.isfinite: True, Tensor.isfinite: True, torch.isnan: False, Tensor.isnan: False,
    torch.isinf: False, Tensor.isinf: False,
}  # fmt: skip
"""function → its result's elements if all numbers are finite"""
_ALL_OR_ANY = (torch.all, Tensor.all, torch.any, Tensor.any)
_LOGICAL_NOT = (
    torch.logical_not,
    Tensor.logical_not,
    torch.bitwise_not,
    Tensor.bitwise_not,
    Tensor.__invert__,
)
_LOGICAL_OR = (
    torch.logical_or,
    Tensor.logical_or,
    torch.bitwise_or,
    Tensor.bitwise_or,
    Tensor.__or__,
)
_LOGICAL_AND = (
    torch.logical_and,
    Tensor.logical_and,
    torch.bitwise_and,
    Tensor.bitwise_and,
    Tensor.__and__,
)


class TruthValues(Observer):
    """Tracks tests for inf and NaN through a trace, and answers ``bool(tensor)``; not in ``loops``
    of unknown length, where the guard would apply to every iteration."""

    def __init__(self, loops: NonzeroLoops) -> None:
        self.loops = loops
        self.uniform: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        """tensor → value of all its elements if the tested numbers are finite"""

    def patches(self) -> Iterable[Patch]:
        yield replacement_patch(torch.SymBool, "__bool__", self._number)
        yield torch, "_check_tensor_all_with", _guard_all

    def before(self, call: ObservedCall) -> ObserverAnswer | None:
        """The answer to ``bool(tensor)``, with a guard in the graph."""
        if call.func != Tensor.__bool__ or self.loops.running or call.frame is None:
            return None
        tensor, frame = call.args[0], call.frame
        if (uniform := self.uniform.get(tensor)) is not None:
            answer = ObserverAnswer(
                uniform, "a number is infinite or NaN, but the compiled program is for finite numbers"
            )
        elif (wanted := truth_without_raise(frame)) is not None:
            answer = ObserverAnswer(wanted, GUARD_MODEL_CHECK)
        else:
            return None
        guard_true(tensor if answer.value else tensor.logical_not(), f"{answer.reason}: {source_line(frame)}", frame)
        return answer

    def after(self, call: ObservedCall, result: Any) -> Any:
        if isinstance(result, Tensor) and result.dtype == torch.bool:
            self._follow(call.func, call, result)
        return result

    def _follow(self, func: Any, call: ObservedCall, result: Tensor) -> None:
        if func in _FINITENESS_TESTS:
            self.uniform[result] = _FINITENESS_TESTS[func]
            return
        known = [self.uniform.get(x) for x in call.operands]
        if not known or None in known:
            return
        if func in _ALL_OR_ANY:
            self.uniform[result] = bool(known[0])
        elif func in _LOGICAL_NOT:
            self.uniform[result] = not known[0]
        elif func in _LOGICAL_OR:
            self.uniform[result] = any(known)
        elif func in _LOGICAL_AND:
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


def _guard_all(kind: type, condition: Tensor, message: Callable[[], str] | None = None) -> None:
    guard_true(condition.all(), str(message() if message else GUARD_MODEL_CHECK))


def _truth_of_number(number: torch.SymBool, frame: FrameType) -> ObserverAnswer | None:
    """The guarded answer to ``bool(number)``; lengths compared with 0, 1 or 2 count as long."""
    if get_proxy_mode() is None:  # inside an op: the graph would miss the guard
        return None
    if (wanted := truth_without_raise(frame)) is not None:
        answer = ObserverAnswer(wanted, GUARD_MODEL_CHECK)
    elif (many := _truth_for_long(number)) is not None:
        answer = ObserverAnswer(many, TOO_SHORT)
    else:
        return None
    holds = number if answer.value else torch.sym_not(number)
    guard_true(holds, f"{answer.reason}: {source_line(frame)}", frame)
    if answer.reason == TOO_SHORT:
        check(holds)  # for a tensor's number this would fix a constant
    return answer


def _truth_for_long(number: torch.SymBool) -> bool | None:
    """Truth of ``number`` for long lengths if it compares one with 0, 1 or 2, else None."""
    expression, shapes = number.node.expr, number.node.shape_env
    symbols = expression.free_symbols
    small = expression.is_Relational and any(side in (0, 1, 2) for side in expression.args)
    if not small or len(symbols) != 1 or not symbols <= shapes.size_like:
        return None
    values = {bool(expression.xreplace(dict.fromkeys(symbols, n))) for n in (2**10, 2**20 + 1, 2**30 + 3)}
    return values.pop() if len(values) == 1 else None


def truth_without_raise(frame: FrameType) -> bool | None:
    """The truth value that avoids the error if ``frame`` evaluates an assert or guards a raise."""
    line = frame.f_lineno
    tests = [
        (node.test, isinstance(node, ast.Assert))
        for node in _raising_tests(frame.f_code.co_filename)
        if node.test.lineno <= line <= (node.test.end_lineno or line)
    ]
    if not tests:
        return None
    leaves = list(_condition_terms(*tests[-1]))
    if (span := _tested_span(frame.f_code, frame.f_lasti)) is not None:
        leaves = [(leaf, wanted) for leaf, wanted in leaves if _covers_span(leaf, span)]
    wanted = {wanted for _, wanted in leaves}
    return wanted.pop() if len(wanted) == 1 else None


@functools.cache
def _raising_tests(file: str) -> tuple[ast.Assert | ast.If, ...]:
    """Every assert in ``file``, and every ``if`` whose body ends in ``raise``, without ``else``."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    found = [n for n in ast.walk(tree) if isinstance(n, ast.Assert | ast.If)]
    return tuple(n for n in found if isinstance(n, ast.Assert) or (isinstance(n.body[-1], ast.Raise) and not n.orelse))


def _condition_terms(test: ast.expr, wanted: bool) -> Iterator[tuple[ast.expr, bool]]:
    """(operand of and, or, not; its truth value for ``test`` to be ``wanted``), recursively."""
    if isinstance(test, ast.BoolOp):
        for value in test.values:
            yield from _condition_terms(value, wanted)
    elif isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _condition_terms(test.operand, not wanted)
    else:
        yield test, wanted


SourceSpan = tuple[tuple[int, int], tuple[int, int]]
"""((line, column) of the start, (line, column) of the end) in source text"""


def _tested_span(code: CodeType, offset: int) -> SourceSpan | None:
    """Source span of the value tested by the instruction at ``offset``; None before Python 3.11."""
    before = [i for i in dis.get_instructions(code) if i.offset < offset and i.opname != "EXTENDED_ARG"]
    place = getattr(before[-1], "positions", None) if before else None
    if place is None or None in place:
        return None
    return (place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)


def _covers_span(node: ast.expr, span: SourceSpan) -> bool:
    start, end = (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    return start <= span[0] and span[1] <= end
