"""What the simulation of memory counts: storages, and groups of them that the backward brings back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.passes.ir.program import Statement, reads
from autoshard.passes.lower.blocks import Segment


@dataclass
class Heap:
    """Storages, their reference counts, and the bytes alive at any time."""

    sizes: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    """references by locals, gradients and the caller"""
    saved: list[int] = field(default_factory=list)
    """references by tensors that autograd saves"""
    alive: float = 0.0
    kept: float = 0.0

    def new(self, size: int) -> int:
        """A new storage without references."""
        for column, value in ((self.sizes, size), (self.held, 0), (self.saved, 0)):
            column.append(value)
        return len(self.sizes) - 1

    def hold(self, storage: int, by: int = 1) -> None:
        before = self.held[storage] + self.saved[storage]
        self.held[storage] += by
        self._changed(storage, before)

    def save(self, storage: int, by: int = 1) -> None:
        before, was = self.held[storage] + self.saved[storage], self.saved[storage]
        self.saved[storage] += by
        self.kept += self.sizes[storage] * ((self.saved[storage] > 0) - (was > 0))
        self._changed(storage, before)

    def _changed(self, storage: int, before: int) -> None:
        self.alive += self.sizes[storage] * ((self.held[storage] + self.saved[storage] > 0) - (before > 0))


@dataclass(frozen=True)
class ReplayedStatement:
    """A statement of a recomputed part, as recorded in the forward."""

    statement: Statement
    new: tuple[int, ...]
    """storages that it made"""
    outputs: Mapping[str, int]
    """its locals → storages"""
    peak: int
    """most bytes of new tensors at once during the statement"""


@dataclass
class ReplayedPart:
    """Statements that the backward recomputes together."""

    reads: Collection[str]
    """locals from outside"""
    inner: Collection[str]
    """locals without readers outside"""
    sums: float = 0.0
    """bytes of internal sums over ranks, which are saved instead of repeated"""
    inputs: tuple[int, ...] = ()
    """storages of ``reads``, without those of parameters and buffers"""
    counted: tuple[int, ...] = ()
    """those of ``inputs`` that the part uses once more, to run again"""
    ran: list[ReplayedStatement] = field(default_factory=list)

    @classmethod
    def of(cls, statements: Sequence[Statement], segment: Segment) -> ReplayedPart:
        """``segment``: the block's run that contains the part."""
        made = {o for s in statements for o in s.outputs}
        number = statements[0].again
        outside = {n for s in segment.statements if s.again != number for n in reads(s)}
        read = dict.fromkeys(n for s in statements for n in reads(s) if n not in made)
        sums = sum(c.bytes for s in statements for part in s.parts for c in part.internal if c.kept)
        return cls(read, made - outside - set(segment.outputs), sums)


@dataclass
class OffloadedSaves:
    """What a block saves for the backward, and its place in the model."""

    path: str = ""
    storages: list[int] = field(default_factory=list)
    awaited: bool = True
    """whether the backward has not reached it"""
