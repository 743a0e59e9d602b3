"""Replicated labels of a mean loss are counted locally, without a collective."""

from __future__ import annotations

from dataclasses import replace

from autoshard.passes.ir.assignment import is_whole
from autoshard.passes.ir.graph import Ref, refs
from autoshard.passes.ir.program import Call, Program, Statement


def counted(program: Program) -> Program:
    """``program`` whose losses count labels locally, if these are replicated before sharding."""
    whole = {i.name: i.name for i in program.graph.inputs if _is_whole(program, i.name)}
    statements = []
    for s in program.statements:
        statements.append(_counting(s, program, whole))
        for name in s.outputs:
            if name != "_" and _is_whole(program, name):
                whole.setdefault(program.values.get(name, name), name)
    return replace(program, statements=tuple(statements))


def _counting(s: Statement, program: Program, whole: dict[str, str]) -> Statement:
    """``s`` with the replicated labels as the argument ``counted``."""
    if not any(c.spared is not None for c in s.internal):
        return s
    labels = next(refs(s.call.args[1])).name
    name = whole.get(program.values.get(labels, labels))
    if name is None:
        return s
    call = Call(s.call.fn, s.call.args, {**s.call.kwargs, "counted": Ref(name)})
    return replace(s, call=call, internal=tuple(c for c in s.internal if c.spared is None))


def _is_whole(program: Program, name: str) -> bool:
    return is_whole(program.layouts[name].placements)
