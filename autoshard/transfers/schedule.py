"""The schedule of a transfer: who sends which box to whom, alike on every rank."""

from __future__ import annotations

import html
import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from autoshard.errors import PlanError
from autoshard.hardware import Hardware
from autoshard.passes.ir.text import show_bytes, show_seconds
from autoshard.plans.plan import Plan
from autoshard.transfers.files import open_folder
from autoshard.transfers.flow import Demand, choose_senders
from autoshard.transfers.holdings import (
    Box,
    FileGrid,
    Grid,
    Held,
    Holdings,
    Link,
    Replica,
    holdings_of_plan,
    sub_boxes,
)
from autoshard.transfers.names import Names, links_of

MOST_SHOWN_RANKS = 16
"""ranks up to which ``str()`` shows who sends what to whom"""


class Piece(NamedTuple):
    """A box of a target tensor that one rank sends another; equal ranks: already there."""

    sender: int
    receiver: int
    source: str
    target: str
    source_box: Box
    """(start, length) per dim of the source tensor"""
    target_box: Box
    dtype: torch.dtype
    """in which it is sent"""

    @property
    def nbytes(self) -> int:
        return math.prod(n for _, n in self.source_box) * self.dtype.itemsize


class Message(NamedTuple):
    """All that ``sender`` sends to ``receiver``, in bytes."""

    sender: int
    receiver: int
    bytes: int


class _Alike(NamedTuple):
    """Links between tensors of equal shapes, layouts and ranks: one problem, solved once."""

    links: list[Link]
    grid: Grid
    dtype: torch.dtype


