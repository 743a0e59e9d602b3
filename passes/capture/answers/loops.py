"""Loops over the rows of ``nonzero()``, whose number depends on the data: one iteration per row that there can be.

    for expert in mask.sum((-1, -2)).greater(0).nonzero():  # [at most experts, 1]
        out.index_add_(0, tokens, ...)

One graph must serve all inputs, so the body is traced for every place of the condition, and where the condition is
false, what the body wrote in place is taken back: ``out = where(hit, out, out before)``. That is the same computation
whatever the body does, as long as it hands on its results in place only; anything else is refused.
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
from torch._subclasses.fake_tensor import FakeTensor

from autoshard.errors import CaptureError
from autoshard.passes.capture.answers import checks
from autoshard.passes.capture.exported.provenance import marking
from autoshard.passes.capture.observer import Answer, Call, Observer, Patch, replacing
from autoshard.passes.rules.facts import is_random

LOOP = "autoshard_loop"
"""key in a node's meta: it was traced in the body of such a loop"""
LONGEST = 1024
"""iterations; a longer loop would make a graph that nobody can read or search"""

_NONZERO = (
    torch.nonzero, torch.Tensor.nonzero, torch.argwhere, torch.Tensor.argwhere, torch.where, torch.Tensor.where,
)  # fmt: skip
_SAME_ROWS = (
    torch.Tensor.squeeze, torch.squeeze, torch.Tensor.flatten, torch.flatten, torch.Tensor.reshape, torch.Tensor.view,
    torch.Tensor.cpu, torch.Tensor.to, torch.Tensor.long, torch.Tensor.detach,
)  # fmt: skip
_NARROW = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.float16, torch.bfloat16)
"""dtypes in which some numbers of rows are others"""
_CONTAINERS = (list, dict, set)
_CHANGES = frozenset("append extend insert add update setdefault pop popitem remove discard clear".split())
_ADVICE = "Hand on results in place only, as in out.index_add_(0, tokens, result)."


@dataclass
class Learnt:
    """What one trace has shown for the next, per ``for`` statement (code and line)."""

    impossible: set[tuple[Any, int, tuple[int, ...]]] = field(default_factory=set)
    """places where the body raises an IndexError, as it would in eager"""
    checked: set[tuple[Any, int]] = field(default_factory=set)
    """statements whose body asks whether a length that depends on the data is 0"""


class Index(int):
    """A number of a row, in place of the tensor without dims that it is in eager."""

    def item(self) -> int:
        """The number."""
        return int(self)

    tolist = item


class Row:
    """A row ``[k]`` of indices, in place of the tensor that it is in eager."""

    def __init__(self, place: tuple[int, ...]) -> None:
        self.place = tuple(map(Index, place))

    def __getitem__(self, item: int) -> Index:
        return self.place[item]

    def __iter__(self) -> Iterator[Index]:
        return iter(self.place)

    def __len__(self) -> int:
        return len(self.place)

    def tolist(self) -> list[int]:
        """The indices."""
        return [int(i) for i in self.place]

    def item(self) -> int:
        """The only index. Raises ValueError where there are several."""
        (only,) = self.place
        return int(only)

    __int__ = __index__ = item

    def __eq__(self, other: object) -> bool:
        return self.item() == other

    def __hash__(self) -> int:
        return hash(self.place)


def _of_rows(call: Call) -> bool:
    """Whether it iterates over the first dim: the others' lengths are known."""
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    return dim in (0, -call.args[0].ndim)


