"""Parts of a simulated step that the backward recomputes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.passes.ir.program import Statement, reads
from autoshard.passes.lower.blocks import Segment


@dataclass(frozen=True)
class Replayed:
    """A statement of a recomputed part, as recorded in the forward."""

    statement: Statement
    new: tuple[int, ...]
    """storages that it made"""
    outputs: Mapping[str, int]
    """its locals → storages"""
    peak: int
    """most bytes of new tensors at once during the statement"""


@dataclass
class Part:
    """Statements that the backward recomputes together."""

    reads: Collection[str]
    """locals from outside"""
    inner: Collection[str]
    """locals without readers outside"""
    sums: float = 0.0
    """bytes of internal sums over ranks, which are saved instead of repeated"""
    inputs: tuple[int, ...] = ()
    """storages of ``reads``, without those of parameters and buffers"""
    ran: list[Replayed] = field(default_factory=list)

    @classmethod
    def of(cls, statements: Sequence[Statement], segment: Segment) -> Part:
        """``segment``: the block's run that contains the part."""
        made = {o for s in statements for o in s.outputs}
        number = statements[0].again
        outside = {n for s in segment.statements if s.again != number for n in reads(s)}
        read = dict.fromkeys(n for s in statements for n in reads(s) if n not in made)
        sums = sum(c.bytes for s in statements for part in s.parts for c in part.internal if c.kept)
        return cls(read, made - outside - set(segment.outputs), sums)
