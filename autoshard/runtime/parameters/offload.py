"""Saved tensors of blocks in host memory, from their forward to their backward.

What autograd saves in an offloaded block is copied to the host while the next block computes, and
leaves the device at the end of that. The backward brings a block's tensors back together, and begins
to bring those of the block before it. Parameters, buffers, inputs, parameters that stay gathered,
and what is saved outside of these blocks remain on the device."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.parameters.host import HostCopy, to_device, to_host
from autoshard.runtime.parameters.recompute import (
    RecomputeSource,
    SavedTensor,
    is_recomputable,
    mark_recomputable,
    saving_through,
)
from autoshard.torch_private.autograd import current_backward, queue_callback
from autoshard.torch_private.dispatch import storage_id


class OffloadedBlock(RecomputeSource):
    """The storages that one call of a block sent to the host. ``before``: the block that did so before it."""

    def __init__(self, before: OffloadedBlock | None) -> None:
        super().__init__()
        self.before = None if before is None else weakref.ref(before)
        self.thread = threading.get_ident()
        self.leaving: list[tuple[SavedTensor, HostCopy]] = []
        self.hosts: list[Tensor] = []
        self.device = torch.device("cpu")
        self.arriving: list[HostCopy] | None = None
        self.here: dict[int, Tensor] = {}
        self.uses: Counter[int] = Counter()
        self.left: Counter[int] = Counter()
        """uses until a tensor is freed"""

    @torch.no_grad()
    def send(self, x: Tensor) -> None:
        """Begin to copy the storage of ``x``; from now on it is saved as a place there."""
        copy = to_host(torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()))
        self.device = x.device
        self.leaving.append((SavedTensor.of(x), copy))
        mark_recomputable(x, self, len(self.hosts))
        self.hosts.append(copy.made)

    def settle(self) -> None:
        """Let computation wait for the copies, and free what is on the device."""
        for saved, copy in self.leaving:
            saved.get()  # nobody has written to it in the meantime
            copy.wait()
        self.leaving = []

    def asked(self, number: int) -> None:
        """See :meth:`RecomputeSource.asked`."""
        super().asked(number)
        self.uses[number] += 1

    def rematerialize(self) -> None:
        """See :meth:`RecomputeSource.rematerialize`."""
        copies, self.arriving = self.arriving or self._begin(), None
        before = self.before() if self.before is not None else None
        if before is not None and before.is_awaited() and current_backward() != -1:
            before.arriving = before._begin()
            queue_callback(before.discard)
        self.here, self.left = {n: copy.wait() for n, copy in enumerate(copies)}, self.uses.copy()

    def is_awaited(self) -> bool:
        """Whether a backward is to bring it back, and has not begun to."""
        return not self.here and self.arriving is None and self.unpacked < self.packed

    def _begin(self) -> list[HostCopy]:
        return [to_device(x, self.device) for x in self.hosts]

    def value(self, number: int) -> Tensor | None:
        """See :meth:`RecomputeSource.value`: freed after its last use."""
        if number not in self.here:
            return None
        self.left[number] -= 1
        return self.here[number] if self.left[number] > 0 else self.here.pop(number)

    def drop(self) -> None:
        """See :meth:`RecomputeSource.drop`."""
        self.here = {}

    def discard(self) -> None:
        """Drop what was begun for a backward that did not need it."""
        for copy in self.arriving or ():
            copy.wait()
        self.arriving = None


class _Forward:
    """One forward of a rank module. ``stays``: storages that remain on the device."""

    def __init__(self, stays: Iterable[Tensor]) -> None:
        kept = list(stays)
        self.stays = set(map(storage_id, kept))
        self.on_accelerator = any(x.device.type != "cpu" for x in kept)
        self.block: OffloadedBlock | None = None
        """the block that computes, if it is offloaded"""
        self.last: OffloadedBlock | None = None
        """the last one before it"""

    def save(self, x: Tensor) -> None:
        """Autograd saves ``x``."""
        if is_recomputable(x) or storage_id(x) in self.stays or (self.on_accelerator and x.device.type == "cpu"):
            return
        if self.block is not None and x.untyped_storage().nbytes():
            self.block.send(x)
        else:
            self.stays.add(storage_id(x))

    def run(self, call: Callable[..., Any], offloads: bool, *inputs: Any) -> Any:
        """A block's ``call(*inputs)``; after it what the block before it sent is gone."""
        self.block = OffloadedBlock(self.last) if offloads else None
        try:
            found = call(*inputs)
            if self.last is not None:
                self.last.settle()
        finally:
            self.last, self.block = self.block or self.last, None
        return found


_forwards: dict[int, _Forward] = {}
"""by thread"""


@contextlib.contextmanager
def offloading(stays: Iterable[Tensor]) -> Iterator[None]:
    """Around a forward whose blocks are classes of :func:`offloading_class`."""
    here = threading.get_ident()
    outer, forward = _forwards.get(here), _Forward(stays)
    _forwards[here] = forward
    try:
        with saving_through(forward.save):
            yield
        if forward.last is not None:
            forward.last.settle()
    finally:
        del _forwards[here]
        if outer is not None:
            _forwards[here] = outer


def keep_on_device(tensors: Iterable[Tensor]) -> None:
    """Gathered parameters that stay: several micro-batches read them."""
    if (forward := _forwards.get(threading.get_ident())) is not None:
        forward.stays.update(map(storage_id, tensors))


@functools.cache
def offloading_class(block: type[Any], offloads: bool) -> type[Any]:
    """``block`` whose forwards send what they save to the host, or (``offloads=False``) free what others sent."""

    def through(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(self: Any, *inputs: Any) -> Any:
            forward = _forwards.get(threading.get_ident())
            bound = functools.partial(call, self)
            return bound(*inputs) if forward is None else forward.run(bound, offloads, *inputs)

        return run

    names = {name: through(call) for name, call in vars(block).items() if name.startswith("forward")}
    return type(block.__name__, (block,), {**names, "__module__": block.__module__})
