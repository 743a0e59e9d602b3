"""Grouped matrix products: consecutive groups of rows, each with a matrix of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.runtime.transport.handed_on import HandingOn, register

CACHED = 1 << 17
"""elements that a piece of rows makes on a CPU: a megabyte, of the two that its caches have for a core"""


@torch.library.custom_op("autoshard::grouped_mm", mutates_args=())
def grouped_mm(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, full: bool = False) -> torch.Tensor:
    """Rows [s, k] in consecutive groups that end at ``ends`` [e], each times its matrix of [e, k, n] → [s, n].

    Rows after the last group are zero; ``full``: there are none.
    """
    return _multiplied(x, weight, ends, full)


@torch.library.custom_op("autoshard::grouped_outer", mutates_args=())
def grouped_outer(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Of the rows [s, k] and [s, n] of each group the sum of outer products → [e, k, n]."""
    return _outer(x, y, ends)


def product(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """As :func:`grouped_mm` where no rows follow the last group, for calls that nothing traces: an operator of torch's
    library takes as long as the product of some rows."""
    found: torch.Tensor = grouped_mm(x, weight, ends, True) if _is_traced(x) else _Product.apply(x, weight, ends)
    return found


def _is_traced(x: torch.Tensor) -> bool:
    return x.is_meta or bool(torch._C._len_torch_dispatch_stack()) or type(x) is not torch.Tensor


class Piece(NamedTuple):
    """Consecutive groups of rows that are worked on together, without autograd."""

    groups: slice
    """their numbers"""
    lengths: tuple[int, ...]
    """how many rows each has; (): one kernel takes all groups"""
    rows: int
    """how many all have"""
    ends: torch.Tensor
    """where each group ends, of all rows"""

    def times(self, x: torch.Tensor, matrices: Any, out: torch.Tensor | None = None) -> torch.Tensor:
        """The piece's rows [s, k], each times its one of :func:`matrices` → [s, n]; in ``out``, if there is one."""
        if not self.lengths:
            return (grouped_mm if _is_traced(x) else _multiplied)(x, matrices, self.ends, True)
        if len(self.lengths) == 1:
            return torch.mm(x, matrices[0], out=out)
        out = x.new_empty(x.shape[0], matrices[0].shape[1]) if out is None else out
        for rows, matrix, into in zip(x.split(self.lengths), matrices, out.split(self.lengths), strict=True):
            torch.mm(rows, matrix, out=into)
        return out

    def outer(self, x: torch.Tensor, y: torch.Tensor, out: Any) -> torch.Tensor | None:
        """Of the rows [s, k] and [s, n] of each of its groups the sum of outer products, in its :func:`matrices` of ``out``;
        where one kernel takes all: a new tensor, in memory as ``out`` [e, k, n]."""
        if not self.lengths:
            made: Callable[..., torch.Tensor] = grouped_outer if _is_traced(x) else _outer
            return made(y, x, self.ends).mT if out.mT.is_contiguous() else made(x, y, self.ends)
        if len(self.lengths) == 1:
            torch.mm(x.mT, y, out=out[0])  # of no rows: zeros
            return None
        for rows, theirs, into in zip(x.split(self.lengths), y.split(self.lengths), out, strict=True):
            torch.mm(rows.mT, theirs, out=into)
        return None


def pieces(x: torch.Tensor, ends: torch.Tensor, columns: int) -> list[Piece]:
    """Rows [s, k] in groups that end at ``ends``, of which each makes ``columns`` elements: all where one kernel takes them;
    on CPUs pieces that stay in the caches, and no part of a group."""
    if _is_traced(x) or x.device.type != "cpu":
        return [Piece(slice(None), (), x.shape[0], ends)]
    lengths = [b - a for a, b in itertools.pairwise([0, *ends.tolist()])]
    found, first, rows = list[Piece](), 0, 0
    for last, length in enumerate(lengths, 1):
        rows += length
        if rows * columns >= CACHED or last == len(lengths):
            found.append(Piece(slice(first, last), tuple(lengths[first:last]), rows, ends))
            first, rows = last, 0
    return found


def parts(of: Sequence[Piece], x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Of every piece the rows of ``x``."""
    return x.split_with_sizes([piece.rows for piece in of]) if len(of) > 1 else (x,)


def matrices(of: Sequence[Piece], weight: torch.Tensor) -> Sequence[Any]:
    """Of every piece the matrices of its groups, in ``weight`` [e, k, n]; all of it where one kernel takes all groups."""
    if not of[0].lengths:
        return (weight,)
    each = weight.unbind()
    return [each[piece.groups] for piece in of]


def _multiplied(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, full: bool) -> torch.Tensor:
    if full and _has_kernel(x, weight.shape[2]):
        return torch._grouped_mm(x.contiguous(), weight, offs=ends)
    out, last = x.new_empty(x.shape[0], weight.shape[2]), 0
    for e, a, last in _groups(ends):
        torch.mm(x[a:last], weight[e], out=out[a:last])
    if last < out.shape[0]:
        out[last:].zero_()
    return out


def _outer(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if _has_kernel(x, y.shape[1]):
        return torch._grouped_mm(x.contiguous().mT, y.contiguous(), offs=ends)
    out = x.new_empty(ends.shape[0], x.shape[1], y.shape[1])
    for e, a, b in _groups(ends):
        torch.mm(x[a:b].mT, y[a:b], out=out[e])  # of no rows: zeros
    return out


@grouped_mm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor, full: bool = False) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@grouped_outer.register_fake
def _(x: torch.Tensor, y: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


def _groups(ends: torch.Tensor) -> Iterator[tuple[int, int, int]]:
    """(number, start, end) of every group."""
    for number, (a, b) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        yield number, a, b


def _has_kernel(x: torch.Tensor, columns: int) -> bool:
    """Whether torch's grouped product takes it: it knows no float64, and wants rows of whole 16 bytes."""
    units = (x.shape[1] * x.element_size(), columns * x.element_size())
    narrow = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return narrow and x.shape[0] > 0 and not any(n % 16 for n in units)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ends, ctx.full = inputs  # the products keep each other where they are differentiated
    of_x, of_weight = ctx.needs_input_grad[:2]
    ctx.turned = weight.mT.is_contiguous()
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None, ends)


def _backward(
    ctx: Any, grad: torch.Tensor, times: Callable[..., Any] = grouped_mm, outer: Callable[..., Any] = grouped_outer
) -> tuple[torch.Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    of_x = times(grad, weight.mT, ends, ctx.full) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return of_x, None, None, None
    # In memory as the weight is: else the gradient is copied to lie so.
    return of_x, outer(grad, x, ends).mT if ctx.turned else outer(x, grad, ends), None, None


class _Product(HandingOn):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        out = _multiplied(x, weight, ends, True)
        _save(ctx, (x, weight, ends, True), out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        found = _backward(ctx, grad) if torch.is_grad_enabled() else _backward(ctx, grad, _multiplied, _outer)
        return found[:3]


def _save_outer(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_outer(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    x, y, ends = ctx.saved_tensors
    return grouped_mm(y, grad.mT, ends), grouped_mm(x, grad, ends), None


register(grouped_mm, _backward, _save)
register(grouped_outer, _backward_of_outer, _save_outer)
