"""Recomputation (rematerialization): which statements the backward runs again."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from autoshard.passes.ir.graph import Node
from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.rules.facts import can_redraw, is_view, saved


def run_again(program: Program) -> tuple[Statement, ...]:
    """The parts of ``program``'s statements that the backward recomputes, in order, without views.

    The backward has their operands, saved or recomputed. Autograd does not save their results.
    """
    assignment = program.assignment
    if not assignment.again and not assignment.shared_again:
        return ()
    parts = [part for s in program.statements for part in s.parts]
    copies = _copies(parts, program)
    needed: set[str] = set()
    found: list[Statement] = []
    for part in reversed(parts):
        node = part.node if part.step is None else None
        wanted = not needed.isdisjoint(part.outputs)
        if node is None:
            if wanted and part.outputs[0] in copies:
                found.append(part)
                needed.update(reads(part))
            continue
        keeps = saved(node, program.graph.types)
        operands = reads(part)
        if _again(node, program) and (wanted or keeps.results or (keeps.intermediates and not can_redraw(node))):
            found.append(part)
            needed.update(operands)
        elif is_view(node.op):
            needed.update(operands if wanted else ())
        else:
            needed.update(_kept(node, operands, keeps.operands))
    return tuple(reversed(found))


def redrawing(program: Program, remade: Collection[int]) -> Program:
    """``program`` with dropout that redraws its mask, if recomputed but not in ``remade`` (ids).
    Then the backward needs neither its result nor its operands."""

    def form(s: Statement) -> Statement:
        node = s.node if s.call.fn == "dropout" and id(s) not in remade else None
        if node is None or not can_redraw(node) or not program.assignment.again.get(node.name):
            return s
        return replace(s, call=replace(s.call, kwargs={**s.call.kwargs, "again": True}))

    return replace(program, statements=tuple(map(form, program.statements)))


def redrawn(program: Program) -> tuple[Statement, ...]:
    """Dropout statements of ``program`` whose backward redraws the mask."""
    return tuple(s for s in program.statements if s.call.fn == "dropout" and s.call.kwargs.get("again"))


def _kept(node: Node, operands: Sequence[str], positions: frozenset[int]) -> list[str]:
    """Operands that autograd saves, as local names: all, if the local form reorders them."""
    return [operands[i] for i in positions] if len(operands) == len(node.inputs) else list(operands)


def _copies(parts: Sequence[Statement], program: Program) -> frozenset[str]:
    """Redistributed copies to recompute: those that only recomputed readers would save.

    A copy no larger than its source is saved in its place, unless the source is available anyway:
    saved, recomputed, or a view of a recomputed value.
    """
    assignment = program.assignment
    readers: dict[str, list[Statement]] = {}
    for part in parts:
        for name in reads(part):
            readers.setdefault(name, []).append(part)

    def remade(name: str, part: Statement) -> bool:
        if part.value in assignment.shared_again and program.layouts[name] == assignment.shared.get(part.value):
            return True
        nodes = [s.node for s in readers.get(name, ()) if s.step is None and s.node is not None]
        steps = [s for s in readers.get(name, ()) if s.step is not None]
        keeping = [n for n in nodes if _needs(n, name, readers, program)]
        return all(assignment.again.get(n.name) for n in keeping) and (
            bool(keeping) or any(remade(o, s) for s in steps for o in s.outputs)
        )

    found: set[str] = set()
    computed: set[str] = set()
    for part in parts:
        if part.step is None and part.node is not None:
            of_view = is_view(part.node.op) and not computed.isdisjoint(reads(part))
            computed.update(part.outputs if of_view or _again(part.node, program) else ())
    fixed = {i.name for i in program.graph.inputs}
    for part in parts:
        if part.step is None or part.value in program.graph.parameters:
            continue
        source = reads(part)[0]
        others = [s for s in readers[source] if s is not part]
        kept = any(s.node is None or s.step is not None or _needs(s.node, source, readers, program) for s in others)
        there = kept or source in found or source in computed or source in fixed
        free = part.step.kind in ("enter", "leave")  # no copy: the same memory
        if there or free or _size(part.outputs[0], program) > _size(source, program):
            found.update(o for o in part.outputs if remade(o, part))
    return frozenset(found)


def _again(node: Node, program: Program) -> bool:
    return program.assignment.again.get(node.name) == 2


def _size(name: str, program: Program) -> int:
    """Elements on the rank with the largest shard."""
    return math.prod(program.layouts[name].max_local_shape(program.types[name].example.shape))


def _needs(node: Node, name: str, readers: dict[str, list[Statement]], program: Program) -> bool:
    """Whether ``node`` saves the value, is a view of it, or is recomputed from it."""
    if is_view(node.op) or _again(node, program):
        return True
    part = next(s for s in readers[name] if s.node is node)
    return name in _kept(node, reads(part), saved(node, program.graph.types).operands)
