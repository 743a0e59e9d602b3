"""Roll calls of equal blocks into a loop: ``for block in self.blocks: x = block(x)``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoshard.passes.codegen.body import Function, Line
from autoshard.passes.codegen.printing import Expression
from autoshard.passes.codegen.source_text import one_of, python_path

_INDENT = " " * 8


@dataclass(frozen=True)
class _Turn:
    """``size`` lines from ``start``, one of which calls a block, that repeat ``count`` times."""

    start: int
    size: int
    path: str
    count: int

    @property
    def end(self) -> int:
        return self.start + self.size * self.count


def rolled(
    body: Sequence[Line], children: Mapping[str, Collection[str]], taken: Collection[str], mark: Callable[[str], str]
) -> list[str]:
    """The text of the root's ``body`` with repeated lines as loops.

    Lines repeat if their text is equal but for the block. ``children``: container of blocks → names
    of its children. ``taken``: names that a loop variable may not have.
    """
    calls = [i for i, line in enumerate(body) if line.block]
    text: list[str] = []
    done = 0
    for here, following in itertools.pairwise([*calls, len(body)]):
        turn = _turn(body, done, here, following) if here >= done else None
        if turn is None or turn.count < 2:
            continue
        for line in body[done : turn.start]:
            text += line.lines(_INDENT, mark)
        container, _, first = turn.path.rpartition(".")
        variable = _variable(container, taken)
        numbers = range(int(first), int(first) + turn.count)
        text.append(f"{_INDENT}for {variable} in {_sequence(container, numbers, children[container])}:")
        for line in body[turn.start : turn.start + turn.size]:
            text += _of(line, turn.path, variable).lines(f"{_INDENT}    ", mark)
        done = turn.end
    for line in body[done:]:
        text += line.lines(_INDENT, mark)
    return text


def _turn(body: Sequence[Line], done: int, here: int, following: int) -> _Turn | None:
    """The longest loop whose first turn has the call at ``here``; lines before may belong to it."""
    if following == len(body):
        return None
    size, path = following - here, body[here].block
    starts = range(here, max(here - size, done - 1), -1)
    return max((_Turn(start, size, path, _count(body, start, size, path)) for start in starts), key=lambda t: t.count)


def _count(body: Sequence[Line], start: int, size: int, path: str) -> int:
    """How often the ``size`` lines from ``start`` repeat, each time with the next block."""
    container, _, number = path.rpartition(".")

    def turn(n: int) -> list[Any]:
        lines = body[start + n * size : start + (n + 1) * size]
        own = ".".join(filter(None, (container, str(int(number) + n))))
        return [_of(line, own, "").key for line in lines] if own in [line.block for line in lines] else []

    first, n = turn(0), 1
    while turn(n) == first:
        n += 1
    return n


def _of(line: Line, path: str, variable: str) -> Line:
    """``line`` with ``variable`` in place of the block at ``path``, in its profiling scope, too."""
    module = line.module
    if module is not None and f"{module}.".startswith(f"{path}."):
        module = f"@{variable}{module[len(path) :]}"
    if isinstance(line, Function):
        return replace(line, body=tuple(_of(inner, path, variable) for inner in line.body))
    if line.block != path:
        return replace(line, module=module)
    value = line.value
    head = variable + value.head[len(python_path(path)) :]
    return replace(line, value=Expression(head, value.parts, value.close), module=module, block="")


def _variable(container: str, taken: Collection[str]) -> str:
    plain = one_of(container)
    numbered = (f"{plain}_{n}" for n in itertools.count(1))
    return next(name for name in itertools.chain([plain], numbered) if name not in taken)


def _sequence(container: str, numbers: range, children: Collection[str]) -> str:
    """Source of the blocks ``numbers``: the container, sliced if it has other children."""
    owner = python_path(container) if container else "self"
    if container and set(children) == set(map(str, numbers)) and numbers.start == 0:
        return owner
    return f"{owner}[{numbers.start or ''}:{numbers.stop}]"
