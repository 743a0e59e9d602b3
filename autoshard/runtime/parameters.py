"""Parameters on their way into a block, and their gradients on the way back, overlapped with the computation.

A block's parameters travel together (:mod:`autoshard.runtime.buckets`). In the backward their gradients are reduced
by an asynchronous collective and reach the parameters through :func:`wait_gradients`: autograd itself never adds or
reads a gradient that is still under way.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from autoshard.errors import LayoutError, RuntimeMismatchError
from autoshard.runtime.again import CHANGED, Source, can_be_made_again, forget_freed, forgetting
from autoshard.runtime.buckets import Bucket, Dtypes, Tensors, carried
from autoshard.runtime.collectives import Whole
from autoshard.runtime.communicator import Axes, current
from autoshard.runtime.gradients import Gradients
from autoshard.runtime.in_process import InProcessCommunicator
from autoshard.runtime.move import Move
from autoshard.runtime.together import moved_back

Dtype = torch.dtype | None


def enter_parameters(
    tensors: Sequence[torch.Tensor], axes: Axes, *, dtype: Dtype = None, reduce_dtype: Dtype = None
) -> Tensors:
    """I → R for the parameters of a block, as in data parallelism. Forward: nothing.

    Backward: the gradients are flattened into one buffer per dtype and all-reduced, asynchronously for parameters that
    come from :func:`wait_gradients`. In mixed precision values come in ``dtype``, and gradients are summed in
    ``reduce_dtype`` and arrive in the parameter's own.
    """
    comm = current()
    names = comm.active(axes)
    moving = [t for t in tensors if t.requires_grad]
    if not names or not moving or not torch.is_grad_enabled():
        return tuple(tensors) if dtype is None else tuple(t.to(dtype) for t in tensors)
    moves, dtypes = [Move("I", "R", names)] * len(moving), Dtypes(dtype, reduce_dtype)
    moved = iter(carried("enter_parameters", moves, moving, _through, listed=True, dtypes=dtypes))
    return tuple(next(moved) if t.requires_grad else t if dtype is None else t.to(dtype) for t in tensors)


def gather_parameters(
    tensors: Sequence[torch.Tensor],
    dims: Sequence[int],
    axes: Axes,
    to: Whole = "R",
    sizes: Sequence[int] | None = None,
    replicas: Axes = (),
    *,
    dtype: Dtype = None,
    reduce_dtype: Dtype = None,
) -> Tensors:
    """S → R (or I) for the parameters of a block, as in FSDP. Forward: one all-gather per dtype.

    ``dims``: the cut dim of each tensor; ``sizes``: its length after the gather (default: the cut is even). Backward:
    one reduce-scatter per dtype (``to="I"``: a local slice), asynchronous as in :func:`enter_parameters`.
    ``replicas``: axes that hold equal shards (I → R there, as in HSDP); the reduced shards are all-reduced over them.
    Inside :func:`regather` the gathered tensors are not kept for the backward. ``dtype``: what is gathered is cast to
    first; it and ``reduce_dtype`` as in :func:`enter_parameters`.
    """
    comm = current()
    names = comm.active(axes)
    if to not in ("I", "R"):
        raise LayoutError(f'gather_parameters: to={to!r} is not "I" or "R"')
    if not names or not tensors:
        return enter_parameters(tensors, replicas, dtype=dtype, reduce_dtype=reduce_dtype)
    n = comm.size_of(names)
    lengths = sizes if sizes is not None else [t.shape[d] * n for t, d in zip(tensors, dims, strict=True)]
    moves = [Move("S", to, names, d, length) for d, length in zip(dims, lengths, strict=True)]
    dtypes = Dtypes(dtype, reduce_dtype)
    return carried("gather_parameters", moves, tensors, _through, comm.active(replicas), listed=True, dtypes=dtypes)


def wait_gradients(*parameters: torch.Tensor, gradients: Gradients | None = None) -> Tensors:
    """The parameters as they are, to be used for everything that follows; call it once, where the forward begins.

    In the backward it comes last: it waits for the gradients under way and hands every parameter its own.
    ``gradients``: where those under way are kept; give one to have sums of gradients wait for a later backward.
    """
    trained = [p for p in parameters if p.requires_grad]
    if not trained or not torch.is_grad_enabled() or isinstance(current(), InProcessCommunicator):
        return parameters
    waiting = iter(_Wait.apply(gradients or Gradients(current()), *trained))  # type: ignore[no-untyped-call]
    return tuple(next(waiting) if p.requires_grad else p for p in parameters)


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Gradients, *parameters: torch.Tensor) -> Tensors:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return None, *ctx.pending.finish(gradients)


class _Move(torch.autograd.Function):
    """A bucket as one node of the autograd graph."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, *xs: torch.Tensor) -> Tensors:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        ctx.owners = [(getattr(x.grad_fn, "pending", None), x.output_nr) for x in xs if x.requires_grad]
        out = tuple(bucket.forward(xs, current().phase))
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in out]
        ctx.mark_non_differentiable(*(y for x, y in zip(xs, out, strict=True) if not x.requires_grad))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():  # create_graph: as nodes that have a derivative, nothing left under way
            return None, *moved_back(ctx.bucket, gradients, wanted, ctx.shapes)
        pending = ctx.owners[0][0]
        overlap = pending is not None and all(owner is pending for owner, _ in ctx.owners)
        if overlap:
            pending.begin_later()
        gradients = tuple(g if w else None for g, w in zip(gradients, wanted, strict=True))
        if not overlap:
            out, works, later = ctx.bucket.backward(gradients)
            for work in works:
                work.wait()
            for begin in later:
                begin().wait()
            return None, *out
        numbers = iter(number for _, number in ctx.owners)
        pending.move(ctx.bucket, [next(numbers) if w else -1 for w in wanted], gradients)
        return None, *(None for _ in gradients)


