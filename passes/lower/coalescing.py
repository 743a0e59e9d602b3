"""Message coalescing: table look-ups share one exchange, small collectives one call."""

from __future__ import annotations

import math
from collections.abc import Container, Mapping
from dataclasses import replace
from typing import Any

from autoshard.passes.ir.analyses import outputs_reached
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import (
    POOLED_LOOKUP,
    POOLED_LOOKUPS,
    TABLE_WISE,
    Program,
    Statement,
    merge_statements,
    reads,
)
from autoshard.passes.lower.bucket import order_units
from autoshard.passes.redistribute.pricing import COALESCED_KINDS, SMALL_BYTES


def group_look_ups(program: Program) -> Program:
    """``program`` with independent look-ups merged into one call, outside all blocks."""
    if not any(s.call.fn in (TABLE_WISE, POOLED_LOOKUP) for s in program.statements):
        return program
    enters = (s for s in program.statements if s.parameter and s.step is not None and s.step.kind == "enter")
    stored = program.graph.parameters.union(s.outputs[0] for s in enters if reads(s)[0] in program.graph.parameters)
    depth: dict[str, int] = {}
    units: list[list[Statement]] = []
    open_: dict[Any, list[Statement]] = {}
    for s in program.statements:
        level = max((depth.get(name, 0) for name in reads(s)), default=0)
        key = _look_up_key(s, program, stored, level)
        depth.update(dict.fromkeys(s.outputs, level + (key is not None)))
        if key is None:
            units.append([s])
            continue
        if key not in open_:
            open_[key] = []
            units.append(open_[key])
        open_[key].append(s)
    whole = {n for n, t in program.graph.types.items() if t.tables and t.looked_up}
    whole |= {
        program.values.get(s.call.args[0].name, "")
        for unit in units
        if len(unit) > 1
        for s in unit
        if s.call.fn == POOLED_LOOKUP
    }
    return replace(program, statements=tuple(_merge_look_ups(unit, whole) for unit in order_units(units)))


def _merge_look_ups(unit: list[Statement], whole: set[str]) -> Statement:
    """A unit as one statement. ``whole``: grouped tables, also converted outside blocks."""
    first = unit[0]
    if first.call.fn == TABLE_WISE or len(unit) > 1:
        return merge_statements(
            TABLE_WISE if first.call.fn == TABLE_WISE else POOLED_LOOKUPS, [replace(s, block="") for s in unit]
        )
    return replace(first, block="") if first.parameter and first.value in whole else first


def _look_up_key(s: Statement, program: Program, stored: Container[str], level: int) -> Any:
    """What look-ups in one call have in common, or None. ``stored``: tables stored or entered."""
    call, kwargs = s.call, s.call.kwargs
    if call.fn == TABLE_WISE:
        form = [(name, kwargs.get(name)) for name in ("sparse", "summed")]
        has = [name in kwargs for name in ("offsets", "weights")]
        return level, repr((call.args[3:], form, has)), program.types[s.outputs[0]].dtype, s.again
    if s.call.fn != POOLED_LOOKUP or "sparse" in kwargs:
        return None
    table, indices, mode = call.args
    if not isinstance(indices, Ref) or table.name not in stored:
        return None
    type_, where = program.types[s.outputs[0]], str(s.layouts[0])
    alike = type_.shape, type_.dtype, program.types[indices.name].shape, str(program.layouts[indices.name])
    return level, mode, kwargs.get("axes"), where, alike, s.again


def coalesce_collectives(program: Program) -> Program:
    """``program`` with small collectives over the same axes merged at the first of them. They agree
    in dtype and block, and all operands exist there (a conversion is lowered at its first
    reader). If the backward communicates, all reach the same outputs, so that all or none have a
    gradient."""
    reached = outputs_reached(program.graph)
    groups: dict[int, list[Statement]] = {}
    open_: dict[Any, int] = {}
    made: dict[str, int] = {}
    path = ""
    for i, s in enumerate(program.statements):
        if s.block != path:
            open_, path = {}, s.block
        key = _coalescing_key(s, program, reached)
        at = open_.get(key, i)
        if key is None or made.get(reads(s)[0], -1) >= at:
            at = i
        groups.setdefault(at, []).append(s)
        made.update(dict.fromkeys(s.outputs, at))
        if key is not None:
            open_[key] = at
    statements = (merge_statements(f"{g[0].call.fn}_together", g) if len(g) > 1 else g[0] for g in groups.values())
    return replace(program, statements=tuple(statements))


def _coalescing_key(s: Statement, program: Program, reached: Mapping[str, int]) -> Any:
    """What coalesced collectives have in common; None for a statement that stays alone."""
    step = s.step
    if step is None or step.kind not in COALESCED_KINDS or s.parameter or s.call.kwargs.get("op", "sum") != "sum":
        return None
    type_ = program.types[s.value]
    if step.kind == "enter" and not type_.grad:
        return None
    if max(math.prod(x.max_local_shape(step.shape)) for x in (step.src, step.dst)) * type_.dtype.itemsize > SMALL_BYTES:
        return None
    outputs = reached[s.value] if step.backward and type_.grad else 0
    return step.kind, step.axes, s.call.kwargs.get("to"), type_.dtype, type_.grad, outputs
