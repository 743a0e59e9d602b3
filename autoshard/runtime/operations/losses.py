"""Losses: vocabulary-parallel cross entropy, NLL, and CTC. Logits are never gathered.
Samples, classes, or both may be sharded. Cross entropy works on slices of the rows, forward and
backward. Only the logits are saved for the backward, and nothing else of their size exists but
their gradient. Of :class:`ChunkedLogits` not even these exist: the backward computes every chunk of
rows once more."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.aten import aten
from autoshard.runtime.operations.checks import check_range
from autoshard.runtime.operations.chunked_logits import (
    ChunkedLogits,
    broadcast_along,
    chunked_class_sums,
    class_sums,
    logit_gradient,
)
from autoshard.runtime.operations.collectives import begin_sum, offset, reduce_statistic
from autoshard.runtime.operations.reductions import sharded_maximum, upcast
from autoshard.runtime.transport.autograd import NoneGradFunction, register_recomputed_backward
from autoshard.runtime.transport.communicator import Axes, current

SLICE_ELEMENTS = 1 << 23
"""elements of a slice, which has at least one row"""
ACCELERATOR_SLICE_FACTOR = 8
"""factor on accelerators, whose kernels need more elements"""


class _CrossEntropySums(NoneGradFunction):
    """[2 or 3, n, …]: row sums of ``logits`` [n, c, …] - ``top`` [n, 1, …], or of [c] - [1].
    They are: sum of exponentials; the entry at ``index`` [n, …], 0 if another rank has it; and if
    ``smoothed`` the sum of all entries, weighted by ``share`` [c] if given."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, top: Tensor, index: Tensor, share: Tensor | None, smoothed: bool) -> Tensor:
        ctx.save_for_backward(logits, top, index, share)
        ctx.smoothed = smoothed
        sums = top.new_empty(2 + smoothed, *index.shape)
        for rows in _row_slices(logits):
            sums[:, rows] = class_sums(upcast(logits[rows]) - top[rows], index[rows], share, smoothed)
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, top, index, share = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            sums = class_sums(upcast(logits) - top, index, share, ctx.smoothed)
            return *torch.autograd.grad(sums, logits, gradient, create_graph=True), None, None, None, None
        found = torch.empty_like(logits)
        for rows in _row_slices(logits):
            shifted = upcast(logits[rows]) - top[rows]
            found[rows] = logit_gradient(shifted, index[rows], share, gradient[:, rows])
        return found, None, None, None, None


