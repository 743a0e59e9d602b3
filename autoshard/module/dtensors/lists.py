"""``foreach`` ops of optimizers on lists of DTensors with table-wise placement.

torch takes the mesh of the first DTensor for all: ranks outside that mesh would skip the others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.distributed.tensor import DTensor

_ELEMENTWISE = (
    *("abs add addcdiv addcmul clamp_max clamp_min copy div exp lerp".split()),
    *("maximum minimum mul neg pow reciprocal rsqrt sign sqrt sub zero".split()),
)


@functools.cache
def mend_lists(is_owned: Callable[[Any], bool], local_of: Callable[[Any], torch.Tensor]) -> None:
    """Run ``foreach`` ops on local shards if a tensor of a list ``is_owned``; else as before."""
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def by_parts(before: Any) -> Any:
        def handle(op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
            if any(is_owned(x) for arg in args if isinstance(arg, list | tuple) for x in arg):
                own, named = pytree.tree_map_only(DTensor, local_of, (tuple(args), kwargs))
                return _as(args[0], op(*own, **named))
            if before is not None:
                return before(op, args, kwargs)
            del handlers[op]
            try:
                return op(*args, **kwargs)
            finally:
                handlers[op] = handle

        return handle

    for name in _ELEMENTWISE:
        for packet in (getattr(torch.ops.aten, f"_foreach_{name}{end}", None) for end in ("", "_")):
            for overload in packet.overloads() if packet is not None else ():
                op = getattr(packet, overload)
                handlers[op] = by_parts(handlers.get(op))


def _as(given: Sequence[Any], made: Sequence[torch.Tensor] | None) -> list[Any] | None:
    """Results as DTensors placed as ``given``; None for in-place ops."""
    if not made:
        return None
    pairs = zip(given, made, strict=True)
    return [DTensor(y, x._spec, requires_grad=False) if isinstance(x, DTensor) else y for x, y in pairs]
