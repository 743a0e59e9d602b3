"""Bucket: several tensors moved together, forward and backward, over any communicator.

A bucket has a *face* for every rank whose tensors it sees: one under torch.distributed, all of them
in-process. Tensors come and go as one list, face after face."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from autoshard.runtime.transport.communicator import Communicator
from autoshard.runtime.transport.move import Move

Tensors = tuple[torch.Tensor, ...]
Gradients = Sequence[torch.Tensor | None]
Begin = Callable[[], Any]


class Dtypes(NamedTuple):
    """Dtypes in which values and gradients are sent; None: their own."""

    forward: torch.dtype | None = None
    backward: torch.dtype | None = None
    """of gradients, which are also summed in it"""


PLAIN = Dtypes()


class Bucket(ABC):
    """``moves``: one per tensor and face, all of one verb; ``replicas``: HSDP's axes.

    ``listed``: the plan lists each member (parameters), so profiles state their number. ``dtypes``:
    mixed precision. ``deferred``: the sum over :attr:`awaited` may be left to a later backward."""

    def __init__(
        self,
        moves: Sequence[Move],
        replicas: tuple[str, ...] = (),
        listed: bool = False,
        dtypes: Dtypes = PLAIN,
        deferred: bool = False,
    ) -> None:
        self.moves, self.replicas, self.listed, self.dtypes = tuple(moves), replicas, listed, dtypes
        first = self.moves[0]
        self.awaited = replicas or (first.axes if first.verb == "enter" else ())
        """axes of the backward's last sum, which several backwards may share; () if none"""
        self.deferred = deferred and bool(self.awaited)

    @property
    @abstractmethod
    def home(self) -> Communicator:
        """A rank whose tensors it sees."""

    @property
    def last_move(self) -> Move:
        """The all-reduce of the reduced shards over the replicas."""
        return Move("P", "I", self.replicas, module=self.moves[0].module)

    @abstractmethod
    def forward(self, xs: Sequence[torch.Tensor], phase: str) -> list[torch.Tensor]:
        """Every tensor moved."""

    @abstractmethod
    def of(self, moves: Sequence[Move], dtype: torch.dtype | None = None) -> Bucket:
        """A bucket of other moves on the same ranks, in ``dtype``."""

    def duals(self, present: Sequence[int]) -> list[Bucket]:
        """Buckets that gradients of the tensors ``present`` go through in turn."""
        back = self.of([self.moves[i].backward() for i in present], self.dtypes.backward)
        return [back, self.of([self.last_move] * len(present))] if self.replicas else [back]

    @abstractmethod
    def backward(
        self, gradients: Gradients, earlier: Gradients = (), keeps: bool = False
    ) -> tuple[Sequence[torch.Tensor | None], list[Any], list[Begin]]:
        """(gradients, perhaps still under way; works to wait for; works to begin later).

        A gradient that is None on every rank stays None and is not communicated. ``keeps``: without
        the sum over :attr:`awaited`. ``earlier``: summands of earlier backwards to add, or None."""


def record(
    comm: Communicator, moves: Sequence[Move], xs: Sequence[torch.Tensor], phase: str, dtype: torch.dtype | None = None
) -> None:
    """Log one collective for several tensors. ``dtype``: in which they are sent; default: their
    own."""
    if not comm.logs:
        return
    axes = moves[0].axes
    size = comm.size_of(axes)
    each = ((m.ring_bytes(x, size), x.dtype.itemsize) for m, x in zip(moves, xs, strict=True))
    ring = sum(n if dtype is None else n / itemsize * dtype.itemsize for n, itemsize in each)
    comm.record(moves[0].kind, axes, phase, ring)


def by_dtype(xs: Sequence[torch.Tensor | None]) -> list[list[int]]:
    """Indices of tensors that are not None by dtype, in order of first appearance."""
    there = [i for i, x in enumerate(xs) if x is not None]
    if len({xs[i].dtype for i in there}) < 2:  # type: ignore[union-attr]
        return [there] if there else []
    groups: dict[torch.dtype, list[int]] = {}
    for i, x in enumerate(xs):
        if x is not None:
            groups.setdefault(x.dtype, []).append(i)
    return list(groups.values())


def each(moves: Sequence[Move], change: Callable[[Move], Move]) -> list[Move]:
    """``change`` of every move; equal moves are changed once."""
    if moves.count(moves[0]) == len(moves):
        return [change(moves[0])] * len(moves)
    known: dict[int, Move] = {}
    return [known.get(id(m)) or known.setdefault(id(m), change(m)) for m in moves]
