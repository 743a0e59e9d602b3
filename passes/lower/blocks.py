"""Cut a program into blocks: one per repeated module (``layers.3``), so that equal layers print as one class."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.passes.ir.graph import Graph, refs
from autoshard.passes.ir.program import Program, Statement
from autoshard.passes.ir.walk import reads

_INDEXED = re.compile(r"^(?:.*?\.)??\d+(?=\.|$)")


@dataclass(frozen=True)
class Segment:
    """Consecutive statements of one block (``path`` "" is the root), with what flows in and out."""

    path: str
    statements: tuple[Statement, ...]
    inputs: tuple[str, ...] = ()
    """local names it reads that are made outside, in order of first use; its own parameters are not listed"""
    outputs: tuple[str, ...] = ()
    """local names made inside that are read outside"""


def block_path(fqn: str) -> str:
    """The outermost numbered module of ``fqn``: ``model.layers.3`` of ``model.layers.3.mlp``; "" if there is none."""
    found = _INDEXED.match(fqn)
    return found.group() if found else ""


def module_of(statement: Statement, graph: Graph) -> str:
    """The module that a statement's collectives are shown under.

    For a redistribution the one that reads the value; between two blocks the one that made it.
    """
    asker = statement.node.fqn if statement.node is not None else ""
    maker = graph.producers.get(statement.value) if statement.step is not None else None
    return asker if maker is None or block_path(maker.fqn) == block_path(asker) else maker.fqn


def segments(program: Program) -> tuple[Segment, ...]:
    """The program's statements, grouped. Conversions of values that come from outside stand before the block."""
    runs = _hoisted(program, _runs(program))
    kinds = {i.name: i for i in program.graph.inputs}
    later = {r.name for r in refs(program.outputs)} | set(program.mutations.values())
    result: list[Segment] = []
    for path, statements in reversed(runs):
        made = {o for s in statements for o in s.outputs}
        read = dict.fromkeys(name for s in statements for name in reads(s) if name not in made)
        own = {n for n in read if n in kinds and path and kinds[n].fqn.startswith(path + ".")}
        inputs = tuple(n for n in read if n not in own)
        outputs = tuple(dict.fromkeys(o for s in statements for o in s.outputs if o in later))
        result.append(Segment(path, tuple(statements), inputs, outputs))
        later |= set(read)
    return tuple(reversed(result))


Run = tuple[str, list[Statement]]


def _runs(program: Program) -> list[Run]:
    runs: list[Run] = []
    for statement in program.statements:
        path = block_path(statement.node.fqn) if statement.node is not None else ""
        if not runs or runs[-1][0] != path:
            runs.append((path, []))
        runs[-1][1].append(statement)
    return runs


def _hoisted(program: Program, runs: Sequence[Run]) -> list[Run]:
    """Move conversions of outside values, other than a block's own parameters, in front of the block."""
    fqn_of = {i.name: i.fqn for i in program.graph.inputs if i.kind in ("parameter", "buffer")}
    result: list[Run] = []
    for path, statements in runs:
        inside: set[str] = set()
        before: list[Statement] = []
        kept: list[Statement] = []
        for statement in statements:
            foreign = not any(name in inside for name in reads(statement))
            own = fqn_of.get(statement.value, "").startswith(path + ".")
            if path and statement.step is not None and foreign and not own:
                before.append(statement)
            else:
                kept.append(statement)
                inside.update(statement.outputs)
        for at, part in (("", before), (path, kept)):
            if part and result and result[-1][0] == at:
                result[-1][1].extend(part)
            elif part:
                result.append((at, part))
    return result
