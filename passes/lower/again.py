"""Which local values are not kept for the backward, because they are made again in it."""

from __future__ import annotations

from autoshard.passes.ir.graph import Node
from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.rules.facts import is_view, saved


def made_again(program: Program) -> frozenset[str]:
    """Local names of what the backward makes again: results of operations, and converted copies.

    Views of them hold nothing of their own and are not listed. A converted copy that an operation keeps whose
    conversions are not made again is kept for all.
    """
    assignment = program.assignment
    if not assignment.again and not assignment.shared_again:
        return frozenset()
    parts = [part for s in program.statements for part in s.parts]
    readers: dict[str, list[Statement]] = {}
    for part in parts:
        for name in reads(part):
            readers.setdefault(name, []).append(part)
    found: set[str] = set()
    for part in parts:
        node = part.node
        if part.step is None:
            if node is not None and assignment.again.get(node.name) == 2:
                found.update(o for o in part.outputs if o != "_")
        elif part.value not in program.graph.parameters:
            found.update(o for o in part.outputs if _is_remade(o, part, readers, program))
    return frozenset(found)


def _is_remade(name: str, made: Statement, readers: dict[str, list[Statement]], program: Program) -> bool:
    assignment = program.assignment
    if made.value in assignment.shared_again and program.layouts[name] == assignment.shared.get(made.value):
        return True
    keeping = [
        s.node for s in readers.get(name, ()) if s.step is None and s.node is not None and _keeps(s, name, program)
    ]
    return bool(keeping) and all(assignment.again.get(node.name) for node in keeping)


def _keeps(s: Statement, name: str, program: Program) -> bool:
    node = s.node
    if node is None:
        return False
    if is_view(node.op) or program.assignment.again.get(node.name) == 2:
        return True
    positions = [i for i, read in enumerate(reads(s)) if read == name]
    return not saved(node, program.graph.types).operands.isdisjoint(positions)


def is_again(node: Node | None, program: Program) -> bool:
    """Whether the results of ``node`` are made again."""
    return node is not None and program.assignment.again.get(node.name) == 2
