"""Ordered gradient accumulation: gradients of a value's readers are summed in a fixed order."""

from __future__ import annotations

from typing import Any

import torch


@torch.library.custom_op("autoshard::fan_out", mutates_args=())
def fan_out(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    """``count`` copies of ``x``. Backward: the last gradient first, as autograd does."""
    return [x.clone() for _ in range(count)]


@fan_out.register_fake
def _(x: torch.Tensor, count: int) -> list[torch.Tensor]:
    return [torch.empty_like(x) for _ in range(count)]


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, gradients: list[torch.Tensor | None]) -> Any:
    total = None
    for gradient in reversed(gradients):
        if gradient is not None:
            total = gradient if total is None else total + gradient
    return total, None


fan_out.register_autograd(_backward, setup_context=_setup)
FAN_OUT = torch.ops.autoshard.fan_out.default
