"""Recompute (rematerialize, activation checkpointing) gathered parameters and parts of the forward.
:func:`pack_saved` packs a tensor that autograd saves, in a recomputable storage, as "which value
of which source, and where in it". The backward asks the source, which makes all its values at
once; in one process for all ranks."""

from __future__ import annotations

import contextlib
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.transport.communicator import Communicator, ReduceStatistic, current
from autoshard.runtime.transport.torch_state import set_generator_states, without_autocast
from autoshard.torch_private.autograd import current_backward, queue_callback
from autoshard.torch_private.dispatch import storage_id

CHANGED_IN_PLACE = (
    "{} was changed in place between forward and backward, but the backward needs its earlier "
    "value. Change it after the backward."
)


class RecomputeSource(ABC):
    """Rematerializes values. ``packed``: how many places autograd saved."""

    def __init__(self) -> None:
        self.packed = self.unpacked = 0
        self.thread: int | None = None
        """thread of the forward after which no more places in it are saved; None: no limit"""

    def asked(self, number: int) -> None:
        """Autograd saved one more place in value ``number``."""
        self.packed += 1

    @abstractmethod
    def rematerialize(self) -> None:
        """Rematerialize all values."""

    @abstractmethod
    def value(self, number: int) -> Tensor | None:
        """Value ``number`` if it exists now."""

    @abstractmethod
    def drop(self) -> None:
        """Free all values."""

    def get(self, number: int) -> Tensor:
        """A value, rematerialized if needed; freed after the last use or at the backward's end."""
        found = self.value(number)
        if found is None:
            self.rematerialize()
            self.unpacked = 0
            if current_backward() != -1:
                queue_callback(partial(_drop_recomputed, weakref.ref(self)))
            found = self.value(number)
            assert found is not None
        self.unpacked += 1
        if self.unpacked == self.packed:
            self.drop()
        return found


def _drop_recomputed(source: weakref.ref[RecomputeSource]) -> None:
    """Free the values of a live source; the engine's callback must not keep it alive."""
    found = source()
    if found is not None:
        found.drop()


class _RecomputedView(NamedTuple):
    """A tensor that is not saved: its position in a value; without ``size`` all of it."""

    source: RecomputeSource
    number: int
    size: torch.Size | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0


class SavedTensor(NamedTuple):
    """A saved tensor, detached (its graph node would hold itself), with its version."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, x: Tensor) -> SavedTensor:
        """``x`` as it is now."""
        return cls(x.detach(), _version_of(x))

    def get(self, what: str = "") -> Tensor:
        """The tensor. Raises :class:`RuntimeMismatchError` if it changed; ``what``: its name."""
        if _version_of(self.tensor) != self.version:
            what = what or f"a tensor of shape {list(self.tensor.shape)} that the backward needs"
            raise RuntimeMismatchError(CHANGED_IN_PLACE.format(what))
        return self.tensor


def _version_of(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


_recomputable_storages: dict[int, tuple[StorageWeakRef, RecomputeSource, int, torch.dtype]] = {}
"""Recomputable storages by address. The weak reference keeps the address from being reused."""


def mark_recomputable(value: Tensor, source: RecomputeSource, number: int) -> None:
    """From now on autograd packs tensors in the storage of ``value`` as places in ``source``."""
    storage = value.untyped_storage()
    _recomputable_storages[storage._cdata] = (StorageWeakRef(storage), source, number, value.dtype)


def is_recomputable(x: Tensor) -> bool:
    """Whether the storage of ``x`` was marked."""
    return storage_id(x) in _recomputable_storages


_savers: dict[int, Callable[[Tensor], object]] = {}
"""by thread: told of each tensor before it is saved, and may mark it"""


@contextlib.contextmanager
def saving_through(tell: Callable[[Tensor], object]) -> Iterator[None]:
    """Inside, call ``tell`` with each tensor before this thread saves it: it may mark the tensor."""
    here = threading.get_ident()
    before, _savers[here] = _savers.get(here), tell
    try:
        yield
    finally:
        del _savers[here]
        if before is not None:
            _savers[here] = before


_saved_observers: dict[int, Callable[[Tensor], object]] = {}
"""by thread"""


@contextlib.contextmanager
def observing_saved_tensors(tell: Callable[[Tensor], object]) -> Iterator[None]:
    """Inside, call ``tell`` with each tensor that this thread saves for the backward, unseen by
    outer saved-tensor hooks."""
    here = threading.get_ident()
    _saved_observers[here] = tell
    try:
        yield
    finally:
        del _saved_observers[here]


def pack_saved(x: Tensor) -> SavedTensor | _RecomputedView:
    """The pack hook for saved tensors."""
    if x.is_conj() or x.is_neg():  # a place in a storage would lose the bit
        return SavedTensor.of(x)
    if _savers and (save := _savers.get(threading.get_ident())) is not None:
        save(x)
    entry = _recomputable_storages.get(storage_id(x))
    if entry is None or x.dtype != entry[3]:
        if _saved_observers and (tell := _saved_observers.get(threading.get_ident())) is not None:
            tell(x)
        return SavedTensor.of(x)
    _, source, number, _ = entry
    source.asked(number)
    return _RecomputedView(source, number, x.shape, x.stride(), int(x.storage_offset()))


def unpack_saved(x: SavedTensor | _RecomputedView, what: str = "") -> Tensor:
    """The unpack hook of :func:`pack_saved`. ``what``: name of the tensor in errors."""
    if isinstance(x, SavedTensor):
        return x.get(what)
    value = x.source.get(x.number)
    return value if x.size is None else value.as_strided(x.size, x.stride, x.offset)


@contextlib.contextmanager
def dropping_recomputable() -> Iterator[None]:
    """Around a forward: recomputable values are not saved for the backward. Copies of them are."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack_saved, unpack_saved):
            yield
    finally:
        forget_freed_storages()
        here = threading.get_ident()  # in-process ranks are threads
        for address in [a for a, (_, source, *_) in _recomputable_storages.items() if source.thread == here]:
            del _recomputable_storages[address]


