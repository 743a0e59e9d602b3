"""CTC loss as one op: ATen's reads the lengths on the host, so it cannot be traced without data."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from autoshard.runtime.operations.whole_op import differentiate


@torch.library.custom_op("autoshard::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> torch.Tensor:
    """Loss per sample, [n] or []: log-probabilities [t, n, c] or [t, c]; targets [n, s] or flat."""
    return _each(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity).clone()


def _each(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: torch.Tensor,
    target_lengths: torch.Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> torch.Tensor:
    if log_probs.ndim == 3 and not log_probs.shape[1]:  # no samples: torch refuses
        return log_probs.sum((0, 2))
    return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity)


@ctc_loss.register_fake
def _(log_probs: torch.Tensor, *others: Any) -> torch.Tensor:
    return log_probs.new_empty(log_probs.shape[1:-1])


# ATen's backward needs a table that the op does not return, so the forward is recomputed.
differentiate(ctc_loss, _each, of=(0,))
