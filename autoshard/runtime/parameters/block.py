"""Parameters of a block and their gradients: DDP and FSDP collectives, overlapped with computation.

A block's parameters move in one bucket (:mod:`autoshard.runtime.parameters.buckets`). In the
backward an asynchronous collective reduces their gradients, which reach the parameters through
:func:`wait_gradients`: autograd itself never adds or reads a gradient that is still under way."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from autoshard.errors import LayoutError
from autoshard.runtime.operations.collectives import Whole
from autoshard.runtime.parameters.again import Source, can_be_made_again, forget_freed, forgetting, keep, kept
from autoshard.runtime.parameters.ahead import gathered, there
from autoshard.runtime.parameters.bucket import Bucket, Dtypes, Tensors
from autoshard.runtime.parameters.buckets import carried
from autoshard.runtime.parameters.flat_bucket import FlatBucket
from autoshard.runtime.parameters.gradients import Entering, Gradients
from autoshard.runtime.parameters.together import lengths_of, moved_back
from autoshard.runtime.transport.communicator import Axes, Communicator, current
from autoshard.runtime.transport.in_process import InProcessCommunicator
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.node import Node
from autoshard.runtime.transport.process_group import TorchCommunicator
from autoshard.runtime.transport.profiling import named
from autoshard.runtime.transport.step import Gathered

Dtype = torch.dtype | None


def enter_parameters(
    tensors: Sequence[torch.Tensor], axes: Axes, *, dtype: Dtype = None, reduce_dtype: Dtype = None
) -> Tensors:
    """I → R for the parameters of a block (data parallelism). Forward: identity.

    Backward: one all-reduce of a flat buffer per dtype. It is asynchronous for parameters from
    :func:`wait_gradients`, or shared by all blocks if :attr:`Communicator.summed_last` says so.
    Mixed precision: values come in ``dtype``; gradients are summed in ``reduce_dtype`` and arrive
    in the parameter's dtype. Tensors that entered already (:func:`enter_ahead`) are unchanged."""
    comm = current()
    names = comm.active(axes)
    if names == comm.summed_last and dtype is None:
        return tuple(tensors)
    first = next((t for t in tensors if t.requires_grad), None)
    if not names or first is None or not torch.is_grad_enabled():
        return tuple(tensors) if dtype is None else tuple([t.to(dtype) for t in tensors])
    if getattr(first.grad_fn, "ahead", ()) == names:
        return tuple(tensors)
    moving = [t for t in tensors if t.requires_grad]
    moved = _entered(comm, moving, names, Dtypes(dtype, reduce_dtype))
    if len(moving) == len(tensors):
        return moved
    arriving = iter(moved)
    return tuple([next(arriving) if t.requires_grad else t if dtype is None else t.to(dtype) for t in tensors])


def _entered(comm: Communicator, moving: Sequence[torch.Tensor], names: tuple[str, ...], dtypes: Dtypes) -> Tensors:
    """``moving`` through a bucket, which later forwards of the same program reuse."""
    pending = getattr(moving[0].grad_fn, "pending", None)
    if not isinstance(pending, Gradients):
        moves = [Move("I", "R", names)] * len(moving)
        return carried("enter_parameters", moves, moving, _through, listed=True, dtypes=dtypes)
    key = Entering(tuple(map(pending.number, moving)), names, dtypes, comm.deferred)
    if key not in pending.buckets:
        assert isinstance(comm, TorchCommunicator)
        move = named(Move("I", "R", names), always=True)
        pending.buckets[key] = FlatBucket(comm, [move] * len(moving), listed=True, dtypes=dtypes)
    return _through(pending.buckets[key], moving)


def to_enter_ahead(pending: Gradients, alone: frozenset[int]) -> list[tuple[Entering, FlatBucket]]:
    """Buckets of parameters that may enter before the forward, as they did in an earlier one.

    Block by block this takes a fifth of the time that it takes between products, which leave the
    caches cold. ``alone``: numbers of the parameters that the forward reads in that block only."""
    return [
        (key, bucket)
        for key, bucket in pending.buckets.items()
        if key.deferred == pending.comm.deferred and key.dtypes.forward is None and alone.issuperset(key.numbers)
    ]


def enter_ahead(
    entering: Sequence[tuple[Entering, FlatBucket]], xs: Sequence[torch.Tensor], pending: Gradients, begun: torch.Tensor
) -> dict[int, torch.Tensor]:
    """Parameter number → tensor for the buckets ``entering``; ``xs``: all parameters.

    ``begun``: a tensor behind the node that comes last in the backward and takes ``pending``."""
    found: dict[int, torch.Tensor] = {}
    for place, (key, bucket) in enumerate(entering):
        moved: Tensors = _Ahead.apply(pending, bucket, key.numbers, [xs[n] for n in key.numbers], begun)
        node: Any = moved[0].grad_fn
        node._set_sequence_nr(AT_ONCE + place)
        node.ahead = key.axes
        found.update(zip(key.numbers, moved, strict=True))
    return found


