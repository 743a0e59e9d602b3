"""Message coalescing: small collectives that are ready together share one message and its latency.

The choice of layouts (:mod:`autoshard.passes.propagate`) has decided the rest: readers share
conversions, which stand on the cheaper side of cheap ops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autoshard.passes.ir.gradients import outputs_reached
from autoshard.passes.ir.merge import merged
from autoshard.passes.ir.program import Program, Statement, reads
from autoshard.passes.redistribute.pricing import SMALL_BYTES, TOGETHER


def together(program: Program) -> Program:
    """``program`` with small collectives over the same axes merged at the first of them.

    They agree in dtype and block, and all operands exist there: a conversion is lowered at its
    first reader, often later than possible. If the backward communicates, all must reach the same
    outputs, so that all or none have a gradient.
    """
    reached = outputs_reached(program.graph)
    groups: dict[int, list[Statement]] = {}
    open_: dict[Any, int] = {}
    made: dict[str, int] = {}
    path = ""
    for i, s in enumerate(program.statements):
        if s.block != path:
            open_, path = {}, s.block
        key = _key(s, program, reached)
        at = open_.get(key, i)
        if key is None or made.get(reads(s)[0], -1) >= at:
            at = i
        groups.setdefault(at, []).append(s)
        made.update(dict.fromkeys(s.outputs, at))
        if key is not None:
            open_[key] = at
    statements = (merged(f"{g[0].call.fn}_together", g) if len(g) > 1 else g[0] for g in groups.values())
    return replace(program, statements=tuple(statements))


def _key(s: Statement, program: Program, reached: Mapping[str, int]) -> Any:
    """What coalesced collectives have in common; None for a statement that stays alone."""
    step = s.step
    if step is None or step.kind not in TOGETHER or s.parameter or s.call.kwargs.get("op", "sum") != "sum":
        return None
    type_ = program.types[s.value]
    if step.kind == "enter" and not type_.grad:
        return None
    if max(math.prod(x.max_local_shape(step.shape)) for x in (step.src, step.dst)) * type_.dtype.itemsize > SMALL_BYTES:
        return None
    outputs = reached[s.value] if step.backward and type_.grad else 0
    return step.kind, step.axes, s.call.kwargs.get("to"), type_.dtype, type_.grad, outputs
