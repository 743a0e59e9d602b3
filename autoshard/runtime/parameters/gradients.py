"""Gradients of one forward's parameters: overlapped reductions, and deferred sums. They come in
parts, each reduced, or still a summand over some axes if converted while
:attr:`Communicator.deferred` held; the parameters' owner keeps summands for the later backward
that sums them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoshard.runtime.parameters.bucket import BeginWork, Bucket, BucketKind, Dtypes, FlatBucket
from autoshard.runtime.parameters.coalesced import bucket_gradients
from autoshard.runtime.transport.communicator import Communicator

MIN_BUCKET_BYTES = 2**20
"""bytes of gradients below which a bucket joins the next: for the first one sent, and for shards"""

ALL_REDUCE_BUCKET_BYTES = 25 * 2**20
"""the same for all-reduces while another is under way, as in DistributedDataParallel"""

MAX_REDUCE_SCATTERS = 2
"""the most reduce-scatters of :data:`MIN_BUCKET_BYTES` bytes or more in flight; each holds full gradients"""

Earlier = Callable[[Sequence[int], tuple[str, ...]], Mapping[int, Tensor]]
"""(parameter numbers, axes) → by number its stored summand over these axes, which is handed over"""


class EnteringKey(NamedTuple):
    """Key of a bucket that enters a block: its parameters' ``numbers`` in the forward."""

    numbers: tuple[int, ...]
    axes: tuple[str, ...]
    dtypes: Dtypes
    deferred: bool
    """whether their sum is left to a later backward"""


