"""What the schema of an op says of its arguments."""

from __future__ import annotations

from functools import cache

import torch


@cache
def argument_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the op's arguments, in schema order."""
    return tuple(a.name for a in op._schema.arguments)


@cache
def tensor_arguments(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the op's arguments that take tensors, in schema order."""
    return tuple(a.name for a in op._schema.arguments if "Tensor" in str(a.type))
