"""Names of values in emitted code: the user's own variable, else the module, else the op. A
variable of the user's source (``q`` of ``q = rotate(self.q(x))``) is taken only if certain: the
statement's operations stand together, it is a plain assignment, and later statements read
exactly one of their results."""

from __future__ import annotations

import ast
import linecache
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from autoshard.layout import Partial, Shard
from autoshard.passes.codegen.source_text import op_name
from autoshard.passes.ir.graph import Graph, Node, TensorType
from autoshard.passes.ir.program import Program, Statement
from autoshard.passes.ir.text import block_path, is_number
from autoshard.passes.lower.blocks import Segment

_NAMED_EXPRESSIONS = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript)
_UNPACKING_CALLS = frozenset({"split", "chunk", "unbind", "tensor_split", "topk", "sort"})
_ARITHMETIC_OPS = frozenset(
    "add sub mul div matmul mm bmm pow remainder floor_divide __and__ __or__ bitwise_and".split()
)


class _UserStatement(NamedTuple):
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
    Values in a numbered block take variables of its forward or deeper: equal blocks name
    alike."""
    return _VariableReader(graph).names


def module_names(graph: Graph) -> dict[str, str]:
    """value → last path component of the module whose only result it is."""
    nodes, last_read = graph.nodes, _last_reads(graph)
    found: dict[str, str] = {}
    for i, node in enumerate(nodes):
        leaf = node.fqn.rpartition(".")[2]
        if not leaf or is_number(leaf) or node.fqn == block_path(node.fqn) or len(node.outputs) != 1:
            continue
        start = i
        while start and _is_within_module(nodes[start - 1], node.fqn):
            start -= 1
        ends = i + 1 == len(nodes) or not _is_within_module(nodes[i + 1], node.fqn)
        if ends and _values_read_after(nodes[start : i + 1], i + 1, last_read) == list(node.outputs):
            found[node.outputs[0]] = leaf
    return found


def _is_within_module(node: Node, path: str) -> bool:
    return node.fqn == path or node.fqn.startswith(f"{path}.")


def _last_reads(graph: Graph) -> dict[str, int]:
    """value → number of the last node that reads it; ``len(nodes)`` if the graph returns it."""
    found = {name: i for i, node in enumerate(graph.nodes) for name in node.inputs}
    return found | dict.fromkeys(graph.returned, len(graph.nodes))


def _values_read_after(nodes: Sequence[Node], end: int, last_read: dict[str, int]) -> list[str]:
    """Values of ``nodes`` that node number ``end`` or a later one reads."""
    return [o for node in nodes for o in node.outputs if last_read.get(o, -1) >= end]


class _VariableReader:
    def __init__(self, graph: Graph) -> None:
        self.nodes, self.last_read = graph.nodes, _last_reads(graph)
        self.statements: dict[str, dict[int, _UserStatement]] = {}
        self.names: dict[str, str] = {}
        self.paths = [block_path(node.fqn) for node in graph.nodes]
        self.frames = self._frames()
        self.visit(0, len(graph.nodes), 0, "")
        for path, group in groupby(range(len(graph.nodes)), self.paths.__getitem__):
            if path:
                numbers = list(group)
                inside = len(_common_frames([self.frames[i] for i in numbers]))
                self.visit(numbers[0], numbers[-1] + 1, inside, path)

    def _frames(self) -> list[tuple[_UserStatement, ...]]:
        """Per node, the stack of statements; without frames it is that of the node before."""
        known: dict[tuple[tuple[str, int], ...], tuple[_UserStatement, ...]] = {(): ()}
        found: list[tuple[_UserStatement, ...]] = []
        for node in self.nodes:
            if node.frames not in known:
                known[node.frames] = tuple(self.statement(*frame) for frame in node.frames)
            found.append(known[node.frames] or (found[-1] if found else ()))
        return found

    def statement(self, file: str, line: int) -> _UserStatement:
        if file not in self.statements:
            self.statements[file] = _assignments(file)
        return self.statements[file].get(line) or _UserStatement(file, line)

    def visit(self, start: int, stop: int, depth: int, path: str) -> None:
        """Name results of statements at ``depth`` of the stack, then of functions they call."""
        for statement, first, end in self._runs(start, stop, depth):
            if path not in self.paths[first:end]:
                continue
            if statement is not None and statement.targets and self.paths[end - 1] == path:
                self.name(statement, first, end)
            if statement is not None:
                self.visit(first, end, depth + 1, path)

    def _runs(self, start: int, stop: int, depth: int) -> Iterator[tuple[_UserStatement | None, int, int]]:
        def running(i: int) -> _UserStatement | None:
            return self.frames[i][depth] if depth < len(self.frames[i]) else None

        for statement, group in groupby(range(start, stop), running):
            numbers = list(group)
            yield statement, numbers[0], numbers[-1] + 1

    def name(self, statement: _UserStatement, first: int, end: int) -> None:
        last = self.nodes[end - 1]
        made = _values_read_after(self.nodes[first:end], end, self.last_read)
        op = last.op._schema.name.rpartition("::")[2]
        if op.endswith("_scatter") or (statement.updates and op not in _ARITHMETIC_OPS):
            return  # the result is the base of a view that was written, not the variable
        kept = [target for target in statement.targets if target != "_"]
        if len(made) == len(kept) == 1 and made == list(last.outputs):
            self.names.setdefault(made[0], kept[0])
        elif statement.takes_apart and made == list(last.outputs) and len(made) == len(statement.targets):
            for value, target in zip(made, statement.targets, strict=True):
                self.names.setdefault(value, target)


def _common_frames(frames: Sequence[tuple[_UserStatement, ...]]) -> tuple[_UserStatement, ...]:
    """The common prefix of all stacks."""
    low, high = min(frames), max(frames)
    same = next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))
    return low[:same]


def _assignments(file: str) -> dict[int, _UserStatement]:
    """line → its plain assignment; lines of several statements are left out."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return {}
    found: dict[int, _UserStatement] = {}
    several: set[int] = set()
    for node in _nested_statements(tree):
        body = getattr(node, "body", None)
        lines = range(node.lineno, (body[0].lineno if body else node.end_lineno or node.lineno) + (not body))
        statement = _parse_assignment(node, file)
        several.update(line for line in lines if line in found)
        found.update(dict.fromkeys(lines, statement))
        if body and body[0].lineno == node.lineno:
            several.add(node.lineno)
    return {line: statement for line, statement in found.items() if statement.targets and line not in several}