AT_ONCE = 1 << 62
"""sequence number of nodes that autograd runs as soon as their gradients exist (after leaves)"""


def gather_parameters(
    tensors: Sequence[torch.Tensor],
    dims: Sequence[int],
    axes: Axes,
    to: Whole = "R",
    sizes: Sequence[int | None] | None = None,
    replicas: Axes = (),
    *,
    zero: int = 3,
    dtype: Dtype = None,
    reduce_dtype: Dtype = None,
) -> Tensors:
    """S → R (or I) for the parameters of a block (FSDP). Forward: one all-gather per dtype.

    ``dims``: the sharded dim of each tensor; ``sizes``: its global length (default: even shards).
    Backward: one reduce-scatter per dtype (``to="I"``: local slice), asynchronous as in
    :func:`enter_parameters`. ``replicas``: axes with equal shards (HSDP, I → R); reduced shards are
    all-reduced over them. ``zero``: ZeRO stage (Rajbhandari et al., arXiv:1910.02054). At 3
    gathered tensors are not saved for the backward inside :func:`regather`. Below 3 they are, and
    the micro-batches of a step share them. At 1 micro-batches also share the reduction of
    gradients, in the last one's backward. ``dtype``: cast before the gather; it and
    ``reduce_dtype`` as in :func:`enter_parameters`."""
    comm = current()
    names = comm.active(axes)
    if to not in ("I", "R"):
        raise LayoutError(f'gather_parameters: to={to!r} is not "I" or "R"')
    if not names or not tensors:
        return enter_parameters(tensors, replicas, dtype=dtype, reduce_dtype=reduce_dtype)
    lengths = lengths_of(tensors, dims, names, sizes)
    moves = [Move("S", to, names, d, length) for d, length in zip(dims, lengths, strict=True)]
    through, dtypes = functools.partial(_through, zero=zero), Dtypes(dtype, reduce_dtype)
    return carried("gather_parameters", moves, tensors, through, comm.active(replicas), listed=True, dtypes=dtypes)


def wait_gradients(*parameters: torch.Tensor) -> Tensors:
    """The parameters unchanged, for all that follows; call once where the forward begins.

    Its backward comes last. It waits for the reductions and hands each parameter its gradient."""
    trained = [p for p in parameters if p.requires_grad]
    if not trained or not torch.is_grad_enabled() or isinstance(current(), InProcessCommunicator):
        return parameters
    waiting = iter(_Wait.apply(Gradients(current()), *trained))
    return tuple(next(waiting) if p.requires_grad else p for p in parameters)


class _Wait(Node):
    @staticmethod
    def forward(ctx: Any, pending: Gradients, *parameters: torch.Tensor) -> Tensors:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        found = ctx.pending.finish(gradients)
        ctx.pending.wait()
        return None, *found


class _Move(Node):
    """A bucket as one autograd node."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, zero: int, *xs: torch.Tensor) -> Tensors:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        trained = ctx.needs_input_grad[2:]
        nodes = [x.grad_fn for x, wanted in zip(xs, trained, strict=True) if wanted]
        alone = nodes.count(nodes[0]) == len(nodes)
        ctx.owner = getattr(nodes[0], "pending", None) if alone else None  # "pending" is _Wait's
        if ctx.owner is not None:
            ctx.owner.expect(bucket)
            ctx.numbers = [ctx.owner.number(x) if wanted else -1 for x, wanted in zip(xs, trained, strict=True)]
        out, shared = _moved(bucket, xs, zero)
        ctx.sums = shared if zero == 1 else None
        ctx.in_two = current().later is not None
        ctx.waits = bucket.home.deferred  # now: other micro-batches may begin
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in out]
        if not all(trained):
            ctx.mark_non_differentiable(*(y for y, wanted in zip(out, trained, strict=True) if not wanted))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[2:]
        if ctx.sums is not None:
            ctx.sums.add(gradients)
            if ctx.waits:
                return None, None, *(None for _ in gradients)
            gradients = tuple(ctx.sums.take(gradients if ctx.in_two else None))
        if torch.is_grad_enabled():  # create_graph: as differentiable nodes, nothing left in flight
            return None, None, *moved_back(ctx.bucket, gradients, wanted, ctx.shapes)
        pending = ctx.owner
        if pending is not None:
            pending.begin_later()
        if not all(wanted):
            gradients = tuple([g if w else None for g, w in zip(gradients, wanted, strict=True)])
        if pending is None:
            out, works, later = ctx.bucket.backward(gradients)
            for work in works:
                work.wait()
            for begin in later:
                begin().wait()
            return None, None, *out
        pending.move(ctx.bucket, ctx.numbers, gradients)
        return (None,) * (2 + len(gradients))


class _Ahead(Node):
    """A bucket that enters before the forward, as one node with one input edge."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: Gradients,
        bucket: FlatBucket,
        numbers: Sequence[int],
        xs: list[torch.Tensor],
        begun: torch.Tensor,
    ) -> Tensors:
        ctx.owner, ctx.bucket, ctx.numbers, ctx.xs = owner, bucket, numbers, xs
        ctx.set_materialize_grads(False)
        owner.expect(bucket)
        return tuple(bucket.forward(xs, "forward"))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        pending, numbers = ctx.owner, ctx.numbers
        if torch.is_grad_enabled():  # create_graph: as differentiable nodes, nothing left in flight
            shapes = [(x.shape, x.dtype, x.device) for x in ctx.xs]
            moved = moved_back(ctx.bucket, gradients, [True] * len(gradients), shapes)
            pending.parts += [(n, g, ()) for n, g in zip(numbers, moved, strict=True) if g is not None]
        else:
            pending.begin_later()
            pending.move(ctx.bucket, numbers, gradients)
        return (None,) * 5


