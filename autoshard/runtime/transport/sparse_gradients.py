"""Sparse gradients of embedding tables (COO, rows as values). Every move has a form for them:
summands, chunks and full gradients are lists of rows, moved by an all-gather of rows and
numbers; nothing has the table's size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.transport.autograd import NoneGradFunction
from autoshard.runtime.transport.move import Move

ChunksOf = Callable[[int, tuple[str, ...]], Sequence[tuple[int, int]]]
"""(length, axes) → (start, length) of every rank of the group"""


def rows_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """(numbers [k], rows [k, …]) of a sparse gradient, without duplicates."""
    x = x.coalesce()
    return x.indices()[0], x.values()


def from_rows(numbers: Tensor, rows: Tensor, size: int) -> Tensor:
    """A sparse gradient of ``size`` rows from these; numbers may repeat."""
    return torch.sparse_coo_tensor(numbers.unsqueeze(0), rows, (size, *rows.shape[1:]), check_invariants=False)


def sum_sparse(parts: Sequence[Tensor]) -> Tensor:
    """The sum of sparse gradients of one shape."""
    found = [rows_of(x) for x in parts]
    numbers, rows = (torch.cat(list(xs)) for xs in zip(*found, strict=True))
    return from_rows(numbers, rows, parts[0].shape[0]).coalesce()


def narrow_sparse(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """A chunk of a sparse gradient along ``dim``."""
    numbers, rows = rows_of(x)
    if dim:
        return from_rows(numbers, rows.narrow(dim, start, length).contiguous(), x.shape[0])
    mine = (numbers >= start) & (numbers < start + length)
    return from_rows(numbers[mine] - start, rows[mine], length)


def pad_sparse(x: Tensor, dim: int, start: int, size: int) -> Tensor:
    """A sparse gradient padded to ``size`` along ``dim``, with its rows from ``start`` on."""
    numbers, rows = rows_of(x)
    if not dim:
        return from_rows(numbers + start, rows, size)
    out = rows.new_zeros([*rows.shape[:dim], size, *rows.shape[dim + 1 :]])
    out.narrow(dim, start, rows.shape[dim]).copy_(rows)
    return from_rows(numbers, out, x.shape[0])


def gather_sparse(move: Move, x: Tensor, ranks: int, gather: Callable[..., Tensor]) -> list[Tensor]:
    """The sparse gradients of all ranks. ``gather``: an all-gather; the host waits for sizes."""

    def every(part: Tensor) -> Sequence[Tensor]:
        return gather(Move("S", "R", move.axes, 0, ranks * len(part)), part).tensor_split(ranks)

    numbers, rows = rows_of(x)
    sizes = [part.tolist() for part in every(torch.tensor([len(numbers), x.shape[0]], device=numbers.device))]
    missing = max(n for n, _ in sizes) - len(numbers)
    wide = [torch.cat([part, part.new_zeros(missing, *part.shape[1:])]) for part in (numbers, rows)]
    pairs = zip(*map(every, wide), sizes, strict=True)
    return [from_rows(n[:count], r[:count], size) for n, r, (count, size) in pairs]


def join_sparse(move: Move, parts: Sequence[Tensor], chunks: ChunksOf, number: int) -> Tensor:
    """The result of ``move`` on rank ``number``, from the sparse gradients of its group."""
    if move.verb == "all_reduce":
        return sum_sparse(parts)
    if move.verb == "reduce_scatter":
        return narrow_sparse(sum_sparse(parts), move.dim, *chunks(move.size, move.axes)[number])
    if move.verb in ("all_gather", "all_to_all") and move.splits is None:
        starts = (start for start, _ in chunks(move.size, move.axes))
        whole = sum_sparse([pad_sparse(x, move.dim, start, move.size) for x, start in zip(parts, starts, strict=True)])
        return whole if move.to_dim < 0 else narrow_sparse(whole, move.to_dim, *chunks(move.to_size, move.axes)[number])
    raise RuntimeMismatchError(f"{move}: a sparse gradient cannot make this move")


def move_sparse_locally(move: Move, x: Tensor, chunks: ChunksOf, number: int) -> Tensor:
    """A move of a sparse gradient without communication."""
    match move.verb:
        case "slice":
            return narrow_sparse(x, move.dim, *chunks(move.size, move.axes)[number])
        case "pad":
            return pad_sparse(x, move.dim, chunks(move.size, move.axes)[number][0], move.size)
        case "partial" if number:
            numbers, rows = rows_of(x)
            return from_rows(numbers[:0], rows[:0], x.shape[0])
    return x


def cast_table(table: Tensor, dtype: torch.dtype) -> Tensor:
    """``table`` in another dtype; its sparse gradient is cast back."""
    return _CastTable.apply(table, dtype)


class _CastTable(NoneGradFunction):
    @staticmethod
    def forward(ctx: Any, table: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = table.dtype
        return table.to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.to(ctx.dtype), None
