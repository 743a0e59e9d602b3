"""Parts of a simulated step that run again in the backward."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.passes.ir.program import Statement, reads
from autoshard.passes.lower.blocks import Segment


@dataclass(frozen=True)
class Replayed:
    """A statement of a part as it ran in the forward."""

    statement: Statement
    new: tuple[int, ...]
    """storages that it made"""
    outputs: Mapping[str, int]
    """its locals → storages"""
    peak: int
    """most bytes of new tensors at once while it runs"""


@dataclass
class Part:
    """Statements that run again together."""

    reads: Collection[str]
    """locals from outside"""
    inner: Collection[str]
    """locals that nobody reads outside"""
    sums: float = 0.0
    """bytes of what its operations sum for themselves over ranks, which is kept"""
    inputs: tuple[int, ...] = ()
    """storages of ``reads``, other than those of parameters and buffers"""
    ran: list[Replayed] = field(default_factory=list)

    @classmethod
    def of(cls, statements: Sequence[Statement], segment: Segment) -> Part:
        """``segment``: that the part is in."""
        made = {o for s in statements for o in s.outputs}
        number = statements[0].again
        outside = {n for s in segment.statements if s.again != number for n in reads(s)}
        read = dict.fromkeys(n for s in statements for n in reads(s) if n not in made)
        sums = sum(c.bytes for s in statements for part in s.parts for c in part.internal if c.kept)
        return cls(read, made - outside - set(segment.outputs), sums)
