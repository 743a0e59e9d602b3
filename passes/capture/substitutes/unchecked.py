"""Polyfills of torch functions that check values, without the check. Refused inputs give NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.runtime.operations.ctc import ctc_loss
from autoshard.runtime.operations.grouped import grouped_mm


def _gaussian_nll_loss(
    input: torch.Tensor,  # noqa: A002
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """``F.gaussian_nll_loss``: ``var`` is clamped to ``eps`` in the value, not in the gradient."""
    if isinstance(var, float):
        var = torch.full_like(input, var)
    if input.shape[:-1] == var.shape:
        var = var.unsqueeze(-1)
    shared = [b for a, b in zip(input.shape, var.shape, strict=False) if a != b]
    if input.dim() != var.dim() or shared not in ([], [1]) or reduction not in ("none", "mean", "sum"):
        raise ValueError(f"gaussian_nll_loss: var {list(var.shape)} for {list(input.shape)}, reduction {reduction!r}")
    clamped = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (clamped.log() + (input - target).square() / clamped)
    loss = (loss + 0.5 * math.log(2 * math.pi) if full else loss).masked_fill(var < 0, torch.nan)
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss


def _cov(
    input: torch.Tensor,  # noqa: A002
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """``torch.cov`` of [variables, observations], or one variable; inf or NaN if ill-defined."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    given = [w for w in (fweights, aweights) if w is not None]
    if not given:
        centred = x - x.sum(1, keepdim=True) / x.shape[1]
        return (torch.mm(centred, centred.t().conj()) / max(0, x.shape[1] - correction)).squeeze()
    weights = given[0] * given[1] if len(given) == 2 else given[0]
    total = weights.sum()
    centred = x - (x * weights).sum(1, keepdim=True) / total
    free = total - (correction * (weights * aweights).sum() / total if aweights is not None else correction)
    return (torch.mm(centred, (centred * weights).t().conj()) / free.clamp(min=0)).squeeze()


def _corrcoef(input: torch.Tensor) -> torch.Tensor:  # noqa: A002
    """``torch.corrcoef``: covariances over the standard deviations, in [-1, 1]."""
    cov = _cov(input)
    if cov.dim() == 0:
        return cov / cov
    deviations = cov.diagonal().real.sqrt() if cov.is_complex() else cov.diagonal().sqrt()
    found = cov / deviations[:, None] / deviations
    return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1)) if cov.is_complex() else found.clamp(-1, 1)


def _ctc_loss(
    log_probs: torch.Tensor,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> torch.Tensor:
    """``F.ctc_loss``; if lengths are tensors, an op of our own per sample, then mean or sum."""
    if not (isinstance(input_lengths, torch.Tensor) and isinstance(target_lengths, torch.Tensor)):
        return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
    each: torch.Tensor = ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    if reduction == "mean":
        return (each / target_lengths.clamp(min=1).to(each.device)).mean()
    return each.sum() if reduction == "sum" else each


def _grouped_mm(mat_a: torch.Tensor, mat_b: torch.Tensor, *given: Any, **options: Any) -> torch.Tensor:
    """``torch._grouped_mm``; in float32 and float16 an op of our own: traces refuse these."""
    options = dict(zip(("offs", "bias", "out_dtype"), given, strict=False)) | options
    ends = options.get("offs")
    plain = options.get("bias") is None and options.get("out_dtype") in (None, mat_a.dtype)
    wide = mat_a.dtype == mat_b.dtype and mat_a.dtype in (torch.float32, torch.float16)
    dims = (mat_a.dim(), mat_b.dim())
    found: torch.Tensor
    if wide and plain and ends is not None and dims == (2, 3):
        found = grouped_mm(mat_a, mat_b, ends)
    elif wide and plain and ends is None and dims == (3, 3):
        found = torch.bmm(mat_a, mat_b)
    else:
        found = torch._grouped_mm(mat_a, mat_b, **options)
    return found


def _masked_select(input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # noqa: A002
    """``torch.masked_select`` as an index: indices by one mask share a symbolic length."""
    if input.shape != mask.shape:
        input, mask = torch.broadcast_tensors(input, mask)  # noqa: A001
    return input[mask]


UNCHECKED: dict[Any, Callable[..., torch.Tensor]] = {
    F.ctc_loss: _ctc_loss,
    torch._is_all_true: torch.all,  # what torch.distributions calls
    torch._is_any_true: torch.any,
    torch._grouped_mm: _grouped_mm,
    F.gaussian_nll_loss: _gaussian_nll_loss,
    torch.cov: _cov,
    torch.Tensor.cov: _cov,
    torch.masked_select: _masked_select,
    torch.Tensor.masked_select: _masked_select,
    torch.corrcoef: _corrcoef,
    torch.Tensor.corrcoef: _corrcoef,
}
