"""Parameters of a block (FSDP all-gather with prefetch, DDP), and their gradients. A block's move
in one bucket (:mod:`autoshard.runtime.parameters.bucket`); an asynchronous collective reduces
gradients, which reach parameters through :func:`wait_gradients`, unread by autograd before.
Prefetch: the first forward of a rank module records the order of its gathers. From then on the
first ``depth`` begin with the forward, and every other one ``depth`` buckets ahead, alike on all
ranks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoshard.errors import LayoutError
from autoshard.runtime.operations.collectives import UnshardedPlacement
from autoshard.runtime.parameters.bucket import Bucket, BucketTensors, Dtypes, FlatBucket, move_bucketed
from autoshard.runtime.parameters.coalesced import bucket_gradients, gathered_lengths
from autoshard.runtime.parameters.gradients import EnteringKey, Gradients
from autoshard.runtime.parameters.offload import keep_on_device
from autoshard.runtime.parameters.recompute import (
    RecomputeSource,
    dropping_recomputable,
    forget_freed_storages,
    mark_recomputable,
    pack_saved,
    unpack_saved,
)
from autoshard.runtime.transport.autograd import LeanFunction
from autoshard.runtime.transport.communicator import Axes, Communicator, SharedGather, current
from autoshard.runtime.transport.in_process import InProcessCommunicator
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.process_group import TorchCommunicator
from autoshard.runtime.transport.profiling import with_module
from autoshard.torch_private.autograd import current_backward, queue_callback

PendingGather = Callable[[], list[Tensor]]
"""waits for a gather and returns the gathered tensors"""


class _PlannedGather(NamedTuple):
    """A gather in forward order. ``names``: of its parameters; None if some are read otherwise."""

    bucket: FlatBucket
    names: tuple[str, ...] | None
    shared: bool
    """whether the micro-batches of a step share it"""


class Prefetcher:
    """Prefetcher of one rank module; at most ``depth`` gathers besides the one waited for."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.order: list[_PlannedGather] = []
        self.known = False
        """whether :attr:`order` is complete"""
        self.at = 0
        self.under_way: dict[int, PendingGather] = {}
        self.tensors: Mapping[str, Tensor] = {}

    @contextlib.contextmanager
    def forward(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Around a forward that reads ``tensors`` by name."""
        before, _prefetch_scope.ahead = _prefetch_scope.ahead, self
        self.tensors, self.at = tensors, 0
        try:
            self._begin_next()
            yield
            self.known = self.known or bool(self.order)
        finally:
            _prefetch_scope.ahead, self.tensors = before, {}
            self.under_way.clear()
            if not self.known:
                self.order.clear()

    def gather(self, bucket: FlatBucket, xs: Sequence[Tensor], shared: bool) -> list[Tensor]:
        """The next bucket's tensors, gathered; begins the gathers after it."""
        if not self.known:
            names = {id(x): name for name, x in self.tensors.items()}
            read = tuple(names.get(id(x), "") for x in xs)
            self.order.append(_PlannedGather(bucket, read if all(read) else None, shared))
            return bucket.forward(xs, "forward")
        arriving = self.under_way.pop(self.at, None) or bucket.begin(xs, "forward")
        self.skip()
        self._begin_next()
        return arriving()

    def _begin_next(self) -> None:
        for number in range(self.at, min(self.at + self.depth, len(self.order) if self.known else 0)):
            planned = self.order[number]
            step = planned.bucket.first_rank.step
            first = step is None or step.index == 0
            if number not in self.under_way and planned.names is not None and (first or not planned.shared):
                begun = planned.bucket.begin([self.tensors[name] for name in planned.names], "forward")
                self.under_way[number] = begun

    def skip(self) -> None:
        """The next bucket is gathered already."""
        self.at += 1


class _PrefetchScope(threading.local):
    ahead: Prefetcher | None = None


_prefetch_scope = _PrefetchScope()


def gather_prefetched(bucket: Bucket, xs: Sequence[Tensor], phase: str, shared: bool) -> list[Tensor]:
    """``bucket.forward(xs, phase)``, prefetched if enabled. ``shared``: among micro-batches."""
    if _prefetch_scope.ahead is None or phase != "forward" or not isinstance(bucket, FlatBucket) or not bucket.gathers:
        return bucket.forward(xs, phase)
    return _prefetch_scope.ahead.gather(bucket, xs, shared)


def skip_prefetched(bucket: Bucket) -> None:
    """The bucket that :func:`gather_prefetched` would gather is gathered already."""
    if _prefetch_scope.ahead is not None and isinstance(bucket, FlatBucket) and bucket.gathers:
        _prefetch_scope.ahead.skip()


Dtype = torch.dtype | None


def enter_parameters(
    tensors: Sequence[Tensor], axes: Axes, *, dtype: Dtype = None, reduce_dtype: Dtype = None
) -> BucketTensors:
    """I → R for the parameters of a block (data parallelism). Forward: identity.

    Backward: one all-reduce of a flat buffer per dtype. It is asynchronous for parameters from
    :func:`wait_gradients`, or shared by all blocks if :attr:`Communicator.summed_last` says so.
    Mixed precision: values come in ``dtype``; gradients are summed in ``reduce_dtype`` and arrive
    in the parameter's dtype. Tensors that entered already (:func:`enter_parameters_early`) are unchanged."""
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
    moved = _enter_through_bucket(comm, moving, names, Dtypes(dtype, reduce_dtype))
    if len(moving) == len(tensors):
        return moved
    arriving = iter(moved)
    return tuple([next(arriving) if t.requires_grad else t if dtype is None else t.to(dtype) for t in tensors])


def _enter_through_bucket(
    comm: Communicator, moving: Sequence[Tensor], names: tuple[str, ...], dtypes: Dtypes
) -> BucketTensors:
    """``moving`` through a bucket, which later forwards of the same program reuse."""
    pending = getattr(moving[0].grad_fn, "pending", None)
    if not isinstance(pending, Gradients):
        moves = [Move("I", "R", names)] * len(moving)
        return move_bucketed("enter_parameters", moves, moving, _through_parameter_bucket, listed=True, dtypes=dtypes)
    key = EnteringKey(tuple(map(pending.number, moving)), names, dtypes, comm.deferred)
    if key not in pending.buckets:
        assert isinstance(comm, TorchCommunicator)
        move = with_module(Move("I", "R", names), always=True)
        pending.buckets[key] = FlatBucket(comm, [move] * len(moving), listed=True, dtypes=dtypes)
    return _through_parameter_bucket(pending.buckets[key], moving)


def buckets_entering_early(pending: Gradients, alone: frozenset[int]) -> list[tuple[EnteringKey, FlatBucket]]:
    """Buckets of parameters that may enter before the forward, as in an earlier one: between
    products, which leave caches cold, it takes five times as long. ``alone``: numbers of the
    parameters read in that block only."""
    return [
        (key, bucket)
        for key, bucket in pending.buckets.items()
        if key.deferred == pending.comm.deferred and key.dtypes.forward is None and alone.issuperset(key.numbers)
    ]


def enter_parameters_early(
    entering: Sequence[tuple[EnteringKey, FlatBucket]],
    xs: Sequence[Tensor],
    pending: Gradients,
    begun: Tensor,
) -> dict[int, Tensor]:
    """Parameter number → tensor for the buckets ``entering``; ``xs``: all parameters. ``begun``: a
    tensor behind the node that comes last in the backward and takes ``pending``."""
    found: dict[int, Tensor] = {}
    for place, (key, bucket) in enumerate(entering):
        moved: BucketTensors = _EarlyEntryNode.apply(pending, bucket, key.numbers, [xs[n] for n in key.numbers], begun)
        node: Any = moved[0].grad_fn
        node._set_sequence_nr(RUN_FIRST_SEQUENCE_NR + place)
        node.ahead = key.axes
        found.update(zip(key.numbers, moved, strict=True))
    return found


RUN_FIRST_SEQUENCE_NR = 1 << 62
"""sequence number of nodes that autograd runs as soon as their gradients exist (after leaves)"""


def gather_parameters(
    tensors: Sequence[Tensor],
    dims: Sequence[int],
    axes: Axes,
    to: UnshardedPlacement = "R",
    sizes: Sequence[int | None] | None = None,
    replicas: Axes = (),
    *,
    zero: int = 3,
    dtype: Dtype = None,
    reduce_dtype: Dtype = None,
) -> BucketTensors:
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
    lengths = gathered_lengths(tensors, dims, names, sizes)
    moves = [Move("S", to, names, d, length) for d, length in zip(dims, lengths, strict=True)]
    through, dtypes = functools.partial(_through_parameter_bucket, zero=zero), Dtypes(dtype, reduce_dtype)
    return move_bucketed(
        "gather_parameters", moves, tensors, through, comm.active(replicas), listed=True, dtypes=dtypes
    )


def wait_gradients(*parameters: Tensor) -> BucketTensors:
    """The parameters unchanged, for all that follows; call once where the forward begins. Its
    backward comes last: it waits for the reductions and hands each parameter its gradient."""
    trained = [p for p in parameters if p.requires_grad]
    if not trained or not torch.is_grad_enabled() or isinstance(current(), InProcessCommunicator):
        return parameters
    waiting = iter(_WaitGradients.apply(Gradients(current()), *trained))
    return tuple(next(waiting) if p.requires_grad else p for p in parameters)


class _WaitGradients(LeanFunction):
    @staticmethod
    def forward(ctx: Any, pending: Gradients, *parameters: Tensor) -> BucketTensors:
        ctx.pending = pending
        ctx.set_materialize_grads(False)
        return tuple(p.view_as(p) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        found = ctx.pending.finish(gradients)
        ctx.pending.wait()
        return None, *found


class _ParameterBucketNode(LeanFunction):
    """A bucket as one autograd node."""

    @staticmethod
    def forward(ctx: Any, bucket: Bucket, zero: int, *xs: Tensor) -> BucketTensors:
        ctx.bucket = bucket
        ctx.set_materialize_grads(False)
        trained = ctx.needs_input_grad[2:]
        nodes = [x.grad_fn for x, wanted in zip(xs, trained, strict=True) if wanted]
        alone = nodes.count(nodes[0]) == len(nodes)
        ctx.owner = getattr(nodes[0], "pending", None) if alone else None  # "pending" is _Wait's
        if ctx.owner is not None:
            ctx.owner.expect(bucket)
            ctx.numbers = [ctx.owner.number(x) if wanted else -1 for x, wanted in zip(xs, trained, strict=True)]
        out, shared = _bucket_forward(bucket, xs, zero)
        ctx.sums = shared if zero == 1 else None
        ctx.in_two = current().later is not None
        ctx.waits = bucket.first_rank.deferred  # now: other micro-batches may begin
        ctx.shapes = [(y.shape, y.dtype, y.device) for y in out]
        if not all(trained):
            ctx.mark_non_differentiable(*(y for y, wanted in zip(out, trained, strict=True) if not wanted))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        wanted = ctx.needs_input_grad[2:]
        if ctx.sums is not None:
            ctx.sums.add(gradients)
            if ctx.waits:
                return None, None, *(None for _ in gradients)
            gradients = tuple(ctx.sums.take(gradients if ctx.in_two else None))
        if torch.is_grad_enabled():  # create_graph: as differentiable nodes, nothing left in flight
            return None, None, *bucket_gradients(ctx.bucket, gradients, wanted, ctx.shapes)
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


class _EarlyEntryNode(LeanFunction):
    """A bucket that enters before the forward, as one node with one input edge."""

    @staticmethod
    def forward(
        ctx: Any,
        owner: Gradients,
        bucket: FlatBucket,
        numbers: Sequence[int],
        xs: list[Tensor],
        begun: Tensor,
    ) -> BucketTensors:
        ctx.owner, ctx.bucket, ctx.numbers, ctx.xs = owner, bucket, numbers, xs
        ctx.set_materialize_grads(False)
        owner.expect(bucket)
        return tuple(bucket.forward(xs, "forward"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        pending, numbers = ctx.owner, ctx.numbers
        if torch.is_grad_enabled():  # create_graph: as differentiable nodes, nothing left in flight
            shapes = [(x.shape, x.dtype, x.device) for x in ctx.xs]
            moved = bucket_gradients(ctx.bucket, gradients, [True] * len(gradients), shapes)
            pending.parts += [(n, g, ()) for n, g in zip(numbers, moved, strict=True) if g is not None]
        else:
            pending.begin_later()
            pending.move(ctx.bucket, numbers, gradients)
        return (None,) * 5


def _bucket_forward(bucket: Bucket, xs: Sequence[Tensor], zero: int) -> tuple[BucketTensors, SharedGather | None]:
    """(the bucket's output, the output shared by micro-batches if any)."""
    step, phase = bucket.first_rank.step, current().phase
    if zero == 3 or step is None:
        return tuple(gather_prefetched(bucket, xs, phase, zero < 3)), None
    if step.is_gathered:
        skip_prefetched(bucket)
    shared = step.gathered(lambda: gather_prefetched(bucket, xs, phase, True), bucket.dtypes.backward)
    return tuple(x.detach() for x in shared.tensors), shared


def _through_parameter_bucket(bucket: Bucket, xs: Sequence[Tensor], zero: int = 3) -> BucketTensors:
    if not torch.is_grad_enabled():
        return _bucket_forward(bucket, xs, zero)[0]
    if any(x.requires_grad for x in xs):
        out: BucketTensors = _ParameterBucketNode.apply(bucket, zero, *xs)
    else:
        out = _bucket_forward(bucket, xs, zero)[0]
    if zero < 3:
        keep_on_device(out)
    if zero == 3 and _regather_scope.depth and bucket.moves[0].verb == "all_gather":
        forget_freed_storages()
        again = _RegatherSource(bucket, tuple(xs), _regather_scope.before, _regather_scope.ahead)
        _regather_scope.before.append(weakref.ref(again))
        for i, y in enumerate(out):
            mark_recomputable(y, again, i)
    return out


class _RegatherScope(threading.local):
    depth = 0
    ahead = 0
    """number of buckets that the backward prefetches"""

    def __init__(self) -> None:
        self.before: list[weakref.ref[_RegatherSource]] = []
        """gathers of this forward so far"""


_regather_scope = _RegatherScope()


class _RegatherSource(RecomputeSource):
    """A bucket that the backward gathers once more and frees after its last use. ``before``:
    gathers of the same forward, in order, of which the backward prefetches ``ahead`` in
    reverse."""

    def __init__(
        self, bucket: Bucket, xs: BucketTensors, before: list[weakref.ref[_RegatherSource]], ahead: int
    ) -> None:
        super().__init__()
        self.bucket = bucket
        self.xs = [pack_saved(x) for x in xs]  # the input of a second gather is recomputed itself
        self.full: list[Tensor] | None = None
        self.arriving: Callable[[], list[Tensor]] | None = None
        self.before, self.number, self.ahead = before, len(before), ahead

    def rematerialize(self) -> None:
        """See :meth:`Source.make`."""
        if not self.ahead or not isinstance(self.bucket, FlatBucket):
            with torch.no_grad():
                self.full = self.bucket.forward(self.given(), "backward")
            return
        arrive, self.arriving = self.arriving or self.bucket.begin(self.given(), "backward"), None
        if current_backward() != -1:
            self._begin_others()
        self.full = arrive()

    def given(self) -> list[Tensor]:
        """The shards. Raises :class:`RuntimeMismatchError` if one was changed in place."""
        return [unpack_saved(x, "a sharded parameter") for x in self.xs]

    def _begin_others(self) -> None:
        wanted = (ref() for ref in reversed(self.before[: self.number]))
        for other in itertools.islice((o for o in wanted if o is not None and o.unpacked < o.packed), self.ahead):
            if other.full is None and other.arriving is None and isinstance(other.bucket, FlatBucket):
                other.arriving = other.bucket.begin(other.given(), "backward")
                queue_callback(other.discard)

    def discard(self) -> None:
        """Drop a prefetch that the backward did not use."""
        if self.arriving is not None:
            self.arriving()
            self.arriving = None

    def value(self, number: int) -> Tensor | None:
        return None if self.full is None else self.full[number]

    def drop(self) -> None:
        """Free the gathered tensors."""
        self.full = None


@contextlib.contextmanager
def regather(ahead: int = 0) -> Iterator[None]:
    """Around a block's forward: gathered parameters are not saved, but gathered again in the
    backward (:func:`gather_parameters`), ``ahead`` buckets early. Copies (a cast under autocast)
    are saved."""
    _regather_scope.depth += 1
    before = _regather_scope.before, _regather_scope.ahead
    _regather_scope.before, _regather_scope.ahead = [], ahead
    try:
        with dropping_recomputable():
            yield
    finally:
        _regather_scope.depth -= 1
        _regather_scope.before, _regather_scope.ahead = before
