"""Recomputation (rematerialization, activation checkpointing): which statements run again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from autoshard.passes.ir.graph import Node
from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.lower.blocks import block_runs
from autoshard.passes.lower.collective_matmul import settle_recomputed
from autoshard.passes.rules.facts import can_redraw, is_view, saved_for_backward


def recomputed_statements(program: Program) -> tuple[Statement, ...]:
    """The parts of ``program``'s statements that the backward recomputes, in order, without views.
    Autograd saves their operands or has them recomputed, not their results."""
    assignment = program.assignment
    if not assignment.again and not assignment.shared_again:
        return ()
    parts = [part for s in program.statements for part in s.parts]
    copies = _recomputed_copies(parts, program)
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
        keeps = saved_for_backward(node, program.graph.types)
        operands = reads(part)
        if _is_recomputed(node, program) and (
            wanted or keeps.results or (keeps.intermediates and not can_redraw(node))
        ):
            found.append(part)
            needed.update(operands)
        elif is_view(node.op):
            needed.update(operands if wanted else ())
        else:
            needed.update(_saved_operands(node, operands, keeps.operands))
    return tuple(reversed(found))


def redraw_dropout(program: Program, remade: Collection[int]) -> Program:
    """``program`` with dropout that redraws its mask, if recomputed but not in ``remade`` (ids).
    Then the backward needs neither its result nor its operands."""

    def form(s: Statement) -> Statement:
        node = s.node if s.call.fn == "dropout" and id(s) not in remade else None
        if node is None or not can_redraw(node) or not program.assignment.again.get(node.name):
            return s
        return replace(s, call=replace(s.call, kwargs={**s.call.kwargs, "again": True}))

    return replace(program, statements=tuple(map(form, program.statements)))


def redrawn_dropouts(program: Program) -> tuple[Statement, ...]:
    """Dropout statements of ``program`` whose backward redraws the mask."""
    return tuple(s for s in program.statements if s.call.fn == "dropout" and s.call.kwargs.get("again"))


def _saved_operands(node: Node, operands: Sequence[str], positions: frozenset[int]) -> list[str]:
    """Operands that autograd saves, as local names: all, if the local form reorders them."""
    return [operands[i] for i in positions] if len(operands) == len(node.inputs) else list(operands)


def _recomputed_copies(parts: Sequence[Statement], program: Program) -> frozenset[str]:
    """Redistributed copies to recompute: those that only recomputed readers would save, unless a
    copy is no larger than its source and the source is not available anyway (saved, recomputed,
    or a view of that)."""
    assignment = program.assignment
    readers: dict[str, list[Statement]] = {}
    sent = {part.value for part in parts if part.step is not None and part.step.is_collective}
    for part in parts:
        for name in reads(part):
            readers.setdefault(name, []).append(part)

    def remade(name: str, part: Statement) -> bool:
        if program.layouts[name] == assignment.shared.get(part.value) and (
            part.value in sent or part.value in assignment.shared_again
        ):
            return part.value in assignment.shared_again  # as the search decided and priced
        nodes = [s.node for s in readers.get(name, ()) if s.step is None and s.node is not None]
        steps = [s for s in readers.get(name, ()) if s.step is not None]
        keeping = [n for n in nodes if _keeps_value(n, name, readers, program)]
        return all(assignment.again.get(n.name) for n in keeping) and (
            bool(keeping) or any(remade(o, s) for s in steps for o in s.outputs)
        )

    found: set[str] = set()
    computed: set[str] = set()
    for part in parts:
        if part.step is None and part.node is not None:
            of_view = is_view(part.node.op) and not computed.isdisjoint(reads(part))
            computed.update(part.outputs if of_view or _is_recomputed(part.node, program) else ())
    fixed = {i.name for i in program.graph.inputs}
    for part in parts:
        if part.step is None or part.value in program.graph.parameters:
            continue
        source = reads(part)[0]
        others = [s for s in readers[source] if s is not part]
        kept = any(
            s.node is None or s.step is not None or _keeps_value(s.node, source, readers, program) for s in others
        )
        there = kept or source in found or source in computed or source in fixed
        free = part.step.kind in ("enter", "leave")  # no copy: the same memory
        if there or free or _local_elements(part.outputs[0], program) > _local_elements(source, program):
            found.update(o for o in part.outputs if remade(o, part))
    return frozenset(found)


def _is_recomputed(node: Node, program: Program) -> bool:
    return program.assignment.again.get(node.name) == 2


def _local_elements(name: str, program: Program) -> int:
    """Elements on the rank with the largest shard."""
    return math.prod(program.layouts[name].max_local_shape(program.types[name].example.shape))


def _keeps_value(node: Node, name: str, readers: dict[str, list[Statement]], program: Program) -> bool:
    """Whether ``node`` saves the value, is a view of it, or is recomputed from it."""
    if is_view(node.op) or _is_recomputed(node, program):
        return True
    part = next(s for s in readers[name] if s.node is node)
    return name in _saved_operands(node, reads(part), saved_for_backward(node, program.graph.types).operands)


def group_recomputed(program: Program) -> Program:
    """``program`` with recomputed statements in parts as long as possible within a block, views
    included. A part's operands are saved for the backward, its results are not."""
    recomputed_ids = {id(part) for part in recomputed_statements(program)}
    program = redraw_dropout(program, recomputed_ids)
    if not recomputed_ids:
        return program
    program = settle_recomputed(program, recomputed_ids)
    result: list[Statement] = []
    number = 0
    for statements in _sink_conversions(program, recomputed_ids):
        for part, one in _recomputed_runs(statements, recomputed_ids):
            saves = part and any(not _is_view_statement(s) for s in one)
            number += saves
            result += (replace(s, again=number) for s in one) if saves else one
    return replace(program, statements=tuple(result))


