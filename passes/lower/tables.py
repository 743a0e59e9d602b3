"""Look-ups in tables that lie whole on one rank each become one: a look-up per rank and one exchange of all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard.passes.ir.merge import TABLES, merged
from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.lower.bucket import placed


def tables_together(program: Program) -> Program:
    """``program`` with look-ups in one call as far as none needs what another has found; it stands in no block."""
    if not any(s.call.fn == TABLES for s in program.statements):
        return program
    whole = {n for n, t in program.graph.types.items() if t.tables and t.looked_up}
    depth: dict[str, int] = {}
    units: list[list[Statement]] = []
    open_: dict[Any, list[Statement]] = {}
    for s in program.statements:
        level = max((depth.get(name, 0) for name in reads(s)), default=0)
        depth.update(dict.fromkeys(s.outputs, level + (s.call.fn == TABLES)))
        if s.call.fn != TABLES:
            units.append([replace(s, block="") if s.parameter and s.value in whole else s])
            continue
        key = _key(s, program, level)
        if key not in open_:
            open_[key] = []
            units.append(open_[key])
        open_[key].append(replace(s, block=""))
    found = (merged(TABLES, unit) if unit[0].call.fn == TABLES else unit[0] for unit in placed(units))
    return replace(program, statements=tuple(found))


def _key(s: Statement, program: Program, level: int) -> Any:
    kwargs: Mapping[str, Any] = s.call.kwargs
    form = [(name, kwargs.get(name)) for name in ("last_offset", "sparse", "summed")]
    has = [name in kwargs for name in ("offsets", "weights")]
    return level, repr((s.call.args[3:], form, has)), program.types[s.outputs[0]].dtype, s.again
