"""The body of one emitted function: statements with identifiers, comments, profiling scopes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from autoshard.aten import aten
from autoshard.frames import printable
from autoshard.passes.codegen.source_text import (
    LINE_WIDTH,
    Expression,
    NameScope,
    atom,
    layout_text,
    print_call,
    python_path,
    shape_text,
    singular_name,
    step_comment,
)
from autoshard.passes.codegen.variable_names import PreferredNames, can_be_next_value
from autoshard.passes.ir.memory import Recomputed
from autoshard.passes.ir.program import COLLECTIVE_MATMULS, SCATTER_PRODUCT, Program, Statement, binary_bytes, reads
from autoshard.passes.ir.text import is_number, show_seconds
from autoshard.passes.lower.blocks import Segment, module_of
from autoshard.passes.rules.facts import is_random


@dataclass(frozen=True)
class SourceLine:
    """``targets = value  # comment``, wrapped as needed."""

    targets: tuple[str, ...]
    value: Expression
    comment: str = ""
    module: str | None = None
    """module path relative to the block, for profiles; None: it cannot communicate"""
    rest: str = ""
    """end of the left side that unpacks unused results: ", *_" or "" """
    wide: bool = False
    """whether it is a bucket: the value is a tuple, and targets may be wrapped, one per line"""
    block: str = ""
    """path of the block that it calls, if it calls one"""
    kind: str = ""
    """class of that block"""

    @property
    def prefix(self) -> str:
        if self.wide and len(self.targets) == 1:
            return f"({self.targets[0]},) = "
        return f"{', '.join(self.targets)}{self.rest} = " if self.targets else ""

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for lines with the same text and scopes."""
        return self.prefix, self.value.flat, self.comment, self.module, self.block, self.kind

    def lines(self, indent: str, mark: Callable[[str], str]) -> list[str]:
        """The text. ``mark``: module → end of its lines until line numbers are known."""
        lines = self.value.lines(self.prefix, indent)
        if self.wide and len(lines[0]) > LINE_WIDTH:  # as ruff format breaks it
            lines = [f"{indent}(", *(f"{indent}    {t}," for t in self.targets), *self.value.lines(") = ", indent)]
        end = "" if self.module is None else mark(self.module)
        if not self.comment:
            return lines
        if len(lines) == 1 and len(lines[0]) + len(self.comment) + 4 <= LINE_WIDTH:
            return [f"{lines[0]}  # {self.comment}{end}"]
        return [f"{indent}# {self.comment}", *(line + end for line in lines)]


@dataclass(frozen=True)
class SourceFunction(SourceLine):
    """A nested function: a recomputed part (activation checkpoint), which a later line calls."""

    arguments: tuple[str, ...] = ()
    body: tuple[SourceLine, ...] = ()
    returned: str = ""

    @property
    def key(self) -> tuple[Any, ...]:
        return *super().key, self.arguments, tuple(line.key for line in self.body), self.returned

    def lines(self, indent: str, mark: Callable[[str], str]) -> list[str]:
        arguments = [atom(a) for a in self.arguments]
        head = Expression(f"def {self.value.flat}(", arguments, "):").lines("", indent)
        head = [f"{indent}# {self.comment}", *head] if self.comment else head
        inner = [text for line in self.body for text in line.lines(f"{indent}    ", mark)]
        return ["", *head, *inner, f"{indent}    return {self.returned}", ""]


@dataclass
class FunctionBody:
    """Writes the statements of one function. ``path``: its block, "" for the root."""

    program: Program
    wanted: PreferredNames
    path: str
    names: NameScope
    recomputed: Mapping[str, Recomputed] = field(default_factory=dict)
    """recomputations, by operation or value; for comments"""
    returns: bool = True
    """whether the function returns right after the added statements: no final ``del``"""
    written: list[SourceLine] = field(default_factory=list)

    def add(self, segment: Segment, kept: Collection[str]) -> None:
        """Write ``segment``, each recomputed part as a function. ``kept``: locals read after it."""
        last_read = {name: i for i, s in enumerate(segment.statements) for name in reads(s)}
        end = 0
        for again, one in groupby(segment.statements, key=lambda s: s.again):
            statements = tuple(one)
            if again:
                end += len(statements)
                self._set_dead_names(kept, last_read, end - 1)
                later = {*kept, *(n for s in segment.statements[end:] for n in reads(s))}
                others = any(s.again not in (0, again) for s in segment.statements)
                self._part(replace(segment, statements=statements), later, "" if others else segment.path)
                self._free(statements[-1])
                continue
            for statement in statements:
                self._set_dead_names(kept, last_read, end)
                self.written.append(self._line(statement))
                end += 1
                if not self.returns or end < len(segment.statements):
                    self._free(statement)

    def _free(self, s: Statement) -> None:
        """Write ``del`` of locals that are dead after ``s``, unless their names were reused."""
        names = self.names
        mine = dict.fromkeys(names.of[n] for n in s.dead_after if n in names.of and names.holder.get(names.of[n]) == n)
        if mine:
            self.written.append(SourceLine((), atom(f"del {', '.join(mine)}")))

    def _set_dead_names(self, kept: Collection[str], last_read: Mapping[str, int], now: int) -> None:
        self.names.dead = lambda name: name not in kept and last_read.get(name, -1) <= now

    def _part(self, segment: Segment, later: Collection[str], whole: str) -> None:
        """Write a recomputed part: a function of all values that it reads, and its call. ``whole``:
        path of the block, if the block has no other part."""
        made = {o for s in segment.statements for o in s.outputs}
        read = [n for n in dict.fromkeys(n for s in segment.statements for n in reads(s)) if n not in made]
        outputs = [o for s in segment.statements for o in s.outputs if o in later and o != "_"]
        self._bind(read)
        inside = NameScope(self.names.fixed)
        for name in read:
            own = name in self.wanted.inputs and self.wanted.inputs[name].kind != "input"
            inside.fresh(name, "_".join(self.wanted.inputs[name].fqn.split(".")[-2:]) if own else self.names.of[name])
        body = FunctionBody(self.program, self.wanted, self.path, inside, self.recomputed)
        body.add(replace(segment, statements=tuple(replace(s, again=0) for s in segment.statements)), outputs)
        function = self.names.fresh("", f"{self._title(segment, whole) or inside.of[outputs[0]]}_again")
        arguments = [inside.of[name] for name in read]
        returned = ", ".join(inside.of[o] for o in outputs)
        self.written.append(
            SourceFunction(
                targets=(),
                value=atom(function),
                comment=self._recompute_comment(segment),
                arguments=tuple(arguments),
                body=tuple(body.written),
                returned=returned,
            )
        )
        parts = [atom(text) for text in (function, *(self.names.of[n] for n in read))]
        if any(s.node is not None and s.step is None and is_random(s.node) for s in segment.statements):
            parts.append(atom("draws=True"))
        targets: list[str] = []
        for o in outputs:
            targets.append(self.names.fresh(o, inside.of[o], avoid=targets))
        module = self._module(segment.statements[0])
        self.written.append(SourceLine(tuple(targets), Expression("runtime.recompute(", parts, ")"), "", module))

    def _title(self, segment: Segment, whole: str) -> str:
        """Name of a part: the submodule of all its operations, or the block; "" if neither fits."""
        paths = [s.node.fqn.split(".") for s in segment.statements if s.node is not None and s.step is None]
        common = paths[0][: sum(len(set(names)) == 1 for names in zip(*paths, strict=False))] if paths else []
        if len(common) > len(self.path.split(".") if self.path else []) and not is_number(common[-1]):
            return common[-1]
        return singular_name(whole.rpartition(".")[0]) if whole and len(paths) > 1 else ""

    def _recompute_comment(self, segment: Segment) -> str:
        """Comment of a recomputed part: bytes it saves, and seconds it costs."""
        parts = [part for s in segment.statements for part in s.parts]
        names = dict.fromkeys(p.value if p.step is not None else p.node.name for p in parts if p.node is not None)
        found = [self.recomputed[n] for n in names if n in self.recomputed]
        kept, seconds = sum(r.bytes for r in found), sum(r.seconds for r in found)
        paid = f", for {show_seconds(float(f'{seconds:.2g}'))}" if seconds >= 1e-9 else ""
        return f"recomputed in the backward, keeps {binary_bytes(kept)} less{paid}" if kept or paid else ""

    def call(self, segment: Segment, kind: str, method: str, lengths: Sequence[str], kept: Collection[str]) -> None:
        """Write the call of ``method`` of a block of class ``kind``."""
        self._bind(segment.inputs)
        self.names.dead = lambda name: name not in kept
        given = [self.names.of[name] for name in segment.inputs]
        one, targets, types = singular_name(segment.path.rpartition(".")[0]), list[str](), self.program.types
        for out in segment.outputs:
            dead = [n for n in segment.inputs if n not in kept and self.names.is_held(n)]
            wanted = [self.names.of[n] for n in dead if can_be_next_value(types[n], types[out])]
            plain = "x" if one in ("block", "layer") else one
            targets.append(self.names.fresh(out, *sorted(wanted, key=plain.__ne__), plain, avoid=targets))
        parts = [atom(name) for name in (*given, *lengths)]
        called = Expression(f"{python_path(segment.path)}{method}(", parts, ")")
        self.written.append(SourceLine(tuple(targets), called, block=segment.path, kind=kind))
        self._free(segment.statements[-1])

    def own(self, name: str) -> str:
        """Python source of a parameter, buffer or constant, relative to the block."""
        fqn = self.wanted.inputs[name].fqn
        inside = self.path and fqn.startswith(f"{self.path}.")
        return python_path(fqn[len(self.path) + 1 :] if inside else fqn)

    def _bind(self, names: Sequence[str]) -> None:
        for name in names:
            if name not in self.names.of:
                self.names.of[name] = self.own(name)

    def _line(self, s: Statement) -> SourceLine:
        names, operands = self.names, reads(s)
        self._bind(operands)
        value = print_call(s.call, names.of, self.program.mesh.sizes)
        targets: list[str] = []
        for out in s.outputs:
            if out == "_":
                targets.append("_")
                continue
            source = operands[len(targets) if s.step is not None else 0] if operands else ""
            held = names.of[source] if source and names.is_held(source) else ""
            if s.step is not None and held and names.dead(source) and held not in targets:
                targets.append(names.reuse(out, source))  # a bucket may read one value twice
            else:
                targets.append(names.fresh(out, *self.wanted.of(s, out, held), avoid=targets))
        module = self._module(s) if "runtime." in value.flat else None
        wide = bool(s.members) and s.call.fn != SCATTER_PRODUCT
        return SourceLine(tuple(targets), value, self._comment(s), module, self._rest(s, targets), wide)

    def _module(self, s: Statement) -> str:
        module = module_of(s, self.program.graph)
        inside = not self.path or f"{module}.".startswith(f"{self.path}.")
        return module[len(self.path) :].removeprefix(".") if inside else ""

    def _rest(self, s: Statement, targets: Sequence[str]) -> str:
        """``, *_`` behind the targets, where a call returns more results than are used; else ""."""
        if s.members:
            return ""
        returns = s.node.op._schema.returns if s.node is not None and s.step is None else ()
        is_list = len(returns) == 1 and "List" in str(returns[0].type)
        if len(returns) <= 1 and not is_list:
            return ""
        complete = len(returns) == len(targets) if not is_list else self._is_complete(s)
        return "" if complete and len(targets) > 1 else ", *_"

    def _is_complete(self, s: Statement) -> bool:
        """Whether the named results of a split are all of its results."""
        types = self.program.types
        named = [o for o in s.outputs if o != "_"]
        if s.node is not None and s.node.op is aten.where.default:
            return len(named) == len(s.outputs) == len(types[s.node.inputs[0]].shape)
        if any(types[o].unknown for o in named):
            return False
        return (
            s.node is not None
            and len(named) == len(s.outputs)
            and sum(math.prod(types[o].shape) for o in named) == math.prod(types[s.node.inputs[0]].shape)
        )

    def _comment(self, s: Statement) -> str:
        if s.step is not None:
            return step_comment(s)
        made = [
            shape_text(self.program.types[o], layout) + layout_text(layout)
            for o, layout in zip(s.outputs, s.layouts, strict=True)
            if layout is not None
        ]
        if s.call.fn in COLLECTIVE_MATMULS:
            moved = (step_comment(part).partition("    ")[0] for part in s.parts if part.step is not None)
            made += [f"{arrow} by collective matmul" for arrow in moved]
        source = s.node.source if s.node is not None else ""
        return printable("; ".join(made) + (f"  {source}" if source else ""))