def _through(bucket: Bucket, xs: Sequence[torch.Tensor]) -> Tensors:
    if not torch.is_grad_enabled():
        return tuple(bucket.forward(xs, current().phase))
    if any(x.requires_grad for x in xs):
        out: Tensors = _Move.apply(bucket, *xs)  # type: ignore[no-untyped-call]
    else:
        out = tuple(bucket.forward(xs, current().phase))
    if _scope.depth and bucket.moves[0].verb == "all_gather":
        forget_freed()
        again = _Gather(bucket, tuple(xs))
        for i, y in enumerate(out):
            can_be_made_again(y, again, i)
    return out


class _Scope(threading.local):
    depth = 0


_scope = _Scope()


class _Gather(Source):
    """A bucket that can be gathered once more for the backward, and is dropped after its last use."""

    def __init__(self, bucket: Bucket, xs: Tensors) -> None:
        super().__init__()
        self.bucket, self.xs = bucket, xs
        self.versions = [x._version for x in xs]
        self.full: list[torch.Tensor] | None = None

    def make(self) -> None:
        """See :meth:`Source.make`."""
        if self.versions != [x._version for x in self.xs]:
            raise RuntimeMismatchError(CHANGED.format("a sharded parameter"))
        with torch.no_grad():
            self.full = self.bucket.forward(self.xs, "backward")

    def value(self, number: int) -> torch.Tensor | None:
        """Gathered tensor number ``number``."""
        return None if self.full is None else self.full[number]

    def drop(self) -> None:
        """Free the gathered tensors."""
        self.full = None


@contextlib.contextmanager
def regather() -> Iterator[None]:
    """Around a block's forward: parameters that :func:`gather_parameters` gathers inside are not kept for the backward,
    which gathers their bucket again, once. Copies (a cast under autocast, say) are kept as usual."""
    _scope.depth += 1
    try:
        with forgetting():
            yield
    finally:
        _scope.depth -= 1
