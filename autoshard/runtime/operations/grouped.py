"""Grouped GEMM: consecutive groups of rows, each times its own matrix."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoshard.runtime.transport.autograd import NoneGradFunction, register_backward
from autoshard.torch_private.dispatch import count_dispatch_modes
from autoshard.torch_private.ops import grouped_matmul

CACHE_BLOCK_ELEMENTS = 1 << 17
"""elements that a block of rows makes on a CPU: a megabyte, half of a core's cache"""


@torch.library.custom_op("autoshard::grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor, full: bool = False) -> Tensor:
    """Rows [s, k] in groups ending at ``ends`` [e], each times its matrix of [e, k, n] → [s, n];
    rows after the last group are zero (``full``: there are none)."""
    return _grouped_matmul(x, weight, ends, full)


@torch.library.custom_op("autoshard::grouped_outer", mutates_args=())
def grouped_outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """Per group of rows [s, k] and [s, n] the sum of outer products → [e, k, n]."""
    return _grouped_outer_product(x, y, ends)


def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """:func:`grouped_mm` with all rows in groups; outside of a trace without a custom op's cost."""
    return grouped_mm(x, weight, ends, True) if _is_traced(x) else _GroupedProduct.apply(x, weight, ends)


def _is_traced(x: Tensor) -> bool:
    return x.is_meta or bool(count_dispatch_modes()) or type(x) is not Tensor


class GroupBlock(NamedTuple):
    """A block of consecutive groups computed together, without autograd."""

    groups: slice
    """their numbers"""
    lengths: tuple[int, ...]
    """rows of each group; (): one kernel takes all groups"""
    rows: int
    """rows of all groups"""
    ends: Tensor
    """where each group of the full tensor ends"""

    def times(self, x: Tensor, matrices: Any, out: Tensor | None = None) -> Tensor:
        """The block's rows [s, k], each times its group's matrix → [s, n], in ``out`` if given."""
        if not self.lengths:
            return (grouped_mm if _is_traced(x) else _grouped_matmul)(x, matrices, self.ends, True)
        if len(self.lengths) == 1:
            return torch.mm(x, matrices[0], out=out)
        out = x.new_empty(x.shape[0], matrices[0].shape[1]) if out is None else out
        for rows, matrix, into in zip(x.split(self.lengths), matrices, out.split(self.lengths), strict=True):
            torch.mm(rows, matrix, out=into)
        return out

    def outer(self, x: Tensor, y: Tensor, out: Any) -> Tensor | None:
        """Per group the sum of outer products of rows [s, k] and [s, n], in this block's ``out``
        [e, k, n]; where one kernel takes all groups, a new tensor in its memory order."""
        if not self.lengths:
            made: Callable[..., Tensor] = grouped_outer if _is_traced(x) else _grouped_outer_product
            return made(y, x, self.ends).mT if out.mT.is_contiguous() else made(x, y, self.ends)
        if len(self.lengths) == 1:
            torch.mm(x.mT, y, out=out[0])  # zeros without rows
            return None
        for rows, theirs, into in zip(x.split(self.lengths), y.split(self.lengths), out, strict=True):
            torch.mm(rows.mT, theirs, out=into)
        return None


def group_blocks(x: Tensor, ends: Tensor, columns: int) -> list[GroupBlock]:
    """Blocks of the rows [s, k], ``columns`` results each: one, or on CPUs as fit the caches. No
    group is split."""
    if _is_traced(x) or x.device.type != "cpu":
        return [GroupBlock(slice(None), (), x.shape[0], ends)]
    lengths = [b - a for a, b in itertools.pairwise([0, *ends.tolist()])]
    found, first, rows = list[GroupBlock](), 0, 0
    for last, length in enumerate(lengths, 1):
        rows += length
        if rows * columns >= CACHE_BLOCK_ELEMENTS or last == len(lengths):
            found.append(GroupBlock(slice(first, last), tuple(lengths[first:last]), rows, ends))
            first, rows = last, 0
    return found


def rows_per_block(of: Sequence[GroupBlock], x: Tensor) -> Sequence[Tensor]:
    return x.split_with_sizes([piece.rows for piece in of]) if len(of) > 1 else (x,)


def matrices_per_block(of: Sequence[GroupBlock], weight: Tensor) -> Sequence[Any]:
    """Matrices of ``weight`` [e, k, n] per block; all of it where one kernel takes all groups."""
    if not of[0].lengths:
        return (weight,)
    each = weight.unbind()
    return [each[piece.groups] for piece in of]


def _grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor, full: bool) -> Tensor:
    if full and _has_kernel(x, weight.shape[2]):
        return grouped_matmul(x.contiguous(), weight, offs=ends)
    out, last = x.new_empty(x.shape[0], weight.shape[2]), 0
    for e, a, last in _group_bounds(ends):
        torch.mm(x[a:last], weight[e], out=out[a:last])
    if last < out.shape[0]:
        out[last:].zero_()
    return out


def _grouped_outer_product(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    if _has_kernel(x, y.shape[1]):
        return grouped_matmul(x.contiguous().mT, y.contiguous(), offs=ends)
    out = x.new_empty(ends.shape[0], x.shape[1], y.shape[1])
    for e, a, b in _group_bounds(ends):
        torch.mm(x[a:b].mT, y[a:b], out=out[e])  # zeros without rows
    return out


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, full: bool = False) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@grouped_outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


def _group_bounds(ends: Tensor) -> Iterator[tuple[int, int, int]]:
    """(number, start, end) of every group."""
    for number, (a, b) in enumerate(itertools.pairwise([0, *ends.tolist()])):
        yield number, a, b


def _has_kernel(x: Tensor, columns: int) -> bool:
    """Whether torch's grouped product supports it: no float64, rows of a multiple of 16 bytes."""
    units = (x.shape[1] * x.element_size(), columns * x.element_size())
    narrow = x.dtype in (torch.float32, torch.bfloat16, torch.float16)
    return narrow and x.shape[0] > 0 and not any(n % 16 for n in units)


def _save_grouped_mm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ends, ctx.full = inputs
    of_x, of_weight = ctx.needs_input_grad[:2]
    ctx.turned = weight.mT.is_contiguous()
    ctx.save_for_backward(x if of_weight else None, weight if of_x else None, ends)


def _grouped_mm_backward(
    ctx: Any, grad: Tensor, times: Callable[..., Any] = grouped_mm, outer: Callable[..., Any] = grouped_outer
) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    of_x = times(grad, weight.mT, ends, ctx.full) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return of_x, None, None, None
    # In the memory order of the weight, into which the gradient would be copied otherwise.
    return of_x, outer(grad, x, ends).mT if ctx.turned else outer(x, grad, ends), None, None


class _GroupedProduct(NoneGradFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        out = _grouped_matmul(x, weight, ends, True)
        _save_grouped_mm(ctx, (x, weight, ends, True), out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        found = (
            _grouped_mm_backward(ctx, grad)
            if torch.is_grad_enabled()
            else _grouped_mm_backward(ctx, grad, _grouped_matmul, _grouped_outer_product)
        )
        return found[:3]


def _save_grouped_outer(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _grouped_outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, y, ends = ctx.saved_tensors
    return grouped_mm(y, grad.mT, ends), grouped_mm(x, grad, ends), None


register_backward(grouped_mm, _grouped_mm_backward, _save_grouped_mm)
register_backward(grouped_outer, _grouped_outer_backward, _save_grouped_outer)
