"""Coalesced collectives: small messages that are ready together share one per dtype, forward and
backward. Each function does to several tensors what its namesake in
:mod:`autoshard.runtime.operations.collectives` does to one. The backward leaves out tensors
without a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.operations.collectives import UnshardedPlacement
from autoshard.runtime.parameters.bucket import Bucket, BucketTensors, JointBucket, move_bucketed
from autoshard.runtime.transport.autograd import NoneGradFunction
from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.move import Move

OptionalLengths = Sequence[int | None] | None


def enter_together(xs: Sequence[Tensor], axes: Axes) -> BucketTensors:
    """I → R. Forward: identity. Backward: one all-reduce."""
    names = current().active(axes)
    return _coalesced("enter_together", [Move("I", "R", names)] * len(xs), xs)


def all_reduce_together(xs: Sequence[Tensor], axes: Axes, to: UnshardedPlacement = "I") -> BucketTensors:
    """P → I (backward: identity) or P → R (backward: one all-reduce)."""
    names = current().active(axes)
    if to == "R" or not names:
        return _coalesced("all_reduce_together", [Move("P", to, names)] * len(xs), xs)
    with torch.no_grad():
        sums = _coalesced("all_reduce_together", [Move("P", "I", names)] * len(xs), xs)
    return tuple(_AllReducedNode.apply(x, y) for x, y in zip(xs, sums, strict=True))


def reduce_scatter_together(xs: Sequence[Tensor], dims: Sequence[int], axes: Axes) -> BucketTensors:
    """P → S(dim). Backward: one all-gather."""
    names = current().active(axes)
    moves = [Move("P", "S", names, d, x.shape[d]) for x, d in zip(xs, dims, strict=True)]
    return _coalesced("reduce_scatter_together", moves, xs)


def all_gather_together(
    xs: Sequence[Tensor],
    dims: Sequence[int],
    axes: Axes,
    to: UnshardedPlacement = "I",
    sizes: OptionalLengths = None,
) -> BucketTensors:
    """S(dim) → I (backward: slices) or R (backward: reduce-scatter). ``sizes``: global lengths."""
    names = current().active(axes)
    full = gathered_lengths(xs, dims, names, sizes)
    moves = [Move("S", to, names, d, n) for d, n in zip(dims, full, strict=True)]
    return _coalesced("all_gather_together", moves, xs)


def all_to_all_together(
    xs: Sequence[Tensor], srcs: Sequence[int], dsts: Sequence[int], axes: Axes, sizes: OptionalLengths = None
) -> BucketTensors:
    """S(src) → S(dst), both ways one all-to-all. ``sizes``: gathered lengths of ``srcs``."""
    names = current().active(axes)
    full = gathered_lengths(xs, srcs, names, sizes)
    moves = [Move("S", "S", names, i, n, j, x.shape[j]) for x, i, j, n in zip(xs, srcs, dsts, full, strict=True)]
    return _coalesced("all_to_all_together", moves, xs)


def gathered_lengths(
    xs: Sequence[Tensor], dims: Sequence[int], axes: tuple[str, ...], sizes: OptionalLengths
) -> list[int]:
    """``sizes``, or the global lengths of even shards: a rank may have no rows."""
    ranks, given = current().size_of(axes), sizes if sizes is not None else [None] * len(xs)
    return [x.shape[d] * ranks if n is None else n for x, d, n in zip(xs, dims, given, strict=True)]


def _coalesced(what: str, moves: Sequence[Move], xs: Sequence[Tensor]) -> BucketTensors:
    return move_bucketed(what, moves, xs, _through_coalesced_bucket) if moves and moves[0].axes else tuple(xs)


def _through_coalesced_bucket(bucket: Bucket, xs: Sequence[Tensor], phase: str = "") -> BucketTensors:
    phase = phase or current().phase
    if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
        return _CoalescedNode.apply(bucket, phase, *xs)  # type: ignore[no-untyped-call]
    return tuple(bucket.forward(xs, phase))


class _CoalescedNode(torch.autograd.Function):
    """A bucket of activations as one autograd node; its backward is the dual bucket."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, phase: str, *xs: Tensor) -> BucketTensors:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        out = tuple(bucket.forward(xs, phase))
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in out]
        ctx.mark_non_differentiable(*(y for x, y in zip(xs, out, strict=True) if not x.requires_grad))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        return None, None, *bucket_gradients(ctx.bucket, gradients, ctx.needs_input_grad[2:], ctx.shapes)


def bucket_gradients(
    bucket: Bucket,
    gradients: Sequence[Tensor | None],
    wanted: Sequence[bool],
    shapes: Sequence[tuple[torch.Size, torch.dtype, torch.device]],
) -> list[Tensor | None]:
    """Differentiable gradients of the tensors of ``bucket``; ``shapes``: of its results."""
    present = _participating(bucket, [w and g is not None for w, g in zip(wanted, gradients, strict=True)])
    out: list[Tensor | None] = [None] * len(gradients)
    if present:
        given = ((gradients[i], *shapes[i]) for i in present)
        moved: Sequence[Tensor]
        moved = [torch.zeros(n, dtype=dtype, device=at) if g is None else g for g, n, dtype, at in given]
        for dual in bucket.duals(present):
            moved = _through_coalesced_bucket(dual, moved, "backward")
        for i, x in zip(present, moved, strict=True):
            out[i] = x
    return out


def _participating(bucket: Bucket, wanted: Sequence[bool]) -> list[int]:
    """Numbers of the tensors in the backward: in one process, if any rank has a gradient."""
    count = bucket.count if isinstance(bucket, JointBucket) else len(wanted)
    return [i for i in range(len(wanted)) if any(wanted[i % count :: count])]


class _AllReducedNode(NoneGradFunction):
    """P → I, given the sum: one node per tensor, so that no gradient waits for another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, total: Tensor) -> Tensor:
        return total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None
