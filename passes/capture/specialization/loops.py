"""Loops over rows of ``nonzero()``, of data-dependent number: unrolled for every possible row.

    for expert in mask.sum((-1, -2)).greater(0).nonzero():  # [at most experts, 1]
        out.index_add_(0, tokens, ...)

One graph must serve all inputs, so the body is traced for every element of the condition. If an
element is false, its iteration's in-place writes are undone: ``out = where(hit, out, out before)``.
This is exact if the body's only results are in-place writes; other bodies are refused.
"""

from __future__ import annotations

import ast
import dis
import inspect
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from autoshard.errors import CaptureError
from autoshard.passes.capture.exported.provenance import marking_nodes
from autoshard.passes.capture.observer import ObservedCall, Observer, ObserverAnswer, Patch, replacement_patch
from autoshard.passes.rules.facts import is_random
from autoshard.torch_private.fake import FakeTensor
from autoshard.torch_private.ops import check

LOOP_KEY = "autoshard_loop"
"""key in a node's meta: traced in the body of an unrolled loop"""
MAX_ITERATIONS = 1024
"""most iterations; graphs of longer loops are too large to read or search"""

_NONZERO = (
    torch.nonzero, Tensor.nonzero, torch.argwhere, Tensor.argwhere, torch.where, Tensor.where,
)  # fmt: skip
_ROW_PRESERVING = (
    Tensor.squeeze, torch.squeeze, Tensor.flatten, torch.flatten, Tensor.reshape, Tensor.view,
    Tensor.cpu, Tensor.to, Tensor.long, Tensor.detach,
)  # fmt: skip
_INEXACT_INDEX_DTYPES = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16)
"""dtypes that cannot represent all row numbers"""
_MUTABLE_CONTAINERS = (list, dict, set)
_MUTATING_METHODS = frozenset("append extend insert add update setdefault pop popitem remove discard clear".split())
_LOOP_ADVICE = "Pass on results in place only, as in out.index_add_(0, tokens, result)."


@dataclass
class LoopFindings:
    """Findings of failed traces for the next one, per ``for`` statement (code, line)."""

    raising_rows: set[tuple[Any, int, tuple[int, ...]]] = field(default_factory=set)
    """rows for which the body raises an IndexError, as in eager"""
    emptiness_checks: set[tuple[Any, int]] = field(default_factory=set)
    """statements whose body asks if a data-dependent length is 0"""


class RowNumber(int):
    """A row number, an int in place of eager's 0-dim tensor."""

    def item(self) -> int:
        return int(self)

    tolist = item


class IndexRow:
    """A row of indices, ints in place of eager's tensor of shape [k]."""

    def __init__(self, place: tuple[int, ...]) -> None:
        self.place = tuple(map(RowNumber, place))

    def __getitem__(self, item: int) -> RowNumber:
        return self.place[item]

    def __iter__(self) -> Iterator[RowNumber]:
        return iter(self.place)

    def __len__(self) -> int:
        return len(self.place)

    def tolist(self) -> list[int]:
        return [int(i) for i in self.place]

    def item(self) -> int:
        """The only index. Raises ValueError if there are several."""
        (only,) = self.place
        return int(only)

    __int__ = __index__ = item

    def __eq__(self, other: object) -> bool:
        return self.item() == other

    def __hash__(self) -> int:
        return hash(self.place)


def _iterates_over_rows(call: ObservedCall) -> bool:
    """Whether ``call`` iterates over dim 0; other dims have known lengths."""
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    return dim in (0, -call.args[0].ndim)


