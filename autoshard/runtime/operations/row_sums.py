"""Sums over classes for cross entropy, in slices of rows: only the logits are saved.

Forward and backward work on one slice at a time. So neither probabilities nor anything else of the
logits' size is in memory besides the logits and their gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from autoshard.runtime.operations.softmax import wide
from autoshard.runtime.transport.handed_on import HandingOn

PIECE = 1 << 23
"""elements of a slice, which has at least one row"""
ON_DEVICES = 8
"""factor on accelerators, whose kernels need more elements"""


def row_sums(
    logits: torch.Tensor, top: torch.Tensor, index: torch.Tensor, share: torch.Tensor | None, smoothed: bool
) -> torch.Tensor:
    """[2 or 3, n, …]: row sums of ``logits`` [n, c, …] - ``top`` [n, 1, …], or of [c] - [1].

    They are: sum of exponentials; the entry at ``index`` [n, …], 0 if another rank has it; and if
    ``smoothed`` the sum of all entries, weighted by ``share`` [c] if given."""
    found: torch.Tensor = _RowSums.apply(logits, top, index, share, smoothed)
    return found


class _RowSums(HandingOn):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        top: torch.Tensor,
        index: torch.Tensor,
        share: torch.Tensor | None,
        smoothed: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, top, index, share)
        ctx.smoothed = smoothed
        sums = top.new_empty(2 + smoothed, *index.shape)
        for rows in _pieces(logits):
            sums[:, rows] = _sums(logits[rows], top[rows], index[rows], share, smoothed)
        return sums

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        logits, top, index, share = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            sums = _sums(logits, top, index, share, ctx.smoothed)
            return *torch.autograd.grad(sums, logits, gradient, create_graph=True), None, None, None, None
        found = torch.empty_like(logits)
        for rows in _pieces(logits):
            found[rows] = _gradient(logits[rows], top[rows], index[rows], share, gradient[:, rows])
        return found, None, None, None, None


def in_pieces(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, smoothing: float
) -> torch.Tensor:
    """``F.cross_entropy`` per sample: unsharded logits [n, c, …], class indices [n, …]."""
    found: torch.Tensor = _InPieces.apply(logits, target, weight, ignore_index, smoothing)
    return found


class _InPieces(HandingOn):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        weight: torch.Tensor | None,
        ignore_index: int,
        smoothing: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(logits, target, weight)
        ctx.options = ignore_index, smoothing
        losses = wide(logits.new_empty(target.shape))
        for rows in _pieces(logits):
            losses[rows] = _losses(logits[rows], target[rows], weight, *ctx.options)
        return losses

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        logits, target, weight = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph
            losses = _losses(logits, target, weight, *ctx.options)
            (found,) = torch.autograd.grad(losses, logits, gradient, create_graph=True)
            return found, None, None, None, None
        found = torch.empty_like(logits)
        for rows in _pieces(logits):
            with torch.enable_grad():
                x = logits[rows].detach().requires_grad_()
                losses = _losses(x, target[rows], weight, *ctx.options)
            (found[rows],) = torch.autograd.grad(losses, x, gradient[rows])
        return found, None, None, None, None


def _losses(
    logits: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, smoothing: float
) -> torch.Tensor:
    return wide(F.cross_entropy(logits, target, weight, None, ignore_index, None, "none", smoothing))


def _pieces(logits: torch.Tensor) -> Iterator[Any]:
    """Slices of rows; on meta tensors the first only, which takes as much memory as others."""
    if logits.dim() == 1:
        yield ...
        return
    count = logits.shape[0]
    piece = PIECE if logits.device.type in ("cpu", "meta") else ON_DEVICES * PIECE
    step = max(1, piece * count // max(1, logits.numel()))
    yield from (slice(start, start + step) for start in range(0, min(count, step) if logits.is_meta else count, step))


def _sums(
    logits: torch.Tensor, top: torch.Tensor, index: torch.Tensor, share: torch.Tensor | None, smoothed: bool
) -> torch.Tensor:
    x, dim = wide(logits) - top, _dim(logits)
    at, here = _places(index, x.shape[dim])
    picked = x.gather(dim, at).squeeze(dim) if x.shape[dim] else x.sum(dim)
    sums = [x.exp().sum(dim), picked.masked_fill(~here, 0)]
    if smoothed:
        sums.append((x if share is None else x * along(share, dim, x.dim())).sum(dim))
    return torch.stack(sums)


def _gradient(
    logits: torch.Tensor, top: torch.Tensor, index: torch.Tensor, share: torch.Tensor | None, gradient: torch.Tensor
) -> torch.Tensor:
    """Gradient of ``logits``, given those of the sums [2 or 3, n, …]."""
    dim = _dim(logits)
    exponentials, picked, *rest = (g.unsqueeze(dim) for g in gradient)
    found = (wide(logits) - top).exp_().mul_(exponentials)
    if found.shape[dim]:
        at, here = _places(index, found.shape[dim])
        found.scatter_(
            dim, at, found.gather(dim, at) + picked.masked_fill(~here.unsqueeze(dim), 0)
        )  # one element per row
    if rest:
        found += rest[0] if share is None else rest[0] * along(share, dim, found.dim())
    return found


def _dim(logits: torch.Tensor) -> int:
    """The dim of the classes."""
    return min(logits.dim() - 1, 1)


def _places(index: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(``index`` with a class dim, 0 where it is outside ``size``; whether it is inside)."""
    here = (index >= 0) & (index < size)
    return index.where(here, 0).unsqueeze(min(index.dim(), 1)), here


def along(vector: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    """``vector`` as a tensor of ``rank`` dims that varies along ``dim``."""
    return vector.view([-1 if d == dim else 1 for d in range(rank)])