class _Run(NamedTuple):
    """Boxes ``numbers`` of every link of ``alike``."""

    alike: _Alike
    numbers: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Who sends what to whom, so that each target rank gets the rest of its shard, each byte once.

    ``received`` and ``sent``: bytes by global rank. ``print()`` shows them, who sends to whom, and
    the predicted seconds.
    """

    source: Holdings = field(repr=False)
    target: Holdings = field(repr=False)
    hardware: Hardware = field(repr=False)
    messages: tuple[Message, ...]
    """one per pair of ranks, by sender and receiver"""
    least_most_sent: int
    """least possible bytes of the most-loaded sender"""
    _shares: Mapping[Demand, list[tuple[int, int]]] = field(repr=False)
    _runs: Mapping[Demand, list[_Run]] = field(repr=False)
    _kept: Sequence[tuple[int, _Run]] = field(repr=False)
    dtype_of: Callable[[Link], torch.dtype] = field(repr=False)
    """the dtype in which a link's tensor is sent"""

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All global ranks of both meshes."""
        return tuple(sorted({r for side in (self.source, self.target) for r in _ranks_of(side)}))

    @cached_property
    def received(self) -> dict[int, int]:
        """Bytes that each rank receives from others."""
        return self._sums(1)

    @cached_property
    def sent(self) -> dict[int, int]:
        """Bytes that each rank sends to others."""
        return self._sums(0)

    def _sums(self, side: int) -> dict[int, int]:
        found = dict.fromkeys(self.ranks, 0)
        for message in self.messages:
            found[message[side]] += message.bytes
        return found

    @property
    def most_sent(self) -> int:
        """Bytes of the most-loaded sender."""
        return max(self.sent.values(), default=0)

    @cached_property
    def bound(self) -> dict[int, int]:
        """Bytes of each rank's target shard that the rank does not hold already: none can receive fewer.

        Computed from the layouts of each rank, not from the schedule.
        """
        found, known = dict.fromkeys(self.ranks, 0), dict[object, dict[int, int]]()
        for links, source, target, dtype in _grouped(self.source, self.target, self._links, self.dtype_of):
            link = links[0]
            key = source.shape, source.replicas, target.shape, target.replicas, *link[2:]
            if key not in known:
                ranks = {r for replica in target.replicas for r in replica.ranks}
                known[key] = {r: _lacking(source, target, link, r) for r in ranks}
            for rank, elements in known[key].items():
                found[rank] += len(links) * elements * dtype.itemsize
        return found

    @property
    def _links(self) -> list[Link]:
        runs = itertools.chain((run for _, run in self._kept), *self._runs.values())
        found = {id(run.alike): run.alike.links for run in runs}
        return [link for links in found.values() for link in links]

    def pieces(self, rank: int) -> Iterator[Piece]:
        """The boxes that ``rank`` sends, receives or keeps, in the order of each pair's message."""
        for needer, run in self._kept:
            if needer == rank:
                yield from (_piece(rank, rank, run.alike, link, box) for link, box in _boxes(run))
        for demand, shares in self._shares.items():
            if demand.needer == rank or any(sender == rank for sender, _ in shares):
                yield from (p for p in _cut(demand, shares, self._runs[demand]) if rank in p[:2])

    @cached_property
    def seconds_by_level(self) -> dict[str, float]:
        """Predicted seconds of the busiest rank: "node" within nodes, "network" between them."""
        busy: dict[tuple[int, int, bool], int] = defaultdict(int)
        peers: dict[tuple[int, int, bool], int] = defaultdict(int)
        for message in (m for m in self.messages if m.sender >= 0):
            far = self._node(message.sender) != self._node(message.receiver)
            for side in (0, 1):
                busy[message[side], side, far] += message.bytes
                peers[message[side], side, far] += 1
        found = {}
        for name, far, link in (("node", False, self.hardware.node), ("network", True, self.hardware.network)):
            latency, per_byte = link.rate("permute", 2)
            each = (peers[key] * latency + n * per_byte for key, n in busy.items() if key[2] == far)
            found[name] = max(each, default=0.0)
        return found

    @property
    def seconds(self) -> float:
        """Predicted seconds; nodes and the network between them are used at the same time."""
        return max(self.seconds_by_level.values())

    @cached_property
    def _files(self) -> dict[int, str]:
        """Number → name of the files of the source."""
        grids = {r for held in self.source.values() for r in held.replicas if isinstance(r, FileGrid)}
        return {number: name for grid in grids for number, name in zip(grid.ranks, grid.files, strict=True)}

    def _node(self, rank: int) -> int:
        return rank // self.hardware.devices_per_node

    def __str__(self) -> str:
        total, pairs = sum(m.bytes for m in self.messages), len(self.messages)
        levels = ", ".join(f"{name} {show_seconds(s)}" for name, s in self.seconds_by_level.items() if s)
        senders, receivers = ({m[side] for m in self.messages} for side in (0, 1))
        kind, who = ("reads", "file") if self._files else ("messages", "rank")
        lines = [
            f"transfer: {show_bytes(total)} in {pairs} {kind}, {len(senders)} senders → {len(receivers)} receivers",
            f"most sent by a {who} {show_bytes(self.most_sent)} (least possible {show_bytes(self.least_most_sent)}), "
            f"most received {show_bytes(max(self.received.values(), default=0))}",
            f"predicted {show_seconds(self.seconds)}" + (f": {levels}" if levels else ""),
        ][: 2 if self._files else 3]
        if not pairs:
            lines[0] = "transfer: nothing to send, every rank holds its target shard already"
        elif len(senders | receivers) <= MOST_SHOWN_RANKS:
            lines += ["", *_matrix(self.messages, sorted(senders), sorted(receivers), self._files)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """For notebooks: the summary, and a matrix of senders (rows) and receivers (columns), darker for more bytes."""
        size = {m[:2]: m.bytes for m in self.messages}
        senders, receivers = (sorted({pair[side] for pair in size}) for side in (0, 1))
        text, _, _ = str(self).partition("\n\n")
        summary = f"<pre>{html.escape(text)}</pre>"
        if not size or len(senders) + len(receivers) > 8 * MOST_SHOWN_RANKS:  # a cell is smaller than a figure
            return summary
        head = "".join(f"<th>{rank}</th>" for rank in receivers)
        rows = [f"<tr><th>from \\ to</th>{head}</tr>"]
        for sender in senders:
            cells = [
                f'<td title="{show_bytes(n)}" style="background:rgba(37,99,235,{n / max(size.values()):.2f})"></td>'
                for n in (size.get((sender, r), 0) for r in receivers)
            ]
            rows.append(f"<tr><th>{html.escape(self._files.get(sender, str(sender)))}</th>{''.join(cells)}</tr>")
        return f"{summary}<table>{''.join(rows)}</table>"


def transfer_schedule(
    source: Plan | str | os.PathLike[str],
    target: Plan,
    *,
    names: Names = None,
    source_ranks: Sequence[int] | None = None,
    target_ranks: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Schedule:
    """The schedule that moves the weights of plan ``source`` into the layouts of plan ``target``.

    Args:
        source: a plan of the model, on any mesh; or a folder of weights (or a file), as :func:`autoshard.transfer` reads.
        target: a plan of the same model, on any mesh.
        names: as for :func:`autoshard.transfer`.
        source_ranks: the global rank of each rank of the source's mesh, by default 0, 1, …
        target_ranks: the same of the target's mesh. The two may be equal, overlap, or be disjoint.
        dtype: dtype on the wire; default: the smaller of the source's and the target's.

    Raises :class:`PlanError` for tensors that the source lacks, other shapes, or wrong ranks.
    """
    want = holdings_of_plan(target, target_ranks)
    have = holdings_of_plan(source, source_ranks) if isinstance(source, Plan) else open_folder(source, want).held
    machine = (source if isinstance(source, Plan) else target).mesh.hardware
    return make_schedule(have, want, links_of(have, want, names), machine, dtype)


def wire_dtype(source: torch.dtype, target: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    """The dtype in which a tensor is sent: ``asked`` if floating, else the smaller."""
    if asked is not None and source.is_floating_point and target.is_floating_point:
        return asked
    return source if source.itemsize < target.itemsize else target


def make_schedule(
    have: Holdings, want: Holdings, links: Sequence[Link], hardware: Hardware, dtype: torch.dtype | None = None
) -> Schedule:
    """The schedule of ``links``; see :func:`transfer_schedule`."""

    def dtype_of(link: Link) -> torch.dtype:
        stored = have[link.source]
        in_files = isinstance(stored.replicas[0], FileGrid)
        return stored.dtype if in_files else wire_dtype(stored.dtype, want[link.target].dtype, dtype)

    runs: dict[Demand, list[_Run]] = defaultdict(list)
    bytes_of: dict[Demand, int] = defaultdict(int)
    kept: list[tuple[int, _Run]] = []
    known: dict[tuple[int, ...], tuple[tuple[int, ...], frozenset[int]]] = {}
    for alike_links, source, target, wire in _grouped(have, want, links, dtype_of):
        if not math.prod(alike_links[0].shape):
            continue
        alike = _Alike(alike_links, Grid(source, target, alike_links[0]), wire)
        for holders, needers, numbers, elements in alike.grid.cells():
            if not holders and needers:
                raise PlanError(
                    f"no rank that is left holds all of {alike_links[0].source!r}: load the last checkpoint instead"
                )
            own, members = known.setdefault(holders, (holders, frozenset(holders)))
            run, size = _Run(alike, numbers), elements * len(alike_links) * wire.itemsize
            for needer in needers:
                if needer in members:
                    kept.append((needer, run))
                else:
                    demand = Demand(own, needer, wire.itemsize)
                    runs[demand].append(run)
                    bytes_of[demand] += size
    unit = math.gcd(*(d.size for d in bytes_of)) or 1
    shares, least = choose_senders(bytes_of, lambda rank: rank // hardware.devices_per_node, unit)
    pairs: dict[tuple[int, int], int] = defaultdict(int)
    for demand, row in shares.items():
        for sender, size in row:
            pairs[sender, demand.needer] += size
    messages = tuple(Message(*pair, size) for pair, size in sorted(pairs.items()))
    return Schedule(have, want, hardware, messages, least, shares, runs, kept, dtype_of)


def _grouped(
    have: Holdings, want: Holdings, links: Sequence[Link], dtype: Callable[[Link], torch.dtype]
) -> Iterator[tuple[list[Link], Held, Held, torch.dtype]]:
    """Links that pose the same problem, with the tensors of the first of them."""
    numbers: dict[object, int] = {}

    def number(held: Held) -> tuple[object, ...]:
        """Equal for equal replicas, and quick to compare."""
        return held.shape, *(numbers.setdefault(r, len(numbers)) for r in held.replicas)

    of_held = {id(h): number(h) for side in (have, want) for h in side.values()}
    found: dict[object, list[Link]] = {}
    for link in links:
        key = of_held[id(have[link.source])], of_held[id(want[link.target])], *link[2:], dtype(link)
        found.setdefault(key, []).append(link)
    for group in found.values():
        yield group, have[group[0].source], want[group[0].target], dtype(group[0])


def _boxes(run: _Run) -> Iterator[tuple[Link, Box]]:
    for link in run.alike.links:
        for number in run.numbers:
            yield link, run.alike.grid.box(number)


def _piece(sender: int, receiver: int, alike: _Alike, link: Link, box: Box) -> Piece:
    source, target = (
        tuple((start + at, n) for start, (at, n) in zip(begin, box, strict=True))
        for begin in (link.source_start, link.target_start)
    )
    return Piece(sender, receiver, link.source, link.target, source, target, alike.dtype)


def _cut(demand: Demand, shares: Sequence[tuple[int, int]], runs: Sequence[_Run]) -> Iterator[Piece]:
    """The boxes of a demand, divided among its senders."""
    queue = [(sender, size // demand.size) for sender, size in reversed(shares)]
    for run in runs:
        for link, box in _boxes(run):
            done, elements = 0, math.prod(n for _, n in box)
            while done < elements:
                sender, left = queue.pop()
                end = min(elements, done + left)
                for part in sub_boxes(box, done, end):
                    yield _piece(sender, demand.needer, run.alike, link, part)
                if end - done < left:
                    queue.append((sender, left - (end - done)))
                done = end


def _ranks_of(side: Holdings) -> set[int]:
    return {rank for ranks in {r.ranks for held in side.values() for r in held.replicas} for rank in ranks}


def _lacking(source: Held, target: Held, link: Link, rank: int) -> int:
    """Elements of the rank's part of the target region that its source part lacks."""
    own, there = target.on(rank), source.on(rank)
    if own is None:
        return 0
    needed, common = 1, 1
    for dim, size in enumerate(link.shape):
        spans = [_within(own, rank, target.shape, dim, link.target_start[dim], size)]
        if there is not None:
            spans.append(_within(there, rank, source.shape, dim, link.source_start[dim], size))
        needed *= sum(high - low for low, high in spans[0])
        both = ((max(a, c), min(b, d)) for a, b in spans[0] for c, d in spans[-1])
        common *= sum(max(0, high - low) for low, high in both)
    return needed if there is None else needed - common


def _within(
    replica: Replica, rank: int, shape: Sequence[int], dim: int, start: int, size: int
) -> list[tuple[int, int]]:
    chunks = replica.local_chunks(rank, shape)[dim]
    return [(max(s - start, 0), min(s + n - start, size)) for s, _, n in chunks if s < start + size and s + n > start]


def _matrix(
    messages: Sequence[Message], senders: Sequence[int], receivers: Sequence[int], files: Mapping[int, str]
) -> Iterator[str]:
    """Bytes from each sender (rows) to each receiver (columns)."""
    size = {m[:2]: show_bytes(m.bytes) for m in messages}
    rows = [["from \\ to", *map(str, receivers)]]
    rows += [[files.get(s, str(s)), *(size.get((s, r), "·") for r in receivers)] for s in senders]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
