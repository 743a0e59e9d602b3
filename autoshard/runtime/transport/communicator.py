"""What the collectives run on: the mesh as one rank sees it, and which communicator this thread uses."""

from __future__ import annotations

import itertools
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch

from autoshard.errors import MeshError, RuntimeMismatchError
from autoshard.runtime.transport import sparse
from autoshard.runtime.transport.generators import states
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.relay import Arrival, Begun
from autoshard.runtime.transport.step import Step
from autoshard.runtime.transport.window import Chunks, chunks

Axes = str | Sequence[str]


class Executed(NamedTuple):
    """One executed collective. ``bytes``: ring bytes per rank. The axes of a permute stand in mesh order."""

    kind: str
    axes: tuple[str, ...]
    phase: str
    bytes: float


Reduce = Callable[[torch.Tensor], torch.Tensor]


class Communicator(ABC):
    """One rank of a named mesh, row-major (the last axis varies fastest).

    ``log``: set it to a list to have every executed collective appended as :class:`Executed`.
    Subclasses say how tensors move: :meth:`apply` and :meth:`shared`.
    """

    log: list[Executed] | None = None

    device: torch.device | None = None
    """where new tensors of this rank go; None: torch's default"""

    phase: str = "forward"
    """in which forwards run: "backward" while one runs again"""

    micro_batch: tuple[int, int] = (0, 1)
    """which of how many micro-batches runs"""

    step: Step | None = None
    """what the micro-batches share, where there are several"""

    summed_last: tuple[str, ...] = ()
    """axes over which :class:`Gradients` sums, when the backward ends, what enters over them in the forward that runs"""

    deferred: bool = False
    """whether forward passes leave their parameters' gradients as summands, to be added up in a later backward"""

    later: list[torch.Tensor] | None = None
    """of a backward in two parts: scalars whose own backward is the second part of it; None: it comes in one"""

    sums: Callable[[torch.Tensor, Reduce], torch.Tensor] | None = None
    """how operations sum over ranks for themselves while a part runs that runs again in the backward"""

    def __init__(self, axes: Mapping[str, int], rank: int) -> None:
        self.mesh = dict(axes)
        self.rank = rank
        self.world_size = math.prod(self.mesh.values())
        if not 0 <= rank < self.world_size:
            raise MeshError(f"rank {rank} is not on a mesh of {self.world_size} ranks ({self.mesh})")
        self.memo: dict[Any, Any] = {}
        """what operations have worked out for this rank, each under a key of its own"""
        self._active: dict[Axes, tuple[str, ...]] = {}
        self._chunks: dict[tuple[tuple[str, ...], int], Chunks] = {}
        self._index: dict[tuple[str, ...], int] = {}
        self._steps: dict[int, Step] = {}

    def enter(self, index: int, count: int, stage: int = 0) -> None:
        """Micro-batch number ``index`` of ``count`` runs from now on, in this ``stage``; 0 of 1: the whole batch."""
        self.micro_batch = (index, count)
        if count == 1:
            self._steps.clear()
        elif index == 0:
            self._steps[stage] = Step()
        self.step = self._steps.get(stage)
        if self.step is not None:
            self.step.enter(index)

    @abstractmethod
    def apply(self, move: Move, x: torch.Tensor) -> torch.Tensor:
        """Carry out ``move`` on this rank's ``x``, differentiably."""

    def start(self, move: Move, x: torch.Tensor, phase: str) -> Callable[[], torch.Tensor]:
        """Begin ``move`` on this rank's ``x``, without autograd: what is returned waits for it, once, and gives what came.

        What needs no meeting of ranks may go on beside it.
        """
        moved = self.apply(move, x)
        return lambda: moved

    @abstractmethod
    def shared(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """``fn(*args, **kwargs)`` with one draw from the random generators for all ranks together."""

    @abstractmethod
    def exchange(self, hops: Sequence[Begun], phase: str) -> Sequence[Arrival]:
        """Begin one hop, or one collective, of every rank that this process runs, in their order."""

    def meet(self, what: str, value: Any, joint: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """``joint(values)`` of all ranks that this process runs, once; this rank's part of what it gives."""
        return joint([value])[0]

    def gathered(self, what: str, mine: Any) -> Sequence[Any]:
        """``mine`` of every rank that this process runs, in their order; ``what`` they all have come for."""
        return (mine,)

    def repeat(self, runs: Sequence[tuple[Callable[..., None], Sequence[Any]]]) -> None:
        """Run what each rank of this process ran before once more, in a backward."""
        ((run, inputs),) = runs
        with bind(self), self.in_backward():
            run(*inputs)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Collectives of forwards inside count as the backward's."""
        before, self.phase = self.phase, "backward"
        try:
            yield
        finally:
            self.phase = before

    def random_states(self) -> list[torch.Tensor]:
        """Of the generators that the next draw for all ranks takes its numbers from."""
        return states()

    def active(self, axes: Axes) -> tuple[str, ...]:
        """``axes`` as a tuple, without the axes of size 1. Raises :class:`MeshError` for an unknown axis."""
        axes = axes if isinstance(axes, str) else tuple(axes)
        try:
            return self._active[axes]
        except KeyError:
            names = (axes,) if isinstance(axes, str) else axes
            if unknown := [a for a in names if a not in self.mesh]:
                raise MeshError(f"mesh has no axis {unknown[0]!r}; its axes are {', '.join(self.mesh)}") from None
            if len(set(names)) != len(names):
                raise MeshError(f"axes {names} name an axis twice") from None
            result = self._active[axes] = tuple(a for a in names if self.mesh[a] > 1)
            return result

    def size_of(self, axes: tuple[str, ...]) -> int:
        """Ranks in the flattened group ``axes``."""
        return math.prod(self.mesh[a] for a in axes)

    def index(self, axes: tuple[str, ...]) -> int:
        """This rank's number in its flattened group ``axes``."""
        if axes not in self._index:
            self._index[axes] = self.group(axes).index(self.rank)
        return self._index[axes]

    def group(self, axes: tuple[str, ...], rank: int | None = None) -> tuple[int, ...]:
        """Ranks that differ from ``rank`` (default: this one) only along ``axes``, the first axis outermost."""
        stride, strides = 1, {}
        for name in reversed(self.mesh):
            strides[name] = stride
            stride *= self.mesh[name]
        base = self.rank if rank is None else rank
        base -= sum((base // strides[a]) % self.mesh[a] * strides[a] for a in axes)
        steps = itertools.product(*(range(0, strides[a] * self.mesh[a], strides[a]) for a in axes))
        return tuple(base + sum(s) for s in steps)

    def chunks(self, size: int, axes: tuple[str, ...]) -> Chunks:
        """``(start, length)`` for every rank of the group: ``size`` cut by ``axes`` as torch.chunk does."""
        key = (axes, size)
        if key not in self._chunks:
            self._chunks[key] = chunks(size, (self.mesh[a] for a in axes))
        return self._chunks[key]

    def chunk(self, size: int, axes: tuple[str, ...]) -> tuple[int, int]:
        """This rank's ``(start, length)``."""
        return self.chunks(size, axes)[self.index(axes)]

    def local(self, move: Move, x: torch.Tensor) -> torch.Tensor:
        """The moves that need no communication."""
        if x.is_sparse:
            return sparse.local(move, x, self.chunks, self.index(move.axes))
        match move.verb:
            case "enter" | "leave":
                return x
            case "partial":
                # A copy on the first rank, too: in the memory of what is made again, its backward alone would make that.
                return x.clone() if self.index(move.axes) == 0 else torch.zeros_like(x)
            case "slice":
                # A copy: a view would keep the whole tensor alive.
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
        """Whether anyone wants to know of collectives."""
        return self.log is not None

    def record(self, kind: str, axes: tuple[str, ...], phase: str, ring_bytes: float) -> None:
        """Append to :attr:`log`, if there is one."""
        if self.log is not None:
            self.log.append(Executed(kind, self.named(kind, axes), phase, ring_bytes))

    def named(self, kind: str, axes: tuple[str, ...]) -> tuple[str, ...]:
        """How a log names a group: a permute renumbers its axes, so their order says nothing."""
        return tuple(a for a in self.mesh if a in axes) if kind == "permute" else axes


def in_order_of(x: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """``moved`` with its dims in memory in the order of those of ``x``: a redistribution does not change it.

    Kernels follow that order, so another one would round otherwise than on one device.
    """
    if moved is x or x.is_sparse or x.is_contiguous():
        return moved
    strides = x.stride()
    order = sorted(range(x.ndim), key=lambda d: -strides[d])
    if order == list(range(x.ndim)) or not all(strides):
        return moved
    back = sorted(range(x.ndim), key=order.__getitem__)
    return moved.permute(order).contiguous().permute(back)


_bound = threading.local()


def current() -> Communicator:
    """The communicator bound in this thread."""
    comm: Communicator | None = getattr(_bound, "comm", None)
    if comm is None:
        raise RuntimeMismatchError(
            "no communicator is bound in this thread: run the rank module inside `with runtime.bind(comm):`"
        )
    return comm


class _Binding:
    def __init__(self, comm: Communicator) -> None:
        self.comm = comm

    def __enter__(self) -> Communicator:
        self.previous = getattr(_bound, "comm", None)
        _bound.comm = self.comm
        return self.comm

    def __exit__(self, *error: object) -> None:
        _bound.comm = self.previous


def bind(comm: Communicator) -> AbstractContextManager[Communicator]:
    """Let the collectives called in this thread run on ``comm``."""
    return _Binding(comm)


def device() -> torch.device:
    """Where new tensors of this rank go: the device of the bound communicator."""
    return current().device or torch.get_default_device()