def forget_freed_storages() -> None:
    """Remove entries of freed storages."""
    for address in [a for a, (storage, *_) in _recomputable_storages.items() if storage.expired()]:
        del _recomputable_storages[address]


# --- parts of the forward ---


def recompute(part: Callable[..., Any], *inputs: Any, draws: bool = False) -> Any:
    """``part(*inputs)`` with activation checkpointing: the backward recomputes saved tensors.
    ``inputs``: all tensors and plain values that the part reads; they are saved. ``draws``: whether
    it draws random numbers; then it draws the same again. Its collectives run again in the same
    order on every rank, except sums inside operations
    (:func:`~autoshard.runtime.operations.collectives.reduce_statistic`), which are saved."""
    if not torch.is_grad_enabled() or not any(isinstance(x, Tensor) and x.requires_grad for x in inputs):
        return part(*inputs)
    comm = current()
    run = _RankForward(part, inputs, comm.random_states() if draws else None)
    source = _RecomputedPart(comm, run)
    with torch.autograd.graph.saved_tensors_hooks(source.keep, unpack_saved), _statistics_through(comm, run.sum):
        found = part(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    for number, out in enumerate(outputs):
        if storage_id(out) not in run.own:
            mark_recomputable(out, source, ~number)
    run.saved = source.packed
    source.runs = comm.gathered(f"again {part.__name__}", run)
    return found


@contextlib.contextmanager
def _statistics_through(comm: Communicator, how: Callable[[Tensor, ReduceStatistic], Tensor]) -> Iterator[None]:
    comm.sums = how
    try:
        yield
    finally:
        comm.sums = None


class _RankForward:
    """One rank's run of a part. ``values``: what autograd saved, by number; ``~n``: output n."""

    def __init__(self, part: Callable[..., Any], inputs: Sequence[Any], states: list[Tensor] | None) -> None:
        self.part, self.states, self.saved = part, states, 0
        self.micro_batch = current().micro_batch
        self.flags = [isinstance(x, Tensor) and x.requires_grad for x in inputs]
        self.own = {storage_id(x) for x in inputs if isinstance(x, Tensor)}
        # Inputs that are recomputed themselves are packed as places.
        self.inputs = [pack_saved(x) if isinstance(x, Tensor) else x for x in inputs]
        self.values: dict[int, Tensor] = {}
        self.asked: Counter[int] = Counter()
        """output → number of saved places in it outside"""
        self.left: Counter[int] = Counter()
        self.sums: list[SavedTensor | _RecomputedView] = []

    def sum(self, x: Tensor, reduce: ReduceStatistic) -> Tensor:
        """``reduce(x)`` inside an operation; saved, since it is small."""
        found = reduce(x)
        self.sums.append(pack_saved(found.detach().clone()))
        return found

    def summed(self) -> Callable[[Tensor, ReduceStatistic], Tensor]:
        """Replays those sums in order; none needs a gradient."""
        left = iter(self.sums)

        def sum_(x: Tensor, reduce: ReduceStatistic) -> Tensor:
            return unpack_saved(next(left)).clone().requires_grad_(x.requires_grad and torch.is_grad_enabled())

        return sum_

    def given(self) -> list[Any]:
        """The inputs, rematerialized if they were not saved."""
        what = f"an input of {self.part.__name__}"
        return [unpack_saved(x, what) if isinstance(x, SavedTensor | _RecomputedView) else x for x in self.inputs]

    def repeat(self, *inputs: Any) -> None:
        """Run the part again and collect what autograd saves."""
        made: dict[int, Tensor] = {}
        pairs = zip(inputs, self.flags, strict=True)
        fresh = [x.detach().requires_grad_(f) if isinstance(x, Tensor) else x for x, f in pairs]
        own = {storage_id(x) for x in fresh if isinstance(x, Tensor)}

        def note(x: Tensor) -> None:
            if storage_id(x) not in own:
                made[len(made)] = x.detach()

        comm = current()
        # In a pipeline another micro-batch may have run since, and draws depend on the micro-batch.
        entered, comm.micro_batch = comm.micro_batch, self.micro_batch
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(note, _refuse_unpack),
                _statistics_through(comm, self.summed()),
            ):
                found = self.part(*fresh)
        finally:
            comm.micro_batch = entered
        if len(made) != self.saved:
            raise RuntimeMismatchError(
                f"{self.part.__name__} saved {self.saved} tensors in the forward and {len(made)} recomputed"
            )
        outputs = found if isinstance(found, tuple) else (found,)
        self.values = made | {~n: out.detach() for n, out in enumerate(outputs) if self.asked[~n]}
        self.left = self.asked.copy()


