"""What is not kept for the backward, but made again in it: gathered parameters, and results of parts of the forward.

Autograd asks :func:`keep` about every tensor that it saves. One that lies in a storage of such a value is kept as "which
value of which source, and where in it"; the backward asks the source, which makes all of its values at once. In one
process the backward is one thread for all ranks, so a part of the forward runs again on all of them together.
"""

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
from torch.multiprocessing.reductions import StorageWeakRef

from autoshard.errors import RuntimeMismatchError
from autoshard.runtime.autocast import without_autocast
from autoshard.runtime.transport.communicator import Communicator, Reduce, current
from autoshard.runtime.transport.generators import set_states

CHANGED = (
    "{} was changed in place between forward and backward, which computes with it as it was then, and so cannot be right. "
    "Change it after the backward."
)


class Source(ABC):
    """What makes values again. ``packed``: places that autograd remembers them by."""

    def __init__(self) -> None:
        self.packed = self.unpacked = 0
        self.thread: int | None = None
        """where it was made, if nothing is kept by a place in it after the forward of this thread"""

    def asked(self, number: int) -> None:
        """One more place in value ``number`` is remembered."""
        self.packed += 1

    @abstractmethod
    def make(self) -> None:
        """Make all values again."""

    @abstractmethod
    def value(self, number: int) -> torch.Tensor | None:
        """One of them, if it is there."""

    @abstractmethod
    def drop(self) -> None:
        """Free them."""

    def get(self, number: int) -> torch.Tensor:
        """A value, made again where it is not there; all are freed after their last use, or when the backward ends."""
        found = self.value(number)
        if found is None:
            self.make()
            self.unpacked = 0
            if torch._C._current_graph_task_id() != -1:
                torch.autograd.Variable._execution_engine.queue_callback(partial(_drop, weakref.ref(self)))
            found = self.value(number)
            assert found is not None
        self.unpacked += 1
        if self.unpacked == self.packed:
            self.drop()
        return found


def _drop(source: weakref.ref[Source]) -> None:
    """Free its values, if it is still there: a backward that held it would hold what it is made from, too."""
    found = source()
    if found is not None:
        found.drop()


class _Place(NamedTuple):
    """A tensor that is not kept: where it lies in a value; without ``size`` all of it."""

    source: Source
    number: int
    size: torch.Size | None = None
    stride: tuple[int, ...] = ()
    offset: int = 0


class Kept(NamedTuple):
    """A tensor that is kept: without its place in the graph, which would hold itself, and as it was."""

    tensor: torch.Tensor
    version: int

    def get(self, what: str = "") -> torch.Tensor:
        """It. Raises :class:`RuntimeMismatchError` if it was changed in place; ``what``: whose it is."""
        if _version(self.tensor) != self.version:
            what = what or f"a tensor of shape {list(self.tensor.shape)} that the backward needs"
            raise RuntimeMismatchError(CHANGED.format(what))
        return self.tensor


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version


_known: dict[int, tuple[StorageWeakRef, Source, int, torch.dtype]] = {}
"""Storages of values by address. The weak reference keeps the address from being used again."""


def can_be_made_again(value: torch.Tensor, source: Source, number: int) -> None:
    """Have what autograd saves of ``value`` from now on be kept as a place."""
    storage = value.untyped_storage()
    _known[storage._cdata] = (StorageWeakRef(storage), source, number, value.dtype)


_told: dict[int, Callable[[torch.Tensor], object]] = {}
"""by thread"""


