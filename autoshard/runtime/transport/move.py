"""A move: the conversion of one tensor from one placement to another along one group of mesh axes.

The table of the layout algebra in code, for what runs and for what is planned. Where a gradient flows, the gradient of
``X → Y`` is ``dual(Y) → dual(X)``, with ``dual``: S ↔ S, I ↔ I, R ↔ P. So the backward of every move is a move again, and
nothing else has to be known.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from autoshard.runtime.transport.segments import Order
from autoshard.runtime.transport.window import Exchange

DUAL = {"S": "S", "I": "I", "R": "P", "P": "R"}

CONVERSIONS = {
    ("I", "R"): "enter",
    ("R", "I"): "leave",
    ("P", "I"): "all_reduce",
    ("P", "R"): "all_reduce",
    ("P", "S"): "reduce_scatter",
    ("S", "I"): "all_gather",
    ("S", "R"): "all_gather",
    ("I", "S"): "slice",
    ("R", "S"): "slice",
    ("S", "P"): "pad",
    ("I", "P"): "partial",
    ("R", "P"): "partial",
    ("S", "S"): "all_to_all",
}
"""(source, target) → the function of ``autoshard.runtime`` that converts: one of the collectives, or a local one."""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")

DIRECT = 1 << 16
"""bytes that a rank sends, or gets, where more than two ranks of gloo send each other all of what they sum: of few numbers"""

EXCHANGED = 1 << 22
"""bytes up to which two ranks of gloo send each other what they sum"""

LOCAL = frozenset(CONVERSIONS.values()).difference(COLLECTIVES)
"""Functions that look at this rank's tensor only."""

UNNAMED = "?"


def is_few(size: float, ranks: int) -> bool:
    """Whether ``size`` bytes on each of so many ranks are few to sum."""
    return size * ranks <= DIRECT


def dual(source: str, target: str) -> tuple[str, str]:
    """The conversion of the gradient: (source, target)."""
    return DUAL[target], DUAL[source]


def ring_volume(verb: str, ranks: int) -> int:
    """What each of ``ranks`` puts on the wire, ring algorithm: in elements of the smaller chunk, times ``ranks``.

    All-reduce 2(n-1)/n of the whole; all-gather, reduce-scatter and all-to-all n-1 chunks; a permute one.
    """
    if verb == "all_reduce":
        return 2 * (ranks - 1)
    if verb == "permute":
        return ranks
    return (ranks - 1) * ranks if verb in COLLECTIVES else 0