def _moved(bucket: Bucket, xs: Sequence[torch.Tensor], zero: int) -> tuple[Tensors, Gathered | None]:
    """(the bucket's output, the output shared by micro-batches if any)."""
    step, phase = bucket.home.step, current().phase
    if zero == 3 or step is None:
        return tuple(gathered(bucket, xs, phase, zero < 3)), None
    if step.is_gathered:
        there(bucket)
    shared = step.gathered(lambda: gathered(bucket, xs, phase, True), bucket.dtypes.backward)
    return tuple(x.detach() for x in shared.tensors), shared


def _through(bucket: Bucket, xs: Sequence[torch.Tensor], zero: int = 3) -> Tensors:
    if not torch.is_grad_enabled():
        return _moved(bucket, xs, zero)[0]
    if any(x.requires_grad for x in xs):
        out: Tensors = _Move.apply(bucket, zero, *xs)
    else:
        out = _moved(bucket, xs, zero)[0]
    if zero == 3 and _scope.depth and bucket.moves[0].verb == "all_gather":
        forget_freed()
        again = _Gather(bucket, tuple(xs), _scope.before, _scope.ahead)
        _scope.before.append(weakref.ref(again))
        for i, y in enumerate(out):
            can_be_made_again(y, again, i)
    return out


class _Scope(threading.local):
    depth = 0
    ahead = 0
    """number of buckets that the backward prefetches"""

    def __init__(self) -> None:
        self.before: list[weakref.ref[_Gather]] = []
        """gathers of this forward so far"""


_scope = _Scope()


class _Gather(Source):
    """A bucket that the backward gathers once more and frees after its last use.

    ``before``: gathers of the same forward, in order. The backward needs them in reverse order and
    prefetches ``ahead`` of them when it makes this one."""

    def __init__(self, bucket: Bucket, xs: Tensors, before: list[weakref.ref[_Gather]], ahead: int) -> None:
        super().__init__()
        self.bucket = bucket
        self.xs = [keep(x) for x in xs]  # the input of a second gather is recomputed itself
        self.full: list[torch.Tensor] | None = None
        self.arriving: Callable[[], list[torch.Tensor]] | None = None
        self.before, self.number, self.ahead = before, len(before), ahead

    def make(self) -> None:
        """See :meth:`Source.make`."""
        if not self.ahead or not isinstance(self.bucket, FlatBucket):
            with torch.no_grad():
                self.full = self.bucket.forward(self.given(), "backward")
            return
        arrive, self.arriving = self.arriving or self.bucket.begin(self.given(), "backward"), None
        if torch._C._current_graph_task_id() != -1:
            self._begin_others()
        self.full = arrive()

    def given(self) -> list[torch.Tensor]:
        """The shards. Raises :class:`RuntimeMismatchError` if one was changed in place."""
        return [kept(x, "a sharded parameter") for x in self.xs]

    def _begin_others(self) -> None:
        wanted = (ref() for ref in reversed(self.before[: self.number]))
        for other in itertools.islice((o for o in wanted if o is not None and o.unpacked < o.packed), self.ahead):
            if other.full is None and other.arriving is None and isinstance(other.bucket, FlatBucket):
                other.arriving = other.bucket.begin(other.given(), "backward")
                torch.autograd.Variable._execution_engine.queue_callback(other.discard)

    def discard(self) -> None:
        """Drop a prefetch that the backward did not use."""
        if self.arriving is not None:
            self.arriving()
            self.arriving = None

    def value(self, number: int) -> torch.Tensor | None:
        """Gathered tensor number ``number``."""
        return None if self.full is None else self.full[number]

    def drop(self) -> None:
        """Free the gathered tensors."""
        self.full = None


@contextlib.contextmanager
def regather(ahead: int = 0) -> Iterator[None]:
    """Around a block's forward: gathered parameters are not saved for the backward.

    It repeats the gather of each bucket (:func:`gather_parameters`). Copies (a cast under autocast)
    are saved. ``ahead``: number of buckets that the backward prefetches."""
    _scope.depth += 1
    before = _scope.before, _scope.ahead
    _scope.before, _scope.ahead = [], ahead
    try:
        with forgetting():
            yield
    finally:
        _scope.depth -= 1
        _scope.before, _scope.ahead = before
