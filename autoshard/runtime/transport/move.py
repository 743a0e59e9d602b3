"""A move: one tensor from one placement to another along a group of mesh axes; its adjoint. The
gradient of ``X → Y`` is ``dual(Y) → dual(X)``, with ``dual``: S ↔ S, I ↔ I, R ↔ P. So the
backward of every move is a move."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from autoshard.runtime.transport.window import Exchange


class SegmentOrder(NamedTuple):
    """Rows of segments [a, b], reordered as the segments of the transpose."""

    lengths: Sequence[Sequence[int]]
    """of the segments, [a, b]"""
    numbers: tuple[Tensor, Tensor] | None
    """index of each row in the other order, both ways; None: few segments, concatenated instead"""

    def turned(self) -> SegmentOrder:
        return SegmentOrder([*zip(*self.lengths, strict=True)], self.numbers and self.numbers[::-1])

    def of(self, x: Tensor) -> Tensor:
        """Rows ``x`` in this order."""
        if self.numbers is not None:
            return x.index_select(0, self.numbers[0])
        columns = len(self.lengths[0])
        segments = x.split_with_sizes([n for row in self.lengths for n in row])
        return torch.cat([s for number in range(columns) for s in segments[number::columns]])


MAX_CONCATENATED_SEGMENTS = 64
"""segments up to which concatenation is faster than gathering rows by index"""


def transposed_segments(lengths: Sequence[Sequence[int]], device: torch.device) -> SegmentOrder:
    """The order of rows in segments of ``lengths`` [a, b] as segments of the transpose [b, a]."""
    columns, rows = len(lengths[0]), sum(map(sum, lengths))
    if columns * len(lengths) <= MAX_CONCATENATED_SEGMENTS:
        return SegmentOrder(lengths, None)
    starts = [0, *itertools.accumulate(itertools.chain.from_iterable(lengths))]
    turned = list(itertools.chain.from_iterable(zip(*lengths, strict=True)))
    places = [0, *itertools.accumulate(turned)]
    begins = (start for b in range(columns) for start in starts[b:-1:columns])
    ways = [start - place for start, place in zip(begins, places, strict=False)]  # source - target
    way, length = torch.tensor([ways, turned], device=device).unbind()
    numbers = torch.arange(rows, device=device)
    order = way.repeat_interleave(length, output_size=rows).add_(numbers)
    return SegmentOrder(lengths, (order, torch.empty_like(order).scatter_(0, order, numbers)))


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
"""(source, target) → function of ``autoshard.runtime`` that converts: a collective or local"""

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute")

DIRECT_SUM_BYTES = 1 << 16
"""bytes · ranks up to which more than two ranks of gloo send each other their summands"""

PAIR_EXCHANGE_BYTES = 1 << 22
"""bytes up to which two ranks of gloo send each other their summands"""

LOCAL = frozenset(CONVERSIONS.values()).difference(COLLECTIVES)
"""moves without communication"""

UNNAMED = "?"


def sums_directly(size: float, ranks: int) -> bool:
    """Whether ``ranks`` ranks of gloo send each other their summands of ``size`` bytes."""
    return size * ranks <= DIRECT_SUM_BYTES


def dual(source: str, target: str) -> tuple[str, str]:
    """(source, target) of the gradient's conversion."""
    return DUAL[target], DUAL[source]


def ring_volume(verb: str, ranks: int) -> int:
    """Elements that each rank sends in a ring algorithm, in units of chunk size / ``ranks``:
    2(n-1)/n of the full tensor in an all-reduce, one chunk in a permute, else n-1 chunks."""
    if verb == "all_reduce":
        return 2 * (ranks - 1)
    if verb == "permute":
        return ranks
    return (ranks - 1) * ranks if verb in COLLECTIVES else 0


