"""Losses: vocabulary-parallel cross entropy, NLL, and CTC. Logits are never gathered.

Samples, classes, or both may be sharded. Cross entropy works on slices of the rows, forward and
backward. Only the logits are saved for the backward, and nothing else of their size exists but
their gradient. Of :class:`ChunkedLogits` not even these exist: the backward computes every chunk of
rows once more."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.aten import aten
from autoshard.runtime.operations.checks import check_range
from autoshard.runtime.operations.collectives import begin_sum, offset, reduce_statistic
from autoshard.runtime.operations.reductions import sharded_maximum, upcast
from autoshard.runtime.transport.autograd import NoneGradFunction, register_recomputed_backward
from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.coroutine_autograd import CoroutinePair, apply_coroutines
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.profiling import with_module
from autoshard.runtime.transport.rank_coroutines import Arrival, Collective, RankCoroutine, Sending, Tensors

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
            sums[:, rows] = _class_sums(upcast(logits[rows]) - top[rows], index[rows], share, smoothed)
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        logits, top, index, share = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            sums = _class_sums(upcast(logits) - top, index, share, ctx.smoothed)
            return *torch.autograd.grad(sums, logits, gradient, create_graph=True), None, None, None, None
        found = torch.empty_like(logits)
        for rows in _row_slices(logits):
            shifted = upcast(logits[rows]) - top[rows]
            found[rows] = _logit_gradient(shifted, index[rows], share, gradient[:, rows])
        return found, None, None, None, None


class ChunkedLogits(NamedTuple):
    """Logits of a linear layer, of which one chunk of rows exists at a time."""

    x: Tensor
    """[rows, features]"""
    matrix: Tensor
    """[classes, features]"""
    bias: Tensor | None
    chunks: int
    dtype: torch.dtype
    """to which the results of the layer are cast"""
    lead: tuple[int, ...]
    """the dims that rows are made of, on this rank"""
    dim: int
    axes: Axes
    """mesh axes that shard ``dim`` of the rows, whose chunks all ranks gather"""

    def of(self, x: Tensor) -> Tensor:
        """The logits [n, classes] of some rows [n, features], in at least float32."""
        return upcast(F.linear(x, self.matrix, self.bias).to(self.dtype))

    def slices(self) -> list[slice]:
        """The chunks of this rank's rows; on meta tensors that are not gathered the first only, which
        takes as much memory as others."""
        count, first = len(self.x), self.x.is_meta and not self.axes
        step = max(1, -(-count // self.chunks))
        return [
            slice(start, min(start + step, count)) for start in range(0, min(count, step) if first else count, step)
        ]

    def ordered(self, target: Tensor) -> Tensor:
        """``target`` of all ranks' rows, rank by rank."""
        ranks = current().size_of(current().active(self.axes))
        if ranks == 1:
            return target
        whole = [n * ranks if d == self.dim else n for d, n in enumerate(self.lead)]
        return target.view(whole).unflatten(self.dim, (ranks, -1)).movedim(self.dim, 0).flatten()


def chunked_logits(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None = None,
    *,
    chunks: int,
    dtype: torch.dtype | None = None,
    dim: int = 0,
    axes: Axes = (),
) -> ChunkedLogits:
    """``F.linear(x, matrix, bias)`` for :func:`cross_entropy`, a chunk of the rows of ``x`` [..., features] at a time.

    ``chunks``: their number; ``dtype``: to which the logits are cast. ``axes`` shard the classes, and
    ``dim`` of ``x`` evenly: the ranks gather a chunk of each, forward and backward, and reduce-scatter
    its gradient. Then there is no second derivative."""
    return ChunkedLogits(x.flatten(0, -2), matrix, bias, chunks, dtype or x.dtype, x.shape[:-1], dim, axes)


def _sums_and_maxima(logits: Tensor, index: Tensor, share: Tensor | None, smoothed: bool) -> Tensor:
    """[3 or 4, n]: :func:`_class_sums` of a chunk less its maxima, and these; ``logits`` are overwritten."""
    top = logits.amax(1) if logits.shape[1] else logits.new_full(logits.shape[:1], -torch.inf)
    top.clamp_min_(torch.finfo(logits.dtype).min / 4)  # differences of maxima stay finite
    return torch.cat([_class_sums(logits.sub_(top.unsqueeze(1)), index, share, smoothed), top.unsqueeze(0)])


