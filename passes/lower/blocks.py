"""Blocks: one per repeated module (``layers.3``), so that equal layers print as one class."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

from autoshard.passes.ir.graph import Graph, Node
from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.ir.text import block_path


@dataclass(frozen=True)
class Segment:
    """Consecutive statements of one block; ``path`` "" is the root."""

    path: str
    statements: tuple[Statement, ...]
    inputs: tuple[str, ...] = ()
    """local names read here and made outside, by first use, without the block's own parameters"""
    outputs: tuple[str, ...] = ()
    """local names made here and read outside"""


def block_of(node: Node | None) -> str:
    """The block that a statement made for ``node`` belongs to."""
    return block_path(node.fqn) if node is not None else ""


def module_of(statement: Statement, graph: Graph) -> str:
    """The module of a statement's collectives in reports: the reader, between two blocks the
    maker."""
    asker = statement.node.fqn if statement.node is not None else ""
    maker = graph.producers.get(statement.value) if statement.step is not None else None
    return asker if maker is None or block_path(maker.fqn) == block_path(asker) else maker.fqn


def block_runs(program: Program) -> Iterator[tuple[str, tuple[Statement, ...]]]:
    """Maximal runs of statements of one block, in program order: (path, statements)."""
    for path, statements in groupby(program.statements, key=lambda s: s.block):
        yield path, tuple(statements)


def hoist_redistributions(program: Program) -> Program:
    """Loop-invariant code motion: conversions of values from outside precede their block."""
    fqn_of = {i.name: i.fqn for i in program.graph.of_kind("parameter", "buffer")}
    result: list[Statement] = []
    for path, statements in block_runs(program):
        inside: set[str] = set()
        kept: list[Statement] = []
        for s in statements:
            foreign = inside.isdisjoint(reads(s)) and not fqn_of.get(s.value, "").startswith(path + ".")
            if path and s.step is not None and foreign:
                result.append(replace(s, block=""))
            else:
                kept.append(s)
                inside.update(s.outputs)
        result += kept
    return replace(program, statements=tuple(result))


def program_segments(program: Program) -> tuple[Segment, ...]:
    """The program as one :class:`Segment` per run of a block."""
    kinds = {i.name: i for i in program.graph.inputs}
    later = set(program.returned)
    result: list[Segment] = []
    for path, statements in reversed(tuple(block_runs(program))):
        made = {o for s in statements for o in s.outputs}
        read = dict.fromkeys(name for s in statements for name in reads(s) if name not in made)
        own = {n for n in read if n in kinds and path and kinds[n].fqn.startswith(path + ".")}
        inputs = tuple(n for n in read if n not in own)
        outputs = tuple(dict.fromkeys(o for s in statements for o in s.outputs if o in later))
        result.append(Segment(path, statements, inputs, outputs))
        later |= set(read)
    return tuple(reversed(result))