class NonzeroLoops(Observer):
    """The loops of one trace."""

    def __init__(self, findings: LoopFindings) -> None:
        self.findings = findings
        self.conditions: dict[int, tuple[Tensor, Tensor, bool]] = {}
        """id → (result of nonzero, its condition, whether its rows are numbers)"""
        self.running: list[_UnrolledLoop] = []
        self.ended: dict[int, Tensor] = {}
        """id → tensor made in a finished body"""
        self.open: list[_UnrolledLoop] = []
        """loops begun and not finished"""

    def patches(self) -> Iterable[Patch]:
        yield replacement_patch(torch.fx.Graph, "create_node", marking_nodes(LOOP_KEY, lambda: bool(self.running)))
        yield replacement_patch(FakeTensor, "tolist", self.tolist)

    def before(self, call: ObservedCall) -> ObserverAnswer | ObservedCall | None:
        func, args = call.func, call.args
        if func is Tensor.__getitem__ and isinstance(args[1], IndexRow | tuple):
            call = replace(call, args=(args[0], _plain_index(args[1])))
        if func in (Tensor.unbind, Tensor.__iter__) and id(args[0]) in self.conditions and _iterates_over_rows(call):
            return ObserverAnswer(self.loop(args[0], call.frame), "its rows are among the positions of a condition")
        if self.ended and any(id(x) in self.ended for x in call.operands):
            raise CaptureError(f"a value from a loop of unknown length is read after the iteration. {_LOOP_ADVICE}")
        if self.running:
            self.running[-1].before(call)
        return call

    def after(self, call: ObservedCall, result: Any) -> Any:
        if self.running:
            self.running[-1].after(call, result)
        func, args = call.func, call.args
        if (func in _NONZERO and len(call.operands) == 1) or func in _ROW_PRESERVING or _is_first_column(func, args):
            self._remember(func, args, result)
        return result

    def _remember(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Record ``result`` if its rows index a condition: a loop over it is bounded."""
        if func in _NONZERO and isinstance(result, Tensor):
            if all(isinstance(n, int) for n in args[0].shape):
                self.conditions[id(result)] = (result, args[0], False)
        elif func in _NONZERO and isinstance(result, tuple) and len(result) == 1:
            self.conditions[id(result[0])] = (result[0], args[0], True)
        elif args and id(args[0]) in self.conditions and isinstance(result, Tensor):
            _, condition, has_scalar_rows = self.conditions[id(args[0])]
            if result.dtype in _INEXACT_INDEX_DTYPES:
                return
            if result.shape == args[0].shape or (condition.ndim == 1 and result.shape == args[0].shape[:1]):
                self.conditions[id(result)] = (result, condition, has_scalar_rows or result.ndim == 1)

    def loop(self, rows: Tensor, caller: FrameType | None, from_tolist: bool = False) -> Iterator[Any]:
        """An iterator over ``rows``, or over ``rows.tolist()`` if ``from_tolist``."""
        frame = _for_statement_frame(caller)
        _, condition, has_scalar_rows = self.conditions[id(rows)]
        if condition.numel() > MAX_ITERATIONS:
            raise CaptureError(f"a loop over the rows of nonzero() may have {condition.numel()} iterations")
        _check_loop_body(frame, from_tolist)
        return _UnrolledLoop(self, condition, has_scalar_rows, frame)

    def tolist(self, original: Callable[[Any], Any]) -> Callable[[Tensor], Any]:
        """Wrapper of ``tensor.tolist()``, which function modes do not see."""

        def tolist(tensor: Tensor) -> Any:
            if id(tensor) in self.conditions:
                return self.loop(tensor, sys._getframe(1), from_tolist=True)
            return original(tensor)

        return tolist

    def learn(self, error: Exception) -> bool:
        """Whether ``error`` is a finding with which another trace may succeed."""
        if not self.running:
            return False
        loop, findings = self.running[-1], self.findings
        before = len(findings.raising_rows) + len(findings.emptiness_checks)
        if isinstance(error, IndexError) and loop.place is not None:
            findings.raising_rows.add((*loop.statement, loop.place))
        elif type(error).__name__ == "GuardOnDataDependentSymNode":
            findings.emptiness_checks.add(loop.statement)
        return len(findings.raising_rows) + len(findings.emptiness_checks) > before

    def end(self, output: Any) -> None:
        """Refuse loops that were left early, and outputs made in a body."""
        if self.open:
            raise CaptureError("a loop over a tensor of unknown length ends early")
        if any(id(x) in self.ended for x in pytree.tree_leaves(output)):
            raise CaptureError(f"a value from a loop of unknown length is returned. {_LOOP_ADVICE}")


class _UnrolledLoop:
    """An iterator over all indices of ``condition``."""

    def __init__(self, loops: NonzeroLoops, condition: Tensor, has_scalar_rows: bool, frame: FrameType) -> None:
        self.loops, self.condition, self.has_scalar_rows, self.frame = loops, condition, has_scalar_rows, frame
        self.statement = (frame.f_code, frame.f_lineno)
        self.places = itertools.product(*map(range, condition.shape))
        self.place: tuple[int, ...] | None = None
        self.made: dict[int, Tensor] = {}
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        """id → (outside tensor written by the body, its value before)"""
        self.is_nonempty: list[Tensor] = []
        loops.open.append(self)

    def __iter__(self) -> _UnrolledLoop:
        return self

    def __next__(self) -> Any:
        if self.place is not None:
            self.end()
        raising_rows = self.loops.findings.raising_rows
        self.place = next((p for p in self.places if (*self.statement, p) not in raising_rows), None)
        if self.place is None:
            self.loops.open.remove(self)
            raise StopIteration
        self.loops.running.append(self)
        return RowNumber(self.place[0]) if self.has_scalar_rows else IndexRow(self.place)

    def end(self) -> None:
        """Undo the body's writes if its condition is false."""
        self.loops.running.remove(self)
        self.loops.ended.update(self.made)
        self.made = {}
        written, self.written = list(self.written.values()), {}
        hit = self.condition[self.place] != 0
        for is_nonempty in self.is_nonempty:  # the body does nothing if a list that it checks is empty
            hit = hit & is_nonempty
        self.is_nonempty = []
        for tensor, before in written:
            tensor.copy_(torch.where(hit, tensor, before))

    def before(self, call: ObservedCall) -> None:
        """Save values of tensors that ``call`` is about to write."""
        for target in call.written:
            base = target if target._base is None else target._base
            if id(base) not in self.made and id(base) not in self.written:
                self.written[id(base)] = (base, base.clone())

    def after(self, call: ObservedCall, result: Any) -> None:
        """Record tensors made in the body."""
        if self.statement in self.loops.findings.emptiness_checks and call.func in _NONZERO:
            for rows in (x for x in pytree.tree_leaves(result)[:1] if not isinstance(x.shape[0], int)):
                check(rows.shape[0] > 0)
                self.is_nonempty.append(torch.ones_like(rows).any())
        known = {id(x) for x in call.operands}
        for x in pytree.tree_leaves(result):
            if isinstance(x, Tensor) and id(x) not in known:
                self.made[id(x)] = x


def _is_first_column(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether the call is ``rows[:, 0]``."""
    index = args[1] if func is Tensor.__getitem__ else None
    plain = isinstance(index, tuple) and all(isinstance(i, int | slice) for i in index)
    return plain and index == (slice(None), 0)


def _plain_index(item: Any) -> Any:
    """``item`` with rows as lists."""
    if isinstance(item, IndexRow):
        return item.tolist()
    return tuple(map(_plain_index, item)) if isinstance(item, tuple) else item


def check_loop_draws(program: torch.export.ExportedProgram) -> None:
    """Refuse fixed-size draws in an unrolled loop: eager skips draws of skipped iterations."""
    for node in program.graph.nodes:
        shape = getattr(node.meta.get("val"), "shape", ())
        if node.meta.get(LOOP_KEY) and is_random(node) and all(isinstance(n, int) for n in shape):
            raise CaptureError("a loop over a tensor of unknown length draws random numbers. Draw them before it.")


def _for_statement_frame(found: FrameType | None) -> FrameType:
    """The frame whose ``for`` statement iterates."""
    while found is not None and found.f_globals.get("__name__", "").partition(".")[0] in ("torch", "autoshard"):
        found = found.f_back
    if found is None:
        raise CaptureError("a tensor of unknown length is iterated over outside of a for statement")
    return found


def _check_loop_body(frame: FrameType, from_tolist: bool) -> None:
    """Refuse a loop that is no plain ``for``, may exit early, or assigns values read after it.
    ``frame`` is about to iterate or, if ``from_tolist``, to evaluate the iterable."""
    now, code = frame.f_lasti, dis.get_instructions(frame.f_code)
    begin = next(i for i in code if (i.offset > now if from_tolist else i.offset == now))
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        raise CaptureError("a loop over a tensor of unknown length has no source code to read") from None
    number = frame.f_lineno - (first or 1) + 1
    found = [n for n in ast.walk(tree) if isinstance(n, ast.For) and n.iter.lineno <= number <= n.iter.end_lineno]  # type: ignore[operator]
    nested = [n for loop in found for n in ast.walk(loop.iter) if isinstance(n, ast.comprehension)]
    if begin.opname != "GET_ITER" or len(found) != 1 or nested:
        raise CaptureError(
            "the iteration over a tensor of unknown length is neither `for row in tensor:` nor "
            "`for row in tensor.tolist():`"
        )
    (loop,) = found
    inside = {id(n) for statement in loop.body for n in ast.walk(statement)}
    if loop.orelse or any(
        isinstance(n, ast.Break | ast.Return | ast.Yield) and id(n) in inside for n in ast.walk(tree)
    ):
        raise CaptureError("a loop over a tensor of unknown length ends early (break, return or else)")
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    bound = {n.id for n in names if id(n) in inside and isinstance(n.ctx, ast.Store)}
    added = {n.target.id for n in ast.walk(loop) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
    added = {name for name in added if isinstance(frame.f_locals.get(name), Tensor)}  # written in place
    outside = {n.id for n in names if id(n) not in inside and isinstance(n.ctx, ast.Load)}
    handed = sorted((bound - added) & outside) + _changed_objects(loop, bound, frame)
    if handed:
        raise CaptureError(f"the body of a loop over a tensor of unknown length assigns {handed[0]!r}. {_LOOP_ADVICE}")


def _changed_objects(loop: ast.For, bound: set[str], frame: FrameType) -> list[str]:
    """Outside Python objects that the body of ``loop`` mutates: attributes, container items."""

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Attribute):
            return getattr(value(node.value), node.attr, None)
        name = node.id if isinstance(node, ast.Name) else ""
        return None if name in bound else frame.f_locals.get(name, frame.f_globals.get(name))

    def changed(n: ast.AST) -> ast.expr | None:
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store):
            return n
        if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store):
            return n if isinstance(value(n.value), _MUTABLE_CONTAINERS) else None
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in _MUTATING_METHODS:
            return n.func.value if isinstance(value(n.func.value), _MUTABLE_CONTAINERS) else None
        return None

    found = (changed(n) for statement in loop.body for n in ast.walk(statement))
    return [ast.unparse(n) for n in found if n is not None]
