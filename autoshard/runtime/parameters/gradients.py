"""The gradients of one forward's parameters in its backward: reductions under way, and sums that wait for a later one.

A gradient that reaches a parameter through several conversions comes in parts. Each part is summed over the ranks, or
still a summand over some axes: then the conversion was made while :attr:`Communicator.deferred` held. Whoever keeps
the parameters keeps such summands, and hands them over where a later backward takes the sum: one for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.runtime.parameters.bucket import Begin, Bucket, Dtypes
from autoshard.runtime.parameters.flat_bucket import FlatBucket, Kind
from autoshard.runtime.parameters.together import moved_back
from autoshard.runtime.transport.communicator import Communicator

SMALL = 2**20
"""bytes of gradients below which a bucket goes with the next one: of the first that is sent, and of those in shards"""

LARGE = 25 * 2**20
"""of all-reduces while another is under way, as in DistributedDataParallel"""

UNDER_WAY = 2
"""reduce-scatters of :data:`SMALL` bytes or more that may be under way: each holds whole gradients, sent and received, until it
is waited for"""

Earlier = Callable[[Sequence[int], tuple[str, ...]], Mapping[int, torch.Tensor]]
"""(numbers of parameters, axes) → by number the summand over these axes that was kept of it, and is no longer"""


class Entering(NamedTuple):
    """What goes through a bucket on its way into a block: parameters by their ``numbers`` in the forward."""

    numbers: tuple[int, ...]
    axes: tuple[str, ...]
    dtypes: Dtypes
    deferred: bool
    """whether their sum is left to a later backward"""


class Gradients:
    """``earlier``: gives what earlier backward passes left; called in the backward, once for a parameter and its axes.

    ``last``: numbers of parameters whose gradients autograd brings as summands, and the bucket through which they go together
    when all of them are there. ``buckets``: of the blocks' parameters, as forwards of the same program found them before.
    """

    def __init__(
        self,
        comm: Communicator,
        earlier: Earlier = lambda numbers, axes: {},
        last: tuple[Sequence[int], FlatBucket | None] = ((), None),
        buckets: dict[Entering, FlatBucket] | None = None,
    ) -> None:
        self.comm, self.earlier, self.last = comm, earlier, last
        self.buckets: dict[Entering, FlatBucket] = {} if buckets is None else buckets
        self.numbers: Sequence[int] | None = None
        """which parameters are the results of the node that comes last in the backward; None: all"""
        self.expected = Counter[Kind]()
        """buckets of a kind whose gradients are still to come"""
        self.works: list[Any] = []
        self.whole: list[Any] = []
        """those of them that hold much"""
        self.later: list[Begin] = []
        self.parts: list[tuple[int, torch.Tensor, tuple[str, ...]]] = []
        """(number of the parameter, part of its gradient, axes over which it is a summand)"""
        self.held: list[tuple[FlatBucket, Sequence[int], Sequence[torch.Tensor | None]]] = []
        """small buckets, that go with the next ones"""
        self.summands: dict[int, tuple[str, ...]] = {}
        """after :meth:`finish`: the parameters whose gradient is a summand, and over which axes"""

    def number(self, x: torch.Tensor) -> int:
        """Which parameter a result of the node that comes last in the backward is."""
        return x.output_nr if self.numbers is None else self.numbers[x.output_nr]

    def begin_later(self) -> None:
        """Begin what had to wait for an earlier reduction: by now that has had a block's time to finish."""
        self.works += [begin() for begin in self.later]
        self.later.clear()

    def expect(self, bucket: Bucket) -> None:
        """The gradients of ``bucket``'s parameters are to come."""
        if isinstance(bucket, FlatBucket):
            self.expected[bucket.kind] += 1

    def move(self, bucket: Bucket, numbers: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        """Begin to move the ``gradients`` of the parameters with these ``numbers`` back through ``bucket``.

        Small ones wait for the next of their kind: a message has its price, however short it is. Behind the last of a kind
        there is none: what else the backward does goes beside its message.
        """
        if not isinstance(bucket, FlatBucket):
            self._move(bucket, numbers, gradients)
            return
        self.expected[bucket.kind] -= 1
        if self.held and self.held[0][0].kind != bucket.kind:
            self._flush()
        self.held.append((bucket, numbers, gradients))
        enough = SMALL
        if self.works and not bucket.gathers:
            enough = LARGE
        held = sum([_bytes(given) for *_, given in self.held])
        if held >= enough or not self.expected[bucket.kind]:
            self._flush()

    def _flush(self) -> None:
        if self.held:
            buckets, numbers, gradients = zip(*self.held, strict=True)
            self.held = []
            joint = buckets[0].joined(buckets)
            self._move(joint, [n for ns in numbers for n in ns], [g for gs in gradients for g in gs])

    def _move(self, bucket: Bucket, numbers: Sequence[int], gradients: Sequence[torch.Tensor | None]) -> None:
        kept = bucket.awaited if bucket.deferred else ()
        there = [n for n, g in zip(numbers, gradients, strict=True) if g is not None]
        found = self.earlier(there, bucket.awaited) if bucket.awaited and not kept else {}
        earlier = [found.get(n) for n in numbers] if found else ()
        moved, works, later = bucket.backward(gradients, earlier, bool(kept))
        self.parts += [(n, g, kept) for n, g in zip(numbers, moved, strict=True) if g is not None]
        self.works += works
        self.later += later
        if isinstance(bucket, FlatBucket) and bucket.gathers and _bytes(gradients) >= SMALL:
            self.whole += works
            while len(self.whole) > UNDER_WAY:
                first = self.whole.pop(0)
                self.works.remove(first)
                first.wait()

    def finish(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Every parameter's gradient, of its parts and what autograd itself brought (``gradients``), under way until
        :meth:`wait`.

        The latter comes from uses that no bucket carries; a parameter may have both, and then nothing is under way.
        """
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
        parts: list[list[tuple[torch.Tensor, tuple[str, ...]]]] = [[] if g is None else [(g, ())] for g in gradients]
        for number, part, axes in arrived:
            parts[number].append((part, axes))
        return [self._sum(number, found) if found else None for number, found in enumerate(parts)]

    def wait(self) -> None:
        """Wait for everything that is under way."""
        for work in self.works:
            work.wait()
        self.works, self.whole = [], []

    def _sum_last(self, bucket: FlatBucket, gradients: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Begin the last sums; what autograd brought without these. With create_graph they are nodes of the graph."""
        numbers, rest = self.last[0], list(gradients)
        given = [gradients[n] for n in numbers]
        summed: Sequence[torch.Tensor | None] = [None] * len(given)
        if torch.is_grad_enabled():
            like = (torch.empty(0) if g is None else g for g in given)
            summed = moved_back(bucket, given, [True] * len(given), [(x.shape, x.dtype, x.device) for x in like])
        else:
            self._move(bucket, numbers, given)
        for n, g in zip(numbers, summed, strict=True):
            rest[n] = g
        return rest

    def _sum(self, number: int, parts: Sequence[tuple[torch.Tensor, tuple[str, ...]]]) -> torch.Tensor:
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
        """All these axes, in the order of the mesh."""
        return tuple(a for a in self.comm.mesh if any(a in names for names in axes))

    def summand(self, x: torch.Tensor, over: tuple[str, ...], axes: tuple[str, ...]) -> torch.Tensor:
        """A summand ``over`` some axes as one over ``axes``, which has these and more: the first rank along those keeps it."""
        more = tuple(a for a in axes if a not in over)
        return x if not more or self.comm.index(more) == 0 else torch.zeros_like(x)


def _bytes(gradients: Sequence[torch.Tensor | None]) -> int:
    return sum([g.nbytes for g in gradients if g is not None])