@contextlib.contextmanager
def telling(tell: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Inside, ``tell`` is called with each tensor that this thread keeps for the backward. Hooks for saved tensors that are
    around those here hear of none."""
    here = threading.get_ident()
    _told[here] = tell
    try:
        yield
    finally:
        del _told[here]


def keep(x: torch.Tensor) -> Kept | _Place:
    """What is kept of a tensor for the backward."""
    entry = _known.get(x.untyped_storage()._cdata)
    if entry is None or x.dtype != entry[3]:
        if _told and (tell := _told.get(threading.get_ident())) is not None:
            tell(x)
        return Kept(x.detach(), _version(x))
    _, source, number, _ = entry
    source.asked(number)
    return _Place(source, number, x.shape, x.stride(), int(x.storage_offset()))


def kept(x: Kept | _Place, what: str = "") -> torch.Tensor:
    """The tensor that :func:`keep` was given. ``what``: whose it is, for errors."""
    if isinstance(x, Kept):
        return x.get(what)
    value = x.source.get(x.number)
    return value if x.size is None else value.as_strided(x.size, x.stride, x.offset)


@contextlib.contextmanager
def forgetting() -> Iterator[None]:
    """Around a forward: values that :func:`can_be_made_again` are not kept for the backward. Copies of them are."""
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, kept):
            yield
    finally:
        forget_freed()
        here = threading.get_ident()  # ranks of one process are threads
        for address in [a for a, (_, source, *_) in _known.items() if source.thread == here]:
            del _known[address]


def forget_freed() -> None:
    """Drop what is known of storages that are gone."""
    for address in [a for a, (storage, *_) in _known.items() if storage.expired()]:
        del _known[address]


# --- parts of the forward ---


def again(part: Callable[..., Any], *inputs: Any, draws: bool = False) -> Any:
    """``part(*inputs)``; what autograd saves of what it makes is made again in the backward, by running it once more.

    ``inputs``: tensors (and plain values), all that the part reads; they are kept. ``draws``: whether it takes random
    numbers: it takes the same ones again. Its collectives run again, too, in the same order on every rank, but the sums that
    its operations make for themselves.
    """
    if not torch.is_grad_enabled() or not any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs):
        return part(*inputs)
    comm = current()
    run = _Run(part, inputs, comm.random_states() if draws else None)
    source = _Part(comm, run)
    with torch.autograd.graph.saved_tensors_hooks(source.keep, kept), _summing(comm, run.sum):
        found = part(*inputs)
    outputs = found if isinstance(found, tuple) else (found,)
    for number, out in enumerate(outputs):
        if out.untyped_storage()._cdata not in run.own:
            can_be_made_again(out, source, ~number)
    run.saved = source.packed
    source.runs = comm.gathered(f"again {part.__name__}", run)
    return found


@contextlib.contextmanager
def _summing(comm: Communicator, how: Callable[[torch.Tensor, Reduce], torch.Tensor]) -> Iterator[None]:
    comm.sums = how
    try:
        yield
    finally:
        comm.sums = None


class _Run:
    """What one rank ran: the part, and what it read. ``values``: what autograd saved inside, in order; ``~n``: output n."""

    def __init__(self, part: Callable[..., Any], inputs: Sequence[Any], states: list[torch.Tensor] | None) -> None:
        self.part, self.states, self.saved = part, states, 0
        self.micro_batch = current().micro_batch
        self.flags = [isinstance(x, torch.Tensor) and x.requires_grad for x in inputs]
        self.own = {x.untyped_storage()._cdata for x in inputs if isinstance(x, torch.Tensor)}
        # Inputs that are made again themselves are kept as places.
        self.inputs = [keep(x) if isinstance(x, torch.Tensor) else x for x in inputs]
        self.values: dict[int, torch.Tensor] = {}
        self.asked: Counter[int] = Counter()
        """outputs → how often what reads them outside asks for them"""
        self.left: Counter[int] = Counter()
        self.sums: list[Kept | _Place] = []

    def sum(self, x: torch.Tensor, reduce: Reduce) -> torch.Tensor:
        """``reduce(x)``, which an operation makes for itself. It is small beside what it is of, and kept."""
        found = reduce(x)
        self.sums.append(keep(found.detach().clone()))
        return found

    def summed(self) -> Callable[[torch.Tensor, Reduce], torch.Tensor]:
        """What gives those sums once more, in order; nobody asks for a gradient of them."""
        left = iter(self.sums)

        def sum_(x: torch.Tensor, reduce: Reduce) -> torch.Tensor:
            return kept(next(left)).clone().requires_grad_(x.requires_grad and torch.is_grad_enabled())

        return sum_

    def given(self) -> list[Any]:
        """The inputs, those that were not kept made again."""
        what = f"what {self.part.__name__} reads"
        return [kept(x, what) if isinstance(x, Kept | _Place) else x for x in self.inputs]

    def repeat(self, *inputs: Any) -> None:
        """Run the part once more; what autograd saves is what it saved."""
        made: dict[int, torch.Tensor] = {}
        pairs = zip(inputs, self.flags, strict=True)
        fresh = [x.detach().requires_grad_(f) if isinstance(x, torch.Tensor) else x for x, f in pairs]
        own = {x.untyped_storage()._cdata for x in fresh if isinstance(x, torch.Tensor)}

        def note(x: torch.Tensor) -> None:
            if x.untyped_storage()._cdata not in own:
                made[len(made)] = x.detach()

        comm = current()
        # In a schedule of stages another micro-batch's forward may have run since; what is drawn depends on whose it is.
        entered, comm.micro_batch = comm.micro_batch, self.micro_batch
        try:
            with torch.autograd.graph.saved_tensors_hooks(note, _nothing), _summing(comm, self.summed()):
                found = self.part(*fresh)
        finally:
            comm.micro_batch = entered
        if len(made) != self.saved:
            raise RuntimeMismatchError(
                f"{self.part.__name__} saved {self.saved} tensors in the forward and {len(made)} when it ran again"
            )
        outputs = found if isinstance(found, tuple) else (found,)
        self.values = made | {~n: out.detach() for n, out in enumerate(outputs) if self.asked[~n]}
        self.left = self.asked.copy()


class _Part(Source):
    """A part as one rank remembers it. ``runs``: of all ranks of this process, which run again together.

    Places hold it, and it holds the runs; they do not hold it, so that all goes with the last place.
    """

    def __init__(self, comm: Communicator, run: _Run) -> None:
        super().__init__()
        self.comm, self.run, self.thread = comm, run, threading.get_ident()
        self.runs: Sequence[_Run] = ()

    def keep(self, x: torch.Tensor) -> Kept | _Place:
        """What is kept of a tensor that autograd saves inside: inputs as they are, all else as a number."""
        if x.untyped_storage()._cdata in self.run.own:
            return keep(x)
        self.packed += 1
        return _Place(self, self.packed - 1)

    def asked(self, number: int) -> None:
        """See :meth:`Source.asked`."""
        super().asked(number)
        self.run.asked[number] += 1

    def value(self, number: int) -> torch.Tensor | None:
        """See :meth:`Source.value`: freed once it was asked for as often as in the forward. What was saved inside was once."""
        values, left = self.run.values, self.run.left
        left[number] -= 1
        return values.get(number) if left[number] > 0 else values.pop(number, None)

    def drop(self) -> None:
        """See :meth:`Source.drop`."""
        self.run.values = {}

    def make(self) -> None:
        """See :meth:`Source.make`: on all ranks of this process."""
        given = [run.given() for run in self.runs]
        states = self.run.states
        before = None if states is None else self.comm.random_states()
        try:
            if states is not None:
                set_states(states)
            with torch.enable_grad(), without_autocast():
                self.comm.repeat([(run.repeat, inputs) for run, inputs in zip(self.runs, given, strict=True)])
        finally:
            if before is not None:
                set_states(before)


def _nothing(x: Any) -> torch.Tensor:
    raise RuntimeMismatchError("the backward of a part that runs again was asked for")
