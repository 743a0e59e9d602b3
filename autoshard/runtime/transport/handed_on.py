"""Functions where no gradient comes: none goes on, as through torch's own operations.

Torch makes zeros for a Function of one's own otherwise. A parameter behind it then has a gradient of zeros where one
device has none, and an optimizer's decay and momentum move it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from autoshard.errors import CaptureError
from autoshard.runtime.transport.node import Node


class HandingOn(Node):
    """The base of Functions whose ``backward`` wants the gradient of their only result."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        forward, backward = cls.forward, cls.backward

        @functools.wraps(forward)
        def remembered(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            return forward(ctx, *args)

        cls.forward, cls.backward = staticmethod(remembered), staticmethod(handing_on(backward))  # type: ignore[method-assign]


def handing_on(backward: Callable[..., Any]) -> Callable[..., Any]:
    """``backward`` of one result, for where the context makes no zeros: not called without a gradient."""

    @functools.wraps(backward)
    def handed_on(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is not None:
            refuse_batched(is_batched(gradient))
            return backward(ctx, gradient)
        return tuple([None] * len(n) if isinstance(n, list | tuple) else None for n in ctx.needs_input_grad)

    return handed_on


def is_batched(gradient: torch.Tensor) -> bool:
    """Whether ``gradient`` is many of them, under vmap."""
    return is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient)


def refuse_batched(batched: bool) -> None:
    """Raise :class:`CaptureError` where gradients come ``batched``: a program's collectives move one."""
    if batched:
        raise CaptureError(
            "a backward through a sharded module runs under vmap (vectorize=True, is_grads_batched=True, torch.func.vmap), and "
            "its programs take one gradient at a time. Leave vectorize out, or call torch.autograd.grad once for each."
        )


def register(op: Any, backward: Callable[..., Any], save: Callable[..., None]) -> None:
    """Make a custom op of one result differentiable, as :class:`HandingOn` does a Function."""

    def remembered(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.set_materialize_grads(False)
        save(ctx, inputs, output)

    op.register_autograd(handing_on(backward), setup_context=remembered)
