"""Which box of which tensor each rank holds, and the cells in which two layouts overlap."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from autoshard.errors import PlanError
from autoshard.layout import Layout
from autoshard.report.record import Record

Numbers = np.ndarray[Any, np.dtype[np.int64]]
Box = tuple[tuple[int, int], ...]
"""(start, length) per tensor dim"""


@dataclass(frozen=True)
class Replica:
    """A complete copy of a tensor: its layout, and the global rank of each of its ranks."""

    layout: Layout
    ranks: tuple[int, ...]

    @cached_property
    def positions(self) -> dict[int, int]:
        """Global rank → rank on the layout's mesh."""
        return {rank: at for at, rank in enumerate(self.ranks)}

    @cached_property
    def free(self) -> tuple[int, ...]:
        """Offsets on the mesh of the ranks that hold the same box: those along replicated axes."""
        mesh = self.layout.mesh
        fixed = {*self.layout.owner, *(a for d in self._dims for a in self.layout.cutting(d))}
        steps = [range(1 if a in fixed else n) for a, n in zip(mesh.axes, mesh.shape, strict=True)]
        return tuple(mesh.rank(at) for at in itertools.product(*steps))

    @property
    def _dims(self) -> set[int]:
        return {p.dim for p in self.layout.placements if hasattr(p, "dim")}

    def spans(self, dim: int, size: int) -> list[tuple[int, int, int]]:
        """(start, length, offset on the mesh) of all chunks of a tensor dim of one replica."""
        mesh, found = self.layout.mesh, []
        axes = self.layout.cutting(dim)
        owner = sum(self._step(a, n) for a, n in self.layout.owner.items())
        for at in itertools.product(*(range(mesh.size_of(a)) for a in axes)):
            offset = sum(map(self._step, axes, at))
            chunks = self.layout.chunks_of(dim, size, offset + owner)
            found += [(start, length, offset + owner * (dim == 0)) for start, length in chunks if length]
        return found

    def _step(self, axis: str, coordinate: int) -> int:
        at = self.layout.mesh.index(axis)
        return coordinate * math.prod(self.layout.mesh.shape[at + 1 :])

    def local_chunks(self, rank: int, shape: Sequence[int]) -> list[list[tuple[int, int, int]]]:
        """Per dim (start in the tensor, in the shard, length) of each chunk of global ``rank``."""
        found = []
        for dim, size in enumerate(shape):
            chunks = self.layout.chunks_of(dim, size, self.positions[rank])
            begins = itertools.accumulate((n for _, n in chunks), initial=0)
            found.append([(start, begin, n) for (start, n), begin in zip(chunks, begins, strict=False)])
        return found

    def local(self, rank: int, shape: Sequence[int], box: Box) -> tuple[slice, ...]:
        """Where ``box`` of the tensor lies in the shard of global ``rank``."""
        found = []
        for (start, n), chunks in zip(box, self.local_chunks(rank, shape), strict=True):
            begin = next(start - s + at for s, at, length in chunks if s <= start and start + n <= s + length)
            found.append(slice(begin, begin + n))
        return tuple(found)

    def holds(self, rank: int) -> bool:
        """Whether global ``rank`` is on the mesh and holds rows: not if another owns the table."""
        mesh, at = self.layout.mesh, self.positions.get(rank)
        return at is not None and all(mesh.index_along(at, a) == n for a, n in self.layout.owner.items())


GONE = -1
"""in place of the rank of a process that ended"""


@dataclass(frozen=True)
class Held:
    """A tensor on ranks: its global shape, dtype and replicas (several on several stages)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    replicas: tuple[Replica, ...]

    def on(self, rank: int) -> Replica | None:
        """The replica of which global ``rank`` holds a part."""
        return next((r for r in self.replicas if r.holds(rank)), None)


@dataclass(frozen=True)
class FileGrid(Replica):
    """A tensor in files: a grid of chunks. ``ranks``: files' numbers -2, -3, … by chunk."""

    borders: tuple[tuple[int, ...], ...]
    """per dim where chunks begin, and where the last ends"""
    files: tuple[str, ...]
    """name of the file of each chunk"""

    @property
    def free(self) -> tuple[int, ...]:
        """Each chunk is in one file."""
        return (0,)

    def spans(self, dim: int, size: int) -> list[tuple[int, int, int]]:
        """See :meth:`Replica.spans`; offsets are numbers of chunks."""
        step = math.prod(len(b) - 1 for b in self.borders[dim + 1 :])
        return [(s, e - s, n * step) for n, (s, e) in enumerate(itertools.pairwise(self.borders[dim]))]

    def local(self, rank: int, shape: Sequence[int], box: Box) -> tuple[slice, ...]:
        """The box itself: readers find its chunk."""
        return tuple(slice(start, start + n) for start, n in box)


