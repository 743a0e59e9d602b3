"""Recomputed parts: consecutive statements of a block that the backward reruns as one function."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.lower.again import redrawing, run_again
from autoshard.passes.lower.blocks import runs
from autoshard.passes.lower.travelling import settled
from autoshard.passes.rules.facts import is_view


def parted(program: Program) -> Program:
    """``program`` with recomputed statements in parts, as long as possible within a block.

    Parts may contain views. The operands of a part are saved for the backward, its results are not.
    """
    remade = {id(part) for part in run_again(program)}
    program = redrawing(program, remade)
    if not remade:
        return program
    program = settled(program, remade)
    result: list[Statement] = []
    number = 0
    for statements in _sunk(program, remade):
        for part, one in _neighbours(statements, remade):
            saves = part and any(not _shows(s) for s in one)
            number += saves
            result += (replace(s, again=number) for s in one) if saves else one
    return replace(program, statements=tuple(result))


def _sunk(program: Program, remade: set[int]) -> list[list[Statement]]:
    """Runs of statements per block, with local conversions moved into the block that alone reads
    them.

    In front of the block each would be a part of its own.
    """
    found = [list(statements) for _, statements in runs(program)]
    for before, inside in itertools.pairwise(found):
        if before[0].block:
            continue
        for s in reversed(before):
            local = id(s) in remade and s.step is not None and not s.step.is_collective
            if local and _readers(s, inside, program) <= remade:
                before.remove(s)
                first = next(i for i, x in enumerate(inside) if not {*s.outputs}.isdisjoint(reads(x)))
                inside.insert(first, moved := replace(s, block=inside[0].block))
                remade.add(id(moved))
    return [statements for statements in found if statements]


def _readers(s: Statement, inside: Collection[Statement], program: Program) -> set[int]:
    """Ids of the statements that read ``s``'s results; 0 for readers not ``inside``."""
    names, here = {*s.outputs}, {id(x) for x in inside}
    found = [x for x in program.statements if not names.isdisjoint(reads(x))]
    return {id(part) if id(x) in here else 0 for x in found for part in x.parts}


def _neighbours(statements: Sequence[Statement], remade: set[int]) -> Iterator[tuple[bool, list[Statement]]]:
    """(is a part, statements), in order. A part neither begins nor ends with a view.

    Redistributions of parameters that would interrupt a part go in front of it.
    """
    one: list[Statement] = []
    views: list[Statement] = []
    for s in statements:
        if all(id(part) in remade for part in s.parts):
            one += [*views, s]
            views = []
        elif one and _shows(s):
            views.append(s)
        elif s.parameter and not {o for x in (*one, *views) for o in x.outputs} & set(reads(s)):
            yield False, [s]
        else:
            yield True, one
            yield False, [*views, s]
            one, views = [], []
    yield True, one
    yield False, views


def _shows(s: Statement) -> bool:
    """Whether the result is a view of an operand."""
    if s.step is not None:
        return s.step.kind in ("enter", "leave")
    return s.node is not None and is_view(s.node.op)