def _nested_statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All statements, nested ones included; expressions are not entered."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for child in getattr(tree, field, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from _nested_statements(child)


def _parse_assignment(node: ast.stmt, file: str) -> _UserStatement:
    none = _UserStatement(file, node.lineno)
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target: ast.expr = node.targets[0]
    elif isinstance(node, ast.AnnAssign | ast.AugAssign):
        target = node.target
    else:
        return none
    updates = isinstance(node, ast.AugAssign)
    value = node.value
    if (
        value is None
        or not (updates or isinstance(value, _NAMED_EXPRESSIONS))
        or any(map(_is_unclear, ast.walk(value)))
    ):
        return none
    parts = target.elts if isinstance(target, ast.Tuple) else [target]
    names = tuple(part.id for part in parts if isinstance(part, ast.Name))
    if len(names) != len(parts):
        return none
    takes_apart = len(names) > 1 and isinstance(value, ast.Call) and _callee_name(value) in _UNPACKING_CALLS
    return _UserStatement(file, node.lineno, names, updates, takes_apart)


def _is_unclear(node: ast.AST) -> bool:
    """Whether it may assign more than one variable: a walrus, or an in-place call."""
    return isinstance(node, ast.NamedExpr) or (
        isinstance(node, ast.Call) and _callee_name(node).endswith("_") and not _callee_name(node).endswith("__")
    )


