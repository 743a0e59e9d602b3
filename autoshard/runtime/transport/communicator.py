"""The communicator: the mesh as one rank sees it. :class:`MicroBatchStep` has what the
micro-batches of a step share: parameters gathered once, gradients reduced once."""

from __future__ import annotations

import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autoshard.errors import MeshError, RuntimeMismatchError
from autoshard.runtime.transport import sparse_gradients
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.rank_coroutines import Arrival, Sending
from autoshard.runtime.transport.torch_state import generator_states
from autoshard.runtime.transport.window import Chunks, chunks


class SharedGather:
    """A bucket of parameters, gathered once for all micro-batches of a step."""

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype | None) -> None:
        self.tensors, self.dtype = tensors, dtype
        """``dtype``: in which gradients are summed; None: their own"""
        self.gradients: list[Tensor | None] = [None] * len(tensors)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Accumulate this micro-batch's ``gradients``."""
        # Out of place: autograd may own the first one.
        for i, (a, b) in enumerate(zip(self.gradients, gradients, strict=True)):
            b = b if b is None or self.dtype is None else b.to(self.dtype)
            self.gradients[i] = a if b is None else b if a is None else a + b

    def take(self, brought: Sequence[Tensor | None] | None = None) -> list[Tensor | None]:
        """The accumulated gradients, which are released. ``brought``: in a split backward, the
        gradients of this part, whose sums alone are taken: earlier micro-batches may add to
        others."""
        taken = [brought is None or g is not None for g in brought or self.gradients]
        sums = [g if now else None for g, now in zip(self.gradients, taken, strict=True)]
        self.gradients = [None if now else g for g, now in zip(self.gradients, taken, strict=True)]
        return sums


class MicroBatchStep:
    """One stage of a rank in a step. Micro-batches gather the same buckets in the same order."""

    def __init__(self) -> None:
        self.index, self.at = 0, 0
        self.found: list[SharedGather] = []

    def enter(self, index: int) -> None:
        """Begin micro-batch number ``index``."""
        self.index, self.at = index, 0

    @property
    def is_gathered(self) -> bool:
        """Whether the next bucket is gathered already."""
        return self.at < len(self.found)

    def gathered(self, gather: Callable[[], Sequence[Tensor]], dtype: torch.dtype | None = None) -> SharedGather:
        """The next bucket, gathered by the first micro-batch only. ``dtype``: of gradient sums."""
        if not self.is_gathered:
            self.found.append(SharedGather(gather(), dtype))
        self.at += 1
        return self.found[self.at - 1]


Axes = str | Sequence[str]


class Executed(NamedTuple):
    """A logged collective. ``bytes``: ring bytes per rank. Axes of a permute are in mesh order."""

    kind: str
    axes: tuple[str, ...]
    phase: str
    bytes: float


ReduceStatistic = Callable[[Tensor], Tensor]


