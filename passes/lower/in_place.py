"""In-place writes of states (KV caches) whose old value is dead: no write into a copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import Call, Program, Statement, reads
from autoshard.runtime.operations.exactly import may_stop

IN_PLACE: dict[torch._ops.OpOverload, torch._ops.OpOverload | str] = {
    aten.copy.default: aten.copy_.default,
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.index_fill.int_Scalar: aten.index_fill_.int_Scalar,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
    aten.slice_scatter.default: "write_slice",
    aten.select_scatter.default: "write_select",
}
"""op that writes into a copy of its first operand → its in-place variant"""

_MAY_PASS_ON = frozenset(
    {"clone", "_unsafe_view", "_to_copy", "dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"}
)
"""ops that return a new tensor by schema, but whose generated code may return the operand"""


def in_place(program: Program) -> Program:
    """``program`` with states written in place where no reader can notice.

    Excluded: the old value or a view of it is read after the write, returned or written. Also
    excluded: programs that may reject their inputs after the write.
    """
    if program.graph.training:
        return program
    found: dict[int, Statement] = {}
    written = set()
    last = max((i for i, s in enumerate(program.statements) if may_stop(s.call.fn, s.call.args)), default=-1)
    for fqn, old in program.graph.states.items():
        writes = _writes(program, old, program.mutations[fqn])
        if (
            writes
            and min(writes) > last
            and program.layouts[old] == program.assignment.written(fqn)
            and _unnoticed(program, old, writes)
        ):
            written.add(fqn)
            found |= {i: _instead(program.statements[i]) for i in writes}
    statements = tuple(found.get(i, s) for i, s in enumerate(program.statements))
    return replace(program, statements=statements, in_place=frozenset(written))


def _writes(program: Program, old: str, new: str) -> list[int]:
    """The statements from the old state to the new one, each a write into a copy; else []."""
    makers = {o: i for i, s in enumerate(program.statements) for o in s.outputs}
    found: list[int] = []
    while new != old:
        s = program.statements[makers[new]] if new in makers else None
        if s is None or s.call.fn not in IN_PLACE or s.again or not isinstance(s.call.args[0], Ref):
            return []
        found.append(makers[new])
        new = s.call.args[0].name
    return found[::-1]


def _unnoticed(program: Program, old: str, writes: Sequence[int]) -> bool:
    """Whether no statement reads a later value in place of an earlier one."""
    shared, stale = {old}, set[str]()
    for i, s in enumerate(program.statements):
        names = reads(s)
        if not stale.isdisjoint(names):
            return False
        if i in writes:
            if [n for n in names if n in shared] != [s.call.args[0].name]:
                return False
            stale |= shared
            shared = {s.outputs[0]}
        elif not shared.isdisjoint(names) and may_share(s):
            shared.update(s.outputs)
    kept = {new for fqn, new in program.mutations.items() if program.graph.states.get(fqn) != old}
    returned = {o.name for o in program.outputs if isinstance(o, Ref)} | kept
    return returned.isdisjoint(shared | stale)


def may_share(s: Statement) -> bool:
    """Whether a result may share memory with an operand."""
    fn = s.call.fn
    if isinstance(fn, str):
        return True
    return fn._schema.name.partition("::")[2] in _MAY_PASS_ON or any(
        a.alias_info is not None for a in fn._schema.arguments
    )


def _instead(s: Statement) -> Statement:
    return replace(s, call=Call(IN_PLACE[s.call.fn], s.call.args, s.call.kwargs))  # type: ignore[index]
