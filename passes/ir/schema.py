"""Schemas of ops: names, positions and defaults of arguments."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch


@cache
def argument_names(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the op's arguments, in schema order."""
    return tuple(a.name for a in op._schema.arguments)


@cache
def places_and_defaults(op: torch._ops.OpOverload) -> dict[str, tuple[int, Any]]:
    """Argument name → (position, default); a missing default is None."""
    return {a.name: (i, a.default_value) for i, a in enumerate(op._schema.arguments)}


@cache
def tensor_arguments(op: torch._ops.OpOverload) -> tuple[str, ...]:
    """Names of the op's arguments that take tensors, in schema order."""
    return tuple(a.name for a in op._schema.arguments if "Tensor" in str(a.type))
