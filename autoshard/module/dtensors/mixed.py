"""Plain numbers that meet DTensors: a loss of outputs and a plain target, plus a penalty on weights.

torch takes such a number as replicated. Autograd then hands what made the number a gradient that is a DTensor, which ops on
plain tensors refuse; and the other way round where a DTensor is added into a plain number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.module.dtensors.made import plain, replicated

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

_TAKES_PLAIN = "_autoshard_takes_plain"
"""marks a plain number that is trained, and has the hook"""


def mend_mixed(
    ops: Iterable[Any],
    is_ours: Callable[[object], bool],
    handle: Callable[[Any, Handler], None],
    as_it_was: Handler,
) -> None:
    """Have each side of ``ops`` on DTensors that ``is_ours`` get gradients of its own kind.

    ``handle`` sets a handler of an op for these; ``as_it_was`` is DTensor's own.
    """

    def beside_plain(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _take_own_gradients(args, result_is_plain=False)
        return as_it_was(op, args, kwargs)

    for op in ops:
        handle(op, beside_plain)
    of: Any = type(DTensor._op_dispatcher)
    tail = of._dispatch_fast_path_python_tail  # of what is written in place, among others

    def written(dispatcher: Any, op: Any, args: tuple[Any, ...], *more: Any) -> Any:
        into_plain = bool(args) and type(args[0]) is torch.Tensor and op._schema.is_mutable
        if into_plain or torch.is_grad_enabled():
            _take_own_gradients(args, into_plain)
        return (
            args[0] if into_plain else tail(dispatcher, op, args, *more)
        )  # a number's part is all of it, and is written

    of._dispatch_fast_path_python_tail = written


def _take_own_gradients(args: tuple[Any, ...], result_is_plain: bool) -> None:
    for x in args:
        if isinstance(x, torch.Tensor) and x.requires_grad and isinstance(x, DTensor) is result_is_plain:
            if isinstance(x, DTensor):
                _take_whole_gradient(x)
            else:
                take_plain_gradient(x)


def take_plain_gradient(x: torch.Tensor) -> torch.Tensor:
    """``x``, a plain number. Where it meets a DTensor its gradient comes as one, and is made plain."""
    if x.grad_fn is not None:
        x.grad_fn.register_prehook(_made_plain)  # not of the tensor, whose hooks are the user's
    elif x.requires_grad and not hasattr(x, _TAKES_PLAIN):
        x.register_hook(plain)
        setattr(x, _TAKES_PLAIN, True)
    return x


def _made_plain(gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple([plain(g) for g in gradients])


def _take_whole_gradient(x: DTensor) -> None:
    """Where ``x`` is written into a plain number its gradient comes plain, and is made a DTensor."""

    def whole(gradients: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
        return tuple([g if g is None or isinstance(g, DTensor) else replicated(x._spec.mesh, g) for g in gradients])

    if x.grad_fn is not None:
        x.grad_fn.register_prehook(whole)