class Gradients:
    """Collects the gradients of one backward.
    ``earlier``: gives summands of earlier backward passes; called once for a parameter and its
    axes. ``last``: numbers of parameters whose gradients autograd brings as summands, and the
    bucket that sums them when all are there. ``buckets``: of the blocks' parameters, found by
    earlier forwards of the same program."""

    def __init__(
        self,
        comm: Communicator,
        earlier: Earlier = lambda numbers, axes: {},
        last: tuple[Sequence[int], FlatBucket | None] = ((), None),
        buckets: dict[EnteringKey, FlatBucket] | None = None,
    ) -> None:
        self.comm, self.earlier, self.last = comm, earlier, last
        self.buckets: dict[EnteringKey, FlatBucket] = {} if buckets is None else buckets
        self.numbers: Sequence[int] | None = None
        """parameter numbers of the last node's results; None: all"""
        self.expected = Counter[BucketKind]()
        """kind → buckets whose gradients are still to come"""
        self.works: list[Any] = []
        self.whole: list[Any] = []
        """works that hold full gradients"""
        self.later: list[BeginWork] = []
        self.parts: list[tuple[int, Tensor, tuple[str, ...]]] = []
        """(parameter number, part of its gradient, axes over which it is a summand)"""
        self.held: list[tuple[FlatBucket, Sequence[int], Sequence[Tensor | None]]] = []
        """small buckets that wait to be joined with the next"""
        self.summands: dict[int, tuple[str, ...]] = {}
        """after :meth:`finish`: parameter number → axes over which its gradient is a summand"""

    def number(self, x: Tensor) -> int:
        """Parameter number of ``x``, a result of the node that comes last in the backward."""
        return x.output_nr if self.numbers is None else self.numbers[x.output_nr]

    def begin_later(self) -> None:
        """Begin what waited for earlier reductions, which had a block's time to finish."""
        self.works += [begin() for begin in self.later]
        self.later.clear()

    def expect(self, bucket: Bucket) -> None:
        """The gradients of ``bucket``'s parameters are to come."""
        if isinstance(bucket, FlatBucket):
            self.expected[bucket.kind] += 1

    def move(self, bucket: Bucket, numbers: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        """Begin to move the ``gradients`` of parameters ``numbers`` back through ``bucket``. Small
        ones wait for the next of their kind; the last is sent at once, to overlap with the
        rest."""
        if not isinstance(bucket, FlatBucket):
            self._move(bucket, numbers, gradients)
            return
        self.expected[bucket.kind] -= 1
        if self.held and self.held[0][0].kind != bucket.kind:
            self._flush()
        self.held.append((bucket, numbers, gradients))
        enough = MIN_BUCKET_BYTES
        if self.works and not bucket.gathers:
            enough = ALL_REDUCE_BUCKET_BYTES
        held = sum([_gradient_bytes(given) for *_, given in self.held])
        if held >= enough or not self.expected[bucket.kind]:
            self._flush()

    def _flush(self) -> None:
        if self.held:
            buckets, numbers, gradients = zip(*self.held, strict=True)
            self.held = []
            joint = buckets[0].joined(buckets)
            self._move(joint, [n for ns in numbers for n in ns], [g for gs in gradients for g in gs])

    def _move(self, bucket: Bucket, numbers: Sequence[int], gradients: Sequence[Tensor | None]) -> None:
        kept = bucket.awaited if bucket.deferred else ()
        there = [n for n, g in zip(numbers, gradients, strict=True) if g is not None]
        found = self.earlier(there, bucket.awaited) if bucket.awaited and not kept else {}
        earlier = [found.get(n) for n in numbers] if found else ()
        moved, works, later = bucket.backward(gradients, earlier, bool(kept))
        self.parts += [(n, g, kept) for n, g in zip(numbers, moved, strict=True) if g is not None]
        self.works += works
        self.later += later
        if isinstance(bucket, FlatBucket) and bucket.gathers and _gradient_bytes(gradients) >= MIN_BUCKET_BYTES:
            self.whole += works
            while len(self.whole) > MAX_REDUCE_SCATTERS:
                first = self.whole.pop(0)
                self.works.remove(first)
                first.wait()

    def finish(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Every parameter's gradient: parts plus autograd's (from uses outside of buckets), in
        flight until :meth:`wait` unless a parameter has both."""
        gradients = gradients if self.last[1] is None else self._sum_last(self.last[1], gradients)
        self._flush()
        self.begin_later()
        arrived, self.parts, self.summands = self.parts, [], {}
        alone = list(gradients)
        for number, part, axes in arrived:
            if axes or alone[number] is not None:
                break
            alone[number] = part
        else:
            return alone
        self.wait()
        parts: list[list[tuple[Tensor, tuple[str, ...]]]] = [[] if g is None else [(g, ())] for g in gradients]
        for number, part, axes in arrived:
            parts[number].append((part, axes))
        return [self._sum(number, found) if found else None for number, found in enumerate(parts)]

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.works, self.whole = [], []

    def _sum_last(self, bucket: FlatBucket, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Begin the last sums; returns autograd's other gradients. create_graph: as nodes."""
        numbers, rest = self.last[0], list(gradients)
        given = [gradients[n] for n in numbers]
        summed: Sequence[Tensor | None] = [None] * len(given)
        if torch.is_grad_enabled():
            like = (torch.empty(0) if g is None else g for g in given)
            summed = bucket_gradients(bucket, given, [True] * len(given), [(x.shape, x.dtype, x.device) for x in like])
        else:
            self._move(bucket, numbers, given)
        for n, g in zip(numbers, summed, strict=True):
            rest[n] = g
        return rest

    def _sum(self, number: int, parts: Sequence[tuple[Tensor, tuple[str, ...]]]) -> Tensor:
        if len(parts) == 1 and not parts[0][1]:
            return parts[0][0]
        axes = self.together(*(axes for _, axes in parts))
        if axes:
            self.summands[number] = axes
        total = self.summand(*parts[0], axes)
        for part, over in parts[1:]:
            total = total + self.summand(part, over, axes)
        return total

    def together(self, *axes: tuple[str, ...]) -> tuple[str, ...]:
        """The union of ``axes``, in mesh order."""
        return tuple(a for a in self.comm.mesh if any(a in names for names in axes))

    def summand(self, x: Tensor, over: tuple[str, ...], axes: tuple[str, ...]) -> Tensor:
        """A summand over ``over`` as one over ``axes``: the first rank along the others has it."""
        more = tuple(a for a in axes if a not in over)
        return x if not more or self.comm.index(more) == 0 else torch.zeros_like(x)


def _gradient_bytes(gradients: Sequence[Tensor | None]) -> int:
    return sum([g.nbytes for g in gradients if g is not None])