class Loops(Observer):
    """The loops of one trace."""

    def __init__(self, learnt: Learnt) -> None:
        self.learnt = learnt
        self.conditions: dict[int, tuple[torch.Tensor, torch.Tensor, bool]] = {}
        """id → a result of nonzero, its condition, and whether a row of it is a number"""
        self.running: list[_Loop] = []
        self.ended: dict[int, torch.Tensor] = {}
        """what bodies made that have ended"""
        self.open: list[_Loop] = []
        """loops that have begun and not come to their end"""

    def patches(self) -> Iterable[Patch]:
        yield replacing(torch.fx.Graph, "create_node", marking(LOOP, lambda: bool(self.running)))
        yield replacing(FakeTensor, "tolist", self.tolist)

    def before(self, call: Call) -> Answer | Call | None:
        func, args = call.func, call.args
        if func is torch.Tensor.__getitem__ and isinstance(args[1], Row | tuple):
            call = replace(call, args=(args[0], _index(args[1])))
        if func in (torch.Tensor.unbind, torch.Tensor.__iter__) and id(args[0]) in self.conditions and _of_rows(call):
            return Answer(self.loop(args[0], call.frame), "its rows are among the places of a condition")
        if self.ended and any(id(x) in self.ended for x in call.operands):
            raise CaptureError(f"a value made in a loop of unknown length is read after the iteration. {_ADVICE}")
        if self.running:
            self.running[-1].before(call)
        return call

    def after(self, call: Call, result: Any) -> Any:
        if self.running:
            self.running[-1].after(call, result)
        func, args = call.func, call.args
        if (func in _NONZERO and len(call.operands) == 1) or func in _SAME_ROWS or _is_first_column(func, args):
            self._remember(func, args, result)
        return result

    def _remember(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Where rows of ``result`` are places of a condition, so that a loop over it is known to be bounded."""
        if func in _NONZERO and isinstance(result, torch.Tensor):
            if all(isinstance(n, int) for n in args[0].shape):
                self.conditions[id(result)] = (result, args[0], False)
        elif func in _NONZERO and isinstance(result, tuple) and len(result) == 1:
            self.conditions[id(result[0])] = (result[0], args[0], True)
        elif args and id(args[0]) in self.conditions and isinstance(result, torch.Tensor):
            _, condition, flat = self.conditions[id(args[0])]
            if result.dtype in _NARROW:
                return
            if result.shape == args[0].shape or (condition.ndim == 1 and result.shape == args[0].shape[:1]):
                self.conditions[id(result)] = (result, condition, flat or result.ndim == 1)

    def loop(self, rows: torch.Tensor, caller: FrameType | None, listed: bool = False) -> Iterator[Any]:
        """The iterations over ``rows``; ``listed``: over ``rows.tolist()``."""
        frame = _user(caller)
        _, condition, flat = self.conditions[id(rows)]
        if condition.numel() > LONGEST:
            raise CaptureError(f"a loop over the rows of nonzero() may have {condition.numel()} iterations")
        _check_body(frame, listed)
        return _Loop(self, condition, flat, frame)

    def tolist(self, original: Callable[[Any], Any]) -> Callable[[torch.Tensor], Any]:
        """``tensor.tolist()``, which no mode for torch functions sees."""

        def tolist(tensor: torch.Tensor) -> Any:
            if id(tensor) in self.conditions:
                return self.loop(tensor, sys._getframe(1), listed=True)
            return original(tensor)

        return tolist

    def learn(self, error: Exception) -> bool:
        """Whether another trace may get past ``error``."""
        if not self.running:
            return False
        loop, learnt = self.running[-1], self.learnt
        before = len(learnt.impossible) + len(learnt.checked)
        if isinstance(error, IndexError) and loop.place is not None:
            learnt.impossible.add((*loop.statement, loop.place))
        elif type(error).__name__ == "GuardOnDataDependentSymNode":
            learnt.checked.add(loop.statement)
        return len(learnt.impossible) + len(learnt.checked) > before

    def end(self, output: Any) -> None:
        """Refuse loops that were left early, and outputs that a body made."""
        if self.open:
            raise CaptureError("a loop over a tensor of unknown length is left before its end")
        if any(id(x) in self.ended for x in pytree.tree_leaves(output)):
            raise CaptureError(f"a value made in a loop of unknown length is returned. {_ADVICE}")


class _Loop:
    """An iterator over the places of ``condition``."""

    def __init__(self, loops: Loops, condition: torch.Tensor, flat: bool, frame: FrameType) -> None:
        self.loops, self.condition, self.flat, self.frame = loops, condition, flat, frame
        self.statement = (frame.f_code, frame.f_lineno)
        self.places = itertools.product(*map(range, condition.shape))
        self.place: tuple[int, ...] | None = None
        self.made: dict[int, torch.Tensor] = {}
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """id → a tensor from outside that the body writes to, and its value before"""
        self.filled: list[torch.Tensor] = []
        loops.open.append(self)

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        if self.place is not None:
            self.end()
        impossible = self.loops.learnt.impossible
        self.place = next((p for p in self.places if (*self.statement, p) not in impossible), None)
        if self.place is None:
            self.loops.open.remove(self)
            raise StopIteration
        self.loops.running.append(self)
        return Index(self.place[0]) if self.flat else Row(self.place)

    def end(self) -> None:
        """Take back what the body wrote, where its condition is false."""
        self.loops.running.remove(self)
        self.loops.ended.update(self.made)
        self.made = {}
        written, self.written = list(self.written.values()), {}
        hit = self.condition[self.place] != 0
        for filled in self.filled:  # where a body asks whether there is anything to do, it does nothing otherwise
            hit = hit & filled
        self.filled = []
        for tensor, before in written:
            tensor.copy_(torch.where(hit, tensor, before))

    def before(self, call: Call) -> None:
        """Keep the value of what ``call`` is about to write to."""
        for target in call.written:
            base = target if target._base is None else target._base
            if id(base) not in self.made and id(base) not in self.written:
                self.written[id(base)] = (base, base.clone())

    def after(self, call: Call, result: Any) -> None:
        """Note what the body has made."""
        if self.statement in self.loops.learnt.checked and call.func in _NONZERO:
            for rows in (x for x in pytree.tree_leaves(result)[:1] if not isinstance(x.shape[0], int)):
                checks.assume(rows.shape[0] > 0)
                self.filled.append(torch.ones_like(rows).any())
        known = {id(x) for x in call.operands}
        for x in pytree.tree_leaves(result):
            if isinstance(x, torch.Tensor) and id(x) not in known:
                self.made[id(x)] = x


def _is_first_column(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is ``rows[:, 0]``."""
    index = args[1] if func is torch.Tensor.__getitem__ else None
    plain = isinstance(index, tuple) and all(isinstance(i, int | slice) for i in index)
    return plain and index == (slice(None), 0)


def _index(item: Any) -> Any:
    """An index in which rows are lists."""
    if isinstance(item, Row):
        return item.tolist()
    return tuple(map(_index, item)) if isinstance(item, tuple) else item


def check_draws(program: torch.export.ExportedProgram) -> None:
    """Refuse draws of fixed size in a loop of unknown length: where the body is not run, eager draws nothing."""
    for node in program.graph.nodes:
        shape = getattr(node.meta.get("val"), "shape", ())
        if node.meta.get(LOOP) and is_random(node) and all(isinstance(n, int) for n in shape):
            raise CaptureError(
                "random numbers are drawn in a loop over a tensor of unknown length. Draw them before it."
            )


def _user(found: FrameType | None) -> FrameType:
    """The frame whose ``for`` statement iterates."""
    while found is not None and found.f_globals.get("__name__", "").partition(".")[0] in ("torch", "autoshard"):
        found = found.f_back
    if found is None:
        raise CaptureError("a tensor of unknown length is iterated over outside of a for statement")
    return found


def _check_body(frame: FrameType, listed: bool) -> None:
    """Refuse a loop whose body hands on Python values, or may be left early, or whose iterations are counted.

    The frame is about to iterate, or where rows are ``listed``, about to get what it iterates over.
    """
    now, code = frame.f_lasti, dis.get_instructions(frame.f_code)
    begin = next(i for i in code if (i.offset > now if listed else i.offset == now))
    try:
        lines, first = inspect.getsourcelines(frame.f_code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        raise CaptureError("a loop over a tensor of unknown length, whose source is not at hand") from None
    number = frame.f_lineno - (first or 1) + 1
    found = [n for n in ast.walk(tree) if isinstance(n, ast.For) and n.iter.lineno <= number <= n.iter.end_lineno]  # type: ignore[operator]
    nested = [n for loop in found for n in ast.walk(loop.iter) if isinstance(n, ast.comprehension)]
    if begin.opname != "GET_ITER" or len(found) != 1 or nested:
        raise CaptureError(
            "a tensor of unknown length is iterated over otherwise than by `for row in tensor:` or "
            "`for row in tensor.tolist():`"
        )
    (loop,) = found
    inside = {id(n) for statement in loop.body for n in ast.walk(statement)}
    if loop.orelse or any(
        isinstance(n, ast.Break | ast.Return | ast.Yield) and id(n) in inside for n in ast.walk(tree)
    ):
        raise CaptureError("a loop over a tensor of unknown length is left before its end (break, return or else)")
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    bound = {n.id for n in names if id(n) in inside and isinstance(n.ctx, ast.Store)}
    added = {n.target.id for n in ast.walk(loop) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
    added = {name for name in added if isinstance(frame.f_locals.get(name), torch.Tensor)}  # written in place
    outside = {n.id for n in names if id(n) not in inside and isinstance(n.ctx, ast.Load)}
    handed = sorted((bound - added) & outside) + _kept(loop, bound, frame)
    if handed:
        raise CaptureError(f"the body of a loop over a tensor of unknown length assigns {handed[0]!r}. {_ADVICE}")


def _kept(loop: ast.For, bound: set[str], frame: FrameType) -> list[str]:
    """Python objects from outside that the body of ``loop`` changes: attributes, items of what is no tensor, containers."""

    def value(node: ast.AST) -> Any:
        if isinstance(node, ast.Attribute):
            return getattr(value(node.value), node.attr, None)
        name = node.id if isinstance(node, ast.Name) else ""
        return None if name in bound else frame.f_locals.get(name, frame.f_globals.get(name))

    def changed(n: ast.AST) -> ast.expr | None:
        if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store):
            return n
        if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store):
            return n if isinstance(value(n.value), _CONTAINERS) else None
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in _CHANGES:
            return n.func.value if isinstance(value(n.func.value), _CONTAINERS) else None
        return None

    found = (changed(n) for statement in loop.body for n in ast.walk(statement))
    return [ast.unparse(n) for n in found if n is not None]