def _callee_name(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


_RELAYOUT_OPS = frozenset(
    "view _unsafe_view reshape permute transpose t expand contiguous clone unsqueeze squeeze _to_copy alias detach".split()
)
"""ops that change shape, memory layout or dtype of a value, so that its name stays"""
_MOVED_SUFFIXES = {
    "all_gather": "whole", "all_reduce": "sum", "slice": "shard", "reduce_scatter": "shard", "all_to_all": "moved",
    "permute": "moved", "partial": "summand", "pad": "summand",
}  # fmt: skip
"""redistribution → suffix of its result where the operand is still live"""
_SUFFIX_PATTERN = re.compile(rf"_({'|'.join(set(_MOVED_SUFFIXES.values()))})$")


class PreferredNames:
    """Names after the user's variables, else the module that returns the value, else the op."""

    def __init__(self, program: Program, segments: tuple[Segment, ...]) -> None:
        self.graph, self.types, self.layouts = program.graph, program.types, program.layouts
        self.inputs = {i.name: i for i in self.graph.inputs}
        self.user, self.module = user_names(self.graph), module_names(self.graph)
        parts = [part for s in program.statements for part in s.parts if part.step]
        self.moved = {o: part.value for part in parts for o in part.outputs}
        readers: dict[str, set[str]] = {}
        for segment in segments:
            for name in segment.inputs if segment.path else ():
                readers.setdefault(self._value(name), set()).add(segment.path)
        self.shared = {value for value, paths in readers.items() if len(paths) > 1}

    def of(self, s: Statement, out: str, operand: str) -> tuple[str, ...]:
        """Names of result ``out`` of ``s``. ``operand``: identifier of its first operand, or ""."""
        value = next((m.value for m in s.members if m.outputs[0] == out), s.value)
        if value in self.inputs and self.inputs[value].kind != "input":
            return ("_".join(self.inputs[value].fqn.split(".")[-2:]),)
        if s.node is None or s.step is not None:
            plain = operand or op_name(value or out)
            moved = _MOVED_SUFFIXES.get(s.step.kind) if s.step is not None else None
            return (f"{plain}_{moved}" if moved else plain,)
        plain = op_name(s.node.name)
        if operand and s.node.op._schema.name.rpartition("::")[2] in _RELAYOUT_OPS:
            return (*self._known(out), operand, f"{operand}_{plain}")
        return (*self._known(value or out), plain)

    def argument(self, local: str, segment: Segment) -> tuple[str, ...]:
        """Names of an argument, the same in all equal blocks: ``x`` if another such block may
        return it; its own name if several blocks read it."""
        value = self._value(local)
        producer = self.graph.producers.get(value)
        inside = producer is not None and bool(block_path(producer.fqn))
        own = value in self.shared and not inside
        if not own and any(can_be_next_value(self.types[local], self.types[out]) for out in segment.outputs):
            return "x", f"x_{self._form(local)}"
        if producer is None:
            return (self.inputs[value].fqn.replace(".", "_"),)
        return (*self._known(value), op_name(producer.name))

    def _form(self, local: str) -> str:
        """Its layout in a word, which tells locals of one value apart."""
        layout = self.layouts[local]
        return "shard" if layout.axes_with(Shard) else "summand" if layout.axes_with(Partial) else "whole"

    def _value(self, local: str) -> str:
        return self.moved.get(local, local)

    def _known(self, value: str) -> tuple[str, ...]:
        return tuple(names[value] for names in (self.user, self.module) if value in names)


def without_moved_suffix(name: str) -> str:
    """An identifier without the suffix of a redistribution."""
    return _SUFFIX_PATTERN.sub("", name)


def can_be_next_value(old: TensorType, new: TensorType) -> bool:
    """Whether ``new``, a block's result, may follow ``old``, its argument: ``x = block(x)``."""
    return old.grad or (old.shape, old.dtype) == (new.shape, new.dtype)
