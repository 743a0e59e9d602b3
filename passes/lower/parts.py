"""Parts of a block that run again in the backward: statements one after another, as one function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.lower.again import run_again
from autoshard.passes.lower.blocks import runs
from autoshard.passes.rules.facts import is_view


def parted(program: Program) -> Program:
    """``program`` with what runs again in parts: as many neighbours of one block as there are, views between them, too.

    What a part makes is not kept for the backward, and what it reads is.
    """
    remade = {id(part) for part in run_again(program)}
    if not remade:
        return program
    result: list[Statement] = []
    number = 0
    for _, statements in runs(program):
        for part, one in _neighbours(statements, remade):
            number += part and bool(one)
            result += (replace(s, again=number) for s in one) if part else one
    return replace(program, statements=tuple(result))


def _neighbours(statements: Sequence[Statement], remade: set[int]) -> Iterator[tuple[bool, list[Statement]]]:
    """Runs of statements, and whether they are a part; a part begins and ends with something that is no view.

    Conversions of parameters that stand in a part's way go before it.
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
    return s.step is None and s.node is not None and is_view(s.node.op)
