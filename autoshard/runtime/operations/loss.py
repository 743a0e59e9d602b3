"""Vocabulary-parallel cross entropy and NLL: samples, classes, or both sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.aten import aten
from autoshard.runtime.operations.collectives import offset, statistic
from autoshard.runtime.operations.in_range import check_range
from autoshard.runtime.operations.row_sums import along, in_pieces, row_sums
from autoshard.runtime.operations.softmax import maximum, wide
from autoshard.runtime.operations.summed import begin_sum
from autoshard.runtime.transport.communicator import Axes

_NAME = "autoshard::cross_entropy_loss"
_OPTIONS = "Tensor? weight=None, int reduction=1, int ignore_index=-100, float label_smoothing=0.0"
torch.library.define(_NAME, f"(Tensor self, Tensor target, {_OPTIONS}) -> Tensor")


@torch.library.impl(_NAME, "CompositeImplicitAutograd")
def _classes_last(self: torch.Tensor, target: torch.Tensor, *options: Any, **named: Any) -> torch.Tensor:
    """``aten.cross_entropy_loss`` of logits [..., c]; indices [...] or probabilities [..., c]."""
    rows = target.flatten() if target.dim() < self.dim() else target.flatten(0, -2)
    found: torch.Tensor = aten.cross_entropy_loss(self.flatten(0, -2), rows, *options, **named)
    return found.view(self.shape[:-1]) if found.dim() else found


cross_entropy_op = torch.ops.autoshard.cross_entropy_loss.default


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    classes: int,
    class_axes: Axes = (),
    batch_axes: Axes = (),
    samples: int = 0,
    pieces: bool = False,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """``F.cross_entropy`` of logits [n, c, ...] or [c], never gathered.

    Classes are sharded by ``class_axes``, samples by ``batch_axes``. ``target``: class indices [n,
    ...], or probabilities sharded like ``logits``. ``weight`` [classes] is replicated. The result
    is I along ``class_axes``. Along ``batch_axes`` it is S for ``reduction="none"``, else P: "mean"
    divides by the count of all ranks, an all-reduce of one number, or by ``samples`` for
    probabilities. ``counted``: class indices of all ranks, counted without communication. Along
    ``class_axes`` the forward all-reduces the maxima, then sum-exp and target logit in one message
    (Megatron-LM); the backward communicates nothing. With class indices, ``pieces`` computes slices
    of the samples in turn, as sharded classes always do."""
    mean = reduction == "mean"
    known = not mean or target.is_floating_point()
    count = None if known else _count(logits, target, weight, ignore_index, batch_axes, counted)
    if class_axes or pieces:
        options = weight, ignore_index, label_smoothing
        if class_axes:
            loss = _over_classes(logits, target, *options, classes, class_axes)
        else:
            loss = in_pieces(logits, target, *options)
        loss = loss if reduction == "none" else loss.sum()
    else:
        summed = "none" if reduction == "none" else "sum"
        loss = F.cross_entropy(logits, target, weight, None, ignore_index, None, summed, label_smoothing)
    return (loss / (samples if count is None else count()) if mean else loss).to(logits.dtype)


def nll_loss(
    log_probabilities: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    *,
    classes: int,
    class_axes: Axes = (),
    batch_axes: Axes = (),
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """``F.nll_loss`` of [n, c, ...] or [c], sharded as :func:`cross_entropy`; P on class axes."""
    mean = reduction == "mean"
    count = _count(log_probabilities, target, weight, ignore_index, batch_axes, counted) if mean else None
    if class_axes:
        check_range(target, classes, ignored=ignore_index)
        dim = min(log_probabilities.dim() - 1, 1)
        valid = target != ignore_index
        picked = _pick(log_probabilities, dim, target - offset(classes, class_axes))
        loss = -picked.masked_fill(~valid, 0)
        if weight is not None:
            loss = loss * weight[target.where(valid, 0)]
        loss = loss if reduction == "none" else loss.sum()
    else:
        summed = "none" if reduction == "none" else "sum"
        loss = F.nll_loss(log_probabilities, target, weight, None, ignore_index, None, summed)
    return (loss if count is None else loss / count()).to(log_probabilities.dtype)


def _over_classes(
    logits: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    smoothing: float,
    classes: int,
    axes: Axes,
) -> torch.Tensor:
    """Cross entropy per sample. With shifted logits x: loss = Σ_c p_c·w_c·(log Σ exp x - x_c)."""
    dim = min(logits.dim() - 1, 1)
    top = wide(maximum(logits, dim, axes))
    start, length = offset(classes, axes), logits.shape[dim]
    share = None if weight is None else weight[start : start + length]
    if target.is_floating_point():
        x = wide(logits) - top
        p = target * (1 - smoothing) + smoothing / classes
        p = p if share is None else p * along(share, dim, x.dim())
        sums = torch.stack([x.exp().sum(dim), p.sum(dim), (p * x).sum(dim)])
        exponentials, total, dot = statistic(sums, axes).unbind()
        return exponentials.log() * total - dot
    check_range(target, classes, ignored=ignore_index)
    sums = row_sums(logits, top, target - start, share, bool(smoothing))
    exponentials, picked, *rest = statistic(sums, axes).unbind()
    log_sum = exponentials.log()
    valid = target != ignore_index
    loss = log_sum - picked
    if weight is not None:
        loss = loss * weight[target.where(valid, 0)]
    if smoothing:
        total_weight = classes if weight is None else weight.sum()
        loss = (1 - smoothing) * loss + smoothing / classes * (log_sum * total_weight - rest[0])
    return loss.masked_fill(~valid, 0)


def _pick(x: torch.Tensor, dim: int, index: torch.Tensor) -> torch.Tensor:
    """``x`` at ``index`` along ``dim``; zero where another rank has that index."""
    if x.shape[dim] == 0:
        return x.sum(dim)  # zeros on the gradient path
    mine = (index >= 0) & (index < x.shape[dim])
    return x.gather(dim, index.where(mine, 0).unsqueeze(dim)).squeeze(dim).masked_fill(~mine, 0)


def _count(
    values: torch.Tensor,
    target: torch.Tensor,
    weight: torch.Tensor | None,
    ignore_index: int,
    axes: Axes,
    everywhere: torch.Tensor | None,
) -> Callable[[], torch.Tensor]:
    """Divisor of "mean": samples of all ranks that are not ignored, weighted by their class.

    Its all-reduce overlaps the loss. ``everywhere``, the targets of all ranks, needs none."""
    given = target if everywhere is None else everywhere
    valid = given != ignore_index
    counted = (
        valid.to(wide(values.new_empty(0)).dtype) if weight is None else wide(weight)[given.where(valid, 0)] * valid
    )
    return begin_sum(counted.sum(), axes if everywhere is None else ())
