"""Autograd functions without materialised zero gradients: None stays None, as in torch's own ops.

By default a user's Function gets zeros for a missing gradient. A parameter behind it then has a
gradient of zeros where one device has none, and the optimizer's decay and momentum move it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._C._functorch import is_batchedtensor, is_legacy_batchedtensor

from autoshard.errors import CaptureError
from autoshard.runtime.transport.node import Node


class HandingOn(Node):
    """Base of Functions with one result; ``backward`` is not called without a gradient."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        forward, backward = cls.forward, cls.backward

        @functools.wraps(forward)
        def remembered(ctx: Any, *args: Any) -> Any:
            ctx.set_materialize_grads(False)
            return forward(ctx, *args)

        cls.forward, cls.backward = staticmethod(remembered), staticmethod(handing_on(backward))  # type: ignore[method-assign]


def handing_on(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``backward`` of one result so that a None gradient gives None gradients."""

    @functools.wraps(backward)
    def handed_on(ctx: Any, gradient: torch.Tensor | None) -> Any:
        if gradient is not None:
            refuse_batched(is_batched(gradient))
            return backward(ctx, gradient)
        return tuple([None] * len(n) if isinstance(n, list | tuple) else None for n in ctx.needs_input_grad)

    return handed_on


def is_batched(gradient: torch.Tensor) -> bool:
    """Whether ``gradient`` is a batch of gradients under vmap."""
    return is_batchedtensor(gradient) or is_legacy_batchedtensor(gradient)


def refuse_batched(batched: bool) -> None:
    """Raise :class:`CaptureError` if ``batched``: collectives of a program move one gradient."""
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
