"""Prefetch: parameter all-gathers begin before their bucket is used and overlap with computation.

The first forward of a rank module records the order of its gathers. From then on the first
``depth`` gathers begin with the forward, and every other one ``depth`` buckets ahead. All ranks
begin the same gathers at the same place."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from autoshard.runtime.parameters.bucket import Bucket
from autoshard.runtime.parameters.flat_bucket import FlatBucket

Arriving = Callable[[], list[torch.Tensor]]
"""waits for a gather and returns the gathered tensors"""


class _Planned(NamedTuple):
    """A gather in forward order. ``names``: of its parameters; None if some are read otherwise."""

    bucket: FlatBucket
    names: tuple[str, ...] | None
    shared: bool
    """whether the micro-batches of a step share it"""


class Ahead:
    """Prefetcher of one rank module; at most ``depth`` gathers besides the one waited for."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.order: list[_Planned] = []
        self.known = False
        """whether :attr:`order` is complete"""
        self.at = 0
        self.under_way: dict[int, Arriving] = {}
        self.tensors: Mapping[str, torch.Tensor] = {}

    @contextlib.contextmanager
    def forward(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Around a forward that reads ``tensors`` by name."""
        before, _scope.ahead = _scope.ahead, self
        self.tensors, self.at = tensors, 0
        try:
            self._begin_next()
            yield
            self.known = self.known or bool(self.order)
        finally:
            _scope.ahead, self.tensors = before, {}
            self.under_way.clear()
            if not self.known:
                self.order.clear()

    def gather(self, bucket: FlatBucket, xs: Sequence[torch.Tensor], shared: bool) -> list[torch.Tensor]:
        """The next bucket's tensors, gathered; begins the gathers after it."""
        if not self.known:
            names = {id(x): name for name, x in self.tensors.items()}
            read = tuple(names.get(id(x), "") for x in xs)
            self.order.append(_Planned(bucket, read if all(read) else None, shared))
            return bucket.forward(xs, "forward")
        arriving = self.under_way.pop(self.at, None) or bucket.begin(xs, "forward")
        self.skip()
        self._begin_next()
        return arriving()

    def _begin_next(self) -> None:
        for number in range(self.at, min(self.at + self.depth, len(self.order) if self.known else 0)):
            planned = self.order[number]
            step = planned.bucket.home.step
            first = step is None or step.index == 0
            if number not in self.under_way and planned.names is not None and (first or not planned.shared):
                begun = planned.bucket.begin([self.tensors[name] for name in planned.names], "forward")
                self.under_way[number] = begun

    def skip(self) -> None:
        """The next bucket is gathered already."""
        self.at += 1


class _Scope(threading.local):
    ahead: Ahead | None = None


_scope = _Scope()


def gathered(bucket: Bucket, xs: Sequence[torch.Tensor], phase: str, shared: bool) -> list[torch.Tensor]:
    """``bucket.forward(xs, phase)``, prefetched if enabled. ``shared``: among micro-batches."""
    if _scope.ahead is None or phase != "forward" or not isinstance(bucket, FlatBucket) or not bucket.gathers:
        return bucket.forward(xs, phase)
    return _scope.ahead.gather(bucket, xs, shared)


def there(bucket: Bucket) -> None:
    """The bucket that :func:`gathered` would gather is gathered already."""
    if _scope.ahead is not None and isinstance(bucket, FlatBucket) and bucket.gathers:
        _scope.ahead.skip()
