"""Logits of a linear layer in chunks of the rows, freed after taking the sums that a cross entropy
needs, and computed once more in the backward. Rows may be sharded over the ranks that share the
classes: then a chunk of each is gathered at a time."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.runtime.operations.collectives import reduce_statistic
from autoshard.runtime.operations.reductions import upcast
from autoshard.runtime.transport.autograd import NoneGradFunction
from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.coroutine_autograd import CoroutinePair, apply_coroutines
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.profiling import with_module
from autoshard.runtime.transport.rank_coroutines import Arrival, Collective, RankCoroutine, Sending, Tensors


class RowChunks(NamedTuple):
    """How the rows of a linear layer's operand are divided into chunks."""

    number: int
    dtype: torch.dtype
    """to which the results of the layer are cast"""
    lead: tuple[int, ...]
    """the dims that this rank's rows are made of"""
    dim: int
    axes: Axes
    """mesh axes that shard dim ``dim`` of the rows, whose chunks their ranks gather"""

    @property
    def names(self) -> tuple[str, ...]:
        """Active mesh axes of ``axes``."""
        return current().active(self.axes)

    def logits(self, x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        """The logits [n, classes] of rows x [n, features], in at least float32."""
        return upcast(F.linear(x, matrix, bias).to(self.dtype))

    def slices(self, x: Tensor) -> list[slice]:
        """The chunks of the rows x, the longest first; as many on all ranks where these gather
        them. On meta tensors that are not gathered only the first, as others take no more."""
        ends = [-(-len(x) * i // self.number) for i in range(self.number + 1)]
        found = [slice(*pair) for pair in itertools.pairwise(ends)]
        return found if self.axes else found[:1] if x.is_meta else [part for part in found if part.start < part.stop]

    def ordered(self, target: Tensor) -> Tensor:
        """``target`` [rows of all ranks], rank by rank."""
        if (ranks := current().size_of(self.names)) == 1:
            return target
        whole = [n * ranks if d == self.dim else n for d, n in enumerate(self.lead)]
        return target.view(whole).unflatten(self.dim, (ranks, -1)).movedim(self.dim, 0).flatten()


class ChunkedLogits(NamedTuple):
    """Logits of a linear layer, of which one chunk of rows exists at a time."""

    x: Tensor
    """[rows, features]"""
    matrix: Tensor
    """[classes, features]"""
    bias: Tensor | None
    rows: RowChunks


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
    return ChunkedLogits(x.flatten(0, -2), matrix, bias, RowChunks(chunks, dtype or x.dtype, x.shape[:-1], dim, axes))


def _sums_and_maxima(logits: Tensor, index: Tensor, share: Tensor | None, smoothed: bool) -> Tensor:
    """[3 or 4, n]: :func:`class_sums` less maxima, and maxima; overwrites ``logits``."""
    top = logits.amax(1) if logits.shape[1] else logits.new_full(logits.shape[:1], -torch.inf)
    top.clamp_min_(torch.finfo(logits.dtype).min / 4)  # differences of maxima stay finite
    return torch.cat([class_sums(logits.sub_(top.unsqueeze(1)), index, share, smoothed), top.unsqueeze(0)])


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
    """[3 or 4, rows]: :func:`class_sums` of chunked logits, and the maxima that they subtract."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
        chunks, index, share, smoothed = given
        sums = upcast(x.new_empty(0, dtype=chunks.dtype)).new_empty(3 + smoothed, len(x))
        for rows in chunks.slices(x):
            sums[:, rows] = _sums_and_maxima(chunks.logits(x[rows], matrix, bias), index[rows], share, smoothed)
        ctx.save_for_backward(x, matrix, bias, index, share, sums[-1].clone())
        ctx.chunks, ctx.smoothed = chunks, smoothed
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, matrix, bias, index, share, top = ctx.saved_tensors
        gradient, top, wanted = gradient[:-1], top.unsqueeze(1), ctx.needs_input_grad[:3]
        if torch.is_grad_enabled():  # create_graph
            sums = class_sums(ctx.chunks.logits(x, matrix, bias) - top, index, share, ctx.smoothed)
            of = [operand for operand, wants in zip((x, matrix, bias), wanted, strict=True) if wants]
            found = iter(torch.autograd.grad(sums, of, gradient, create_graph=True))
            return *(next(found) if wants else None for wants in wanted), None, None, None, None
        of_x, of_weights = torch.empty_like(x) if wanted[0] else None, _LayerGradients(x, matrix, wanted)
        for rows in ctx.chunks.slices(x):
            shifted = ctx.chunks.logits(x[rows], matrix, bias).sub_(top[rows])
            each = logit_gradient(shifted, index[rows], share, gradient[:, rows]).to(x.dtype)
            del shifted
            if of_x is not None:
                of_x[rows] = each @ matrix
            of_weights.add(each, x[rows])
            del each
        return of_x, *of_weights.found(x.dtype), None, None, None, None


class _GatheredRows(NamedTuple):
    """Rows of which ranks gather a chunk of each at a time; ``ranks``: their number."""

    chunks: RowChunks
    slices: list[slice]
    move: Move
    """of rows, to all ranks"""
    ranks: int

    def gather(self, x: Tensor, number: int) -> Generator[Sending, Arrival, Arrival]:
        """Begin the all-gather of a chunk."""
        return (yield from self._moved("S", "R", x[self.slices[number]], self.ranks))

    def scatter(self, gradient: Tensor) -> Generator[Sending, Arrival, Arrival]:
        """Begin the reduce-scatter of the gradient of a gathered chunk."""
        return (yield from self._moved("P", "S", gradient, 1))

    def _moved(self, source: str, target: str, x: Tensor, times: int) -> Generator[Sending, Arrival, Arrival]:
        return (yield Collective(self.move._replace(source=source, target=target, size=times * len(x)), x.contiguous()))

    def part(self, x: Tensor, number: int) -> Tensor:
        """A chunk [..., ranks, n] of what lies rank by rank, [..., rows of all ranks]."""
        return x.unflatten(-1, (self.ranks, -1))[..., self.slices[number]]

    def forward(
        self, index: Tensor, share: Tensor | None, smoothed: bool, x: Tensor, matrix: Tensor, bias: Tensor | None
    ) -> RankCoroutine:
        """→ sums as :class:`_ChunkedSums`, of all ranks' rows; and what the backward needs."""
        sums = upcast(x.new_empty(0, dtype=self.chunks.dtype)).new_empty(3 + smoothed, len(index))
        arrival = yield from self.gather(x, 0)
        for i in range(len(self.slices)):
            (here,) = arrival()
            if i + 1 < len(self.slices):
                arrival = yield from self.gather(x, i + 1)
            if not (x.is_meta and i):  # one chunk takes as much memory as others
                logits = self.chunks.logits(here, matrix, bias)
                found = _sums_and_maxima(logits, self.part(index, i).flatten(), share, smoothed)
                self.part(sums, i).copy_(found.unflatten(-1, (self.ranks, -1)))
                del logits
            del here
        return sums, x, matrix, bias, index, share, sums[-1].clone()  # type: ignore[return-value]

    def backward(self, gradients: Tensors, saved: Sequence[Any], wanted: Sequence[bool]) -> RankCoroutine:
        """→ gradients of the rows, of the matrix and of the bias."""
        (x, matrix, bias, index, share, top), gradient = saved, gradients[0][:-1]
        of_x, of_weights = torch.empty_like(x) if wanted[0] else None, _LayerGradients(x, matrix, wanted)
        arrival, behind = (yield from self.gather(x, 0)), None
        for i in range(len(self.slices)):
            (here,) = arrival()
            if i + 1 < len(self.slices):
                arrival = yield from self.gather(x, i + 1)
            shifted = self.chunks.logits(here, matrix, bias).sub_(self.part(top, i).reshape(-1, 1))
            each = logit_gradient(shifted, self.part(index, i).flatten(), share, self.part(gradient, i).flatten(1))
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


def chunked_class_sums(
    logits: ChunkedLogits, index: Tensor, share: Tensor | None, smoothed: bool, axes: Axes
) -> Tensor:
    """[2 or 3, rows]: :func:`class_sums` of this rank's classes, less all ranks' maxima."""
    comm, (*operands, chunks) = current(), logits
    if names := chunks.names:
        move = with_module(Move("S", "R", names, 0), always=True)
        rows = _GatheredRows(chunks, chunks.slices(logits.x), move, comm.size_of(names))
        ahead, name = (
            partial(rows.forward, index, share, smoothed),
            f"a loss whose rows are gathered along {', '.join(names)}",
        )
        (found,) = apply_coroutines(comm, CoroutinePair(name, ahead, rows.backward), *operands)
    else:
        found = _ChunkedSums.apply(*operands, chunks, index, share, smoothed)
    (exponentials, picked, *rest), top = found[:-1], found[-1].detach()
    higher = reduce_statistic(top, axes, op="max") - top
    classes = len(logits.matrix)
    here = local_class_index(index, classes)[1]
    weights = classes if share is None else share.sum()
    moved = exponentials * (-higher).exp(), picked - higher.masked_fill(~here, 0)
    return torch.stack([*moved, *(x - higher * weights for x in rest)])


def class_sums(x: Tensor, index: Tensor, share: Tensor | None, smoothed: bool) -> Tensor:
    """The sums of shifted logits ``x``, which are overwritten unless gradients are recorded."""
    dim = min(x.dim() - 1, 1)
    at, here = local_class_index(index, x.shape[dim])
    picked = x.gather(dim, at).squeeze(dim) if x.shape[dim] else x.sum(dim)
    rest = [(x if share is None else x * broadcast_along(share, dim, x.dim())).sum(dim)] if smoothed else []
    exponentials = x.exp() if torch.is_grad_enabled() else x.exp_()
    return torch.stack([exponentials.sum(dim), picked.masked_fill(~here, 0), *rest])


def logit_gradient(x: Tensor, index: Tensor, share: Tensor | None, gradient: Tensor) -> Tensor:
    """Gradient of shifted logits, written over ``x``, given those of the sums [2 or 3, n, …]."""
    dim = min(x.dim() - 1, 1)
    exponentials, picked, *rest = (g.unsqueeze(dim) for g in gradient)
    found = x.exp_().mul_(exponentials)
    if found.shape[dim]:
        at, here = local_class_index(index, found.shape[dim])
        # one element per row
        found.scatter_(dim, at, found.gather(dim, at) + picked.masked_fill(~here.unsqueeze(dim), 0))
    if rest:
        found += rest[0] if share is None else rest[0] * broadcast_along(share, dim, found.dim())
    return found


def local_class_index(index: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """(``index`` with a class dim, 0 where it is outside ``size``; whether it is inside)."""
    here = (index >= 0) & (index < size)
    return index.where(here, 0).unsqueeze(min(index.dim(), 1)), here


def broadcast_along(vector: Tensor, dim: int, rank: int) -> Tensor:
    """``vector`` as a tensor of ``rank`` dims that varies along ``dim``."""
    return vector.view([-1 if d == dim else 1 for d in range(rank)])