class _SlicedCrossEntropy(NoneGradFunction):
    """``F.cross_entropy`` per sample: unsharded logits [n, c, …], class indices [n, …]."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        ctx.save_for_backward(logits, target, weight)
        ctx.options = ignore_index, smoothing
        losses = upcast(logits.new_empty(target.shape))
        for rows in _row_slices(logits):
            losses[rows] = _loss_per_row(logits[rows], target[rows], weight, *ctx.options)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, target, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            losses = _loss_per_row(logits, target, weight, *ctx.options)
            (found,) = torch.autograd.grad(losses, logits, gradient, create_graph=True)
            return found, None, None, None, None
        found = torch.empty_like(logits)
        for rows in _row_slices(logits):
            with torch.enable_grad():
                x = logits[rows].detach().requires_grad_()
                losses = _loss_per_row(x, target[rows], weight, *ctx.options)
            (found[rows],) = torch.autograd.grad(losses, x, gradient[rows])
        return found, None, None, None, None


def _loss_per_row(logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, smoothing: float) -> Tensor:
    return upcast(F.cross_entropy(logits, target, weight, None, ignore_index, None, "none", smoothing))


def _row_slices(logits: Tensor) -> Iterator[Any]:
    """Slices of rows; on meta tensors the first only, which takes as much memory as others."""
    if logits.dim() == 1:
        yield ...
        return
    count = logits.shape[0]
    piece = SLICE_ELEMENTS if logits.device.type in ("cpu", "meta") else ACCELERATOR_SLICE_FACTOR * SLICE_ELEMENTS
    step = max(1, piece * count // max(1, logits.numel()))
    yield from (slice(start, start + step) for start in range(0, min(count, step) if logits.is_meta else count, step))


_NAME, _OF_LINEAR = "autoshard::cross_entropy_loss", "autoshard::linear_cross_entropy"
_OPTIONS = "Tensor? weight=None, int reduction=1, int ignore_index=-100, float label_smoothing=0.0"
_LAYER = "Tensor matrix, Tensor? bias, ScalarType dtype, int chunks"
torch.library.define(_NAME, f"(Tensor self, Tensor target, {_OPTIONS}) -> Tensor")
torch.library.define(_OF_LINEAR, f"(Tensor self, Tensor target, {_LAYER}, {_OPTIONS}) -> Tensor")


@torch.library.impl(_NAME, "CompositeImplicitAutograd")
def _classes_last(self: Tensor, target: Tensor, *options: Any, **named: Any) -> Tensor:
    """``aten.cross_entropy_loss`` of logits [..., c]; indices [...] or probabilities [..., c]."""
    rows = target.flatten() if target.dim() < self.dim() else target.flatten(0, -2)
    found: Tensor = aten.cross_entropy_loss(self.flatten(0, -2), rows, *options, **named)
    return found.view(self.shape[:-1]) if found.dim() else found


@torch.library.impl(_OF_LINEAR, "CompositeImplicitAutograd")
def _of_linear(
    self: Tensor, target: Tensor, matrix: Tensor, bias: Tensor | None, dtype: torch.dtype, chunks: int, *options: Any,
    **named: Any,
) -> Tensor:  # fmt: skip
    """The loss of ``F.linear(self, matrix, bias)`` cast to ``dtype``, all rows at once."""
    found: Tensor = cross_entropy_op(F.linear(self, matrix, bias).to(dtype), target, *options, **named)
    return found


cross_entropy_op = torch.ops.autoshard.cross_entropy_loss.default
linear_cross_entropy_op = torch.ops.autoshard.linear_cross_entropy.default


def cross_entropy(
    logits: Tensor | ChunkedLogits,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    *,
    classes: int | None = None,
    class_axes: Axes = (),
    batch_axes: Axes = (),
    counted: Tensor | int | None = None,
) -> Tensor:
    """``F.cross_entropy`` of logits [n, c, ...] or [c], never gathered.
    Classes are sharded by ``class_axes``, samples by ``batch_axes``. ``target``: class indices [n,
    ...], or probabilities sharded like ``logits``. ``weight`` [classes] is replicated. The result
    is I along ``class_axes``. Along ``batch_axes`` it is S for ``reduction="none"``, else P: "mean"
    divides by the count of all ranks, an all-reduce of one number. ``counted``: class indices of all
    ranks, counted without communication, or for probabilities the number of samples. Along
    ``class_axes`` the forward all-reduces the maxima, then sum-exp and target logit in one message
    (Megatron-LM); the backward communicates nothing. ``classes``: their number on all ranks; slices
    of the samples are computed in turn. None: all classes are here, and samples go at once.
    :func:`chunked_logits` send the same messages, once for all chunks."""
    mean = reduction == "mean"
    if isinstance(logits, ChunkedLogits):
        values, target = logits.x.new_empty(0, dtype=logits.rows.dtype), logits.rows.ordered(target)
    else:
        values = logits
    count = _begin_mean_divisor(values, target, weight, ignore_index, batch_axes, counted) if mean else None
    if classes is not None:
        options = weight, ignore_index, label_smoothing
        if class_axes or isinstance(logits, ChunkedLogits):
            loss = _vocab_parallel_loss(logits, target, *options, classes, class_axes)
        else:
            loss = _SlicedCrossEntropy.apply(values, target, *options)
        loss = loss if reduction == "none" else loss.sum()
    else:
        summed = "none" if reduction == "none" else "sum"
        loss = F.cross_entropy(values, target, weight, None, ignore_index, None, summed, label_smoothing)
    return (loss if count is None else loss / count()).to(values.dtype)


def nll_loss(
    log_probabilities: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    *,
    classes: int | None = None,
    class_axes: Axes = (),
    batch_axes: Axes = (),
    counted: Tensor | int | None = None,
) -> Tensor:
    """``F.nll_loss`` of [n, c, ...] or [c], sharded as :func:`cross_entropy`; P on class axes."""
    mean = reduction == "mean"
    count = _begin_mean_divisor(log_probabilities, target, weight, ignore_index, batch_axes, counted) if mean else None
    if classes is not None:
        check_range(target, classes, ignored=ignore_index)
        dim = min(log_probabilities.dim() - 1, 1)
        valid = target != ignore_index
        picked = _picked_logit(log_probabilities, dim, target - offset(classes, class_axes))
        loss = -picked.masked_fill(~valid, 0)
        if weight is not None:
            loss = loss * _class_weights(weight, target.where(valid, 0))
        loss = loss if reduction == "none" else loss.sum()
    else:
        summed = "none" if reduction == "none" else "sum"
        loss = F.nll_loss(log_probabilities, target, weight, None, ignore_index, None, summed)
    return (loss if count is None else loss / count()).to(log_probabilities.dtype)


def _vocab_parallel_loss(
    logits: Tensor | ChunkedLogits,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
    classes: int,
    axes: Axes,
) -> Tensor:
    """Cross entropy per sample. With shifted logits x: loss = Σ_c p_c·w_c·(log Σ exp x - x_c)."""
    start, length = current().chunk(classes, current().active(axes))
    share = None if weight is None else weight[start : start + length]
    if isinstance(logits, ChunkedLogits):
        sums = chunked_class_sums(logits, target - start, share, bool(smoothing), axes)
    else:
        dim = min(logits.dim() - 1, 1)
        top = upcast(sharded_maximum(logits, dim, axes))
        if target.is_floating_point():
            x = upcast(logits) - top
            p = target * (1 - smoothing) + smoothing / classes
            p = p if share is None else p * broadcast_along(share, dim, x.dim())
            sums = torch.stack([x.exp().sum(dim), p.sum(dim), (p * x).sum(dim)])
            exponentials, total, dot = reduce_statistic(sums, axes).unbind()
            return exponentials.log() * total - dot
        sums = _CrossEntropySums.apply(logits, top, target - start, share, bool(smoothing))
    check_range(target, classes, ignored=ignore_index)
    exponentials, picked, *rest = reduce_statistic(sums, axes).unbind()
    log_sum = exponentials.log()
    valid = target != ignore_index
    loss = log_sum - picked
    if weight is not None:
        loss = loss * _class_weights(weight, target.where(valid, 0))
    if smoothing:
        total_weight = classes if weight is None else weight.sum()
        loss = (1 - smoothing) * loss + smoothing / classes * (log_sum * total_weight - rest[0])
    return loss.masked_fill(~valid, 0)


def _picked_logit(x: Tensor, dim: int, index: Tensor) -> Tensor:
    """``x`` at ``index`` along ``dim``; zero where another rank has that index."""
    if x.shape[dim] == 0:
        return x.sum(dim)  # zeros on the gradient path
    mine = (index >= 0) & (index < x.shape[dim])
    return x.gather(dim, index.where(mine, 0).unsqueeze(dim)).squeeze(dim).masked_fill(~mine, 0)


def _class_weights(weight: Tensor, index: Tensor) -> Tensor:
    """``weight[index]``, which reads an index without dims on the host."""
    return aten.index.Tensor(weight, [index])


def _begin_mean_divisor(
    values: Tensor,
    target: Tensor,
    weight: Tensor | None,
    ignore_index: int,
    axes: Axes,
    everywhere: Tensor | int | None,
) -> Callable[[], Tensor | int]:
    """Divisor of "mean": weighted samples of all ranks that are not ignored. Its all-reduce
    overlaps the loss; ``everywhere``, all targets or their number, needs none."""
    if isinstance(everywhere, int):
        return lambda: everywhere
    given = target if everywhere is None else everywhere
    valid = given != ignore_index
    counted = (
        valid.to(upcast(values.new_empty(0)).dtype)
        if weight is None
        else _class_weights(upcast(weight), given.where(valid, 0)) * valid
    )
    return begin_sum(counted.sum(), axes if everywhere is None else ())


@torch.library.custom_op("autoshard::ctc_loss", mutates_args=())
def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Tensor:
    """Loss per sample, [n] or []: log-probabilities [t, n, c] or [t, c]; targets [n, s] or flat."""
    return _ctc_loss_per_sample(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity).clone()


def _ctc_loss_per_sample(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Tensor:
    if log_probs.ndim == 3 and not log_probs.shape[1]:  # no samples: torch refuses
        return log_probs.sum((0, 2))
    return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity)


@ctc_loss.register_fake
def _fake_ctc_loss(log_probs: Tensor, *others: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1:-1])


# ATen's backward needs a table that the op does not return, so the forward is recomputed.
register_recomputed_backward(ctc_loss, _ctc_loss_per_sample, of=(0,))
