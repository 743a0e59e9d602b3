"""Messages of one rank: boxes packed into one flat buffer per round, and unpacked."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from autoshard.runtime.transport.peers import FailureNotes, wait
from autoshard.transfers.holdings import sub_boxes
from autoshard.transfers.schedule import Piece, Schedule

Tensors = Mapping[str, Any]
"""tensors, or :class:`~autoshard.transfers.files.FileTensor`, by name"""

_ALIGNMENT = 16
"""bytes: each message of a round begins at a multiple, so that every dtype can be read there"""


class Part(NamedTuple):
    """A box of a local tensor in a message."""

    name: str
    at: tuple[slice, ...]
    dtype: torch.dtype
    """on the wire"""
    nbytes: int


@dataclass(frozen=True)
class RankMessages:
    """What one rank sends, receives and keeps; the same rounds on all ranks."""

    kept: list[tuple[Part, Part]]
    """(of the source, or of files, and of the target), at most ``buffer`` bytes each"""
    sends: list[dict[int, list[Part]]]
    """per round: receiver → boxes of the source"""
    receives: list[dict[int, list[Part]]]
    """per round: sender → boxes of the target"""

    @staticmethod
    def of(schedule: Schedule, rank: int, buffer: int) -> RankMessages:
        """The messages of global ``rank``: each pair's in equal parts within ``buffer`` bytes."""
        busy = Counter[int]()
        for message in schedule.messages:
            if message.sender >= 0:  # files are read when messages are done
                busy.update({message.sender: message.bytes, message.receiver: message.bytes})
        rounds = -(
            -2 * max(busy.values(), default=0) // buffer
        )  # two rounds are in memory: one under way, one being packed
        pairs: dict[tuple[int, int], list[Piece]] = {}
        for piece in schedule.pieces(rank):
            pairs.setdefault(piece[:2], []).append(piece)
        found = RankMessages([], [{} for _ in range(rounds)], [{} for _ in range(rounds)])
        for (sender, receiver), pieces in sorted(pairs.items()):
            if sender == receiver or sender < 0:
                for whole in pieces:
                    for p in itertools.chain(*_in_rounds([whole], -(-whole.nbytes // buffer))):
                        found.kept.append((_part(schedule, p, True), _part(schedule, p, False)))
                continue
            ordered = sorted(pieces, key=lambda p: -p.dtype.itemsize)  # stays aligned
            for number, part in enumerate(_in_rounds(ordered, rounds)):
                if part and sender == rank:
                    found.sends[number][receiver] = [_part(schedule, p, True) for p in part]
                elif part:
                    found.receives[number][sender] = [_part(schedule, p, False) for p in part]
        return found

    def write(self, source: Tensors, arrived: Iterable[torch.Tensor], target: Tensors) -> None:
        """Write what has arrived, by round, and what was there already, into the target."""
        for mine, new in self.kept:
            target[new.name][new.at].copy_(source[mine.name][mine.at].to(mine.dtype))
        for flat, receives in zip(arrived, self.receives, strict=True):
            for view, part in _views(flat, receives):
                target[part.name][part.at].copy_(view)


def _part(schedule: Schedule, piece: Piece, sent: bool) -> Part:
    side, name, box, rank = (
        (schedule.source, piece.source, piece.source_box, piece.sender)
        if sent
        else (schedule.target, piece.target, piece.target_box, piece.receiver)
    )
    replica = side[name].on(rank)
    assert replica is not None
    return Part(name, replica.local(rank, side[name].shape, box), piece.dtype, piece.nbytes)


def _in_rounds(pieces: Sequence[Piece], rounds: int) -> Iterator[list[Piece]]:
    """A message in parts of equal bytes, up to one element."""
    total, at, waiting = sum(p.nbytes for p in pieces), 0, list(reversed(pieces))
    for number in range(rounds):
        end, part = (number + 1) * total // rounds, list[Piece]()
        while waiting and at < end:
            piece = waiting.pop()
            size, elements = piece.dtype.itemsize, math.prod(n for _, n in piece.source_box)
            taken = min(elements, -(-(end - at) // size))
            if taken == elements:
                part.append(piece)
            else:
                part += _range(piece, 0, taken)
                waiting += reversed([*_range(piece, taken, elements)])
            at += taken * size
        yield part


def _range(piece: Piece, begin: int, end: int) -> Iterator[Piece]:
    boxes = (sub_boxes(box, begin, end) for box in (piece.source_box, piece.target_box))
    for source, target in zip(*boxes, strict=True):
        yield piece._replace(source_box=source, target_box=target)


class _Round(NamedTuple):
    """A round under way."""

    works: list[Any]
    arrived: torch.Tensor
    out: torch.Tensor


class Exchange:
    """Runs the rounds of :class:`RankMessages` on a process group of all ranks."""

    def __init__(self, group: dist.ProcessGroup, notes: FailureNotes, device: torch.device) -> None:
        self.group, self.notes, self.device = group, notes, device
        self.gloo = dist.get_backend(group) == "gloo"

    def run(self, messages: RankMessages, source: Tensors) -> Iterator[torch.Tensor]:
        """Send from ``source``; gives what arrives, by round, packed while the last is under way.
        Raises :class:`CommunicationError` if another rank fails or is gone."""
        under_way: _Round | None = None
        for sends, receives in zip(messages.sends, messages.receives, strict=True):
            out = self._packed(sends, source)
            yield from self._finished(under_way)
            under_way = self._begin(out, sends, receives)
        yield from self._finished(under_way)

    def _packed(self, sends: Mapping[int, Sequence[Part]], source: Tensors) -> torch.Tensor:
        out = torch.empty(sum(map(_padded, sends.values())), dtype=torch.uint8, device=self.device)
        for view, part in _views(out, sends):
            view.copy_(source[part.name][part.at])
        return out

    def _begin(
        self, out: torch.Tensor, sends: Mapping[int, Sequence[Part]], receives: Mapping[int, Sequence[Part]]
    ) -> _Round:
        arrived = torch.empty(sum(map(_padded, receives.values())), dtype=torch.uint8, device=self.device)
        if self.gloo:  # waiting for a single message with a time limit would end gloo's connection
            ranks = range(dist.get_world_size(self.group))
            gets, gives = ([_padded(side.get(r, ())) for r in ranks] for side in (receives, sends))
            work = dist.all_to_all_single(arrived, out, gets, gives, self.group, True)
            return _Round([work], arrived, out)
        steps = [
            dist.P2POp(do, piece, rank, self.group)
            for do, flat, side in ((dist.isend, out, sends), (dist.irecv, arrived, receives))
            for rank, piece in zip(sorted(side), flat.split([_padded(side[r]) for r in sorted(side)]), strict=True)
        ]
        return _Round(dist.batch_isend_irecv(steps) if steps else [], arrived, out)

    def _finished(self, begun: _Round | None) -> list[torch.Tensor]:
        for work in () if begun is None else begun.works:
            if self.gloo:
                wait(work, self.notes, lambda: "a transfer of weights")
            else:
                work.wait()
        return [] if begun is None else [begun.arrived]


def _padded(parts: Sequence[Part]) -> int:
    return -(-sum(p.nbytes for p in parts) // _ALIGNMENT) * _ALIGNMENT


def _views(flat: torch.Tensor, sides: Mapping[int, Sequence[Part]]) -> Iterator[tuple[torch.Tensor, Part]]:
    """A view of the flat buffer for each box, in the order of ranks."""
    begin = 0
    for rank in sorted(sides):
        at = begin
        for part in sides[rank]:
            shape = [s.stop - s.start for s in part.at]
            yield flat[at : at + part.nbytes].view(part.dtype).view(shape), part
            at += part.nbytes
        begin += _padded(sides[rank])