Holdings = Mapping[str, Held]


def renumbered(have: Holdings, ranks: Mapping[int, int]) -> dict[str, Held]:
    """The same with other numbers of ranks; those that ``ranks`` lacks are gone."""
    known: dict[int, Held] = {}
    replicas: dict[int, Replica] = {}
    for held in have.values():
        for r in held.replicas:
            if id(r) not in replicas:
                replicas[id(r)] = replace(r, ranks=tuple(ranks.get(rank, GONE) for rank in r.ranks))
        known[id(held)] = replace(held, replicas=tuple(replicas[id(r)] for r in held.replicas))
    return {name: known[id(held)] for name, held in have.items()}  # tied tensors stay one object


class Link(NamedTuple):
    """A region of a target tensor, and the equal region of a source tensor that it receives."""

    source: str
    target: str
    source_start: tuple[int, ...]
    target_start: tuple[int, ...]
    shape: tuple[int, ...]


def holdings_of_plan(plan: Record, ranks: Sequence[int] | None = None) -> dict[str, Held]:
    """Parameters and buffers by name, and who holds them; ``ranks``: the global rank of each rank
    of the plan. Raises :class:`PlanError` for another number of ranks, or a rank twice."""
    own = tuple(range(plan.mesh.size)) if ranks is None else tuple(ranks)
    if len(own) != plan.mesh.size or len(set(own)) != len(own):
        raise PlanError(
            f"the plan's mesh ({plan.mesh}) has {plan.mesh.size} ranks, but {len(own)} ranks are given "
            f"({len(set(own))} different). Give the global rank of each rank of the mesh, once"
        )
    if plan.staged is None:
        return _named(plan, [(plan, own)])
    stages = np.moveaxis(np.array(own).reshape(plan.mesh.shape), plan.mesh.index(plan.staged.axis), 0)
    rows = [tuple(row) for row in stages.reshape(len(stages), -1).tolist()]
    return _named(plan, [(part, rows[n % len(rows)]) for n, part in enumerate(plan.staged.plans)])


def _named(plan: Record, parts: Sequence[tuple[Record, tuple[int, ...]]]) -> dict[str, Held]:
    found: dict[str, Held] = {}
    for part, ranks in parts:
        for name, layout in part.layouts.items():
            if part.kinds.get(name) in ("parameter", "buffer") and name not in part.ties:
                before = found[name].replicas if name in found else ()
                if all(r.ranks != ranks for r in before):
                    dtype = getattr(torch, part.dtypes[name])
                    found[name] = Held(tuple(part.shapes[name]), dtype, (*before, Replica(layout, ranks)))
    ties = {alias: name for part, _ in parts for alias, name in part.ties.items()} | dict(plan.ties)
    return found | {alias: found[name] for alias, name in ties.items() if name in found and alias not in found}


class Cells(NamedTuple):
    """Boxes of one link that have the same holders and the same needers."""

    holders: tuple[int, ...]
    needers: tuple[int, ...]
    numbers: tuple[int, ...]
    """of the boxes in :class:`Grid`"""
    elements: int
    """of all these boxes"""


