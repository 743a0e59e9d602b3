"""A mean over labels that lie whole on every rank is divided by what each rank counts itself: no collective is needed."""

from __future__ import annotations

from dataclasses import replace

from autoshard.layout import Partial, Shard
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import Call, Program, Statement

COUNT = frozenset({"cross_entropy", "nll_loss"})
"""functions of the runtime that count labels, their second operand, and take them whole as ``counted``"""


def counted(program: Program) -> Program:
    """``program`` with the labels of losses counted where they are whole, if they are so before they are cut."""
    whole = {i.name: i.name for i in program.graph.inputs if _is_whole(program, i.name)}
    statements = []
    for s in program.statements:
        statements.append(_counting(s, program, whole) if s.call.fn in COUNT else s)
        for name in s.outputs:
            if name != "_" and _is_whole(program, name):
                whole.setdefault(program.values.get(name, name), name)
    return replace(program, statements=tuple(statements))


def _counting(s: Statement, program: Program, whole: dict[str, str]) -> Statement:
    labels = s.call.args[1].name
    name = whole.get(program.values.get(labels, labels))
    if name is None or not any(c.what == "count" for c in s.internal):
        return s
    call = Call(s.call.fn, s.call.args, {**s.call.kwargs, "counted": Ref(name)})
    return replace(s, call=call, internal=tuple(c for c in s.internal if c.what != "count"))


def _is_whole(program: Program, name: str) -> bool:
    return not any(isinstance(p, Shard | Partial) for p in program.layouts[name].placements)
