"""CTC loss as one op. ATen's reads the lengths while it runs, so that it cannot be traced without data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


@torch.library.custom_op("autoshard::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """``F.ctc_loss`` of log-probabilities [t, n, c] or [t, c]; targets [n, s] or all after one another; whole tensors."""
    return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity).clone()


@ctc_loss.register_fake
def _(
    log_probs: torch.Tensor, targets: Any, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    return log_probs.new_empty(log_probs.shape[1:-1] if reduction == "none" else ())


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.options = inputs[4:]


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Runs the forward again: ATen's backward needs a table that the op does not give out."""
    log_probs, *others = ctx.saved_tensors
    with torch.enable_grad():
        log_probs = log_probs.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(F.ctc_loss(log_probs, *others, *ctx.options), log_probs, grad)
    return gradient, None, None, None, None, None, None


ctc_loss.register_autograd(_backward, setup_context=_save)
