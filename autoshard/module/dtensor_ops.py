"""What torch's DTensor computes wrongly, refuses or is slow at, and scripts and optimizers ask of parameters and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

aten = torch.ops.aten

_FUSED = (aten._fused_adam_, aten._fused_adamw_, aten._fused_sgd_, aten._fused_adagrad_)


def mend() -> None:
    """Have numbers of DTensors whole, let the in-place ops of :class:`torch.optim.Adafactor` begin with whole values, and
    fused optimizers step on the parts.
    """
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[aten._local_scalar_dense.default] = _number
    for op in (aten.pow_.Scalar, aten._foreach_mul_.List):
        handlers[op] = _on_whole
    for packet in _FUSED:
        handlers |= {getattr(packet, name): _on_parts for name in packet.overloads()}


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
    return _as_torch_does(op, args, kwargs)


def _on_parts(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The step of a fused optimizer, element by element: where a parameter, its gradient and its states have one layout every
    rank steps on its parts. DTensor would make, and compare, a layout of each of them in each step.
    """
    lists = [x for x in args if isinstance(x, list | tuple) and x]
    if not all(map(_alike, zip(*lists, strict=False))):
        return _as_torch_does(op, args, kwargs)
    parts = ([_part(x) for x in a] if isinstance(a, list | tuple) else a for a in args)
    with torch.no_grad():
        return op(*parts, **kwargs)


def _alike(tensors: Iterable[Any]) -> bool:
    """Whether a parameter and what belongs to it are cut alike; numbers, such as the count of steps, are whole."""
    first, *others = tensors
    if not isinstance(first, DTensor) or any(p.is_partial() for p in first.placements):
        return False
    placements, mesh, ndim = first.placements, first.device_mesh, first.ndim
    for x in others:
        if isinstance(x, DTensor) and x.ndim == ndim:
            if x.placements != placements or x.device_mesh is not mesh:
                return False
        elif isinstance(x, DTensor) or x.ndim:
            return False
    return True


def _part(x: Any) -> torch.Tensor:
    local: torch.Tensor = x._local_tensor if isinstance(x, DTensor) else x
    return local


def _as_torch_does(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What DTensor's own handling of ``op`` gives."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    ours = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = ours
