"""What torch's DTensor computes wrongly or refuses, and scripts and optimizers ask of parameters and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

aten = torch.ops.aten


def mend() -> None:
    """Have numbers of DTensors whole, and let the in-place ops of :class:`torch.optim.Adafactor` begin with whole values."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[aten._local_scalar_dense.default] = _number
    for op in (aten.pow_.Scalar, aten._foreach_mul_.List):
        handlers[op] = _on_whole


def _number(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.item()``: DTensor's own gives this rank's summand."""
    with torch.no_grad():
        return op(args[0].full_tensor())


def _on_whole(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op in place, after what it writes to was summed in place. DTensor refuses it on summands (norms of parts)."""
    for x in args[0] if isinstance(args[0], list | tuple) else [args[0]]:
        if any(p.is_partial() for p in x.placements):
            whole = x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements])
            x._local_tensor, x._spec = whole._local_tensor, whole._spec
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    del handlers[op]
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = _on_whole