class _RecomputedPart(RecomputeSource):
    """A checkpointed part as one rank remembers it. ``runs``: of all ranks of this process, held by
    it, not vice versa: all is freed with the last place."""

    def __init__(self, comm: Communicator, run: _RankForward) -> None:
        super().__init__()
        self.comm, self.run, self.thread = comm, run, threading.get_ident()
        self.runs: Sequence[_RankForward] = ()

    def keep(self, x: Tensor) -> SavedTensor | _RecomputedView:
        """The pack hook inside the part: inputs as they are, all else as a number."""
        if storage_id(x) in self.run.own:
            return pack_saved(x)
        self.packed += 1
        return _RecomputedView(self, self.packed - 1)

    def asked(self, number: int) -> None:
        """See :meth:`Source.asked`."""
        super().asked(number)
        self.run.asked[number] += 1

    def value(self, number: int) -> Tensor | None:
        """See :meth:`Source.value`: an output is freed after all its uses, others after one."""
        values, left = self.run.values, self.run.left
        left[number] -= 1
        return values.get(number) if left[number] > 0 else values.pop(number, None)

    def drop(self) -> None:
        """See :meth:`Source.drop`."""
        self.run.values = {}

    def rematerialize(self) -> None:
        """See :meth:`Source.make`: on all ranks of this process."""
        given = [run.given() for run in self.runs]
        states = self.run.states
        before = None if states is None else self.comm.random_states()
        try:
            if states is not None:
                set_generator_states(states)
            with torch.enable_grad(), without_autocast():
                self.comm.repeat([(run.repeat, inputs) for run, inputs in zip(self.runs, given, strict=True)])
        finally:
            if before is not None:
                set_generator_states(before)


def _refuse_unpack(x: Any) -> Tensor:
    raise RuntimeMismatchError("the backward of a recomputed part was called")
