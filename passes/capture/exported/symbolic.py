"""Data-dependent sizes and numbers: export's unbacked symbols.

A dim of data-dependent length is never sharded, and a number read from a tensor is a plain Python
number between nodes. Generated code reads both at run time; cost models use an estimate.
All ranks agree on a number: it is read from a replicated value. That value results from one
collective, or from equal ops on equal operands.
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
"""estimate of a number with no known bound"""

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
"""Python arithmetic on numbers → torch op, so that it becomes an ordinary node"""

_TYPED: dict[Any, tuple[torch._ops.OpOverload, torch._ops.OpOverload]] = {
    operator.abs: (prim.abs.int, prim.abs.float),
    operator.floordiv: (aten.floordiv.int, aten.floordiv.default),
    operator.mod: (aten.remainder.int, aten.remainder.default),
    operator.pow: (aten.pow.int_to_int, aten.pow.Scalar_Scalar),
    torch.sym_max: (prim.max.int, prim.max.float),
    torch.sym_min: (prim.min.int, prim.min.float),
}
"""Python function → (op on ints, op on other numbers)"""


def is_symbolic(value: Any) -> bool:
    """Whether ``value`` is a number known at run time only: data-dependent, or not an int."""
    return isinstance(value, _SYMBOLIC) and constant(value) is None and not is_length(value)


def is_length(value: Any) -> bool:
    """Whether ``value`` is a symbolic int computed from input lengths."""
    if not isinstance(value, torch.SymInt) or not value.node.expr.free_symbols:
        return False
    return not free_unbacked_symbols(value.node.expr)


def constant(value: Any) -> Number | None:
    """``value`` as a plain number if it is one in every call, else None."""
    if isinstance(value, int | float):
        return value
    if isinstance(value, _SYMBOLIC):
        kind = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}[type(value)]
        expression = value.node.expr
        return kind(expression) if not expression.free_symbols else None
    return None


def number_op(target: Any, result: Any) -> torch._ops.OpOverload | None:
    """The torch op for Python function ``target`` on numbers, or None. ``result``: its result."""
    if target in _TYPED:
        return _TYPED[target][0 if isinstance(result, torch.SymInt | int) else 1]
    return OPS.get(target)


def estimate(value: Any) -> Number:
    """Estimate of a number: each unknown at half of its upper bound. At least 2 for an int."""
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
    """The type of a fake tensor or symbolic number. ``length``: export's dynamic length → ours."""
    if isinstance(value, torch.Tensor):
        unknown = tuple(d for d, n in enumerate(value.shape) if is_symbolic(n))
        shape = tuple(int(estimate(n)) if d in unknown else length(n) for d, n in enumerate(value.shape))
        return TensorType(shape, value.dtype, grad, unknown)
    kinds = {torch.SymBool: torch.bool, torch.SymFloat: torch.float64}
    return TensorType((), kinds.get(type(value), torch.int64), number=estimate(value))