class Communicator(ABC):
    """One rank of a named mesh, row-major (the last axis varies fastest). ``log``: a list, to log
    every collective as :class:`Executed`. Subclasses move tensors."""

    log: list[Executed] | None = None

    device: torch.device | None = None
    """device of new tensors; None: torch's default"""

    phase: str = "forward"
    """of forwards: "backward" during recomputation"""

    micro_batch: tuple[int, int] = (0, 1)
    """(index, count) of the running micro-batch"""

    step: MicroBatchStep | None = None
    """state shared by micro-batches, if there are several"""

    summed_last: tuple[str, ...] = ()
    """axes over which :class:`Gradients` sums once at the end of the backward"""

    deferred: bool = False
    """whether parameter gradients stay summands, to be summed in a later backward"""

    later: list[Tensor] | None = None
    """split backward: collects scalars whose backward is the second part; None: not split"""

    sums: Callable[[Tensor, ReduceStatistic], Tensor] | None = None
    """how operations sum over ranks inside a part that is recomputed in the backward"""

    def __init__(self, axes: Mapping[str, int], rank: int) -> None:
        self.mesh = dict(axes)
        self.rank = rank
        self.world_size = math.prod(self.mesh.values())
        if not 0 <= rank < self.world_size:
            raise MeshError(f"rank {rank} is not on a mesh of {self.world_size} ranks ({self.mesh})")
        self.memo: dict[Any, Any] = {}
        """cache of operations, by keys of their own"""
        self._active: dict[Axes, tuple[str, ...]] = {}
        self._chunks: dict[tuple[tuple[str, ...], int], Chunks] = {}
        self._index: dict[tuple[str, ...], int] = {}
        self._steps: dict[int, MicroBatchStep] = {}

    def enter(self, index: int, count: int, stage: int = 0) -> None:
        """From now on micro-batch ``index`` of ``count`` runs in ``stage``; 0 of 1: all."""
        self.micro_batch = (index, count)
        if count == 1:
            self._steps.clear()
        elif index == 0:
            self._steps[stage] = MicroBatchStep()
        self.step = self._steps.get(stage)
        if self.step is not None:
            self.step.enter(index)

    @abstractmethod
    def apply(self, move: Move, x: Tensor) -> Tensor:
        """Execute ``move`` on this rank's ``x``, differentiably."""

    def start(self, move: Move, x: Tensor, phase: str) -> Callable[[], Tensor]:
        """Begin ``move`` on this rank's ``x``, without autograd; the result waits. Work that needs
        no meeting of ranks may overlap."""
        moved = self.apply(move, x)
        return lambda: moved

    @abstractmethod
    def shared(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``fn(*args, **kwargs)`` with one random draw for all ranks."""

    @abstractmethod
    def exchange(self, hops: Sequence[Sending], phase: str) -> Sequence[Arrival]:
        """Begin one hop or collective of every rank in this process, in rank order."""

    def meet(self, what: str, value: Any, joint: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Call ``joint(values)`` once for all ranks in this process; returns this rank's entry."""
        return joint([value])[0]

    def gathered(self, what: str, mine: Any) -> Sequence[Any]:
        """``mine`` of every rank in this process, in rank order; ``what``: name for errors."""
        return (mine,)

    def repeat(self, runs: Sequence[tuple[Callable[..., None], Sequence[Any]]]) -> None:
        """Recompute in a backward: run every rank's function on its inputs."""
        ((run, inputs),) = runs
        with bind(self), self.in_backward():
            run(*inputs)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Collectives of forwards inside are logged as the backward's."""
        before, self.phase = self.phase, "backward"
        try:
            yield
        finally:
            self.phase = before

    def random_states(self) -> list[Tensor]:
        """States of the generators that the next draw for all ranks uses."""
        return generator_states()

    def active(self, axes: Axes) -> tuple[str, ...]:
        """``axes`` as a tuple without size-1 axes. Raises :class:`MeshError` for unknown axes."""
        axes = axes if isinstance(axes, str) else tuple(axes)
        try:
            return self._active[axes]
        except KeyError:
            names = (axes,) if isinstance(axes, str) else axes
            if unknown := [a for a in names if a not in self.mesh]:
                raise MeshError(f"the mesh has no axis {unknown[0]!r}. Its axes: {', '.join(self.mesh)}") from None
            if len(set(names)) != len(names):
                raise MeshError(f"axes {names} name an axis twice") from None
            result = self._active[axes] = tuple(a for a in names if self.mesh[a] > 1)
            return result

    def size_of(self, axes: tuple[str, ...]) -> int:
        """Number of ranks in the flattened group ``axes``."""
        return math.prod(self.mesh[a] for a in axes)

    def index(self, axes: tuple[str, ...]) -> int:
        """This rank's number in its flattened group ``axes``."""
        if axes not in self._index:
            self._index[axes] = self.group(axes).index(self.rank)
        return self._index[axes]

    def group(self, axes: tuple[str, ...], rank: int | None = None) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` (default: this one) only along ``axes``, first
        outermost."""
        stride, strides = 1, {}
        for name in reversed(self.mesh):
            strides[name] = stride
            stride *= self.mesh[name]
        base = self.rank if rank is None else rank
        base -= sum((base // strides[a]) % self.mesh[a] * strides[a] for a in axes)
        steps = itertools.product(*(range(0, strides[a] * self.mesh[a], strides[a]) for a in axes))
        return tuple(base + sum(s) for s in steps)

    def chunks(self, size: int, axes: tuple[str, ...]) -> Chunks:
        """(start, length) of ``size`` on every rank of the group, sharded as torch.chunk does."""
        key = (axes, size)
        if key not in self._chunks:
            self._chunks[key] = chunks(size, (self.mesh[a] for a in axes))
        return self._chunks[key]

    def chunk(self, size: int, axes: tuple[str, ...]) -> tuple[int, int]:
        """This rank's ``(start, length)``."""
        return self.chunks(size, axes)[self.index(axes)]

    def local(self, move: Move, x: Tensor) -> Tensor:
        """Execute a move that needs no communication."""
        if x.is_sparse:
            return sparse_gradients.move_sparse_locally(move, x, self.chunks, self.index(move.axes))
        match move.verb:
            case "enter" | "leave":
                return x
            case "partial":
                # Copied on the first rank, too: a view could be recomputed there alone.
                return x.clone() if self.index(move.axes) == 0 else torch.zeros_like(x)
            case "slice":
                # A copy: a view would keep the full tensor alive.
                start, length = self.chunk(move.size, move.axes)
                return x.narrow(move.dim, start, length).clone(memory_format=torch.contiguous_format)
            case "pad":
                start, length = self.chunk(move.size, move.axes)
                out = x.new_zeros([*x.shape[: move.dim], move.size, *x.shape[move.dim + 1 :]])
                out.narrow(move.dim, start, length).copy_(x)
                return out
        raise RuntimeMismatchError(f"{move} is not a local move")

    @property
    def logs(self) -> bool:
        """Whether collectives are logged."""
        return self.log is not None

    def record(self, kind: str, axes: tuple[str, ...], phase: str, ring_bytes: float) -> None:
        """Append to :attr:`log` if it is set."""
        if self.log is not None:
            self.log.append(Executed(kind, self.named(kind, axes), phase, ring_bytes))

    def named(self, kind: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Axes of a group in logs: a permute renumbers its axes, so their order means nothing."""
        return tuple(a for a in self.mesh if a in axes) if kind == "permute" else axes


_thread_binding = threading.local()


def current() -> Communicator:
    """The communicator bound in this thread."""
    comm: Communicator | None = getattr(_thread_binding, "comm", None)
    if comm is None:
        raise RuntimeMismatchError(
            "no communicator is bound in this thread: run the rank module inside `with runtime.bind(comm):`"
        )
    return comm


class _Binding:
    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __enter__(self) -> Communicator:
        self.previous = getattr(_thread_binding, "comm", None)
        _thread_binding.comm = self.comm
        return self.comm

    def __exit__(self, *error: object) -> None:
        _thread_binding.comm = self.previous


def bind(comm: Communicator) -> AbstractContextManager[Communicator]:
    """Let collectives called in this thread run on ``comm``."""
    return _Binding(comm)


def device() -> torch.device:
    """Device of new tensors of this rank: that of the bound communicator."""
    return current().device or torch.get_default_device()
