"""Operations of optimizers on lists of DTensors (``foreach=True``) of which some belong to a part of the ranks.

torch takes the mesh of the first for that of all: a rank that holds none of that one would leave out all the others.
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
    """Have every rank do its own parts of lists in which ``is_owned`` knows one; others are as they were."""
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
    """What was made of ``given``, which lies as that does; None of what writes in place."""
    if not made:
        return None
    pairs = zip(given, made, strict=True)
    return [DTensor(y, x._spec, requires_grad=False) if isinstance(x, DTensor) else y for x, y in pairs]
