"""Grouped look-ups: embedding tables placed table-wise share one exchange; pooled look-ups in
tables of equal sharding share one call."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Any

from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.merge import POOLED, POOLED_TOGETHER, TABLES, merged
from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.lower.bucket import placed


def tables_together(program: Program) -> Program:
    """``program`` with independent look-ups merged into one call, outside all blocks."""
    if not any(s.call.fn in (TABLES, POOLED) for s in program.statements):
        return program
    enters = (s for s in program.statements if s.parameter and s.step is not None and s.step.kind == "enter")
    stored = program.graph.parameters.union(s.outputs[0] for s in enters if reads(s)[0] in program.graph.parameters)
    depth: dict[str, int] = {}
    units: list[list[Statement]] = []
    open_: dict[Any, list[Statement]] = {}
    for s in program.statements:
        level = max((depth.get(name, 0) for name in reads(s)), default=0)
        key = _key(s, program, stored, level)
        depth.update(dict.fromkeys(s.outputs, level + (key is not None)))
        if key is None:
            units.append([s])
            continue
        if key not in open_:
            open_[key] = []
            units.append(open_[key])
        open_[key].append(s)
    whole = {n for n, t in program.graph.types.items() if t.tables and t.looked_up}
    whole |= {program.values.get(s.call.args[0].name, "") for unit in units if len(unit) > 1 for s in unit if _pools(s)}
    return replace(program, statements=tuple(_one(unit, whole) for unit in placed(units)))


def _one(unit: list[Statement], whole: set[str]) -> Statement:
    """A unit as one statement. ``whole``: grouped tables, also converted outside blocks."""
    first = unit[0]
    if first.call.fn == TABLES or len(unit) > 1:
        return merged(TABLES if first.call.fn == TABLES else POOLED_TOGETHER, [replace(s, block="") for s in unit])
    return replace(first, block="") if first.parameter and first.value in whole else first


def _pools(s: Statement) -> bool:
    return s.call.fn == POOLED


def _key(s: Statement, program: Program, stored: Container[str], level: int) -> Any:
    """What look-ups in one call have in common; None for one that is not grouped.

    ``stored``: tables as stored, or entered for a gradient sum over replicas, but not gathered.
    """
    call, kwargs = s.call, s.call.kwargs
    if call.fn == TABLES:
        form = [(name, kwargs.get(name)) for name in ("last_offset", "sparse", "summed")]
        has = [name in kwargs for name in ("offsets", "weights")]
        return level, repr((call.args[3:], form, has)), program.types[s.outputs[0]].dtype, s.again
    if not _pools(s) or "sparse" in kwargs:
        return None
    table, indices, mode = call.args
    if not isinstance(indices, Ref) or table.name not in stored:
        return None
    type_, where = program.types[s.outputs[0]], str(s.layouts[0])
    alike = type_.shape, type_.dtype, program.types[indices.name].shape, str(program.layouts[indices.name])
    return level, mode, kwargs.get("axes"), where, alike, s.again
