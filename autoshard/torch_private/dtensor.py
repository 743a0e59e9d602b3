"""What DTensors are made of: specs, redistribution, dispatch; and the modules of state dicts."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.torch_private import by_name
from autoshard.torch_private.dispatch import all_op_names

with by_name:
    from torch.distributed import _state_dict_utils as state_dict_utils
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX as CHECKPOINT_PREFIX
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
    from torch.optim.optimizer import _foreach_supported_types as optimizer_foreach_types
    from torch.utils._foreach_utils import _foreach_supported_types as foreach_types

    _op_dispatcher: Any = DTensor._op_dispatcher
    _propagator = _op_dispatcher.sharding_propagator
    random_ops = tuple(_op_dispatcher._random_ops)
    """ops that DTensor runs with one generator state for all ranks"""


_RULES = [
    *(vars(_propagator).get(name, {}) for name in ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")),
    {*_op_dispatcher._custom_op_handlers},
]
"""ops that DTensor knows, by the kind of their rules"""


def has_rule(op: Any) -> bool:
    """Whether DTensor has a rule of ``op`` itself, not from a decomposition (torch >= 2.12)."""
    return any(op in known for known in _RULES)


def dispatch_subclass(kind: type[DTensor]) -> None:
    """Have optimizers take lists of ``kind``, a subclass of DTensor, as they take DTensors. Torch
    2.11 dispatches subclasses as DTensors: there handlers lead to their own dispatch."""
    optimizer_foreach_types.append(kind)
    foreach_types.append(kind)
    if torch.__version__ < "2.12":
        _dispatch_by_handlers()


@functools.cache
def _dispatch_by_handlers() -> None:
    handlers: dict[Any, Any] = _op_dispatcher._custom_op_handlers
    for name in all_op_names():
        packet, _, overload = name.removeprefix("aten::").partition(".")
        if name.startswith("aten::"):
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            handlers[op] = functools.partial(_handle, handlers.get(op))


def _handle(before: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [y for x in (*args, *kwargs.values()) for y in (x if isinstance(x, list | tuple) else (x,))]
    kinds = {type(x) for x in given if isinstance(x, DTensor)} - {DTensor}
    if kinds:
        kind: Any = max(kinds, key=lambda k: len(k.__mro__))
        return kind.__torch_dispatch__(op, (), args, kwargs)
    if before is not None:
        return before(op, args, kwargs)
    handlers: dict[Any, Any] = _op_dispatcher._custom_op_handlers
    ours = handlers.pop(op)
    try:
        return op(*args, **kwargs)
    finally:
        handlers[op] = ours
