"""Scalars between plain tensors and DTensors, such as a loss plus a penalty on weights.

torch treats a plain scalar as replicated. Autograd then passes DTensor gradients to plain ops,
which refuse them, and plain ones to DTensor ops after in-place addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.module.dtensors.made import plain, replicated

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_TAKES_PLAIN = "_autoshard_takes_plain"
"""marks a trained plain scalar that has the hook"""


def mend_mixed(
    ops: Iterable[Any],
    is_ours: Callable[[object], bool],
    handle: Callable[[Any, Handler], None],
    as_it_was: Handler,
) -> None:
    """Convert gradients of ``ops`` to the kind of each operand, for DTensors with ``is_ours``.

    ``handle`` installs an op handler; ``as_it_was`` is DTensor's own.
    """

    def beside_plain(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _take_own_gradients(args, result_is_plain=False)
        return as_it_was(op, args, kwargs)

    for op in ops:
        handle(op, beside_plain)
    of: Any = type(DTensor._op_dispatcher)
    tail = of._dispatch_fast_path_python_tail  # in-place ops, among others

    def written(dispatcher: Any, op: Any, args: tuple[Any, ...], *more: Any) -> Any:
        into_plain = bool(args) and type(args[0]) is torch.Tensor and op._schema.is_mutable
        if into_plain or torch.is_grad_enabled():
            _take_own_gradients(args, into_plain)
        return (
            args[0] if into_plain else tail(dispatcher, op, args, *more)
        )  # a scalar's shard is the scalar, and is already written

    of._dispatch_fast_path_python_tail = written


def _take_own_gradients(args: tuple[Any, ...], result_is_plain: bool) -> None:
    for x in args:
        if isinstance(x, torch.Tensor) and x.requires_grad and isinstance(x, DTensor) is result_is_plain:
            if isinstance(x, DTensor):
                _take_whole_gradient(x)
            else:
                take_plain_gradient(x)


def take_plain_gradient(x: torch.Tensor) -> torch.Tensor:
    """``x``, a plain scalar, such that DTensor gradients of it become plain."""
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(_made_plain)  # not a tensor hook: those are the user's
    elif x.requires_grad and not hasattr(x, _TAKES_PLAIN):
        x.register_hook(plain)
        setattr(x, _TAKES_PLAIN, True)
    return x


def _made_plain(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple([plain(g) for g in gradients])


def _take_whole_gradient(x: DTensor) -> None:
    """``x`` is written into a plain scalar: its gradient arrives plain and becomes a DTensor."""

    def whole(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        return tuple([g if g is None or isinstance(g, DTensor) else replicated(x._spec.mesh, g) for g in gradients])

    if x.grad_fn is not None:
        x.grad_fn.register_prehook(whole)