class Splits(NamedTuple):
    """Rows that rank number ``me`` of a group sends to each rank, and receives from each."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    me: int
    before: SegmentOrder | None = None
    """order into which rows are put before sending; None: as they lie"""
    after: SegmentOrder | None = None
    """order into which received rows are put; None: as they arrive"""

    def backward(self) -> Splits:
        before, after = self.after and self.after.turned(), self.before and self.before.turned()
        return Splits(self.received, self.sent, self.me, before, after)

    def going(self, x: Tensor) -> Tensor:
        """Rows in the order of sending."""
        return x if self.before is None else self.before.of(x)

    def staying(self, x: Tensor) -> Tensor:
        """Received rows in their final order."""
        return x if self.after is None else self.after.of(x)


class Move(NamedTuple):
    """``source → target`` over the flattened group ``axes`` (first axis outermost).
    ``dim``: the sharded dim, ``size``: its global length. An all-to-all changes the sharded dim to
    ``to_dim`` of length ``to_size``. ``order`` makes it a permute: the same chunks, numbered along
    ``order``. ``exchange`` makes it a halo exchange: other intervals of ``dim`` than chunks.
    ``splits`` makes it an all-to-all of as many rows (dim 0)."""

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
    """module that it serves, in profiles and errors; :data:`UNNAMED` if none"""
    exchange: Exchange | None = None
    splits: Splits | None = None

    @property
    def verb(self) -> str:
        """What happens to the values: one of :data:`COLLECTIVES` or :data:`LOCAL`, or "halo"."""
        if self.exchange is not None:
            return "halo"
        return "permute" if self.order else CONVERSIONS[self.source, self.target]

    @property
    def kind(self) -> str:
        """Its name in logs, profiles and plans, where a halo is a permute."""
        return "permute" if self.exchange is not None else self.verb

    @property
    def key(self) -> Move:
        """What all ranks must agree on. Lengths may differ between groups of uneven shards."""
        between = None if self.exchange is None else Exchange((), ())
        splits = None if self.splits is None else Splits((), (), 0)
        return self._replace(size=-1, to_size=-1, module=UNNAMED, exchange=between, splits=splits)

    def backward(self) -> Move:
        """The adjoint: the move of the gradient."""
        if self.exchange is not None:
            return self._replace(exchange=self.exchange.backward())
        if self.splits is not None:
            return self._replace(splits=self.splits.backward())
        if self.order:
            return self._replace(axes=self.order, order=self.axes)
        if self.to_dim >= 0:
            return self._replace(dim=self.to_dim, size=self.to_size, to_dim=self.dim, to_size=self.size)
        return Move(*dual(self.source, self.target), self.axes, self.dim, self.size, module=self.module)

    def ring_bytes(self, x: Tensor, ranks: int) -> float:
        """Bytes each rank sends by a ring algorithm, for this rank's ``x`` in a group of ``ranks``.
        Uneven chunks count as the longest, as in the plan: all-gather and reduce-scatter pad to
        that, all-to-all and permute send no more. A halo counts the most that a rank receives;
        ``splits`` count exactly. Of a sparse gradient every other rank gets the rows and their
        numbers."""
        if x.is_sparse:
            return float((ranks - 1) * (x.coalesce().indices().nbytes + x.coalesce().values().nbytes))
        if self.splits is not None:
            elements = math.prod(x.shape[1:]) * (sum(self.splits.sent) - self.splits.sent[self.splits.me])
            return float(elements * x.element_size())
        if self.exchange is not None:
            return self._longest_bytes(x, ranks)
        return ring_volume(self.verb, ranks) * self._longest_bytes(x, ranks) / ranks

    def payload_bytes(self, x: Tensor, ranks: int, phase: str) -> float:
        """Bytes of the operand of an all-reduce, of an unsharded tensor otherwise, or of a received
        halo. Rows sent by ``splits`` count once, as results, whose gradients are sent in the
        backward."""
        if self.splits is not None:
            rows = sum(self.splits.received if phase == "forward" else self.splits.sent)
            return float(rows * math.prod(x.shape[1:]) * x.element_size())
        whole = self.dim >= 0 and self.verb not in ("halo", "permute")
        return float(self._longest_bytes(x, ranks) * (ranks if whole else 1))

    def _longest_bytes(self, x: Tensor, ranks: int) -> int:
        """Bytes of the longest chunk, of ``x`` if no dim is sharded, or of the longest halo."""
        shape = list(x.shape)
        if self.exchange is not None:
            shape[self.dim] = self.exchange.received
            return math.prod(shape) * x.element_size()
        for dim, size in ((self.dim, self.size), (self.to_dim, self.to_size)):
            if dim >= 0:
                shape[dim] = -(-size // ranks)
        return math.prod(shape) * x.element_size()

    def __str__(self) -> str:
        detail = f" of dim {self.dim}" if self.dim >= 0 else ""
        detail += f" to dim {self.to_dim}" if self.to_dim >= 0 else ""
        detail += f" ({self.op})" if self.op != "sum" else ""
        return f"{self.verb} {self.source} → {self.target}{detail} over {', '.join(self.axes)}"


def halo_piece(move: Move, sender: int, receiver: int, x: Tensor) -> Tensor:
    """The part of the sender's ``x`` that a halo sends to the receiver; both are group numbers."""
    assert move.exchange is not None
    start, length = move.exchange.piece(sender, receiver)
    return x.narrow(move.dim, start - move.exchange.held[sender][0] if length else 0, length)


def assemble_halo(move: Move, receiver: int, pieces: Sequence[Tensor]) -> Tensor:
    """A halo's result on the receiver: the pieces of all ranks, concatenated or summed."""
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