def _sink_conversions(program: Program, recomputed_ids: set[int]) -> list[list[Statement]]:
    """Runs of statements per block, with local conversions moved into the block that alone reads
    them: in front of it each would be a part of its own."""
    found = [list(statements) for _, statements in block_runs(program)]
    for before, inside in itertools.pairwise(found):
        if before[0].block:
            continue
        for s in reversed(before):
            local = id(s) in recomputed_ids and s.step is not None and not s.step.is_collective
            if local and _reader_ids(s, inside, program) <= recomputed_ids:
                before.remove(s)
                first = next(i for i, x in enumerate(inside) if not {*s.outputs}.isdisjoint(reads(x)))
                inside.insert(first, moved := replace(s, block=inside[0].block))
                recomputed_ids.add(id(moved))
    return [statements for statements in found if statements]


def _reader_ids(s: Statement, inside: Collection[Statement], program: Program) -> set[int]:
    """Ids of the statements that read ``s``'s results; 0 for readers not ``inside``."""
    names, here = {*s.outputs}, {id(x) for x in inside}
    found = [x for x in program.statements if not names.isdisjoint(reads(x))]
    return {id(part) if id(x) in here else 0 for x in found for part in x.parts}


def _recomputed_runs(
    statements: Sequence[Statement], recomputed_ids: set[int]
) -> Iterator[tuple[bool, list[Statement]]]:
    """(is a part, statements), in order. A part neither begins nor ends with a view;
    redistributions of parameters that would interrupt it go in front."""
    one: list[Statement] = []
    views: list[Statement] = []
    for s in statements:
        if all(id(part) in recomputed_ids for part in s.parts):
            one += [*views, s]
            views = []
        elif one and _is_view_statement(s):
            views.append(s)
        elif s.parameter and not {o for x in (*one, *views) for o in x.outputs} & set(reads(s)):
            yield False, [s]
        else:
            yield True, one
            yield False, [*views, s]
            one, views = [], []
    yield True, one
    yield False, views


def _is_view_statement(s: Statement) -> bool:
    """Whether the result is a view of an operand."""
    if s.step is not None:
        return s.step.kind in ("enter", "leave")
    return s.node is not None and is_view(s.node.op)
