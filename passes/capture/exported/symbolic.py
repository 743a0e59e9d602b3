"""Sizes and numbers that depend on the data: what export's unbacked symbols become.

No dim whose length depends on the data is ever cut, and a number read out of a tensor is a plain Python number that
flows between nodes; generated code takes both from the values at run time. For costs each has an estimate.
All ranks agree on them by construction: a number is read from a whole value, and a whole value is on every rank
either the result of one collective, which hands the same bits to all, or of the same ops on the same operands.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from autoshard.aten import aten
from autoshard.passes.ir.graph import TensorType

Number = int | float | bool
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_FALLBACK = 64
"""guessed value of a number of which only the sign is known"""

prim = torch.ops.prim

OPS: dict[Any, torch._ops.OpOverload] = {
    operator.add: aten.add.default,
    operator.sub: aten.sub.default,
    operator.mul: aten.mul.default,
    operator.truediv: aten.div.default,
    operator.neg: aten.neg.Scalar,
    operator.eq: aten.eq.default,
    operator.ne: aten.ne.default,
    operator.lt: aten.lt.default,
    operator.le: aten.le.default,
    operator.gt: aten.gt.default,
    operator.ge: aten.ge.default,
    operator.and_: aten.__and__.bool,
    operator.or_: aten.__or__.bool,
    torch.sym_not: aten.__not__.default,
    torch.sym_float: aten.Float.Scalar,
    torch.sym_int: aten.Int.Scalar,
    math.trunc: aten.Int.Scalar,
    math.ceil: aten.ceil.Scalar,
    math.floor: aten.floor.Scalar,
}
"""arithmetic on numbers as ops of torch, so that it is a node like any other"""

_TYPED: dict[Any, tuple[torch._ops.OpOverload, torch._ops.OpOverload]] = {
    operator.abs: (prim.abs.int, prim.abs.float),
    operator.floordiv: (aten.floordiv.int, aten.floordiv.default),
    operator.mod: (aten.remainder.int, aten.remainder.default),
    operator.pow: (aten.pow.int_to_int, aten.pow.Scalar_Scalar),
    torch.sym_max: (prim.max.int, prim.max.float),
    torch.sym_min: (prim.min.int, prim.min.float),
}
"""(op on ints, op on others)"""


def is_symbolic(value: Any) -> bool:
    """Whether ``value`` is a number that only a run knows: it depends on the data, or is no int."""
    return isinstance(value, _SYMBOLIC) and constant(value) is None and not is_length(value)


def is_length(value: Any) -> bool:
    """Whether ``value`` is an int that follows from the lengths of the inputs."""
    if not isinstance(value, torch.SymInt) or not value.node.expr.free_symbols:
        return False
    return not free_unbacked_symbols(value.node.expr)


def constant(value: Any) -> Number | None:
    """The number that ``value`` is in every call, or None if it is no number or depends on the data."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, _SYMBOLIC):
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        expression = value.node.expr
        return kind(expression) if not expression.free_symbols else None
    return None


def number_op(target: Any, result: Any) -> torch._ops.OpOverload | None:
    """The op for arithmetic on numbers ``target`` (a Python function), or None. ``result``: its symbolic result."""
    if target in _TYPED:
        return _TYPED[target][0 if isinstance(result, torch.SymInt | int) else 1]
    return OPS.get(target)


def estimate(value: Any) -> Number:
    """A plausible value of a number: half of what each unknown in it is at most. Never less than 2 for an int."""
    if isinstance(value, torch.SymBool | bool):
        return True
    if isinstance(value, torch.SymFloat | float):
        return 1.0
    if isinstance(value, int):
        return value
    expression, ranges = value.node.expr, value.node.shape_env.var_to_range
    guesses = dict(value.node.shape_env.backed_var_to_val)
    for symbol in free_unbacked_symbols(expression):
        upper: Any = ranges[symbol].upper if symbol in ranges else None
        bounded = upper is not None and upper.is_Integer and upper < 2**40
        guesses[symbol] = max(2, int(upper) // 2) if bounded else _FALLBACK
    return max(2, int(expression.xreplace(guesses)))


def type_of(value: Any, grad: bool, length: Callable[[Any], int] = int) -> TensorType:
    """The type of a fake tensor or of a symbolic number. ``length``: what a length that export left open stands for."""
    if isinstance(value, torch.Tensor):
        unknown = tuple(d for d, n in enumerate(value.shape) if is_symbolic(n))
        shape = tuple(int(estimate(n)) if d in unknown else length(n) for d, n in enumerate(value.shape))
        return TensorType(shape, value.dtype, grad, unknown)
    kinds = {torch.SymBool: torch.bool, torch.SymFloat: torch.float64}
    return TensorType((), kinds.get(type(value), torch.int64), number=estimate(value))
