"""Coalesced collectives: small messages that are ready together share one, forward and backward.

Each function does to several tensors what its namesake in
:mod:`autoshard.runtime.operations.collectives` does to one; ``dims`` and ``sizes`` have an entry
per tensor. There is one message per dtype. The backward leaves out tensors without a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from autoshard.runtime.operations.collectives import Whole
from autoshard.runtime.parameters.bucket import Bucket, Tensors
from autoshard.runtime.parameters.buckets import JointBucket, carried
from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.handed_on import HandingOn
from autoshard.runtime.transport.move import Move

Lengths = Sequence[int | None] | None


def enter_together(xs: Sequence[torch.Tensor], axes: Axes) -> Tensors:
    """I → R. Forward: identity. Backward: one all-reduce."""
    names = current().active(axes)
    return _together("enter_together", [Move("I", "R", names)] * len(xs), xs)


def all_reduce_together(xs: Sequence[torch.Tensor], axes: Axes, to: Whole = "I") -> Tensors:
    """P → I (backward: identity) or P → R (backward: one all-reduce)."""
    names = current().active(axes)
    if to == "R" or not names:
        return _together("all_reduce_together", [Move("P", to, names)] * len(xs), xs)
    with torch.no_grad():
        sums = _together("all_reduce_together", [Move("P", "I", names)] * len(xs), xs)
    return tuple(_Sum.apply(x, y) for x, y in zip(xs, sums, strict=True))


def reduce_scatter_together(xs: Sequence[torch.Tensor], dims: Sequence[int], axes: Axes) -> Tensors:
    """P → S(dim). Backward: one all-gather."""
    names = current().active(axes)
    moves = [Move("P", "S", names, d, x.shape[d]) for x, d in zip(xs, dims, strict=True)]
    return _together("reduce_scatter_together", moves, xs)


def all_gather_together(
    xs: Sequence[torch.Tensor], dims: Sequence[int], axes: Axes, to: Whole = "I", sizes: Lengths = None
) -> Tensors:
    """S(dim) → I (backward: slices) or R (backward: reduce-scatter). ``sizes``: global lengths."""
    names = current().active(axes)
    full = lengths_of(xs, dims, names, sizes)
    moves = [Move("S", to, names, d, n) for d, n in zip(dims, full, strict=True)]
    return _together("all_gather_together", moves, xs)


def all_to_all_together(
    xs: Sequence[torch.Tensor], srcs: Sequence[int], dsts: Sequence[int], axes: Axes, sizes: Lengths = None
) -> Tensors:
    """S(src) → S(dst). Backward: one all-to-all. ``sizes``: lengths of the dims ``srcs`` once gathered."""
    names = current().active(axes)
    full = lengths_of(xs, srcs, names, sizes)
    moves = [Move("S", "S", names, i, n, j, x.shape[j]) for x, i, j, n in zip(xs, srcs, dsts, full, strict=True)]
    return _together("all_to_all_together", moves, xs)


def lengths_of(xs: Sequence[torch.Tensor], dims: Sequence[int], axes: tuple[str, ...], sizes: Lengths) -> list[int]:
    """``sizes``, or the global lengths of even shards: a rank may have no rows."""
    ranks, given = current().size_of(axes), sizes if sizes is not None else [None] * len(xs)
    return [x.shape[d] * ranks if n is None else n for x, d, n in zip(xs, dims, given, strict=True)]


def _together(what: str, moves: Sequence[Move], xs: Sequence[torch.Tensor]) -> Tensors:
    return carried(what, moves, xs, _through) if moves and moves[0].axes else tuple(xs)


def _through(bucket: Bucket, xs: Sequence[torch.Tensor], phase: str = "") -> Tensors:
    phase = phase or current().phase
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        out: Tensors = _Together.apply(bucket, phase, *xs)  # type: ignore[no-untyped-call]
        return out
    return tuple(bucket.forward(xs, phase))


class _Together(torch.autograd.Function):
    """A bucket of activations as one autograd node; its backward is the dual bucket."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, phase: str, *xs: torch.Tensor) -> Tensors:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        out = tuple(bucket.forward(xs, phase))
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in out]
        ctx.mark_non_differentiable(*(y for x, y in zip(xs, out, strict=True) if not x.requires_grad))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, None, *moved_back(ctx.bucket, gradients, ctx.needs_input_grad[2:], ctx.shapes)


def moved_back(
    bucket: Bucket,
    gradients: Sequence[torch.Tensor | None],
    wanted: Sequence[bool],
    shapes: Sequence[tuple[torch.Size, torch.dtype, torch.device]],
) -> list[torch.Tensor | None]:
    """Differentiable gradients of the tensors of ``bucket``; ``shapes``: of its results."""
    present = _present(bucket, [w and g is not None for w, g in zip(wanted, gradients, strict=True)])
    out: list[torch.Tensor | None] = [None] * len(gradients)
    if present:
        given = ((gradients[i], *shapes[i]) for i in present)
        moved: Sequence[torch.Tensor]
        moved = [torch.zeros(n, dtype=dtype, device=at) if g is None else g for g, n, dtype, at in given]
        for dual in bucket.duals(present):
            moved = _through(dual, moved, "backward")
        for i, x in zip(present, moved, strict=True):
            out[i] = x
    return out


def _present(bucket: Bucket, wanted: Sequence[bool]) -> list[int]:
    """Numbers of the tensors in the backward: in one process, if any rank has a gradient."""
    count = bucket.count if isinstance(bucket, JointBucket) else len(wanted)
    return [i for i in range(len(wanted)) if any(wanted[i % count :: count])]


class _Sum(HandingOn):
    """P → I, given the sum: one node per tensor, so that no gradient waits for another."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None
