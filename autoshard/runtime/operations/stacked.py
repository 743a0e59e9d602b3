"""Separate parameters as one tensor: stacked expert weights, and views of adjacent tensors."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.transport import sparse_gradients as rows_only
from autoshard.runtime.transport.autograd import NoneGradFunction, register_backward
from autoshard.torch_private.dispatch import storage_id


@torch.library.custom_op("autoshard::stacked", mutates_args=())
def stacked_op(matrices: Sequence[Tensor], parts: int) -> Tensor:
    """Tensors [h, …] of e experts, ``parts`` of each in a row, as one: [e, parts · h, …]."""
    return torch.stack(list(matrices)).view(-1, parts * matrices[0].shape[0], *matrices[0].shape[1:])


@stacked_op.register_fake
def _fake_stacked(matrices: Sequence[Tensor], parts: int) -> Tensor:
    first = matrices[0]
    return first.new_empty(len(matrices) // parts, parts * first.shape[0], *first.shape[1:])


def _save_stacked(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.shape = inputs[0][0].shape


def _stacked_backward(ctx: Any, grad: Tensor) -> tuple[Any, None]:
    return list(grad.reshape(-1, *ctx.shape).unbind()), None


register_backward(stacked_op, _stacked_backward, _save_stacked)


def stacked(matrices: Sequence[Tensor], parts: int = 1, owned: int | None = None) -> Tensor:
    """:func:`stacked_op` without a copy where tensors are adjacent in memory. ``owned``: h if this
    rank owns some experts, which are stacked, and no rows of the others."""
    length, many = owned, sum(m.shape[0] > 0 for m in matrices)
    if length is None:
        length, many = matrices[0].shape[0], len(matrices)
    rows: Tensor = ConcatenatedView.apply(False, *matrices)
    return rows.reshape(many // parts, parts * length, *matrices[0].shape[1:])


class ConcatenatedView(NoneGradFunction):
    """Tensors concatenated along dim 0: a view if they are adjacent in memory."""

    @staticmethod
    def forward(ctx: Any, sparse: bool, *tensors: Tensor) -> Tensor:
        ctx.sizes, ctx.sparse = [t.shape[0] for t in tensors], sparse
        return concatenated_view(tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        starts = itertools.accumulate(ctx.sizes, initial=0)
        if ctx.sparse:
            if not gradient.is_sparse:  # this rank has no rows
                none = torch.zeros(0, dtype=torch.int64, device=gradient.device)
                return None, *(rows_only.from_rows(none, gradient[:0], 0) for _ in ctx.sizes)
            return None, *(rows_only.narrow_sparse(gradient, 0, s, n) for s, n in zip(starts, ctx.sizes, strict=False))
        return None, *(gradient.narrow(0, s, n) for s, n in zip(starts, ctx.sizes, strict=False))


def concatenated_view(tensors: Sequence[Tensor]) -> Tensor:
    """:class:`ConcatenatedView` without gradients; tensors without rows are skipped."""
    here = [t for t in tensors if t.shape[0]]
    if not here:
        return tensors[0].new_empty(0, *tensors[0].shape[1:])
    if not are_adjacent_in_memory(here):
        return torch.cat(here)
    size = (sum(t.shape[0] for t in here), *here[0].shape[1:])
    return here[0].new_empty(0).set_(here[0].untyped_storage(), here[0].storage_offset(), size, here[0].stride())


def stacked_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors of one shape at equal distances in one storage, stacked as a view; else None."""
    first, start = tensors[0], tensors[0].storage_offset()
    distance = tensors[1].storage_offset() - start if len(tensors) > 1 else 0
    if distance < 0:
        return None
    place = first.shape, first.stride(), first.dtype, storage_id(first)
    for n, x in enumerate(tensors):
        if x.storage_offset() != start + n * distance or place != (
            x.shape,
            x.stride(),
            x.dtype,
            storage_id(x),
        ):
            return None
    return first.detach().as_strided((len(tensors), *first.shape), (distance, *first.stride()), start)


def are_adjacent_in_memory(tensors: Sequence[Tensor]) -> bool:
    return all(
        a.is_contiguous()
        and b.is_contiguous()
        and storage_id(a) == storage_id(b)
        and b.storage_offset() == a.storage_offset() + a.numel()
        for a, b in itertools.pairwise(tensors)
    )
