"""Split backward (zero bubble): functions that compute weight gradients (dW) later."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from autoshard.aten import aten
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import Call, Program, Statement, reads
from autoshard.passes.rules.facts import is_view

PRODUCTS: dict[Any, str] = {
    aten.linear.default: "linear",
    aten.mm.default: "matmul",
    aten.bmm.default: "matmul",
    aten.matmul.default: "matmul",
    aten.conv1d.default: "conv",
    aten.conv2d.default: "conv",
    aten.conv3d.default: "conv",
}
"""op (value, weight[, bias]) → runtime function; gradients of other inputs come first"""


def in_two_parts(program: Program) -> Program:
    """``program`` with products of a value and a weight (or its view, cast) by these functions."""
    weights = set(program.graph.parameters)
    statements = []
    for s in program.statements:
        converts = s.parameter or (s.node is not None and s.step is None and _same(s.node.op))
        if converts and weights.issuperset(reads(s)):
            weights.update(s.outputs)
        fits = s.call.fn in PRODUCTS and _fits(s, weights, program)
        statements.append(replace(s, call=replace(s.call, fn=PRODUCTS[s.call.fn])) if fits else s)
    return replace(program, statements=tuple(statements))


def _same(op: torch._ops.OpOverload) -> bool:
    """Whether the backward of ``op`` may run in both parts: it saves nothing."""
    return is_view(op) or op is aten._to_copy.default


def _fits(s: Statement, weights: set[str], program: Program) -> bool:
    x, weight, *rest = s.call.args
    bias = rest[0] if rest else None
    if isinstance(x, Call) and x.fn == "channels_last":
        (x,) = x.args
    if not (isinstance(x, Ref) and isinstance(weight, Ref)) or s.call.kwargs:
        return False
    ranks = [len(program.types[ref.name].shape) for ref in (x, weight)]
    kind = PRODUCTS[s.call.fn]
    known = ranks[1] == 2 if kind == "linear" else ranks[0] == ranks[1] or (kind == "matmul" and ranks[1] == 2)
    if s.call.fn is aten.matmul.default and ranks[1] > 2:  # may broadcast
        return False
    return known and x.name not in weights and weight.name in weights and (bias is None or bias.name in weights)
