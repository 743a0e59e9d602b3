"""Variables of the user's source: ``q`` of ``q = rotate(self.q(x))``, where that is certain.

The operations of one statement of the user stand together in the graph. If the statement is a
plain assignment and later operations read exactly one of their values, that value was assigned.
No other value gets a name: conditional expressions, displays, in-place changes, missing sources.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.names import is_number
from autoshard.passes.ir.paths import block_path

_VALUES = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript)
_TAKE_APART = frozenset({"split", "chunk", "unbind", "tensor_split", "topk", "sort"})
_ARITHMETIC = frozenset("add sub mul div matmul mm bmm pow remainder floor_divide __and__ __or__ bitwise_and".split())


class _Statement(NamedTuple):
    """A plain assignment in the user's source, or a line of anything else (without targets)."""

    file: str
    line: int
    targets: tuple[str, ...] = ()
    updates: bool = False
    """whether it is ``x += y``"""
    takes_apart: bool = False
    """whether it unpacks the results of one op"""


def user_names(graph: Graph) -> dict[str, str]:
    """value → the user's variable; the outermost one, where nested calls assign it several times.

    Values in a numbered block take variables of its forward or deeper: equal blocks name alike.
    """
    return _Reader(graph).names


def module_names(graph: Graph) -> dict[str, str]:
    """value → last path component of the module whose only result it is."""
    nodes, last_read = graph.nodes, _last_reads(graph)
    found: dict[str, str] = {}
    for i, node in enumerate(nodes):
        leaf = node.fqn.rpartition(".")[2]
        if not leaf or is_number(leaf) or node.fqn == block_path(node.fqn) or len(node.outputs) != 1:
            continue
        start = i
        while start and _inside(nodes[start - 1], node.fqn):
            start -= 1
        ends = i + 1 == len(nodes) or not _inside(nodes[i + 1], node.fqn)
        if ends and _escaping(nodes[start : i + 1], i + 1, last_read) == list(node.outputs):
            found[node.outputs[0]] = leaf
    return found


def _inside(node: Node, path: str) -> bool:
    return node.fqn == path or node.fqn.startswith(f"{path}.")


def _last_reads(graph: Graph) -> dict[str, int]:
    """value → number of the last node that reads it; ``len(nodes)`` if the graph returns it."""
    found = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    return found | dict.fromkeys(graph.returned, len(graph.nodes))


def _escaping(nodes: Sequence[Node], end: int, last_read: dict[str, int]) -> list[str]:
    """Values of ``nodes`` that node number ``end`` or a later one reads."""
    return [o for node in nodes for o in node.outputs if last_read.get(o, -1) >= end]


class _Reader:
    def __init__(self, graph: Graph) -> None:
        self.nodes, self.last_read = graph.nodes, _last_reads(graph)
        self.statements: dict[str, dict[int, _Statement]] = {}
        self.names: dict[str, str] = {}
        self.paths = [block_path(node.fqn) for node in graph.nodes]
        self.frames = self._frames()
        self.visit(0, len(graph.nodes), 0, "")
        for path, group in groupby(range(len(graph.nodes)), self.paths.__getitem__):
            if path:
                numbers = list(group)
                inside = len(_common([self.frames[i] for i in numbers]))
                self.visit(numbers[0], numbers[-1] + 1, inside, path)

    def _frames(self) -> list[tuple[_Statement, ...]]:
        """Per node, the stack of statements; without frames it is that of the node before."""
        known: dict[tuple[tuple[str, int], ...], tuple[_Statement, ...]] = {(): ()}
        found: list[tuple[_Statement, ...]] = []
        for node in self.nodes:
            if node.frames not in known:
                known[node.frames] = tuple(self.statement(*frame) for frame in node.frames)
            found.append(known[node.frames] or (found[-1] if found else ()))
        return found

    def statement(self, file: str, line: int) -> _Statement:
        if file not in self.statements:
            self.statements[file] = _assignments(file)
        return self.statements[file].get(line) or _Statement(file, line)

    def visit(self, start: int, stop: int, depth: int, path: str) -> None:
        """Name results of statements at ``depth`` of the stack, then of functions they call."""
        for statement, first, end in self._runs(start, stop, depth):
            if path not in self.paths[first:end]:
                continue
            if statement is not None and statement.targets and self.paths[end - 1] == path:
                self.name(statement, first, end)
            if statement is not None:
                self.visit(first, end, depth + 1, path)

    def _runs(self, start: int, stop: int, depth: int) -> Iterator[tuple[_Statement | None, int, int]]:
        def running(i: int) -> _Statement | None:
            return self.frames[i][depth] if depth < len(self.frames[i]) else None

        for statement, group in groupby(range(start, stop), running):
            numbers = list(group)
            yield statement, numbers[0], numbers[-1] + 1

    def name(self, statement: _Statement, first: int, end: int) -> None:
        last = self.nodes[end - 1]
        made = _escaping(self.nodes[first:end], end, self.last_read)
        op = last.op._schema.name.rpartition("::")[2]
        if op.endswith("_scatter") or (statement.updates and op not in _ARITHMETIC):
            return  # the result is the base of a view that was written, not the variable
        kept = [target for target in statement.targets if target != "_"]
        if len(made) == len(kept) == 1 and made == list(last.outputs):
            self.names.setdefault(made[0], kept[0])
        elif statement.takes_apart and made == list(last.outputs) and len(made) == len(statement.targets):
            for value, target in zip(made, statement.targets, strict=True):
                self.names.setdefault(value, target)


def _common(frames: Sequence[tuple[_Statement, ...]]) -> tuple[_Statement, ...]:
    """The common prefix of all stacks."""
    low, high = min(frames), max(frames)
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:same]


def _assignments(file: str) -> dict[int, _Statement]:
    """line → its plain assignment; lines of several statements are left out."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found: dict[int, _Statement] = {}
    several: set[int] = set()
    for node in _statements(tree):
        body = getattr(node, "body", None)
        lines = range(node.lineno, (body[0].lineno if body else node.end_lineno or node.lineno) + (not body))
        statement = _read(node, file)
        several.update(line for line in lines if line in found)
        found.update(dict.fromkeys(lines, statement))
        if body and body[0].lineno == node.lineno:
            several.add(node.lineno)
    return {line: statement for line, statement in found.items() if statement.targets and line not in several}


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements, nested ones included; expressions are not entered."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(tree, field, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from _statements(child)


def _read(node: ast.stmt, file: str) -> _Statement:
    none = _Statement(file, node.lineno)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target: ast.expr = node.targets[0]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        target = node.target
    else:
        return none
    updates = isinstance(node, ast.AugAssign)
    value = node.value
    if value is None or not (updates or isinstance(value, _VALUES)) or any(map(_is_unclear, ast.walk(value))):
        return none
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    names = tuple(part.id for part in parts if isinstance(part, ast.Name))
    if len(names) != len(parts):
        return none
    takes_apart = len(names) > 1 and isinstance(value, ast.Call) and _called(value) in _TAKE_APART
    return _Statement(file, node.lineno, names, updates, takes_apart)


def _is_unclear(node: ast.AST) -> bool:
    """Whether it may assign more than one variable: a walrus, or an in-place call."""
    return isinstance(node, ast.NamedExpr) or (
        isinstance(node, ast.Call) and _called(node).endswith("_") and not _called(node).endswith("__")
    )


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