class Splits(NamedTuple):
    """Rows that this rank, number ``me`` of its group, sends to each rank of the group, and receives from each."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    me: int
    before: Order | None = None
    """into which rows are put before they go; None: they go as they lie"""
    after: Order | None = None
    """into which they are put where they arrive; None: they stay as they come"""

    def backward(self) -> Splits:
        before, after = self.after and self.after.turned(), self.before and self.before.turned()
        return Splits(self.received, self.sent, self.me, before, after)

    def going(self, x: torch.Tensor) -> torch.Tensor:
        """Rows as they go."""
        return x if self.before is None else self.before.of(x)

    def staying(self, x: torch.Tensor) -> torch.Tensor:
        """Rows that came, as they stay."""
        return x if self.after is None else self.after.of(x)


class Move(NamedTuple):
    """``source → target`` over the flattened group ``axes`` (first axis outermost).

    ``dim`` is the sharded tensor dim and ``size`` its length before the cut. An all-to-all goes from a cut of ``dim``
    to a cut of ``to_dim`` (length ``to_size``). ``order`` makes it a permute: the same chunks, numbered along
    ``order`` afterwards. ``exchange`` makes it a halo: other intervals of ``dim`` than the chunks. ``splits`` makes it an
    all-to-all of as many rows (dim 0) as they say, in the order of the ranks, or in others of their own.
    """

    source: str
    target: str
    axes: tuple[str, ...]
    dim: int = -1
    size: int = -1
    to_dim: int = -1
    to_size: int = -1
    order: tuple[str, ...] = ()
    op: str = "sum"
    module: str = UNNAMED
    """what it is made for, in profiles and errors; :data:`UNNAMED` where none was running, or nobody has asked"""
    exchange: Exchange | None = None
    splits: Splits | None = None

    @property
    def verb(self) -> str:
        """What happens to the values: one of :data:`COLLECTIVES` or :data:`LOCAL`, or a halo."""
        if self.exchange is not None:
            return "halo"
        return "permute" if self.order else CONVERSIONS[self.source, self.target]

    @property
    def kind(self) -> str:
        """What logs, profiles and plans call it: neighbours that send each other a halo permute."""
        return "permute" if self.exchange is not None else self.verb

    @property
    def key(self) -> Move:
        """What every rank must agree on. Lengths may differ between groups, where other axes cut unevenly."""
        between = None if self.exchange is None else Exchange((), ())
        splits = None if self.splits is None else Splits((), (), 0)
        return self._replace(size=-1, to_size=-1, module=UNNAMED, exchange=between, splits=splits)

    def backward(self) -> Move:
        """The move of the gradient."""
        if self.exchange is not None:
            return self._replace(exchange=self.exchange.backward())
        if self.splits is not None:
            return self._replace(splits=self.splits.backward())
        if self.order:
            return self._replace(axes=self.order, order=self.axes)
        if self.to_dim >= 0:
            return self._replace(dim=self.to_dim, size=self.to_size, to_dim=self.dim, to_size=self.size)
        return Move(*dual(self.source, self.target), self.axes, self.dim, self.size, module=self.module)

    def ring_bytes(self, x: torch.Tensor, ranks: int) -> float:
        """Bytes on the wire per rank, ring algorithm, for this rank's input ``x`` in a group of ``ranks``.

        Chunks that differ in length all count as the longest, as in the plan. That is what is sent by an all-gather and
        a reduce-scatter, which pad; an all-to-all and a permute send no more than that. A halo counts what the rank
        gets that gets most; rows that are sent by ``splits`` count as they are. Of a sparse gradient every other rank gets
        this rank's rows and their numbers, whatever the move.
        """
        if x.is_sparse:
            return float((ranks - 1) * (x.coalesce().indices().nbytes + x.coalesce().values().nbytes))
        if self.splits is not None:
            elements = math.prod(x.shape[1:]) * (sum(self.splits.sent) - self.splits.sent[self.splits.me])
            return float(elements * x.element_size())
        if self.exchange is not None:
            return (
                math.prod(n for d, n in enumerate(x.shape) if d != self.dim) * self.exchange.received * x.element_size()
            )
        shape = list(x.shape)
        for dim, size in ((self.dim, self.size), (self.to_dim, self.to_size)):
            if dim >= 0:
                shape[dim] = -(-size // ranks)
        return ring_volume(self.verb, ranks) * math.prod(shape) * x.element_size() / ranks

    def __str__(self) -> str:
        detail = f" of dim {self.dim}" if self.dim >= 0 else ""
        detail += f" to dim {self.to_dim}" if self.to_dim >= 0 else ""
        detail += f" ({self.op})" if self.op != "sum" else ""
        return f"{self.verb} {self.source} → {self.target}{detail} over {', '.join(self.axes)}"


def piece(move: Move, sender: int, receiver: int, x: torch.Tensor) -> torch.Tensor:
    """A halo's part of the sender's ``x`` that goes to the receiver; both by number in the group."""
    assert move.exchange is not None
    start, length = move.exchange.piece(sender, receiver)
    return x.narrow(move.dim, start - move.exchange.held[sender][0] if length else 0, length)


def together(move: Move, receiver: int, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """What a halo gives the receiver, from the pieces of all ranks of the group: one after another, or summed."""
    assert move.exchange is not None
    first, count = move.exchange.wanted[receiver]
    spots = [move.exchange.piece(k, receiver) for k in range(len(pieces))]
    parts = [(start - first, x) for (start, length), x in zip(spots, pieces, strict=True) if length]
    ends = [start + x.shape[move.dim] for start, x in parts]
    if parts and [start for start, _ in parts] + [count] == [0, *ends]:
        return torch.cat([x for _, x in parts], move.dim)
    shape = [count if d == move.dim else n for d, n in enumerate(pieces[0].shape)]
    out = pieces[0].new_zeros(shape)
    for start, x in parts:
        out.narrow(move.dim, start, x.shape[move.dim]).add_(x)
    return out
