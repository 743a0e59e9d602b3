"""Small all-reduces that are ready together become one, on a flattened tensor: their latency is paid once.

Everything else that a view of the whole graph gives is decided before, by the choice of layouts
(:mod:`autoshard.passes.propagate`): conversions are shared by all readers, and stand on the cheaper side of cheap ops.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.passes.blocks import block_path, reads
from autoshard.passes.ir import Ref
from autoshard.passes.lower import Program, Statement
from autoshard.passes.rules.base import Call

SMALL_BYTES = 1 << 20
"""an all-reduce of more bytes per rank gains nothing from company: its time is bandwidth, and flattening copies"""

TOGETHER = {"all_reduce": "all_reduce_together"}


@dataclass
class _Group:
    """Statements that can be one; each index is the position in the program."""

    members: list[int] = field(default_factory=list)
    outputs: set[str] = field(default_factory=set)


def together(program: Program) -> Program:
    """``program`` with small sums over the same axes made by one call, where the last of them stands.

    They must be of one dtype, belong to one block, and none of what stands between them may read a result.
    """
    groups: list[_Group] = []
    open_: dict[Any, _Group] = {}
    path = ""
    for i, s in enumerate(program.statements):
        here = block_path(s.node.fqn) if s.node is not None else ""
        read = set(reads(s))
        open_ = {key: g for key, g in open_.items() if here == path and not g.outputs & read}
        path = here
        key = _key(s, program)
        if key is None:
            continue
        if key not in open_:
            open_[key] = _Group()
            groups.append(open_[key])
        open_[key].members.append(i)
        open_[key].outputs.update(s.outputs)
    return replace(program, statements=tuple(_placed(program.statements, groups)))


def _key(s: Statement, program: Program) -> Any:
    """What the members of a group have in common; None for a statement that stays alone."""
    step = s.step
    if step is None or step.kind not in TOGETHER or s.parameter or s.call.kwargs.get("op", "sum") != "sum":
        return None
    type_ = program.types[s.value]
    if math.prod(step.dst.max_local_shape(step.shape)) * type_.dtype.itemsize > SMALL_BYTES:
        return None
    return step.kind, step.axes, s.call.kwargs.get("to"), type_.dtype


def _placed(statements: Sequence[Statement], groups: Sequence[_Group]) -> list[Statement]:
    several = [g.members for g in groups if len(g.members) > 1]
    merged = {members[-1]: _merged([statements[i] for i in members]) for members in several}
    gone = {i for members in several for i in members}
    return [merged.get(i, s) for i, s in enumerate(statements) if i in merged or i not in gone]


def _merged(members: Sequence[Statement]) -> Statement:
    first = members[0]
    tensors = tuple(Ref(reads(s)[0]) for s in members)
    call = Call(TOGETHER[str(first.call.fn)], (tensors, first.call.args[1]), first.call.kwargs)
    outputs = tuple(s.outputs[0] for s in members)
    layouts = tuple(s.layouts[0] for s in members)
    return replace(first, outputs=outputs, call=call, layouts=layouts, members=tuple(members))