class _LayerGradients:
    """Gradients of a linear layer's weights, summed over chunks in at least float32."""

    def __init__(self, x: Tensor, matrix: Tensor, wanted: Sequence[bool]) -> None:
        wide = upcast(x.new_empty(0))
        self.matrix = wide.new_zeros(matrix.shape) if wanted[1] else None
        self.bias = wide.new_zeros(len(matrix)) if wanted[2] else None

    def add(self, gradient: Tensor, x: Tensor) -> None:
        """Add those of one chunk: gradient [n, classes] of the logits of ``x`` [n, features]."""
        if self.matrix is not None and self.matrix.dtype == x.dtype:
            self.matrix.addmm_(gradient.T, x)
        elif self.matrix is not None:
            self.matrix += gradient.T @ x
        if self.bias is not None:
            self.bias += gradient.sum(0)

    def found(self, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
        """(of the matrix, of the bias), cast to ``dtype``."""
        matrix, self.matrix = self.matrix, None
        return None if matrix is None else matrix.to(dtype), None if self.bias is None else self.bias.to(dtype)


class _ChunkedSums(NoneGradFunction):
    """[3 or 4, rows]: :class:`_CrossEntropySums` of chunked logits, and the maxima that they subtract."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
        options, index, share, smoothed = given
        logits = options._replace(x=x, matrix=matrix, bias=bias)
        sums = upcast(x.new_empty(0, dtype=logits.dtype)).new_empty(3 + smoothed, len(x))
        for rows in logits.slices():
            sums[:, rows] = _sums_and_maxima(logits.of(x[rows]), index[rows], share, smoothed)
        ctx.save_for_backward(x, matrix, bias, index, share, sums[-1].clone())
        ctx.logits, ctx.smoothed = logits._replace(x=None, matrix=None, bias=None), smoothed
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, matrix, bias, index, share, top = ctx.saved_tensors
        logits, gradient, top = ctx.logits._replace(x=x, matrix=matrix, bias=bias), gradient[:-1], top.unsqueeze(1)
        wanted = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph
            sums = _class_sums(logits.of(x) - top, index, share, ctx.smoothed)
            of = [operand for operand, wants in zip((x, matrix, bias), wanted, strict=True) if wants]
            found = iter(torch.autograd.grad(sums, of, gradient, create_graph=True))
            return *(next(found) if wants else None for wants in wanted), None, None, None, None
        of_x, of_weights = torch.empty_like(x) if wanted[0] else None, _LayerGradients(x, matrix, wanted)
        for rows in logits.slices():
            shifted = logits.of(x[rows]).sub_(top[rows])
            each = _logit_gradient(shifted, index[rows], share, gradient[:, rows]).to(x.dtype)
            del shifted
            if of_x is not None:
                of_x[rows] = each @ matrix
            of_weights.add(each, x[rows])
            del each
        return of_x, *of_weights.found(x.dtype), None, None, None, None


class _GatheredRows(NamedTuple):
    """Rows of chunked logits that all ranks gather, a chunk of each rank's at a time."""

    logits: ChunkedLogits
    """without its tensors"""
    slices: list[slice]
    ranks: int
    names: tuple[str, ...]
    """active mesh axes"""

    def gather(self, x: Tensor, number: int) -> Generator[Sending, Arrival, Arrival]:
        """Begin the all-gather of a chunk."""
        return (yield from self._moved("S", "R", x[self.slices[number]], self.ranks))

    def scatter(self, gradient: Tensor) -> Generator[Sending, Arrival, Arrival]:
        """Begin the reduce-scatter of the gradient of a gathered chunk."""
        return (yield from self._moved("P", "S", gradient, 1))

    def _moved(self, source: str, target: str, x: Tensor, times: int) -> Generator[Sending, Arrival, Arrival]:
        move = with_module(Move(source, target, self.names, 0, times * len(x)), always=True)
        return (yield Collective(move, x.contiguous()))

    def part(self, x: Tensor, number: int) -> Tensor:
        """A chunk [..., ranks, n] of what lies rank by rank, [..., rows of all ranks]."""
        return x.unflatten(-1, (self.ranks, -1))[..., self.slices[number]]

    def forward(
        self, index: Tensor, share: Tensor | None, smoothed: bool, x: Tensor, matrix: Tensor, bias: Tensor | None
    ) -> RankCoroutine:
        """→ sums as :class:`_ChunkedSums`, of the rows of all ranks; and what the backward needs."""
        logits = self.logits._replace(x=x, matrix=matrix, bias=bias)
        sums = upcast(x.new_empty(0, dtype=logits.dtype)).new_empty(3 + smoothed, len(index))
        arrival = yield from self.gather(x, 0)
        for i in range(len(self.slices)):
            (here,) = arrival()
            if i + 1 < len(self.slices):
                arrival = yield from self.gather(x, i + 1)
            if not (x.is_meta and i):  # one chunk takes as much memory as others
                found = _sums_and_maxima(logits.of(here), self.part(index, i).flatten(), share, smoothed)
                self.part(sums, i).copy_(found.unflatten(-1, (self.ranks, -1)))
            del here
        return sums, x, matrix, bias, index, share, sums[-1].clone()  # type: ignore[return-value]

    def backward(self, gradients: Tensors, saved: Sequence[Any], wanted: Sequence[bool]) -> RankCoroutine:
        """→ gradients of the rows, of the matrix and of the bias."""
        x, matrix, bias, index, share, top = saved
        logits, gradient = self.logits._replace(x=x, matrix=matrix, bias=bias), gradients[0][:-1]
        of_x, of_weights = torch.empty_like(x) if wanted[0] else None, _LayerGradients(x, matrix, wanted)
        arrival, behind = (yield from self.gather(x, 0)), None
        for i in range(len(self.slices)):
            (here,) = arrival()
            if i + 1 < len(self.slices):
                arrival = yield from self.gather(x, i + 1)
            shifted = logits.of(here).sub_(self.part(top, i).reshape(-1, 1))
            each = _logit_gradient(shifted, self.part(index, i).flatten(), share, self.part(gradient, i).flatten(1))
            each = each.to(x.dtype)
            del shifted
            if of_x is not None and behind is not None:
                (of_x[self.slices[i - 1]],) = behind()
            if of_x is not None:
                behind = yield from self.scatter(each @ matrix)
            of_weights.add(each, here)
            del each, here
        if of_x is not None and behind is not None:
            (of_x[self.slices[-1]],) = behind()
        return of_x, *of_weights.found(x.dtype)  # type: ignore[return-value]


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


def _class_sums(x: Tensor, index: Tensor, share: Tensor | None, smoothed: bool) -> Tensor:
    """The sums of shifted logits ``x``, which are overwritten unless gradients are recorded."""
    dim = min(x.dim() - 1, 1)
    at, here = _local_class_index(index, x.shape[dim])
    picked = x.gather(dim, at).squeeze(dim) if x.shape[dim] else x.sum(dim)
    rest = [(x if share is None else x * broadcast_along(share, dim, x.dim())).sum(dim)] if smoothed else []
    exponentials = x.exp() if torch.is_grad_enabled() else x.exp_()
    return torch.stack([exponentials.sum(dim), picked.masked_fill(~here, 0), *rest])


def _logit_gradient(x: Tensor, index: Tensor, share: Tensor | None, gradient: Tensor) -> Tensor:
    """Gradient of shifted logits, written over ``x``, given those of the sums [2 or 3, n, …]."""
    dim = min(x.dim() - 1, 1)
    exponentials, picked, *rest = (g.unsqueeze(dim) for g in gradient)
    found = x.exp_().mul_(exponentials)
    if found.shape[dim]:
        at, here = _local_class_index(index, found.shape[dim])
        # one element per row
        found.scatter_(dim, at, found.gather(dim, at) + picked.masked_fill(~here.unsqueeze(dim), 0))
    if rest:
        found += rest[0] if share is None else rest[0] * broadcast_along(share, dim, found.dim())
    return found


def _local_class_index(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(``index`` with a class dim, 0 where it is outside ``size``; whether it is inside)."""
    here = (index >= 0) & (index < size)
    return index.where(here, 0).unsqueeze(min(index.dim(), 1)), here


def broadcast_along(vector: Tensor, dim: int, rank: int) -> Tensor:
    """``vector`` as a tensor of ``rank`` dims that varies along ``dim``."""
    return vector.view([-1 if d == dim else 1 for d in range(rank)])


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
    mean, chunked, values = reduction == "mean", isinstance(logits, ChunkedLogits), logits
    if isinstance(logits, ChunkedLogits):
        values, target = logits.x.new_empty(0, dtype=logits.dtype), logits.ordered(target)
    count = _begin_mean_divisor(values, target, weight, ignore_index, batch_axes, counted) if mean else None
    if classes is not None:
        options = weight, ignore_index, label_smoothing
        if class_axes or chunked:
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
        sums = _global_chunked_sums(logits, target - start, share, bool(smoothing), axes)
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


def _global_chunked_sums(
    logits: ChunkedLogits, index: Tensor, share: Tensor | None, smoothed: bool, axes: Axes
) -> Tensor:
    """[2 or 3, rows]: sums of this rank's classes, less the maxima of all ranks' classes."""
    comm, operands = current(), (logits.x, logits.matrix, logits.bias)
    classes, names = len(logits.matrix), comm.active(logits.axes)
    options = logits._replace(x=logits.x.detach(), matrix=None, bias=None)
    if names:
        rows = _GatheredRows(options, options.slices(), comm.size_of(names), names)
        ahead, name = (
            partial(rows.forward, index, share, smoothed),
            f"a loss whose rows are gathered along {', '.join(names)}",
        )
        (found,) = apply_coroutines(comm, CoroutinePair(name, ahead, rows.backward), *operands)
    else:
        found = _ChunkedSums.apply(*operands, options, index, share, smoothed)
    (exponentials, picked, *rest), top = found[:-1], found[-1].detach()
    higher = reduce_statistic(top, axes, op="max") - top
    here = _local_class_index(index, classes)[1]
    weights = classes if share is None else share.sum()
    moved = exponentials * (-higher).exp(), picked - higher.masked_fill(~here, 0)
    return torch.stack([*moved, *(x - higher * weights for x in rest)])


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
    """Divisor of "mean": samples of all ranks that are not ignored, weighted by their class.

    Its all-reduce overlaps the loss. ``everywhere``, all targets or their number, needs none."""
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