class Grid:
    """Overlaps of the source's and the target's chunks along each dim of a link: boxes."""

    def __init__(self, source: Held, target: Held, link: Link) -> None:
        self.cuts: list[list[int]] = []
        """per dim the borders of the boxes, in the link's coordinates"""
        sides = [
            (r, held.shape, start)
            for held, start in ((source, link.source_start), (target, link.target_start))
            for r in held.replicas
        ]
        self._parts, self._sources = [r for r, _, _ in sides], len(source.replicas)
        offsets: list[list[Numbers]] = []
        for dim, size in enumerate(link.shape):
            spans = [_clipped(r.spans(dim, shape[dim]), start[dim], size) for r, shape, start in sides]
            edges = sorted({0, size}.union(*({s, s + n} for each in spans for s, n, _ in each)))
            self.cuts.append(edges)
            offsets.append([_offset_by_interval(each, edges) for each in spans])
        self.shape = tuple(len(c) - 1 for c in self.cuts)
        self._bases = [self._base(r, [of_dim[i] for of_dim in offsets]) for i, r in enumerate(self._parts)]

    def _base(self, part: Replica, offsets: list[Numbers]) -> Numbers:
        base = np.zeros(self.shape, dtype=np.int64)
        for dim, each in enumerate(offsets):
            base += each.reshape([-1 if d == dim else 1 for d in range(len(self.shape))])
        return base.reshape(-1)

    def cells(self) -> Iterator[Cells]:
        """All boxes, grouped by who holds and who needs them, in the order of their first."""
        sizes = np.ones(self.shape, dtype=np.int64)
        for dim, edges in enumerate(self.cuts):
            sizes *= np.diff(edges).reshape([-1 if d == dim else 1 for d in range(len(self.shape))])
        rows = np.stack(self._bases, axis=1)
        keys, inverse = np.unique(rows, axis=0, return_inverse=True)
        inverse = inverse.reshape(-1)
        order = np.argsort(inverse, kind="stable")
        bounds = np.searchsorted(inverse[order], np.arange(len(keys) + 1))
        volume = np.bincount(inverse, weights=sizes.reshape(-1), minlength=len(keys))
        for n, key in enumerate(keys.tolist()):
            who = [tuple(r.ranks[at + f] for f in r.free) for r, at in zip(self._parts, key, strict=True)]
            numbers = tuple(order[bounds[n] : bounds[n + 1]].tolist())
            holders, needers = _merged(who[: self._sources]), _merged(who[self._sources :])
            if GONE in holders:
                holders = tuple(rank for rank in holders if rank != GONE)
            yield Cells(holders, needers, numbers, int(volume[n]))

    def box(self, number: int) -> Box:
        """Box ``number``, in the link's coordinates."""
        found = []
        for n, edges in zip(reversed(self.shape), reversed(self.cuts), strict=True):
            number, at = divmod(number, n)
            found.append((edges[at], edges[at + 1] - edges[at]))
        return tuple(reversed(found))


def _merged(groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    return groups[0] if len(groups) == 1 else tuple(dict.fromkeys(itertools.chain(*groups)))


def _clipped(spans: Iterable[tuple[int, int, int]], start: int, size: int) -> list[tuple[int, int, int]]:
    """The parts of ``spans`` within ``size`` elements from ``start``, counted from there."""
    found = []
    for s, n, offset in spans:
        low, high = max(s - start, 0), min(s + n - start, size)
        if low < high:
            found.append((low, high - low, offset))
    return found


def _offset_by_interval(spans: Sequence[tuple[int, int, int]], edges: Sequence[int]) -> Numbers:
    ordered = sorted(spans)
    at = np.searchsorted([s for s, _, _ in ordered], np.array(edges[:-1]), side="right") - 1
    offsets: Numbers = np.array([o for _, _, o in ordered], dtype=np.int64)[at]
    return offsets


def sub_boxes(box: Box, begin: int, end: int) -> Iterator[Box]:
    """Boxes that make up elements ``begin`` to ``end`` (row-major) of ``box``, in order."""
    if begin >= end:
        return
    if not box or (begin == 0 and end == math.prod(n for _, n in box)):
        yield box
        return
    (start, _), inner = box[0], box[1:]
    row = math.prod(n for _, n in inner)
    first, last = -(-begin // row), end // row
    if first > last:  # within one row
        at = begin // row
        yield from (((start + at, 1), *part) for part in sub_boxes(inner, begin - at * row, end - at * row))
        return
    if begin < first * row:
        rest = sub_boxes(inner, begin - (first - 1) * row, row)
        yield from (((start + first - 1, 1), *part) for part in rest)
    if first < last:
        yield ((start + first, last - first), *inner)
    if last * row < end:
        yield from (((start + last, 1), *part) for part in sub_boxes(inner, 0, end - last * row))
