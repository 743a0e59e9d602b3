"""Attention over keys and values all-gathered in head chunks (or batch chunks of one head).
Queries, keys and values are sharded along the sequence, and queries stay. Keys and values of one
head chunk are gathered from all ranks and meet the query heads that share them, while the next
chunk is gathered. Then they are freed. The backward gathers each chunk once more. It
reduce-scatters the gradients of a chunk, in float32 or wider, while the next is computed. At most
two chunks of the full sequence are in memory; only shards are saved."""

from __future__ import annotations

import itertools
import math
from collections.abc import Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.attention import tile
from autoshard.runtime.attention.ring_geometry import RingStep
from autoshard.runtime.attention.ring_task import (
    GradientSum,
    MergedRows,
    RingTask,
    empty_sequence,
    masked_tiles,
    sink_scores,
    sinks_gradient,
    step_gradients,
)
from autoshard.runtime.attention.zigzag import zigzag_reordered
from autoshard.runtime.transport.rank_coroutines import Arrival, Collective, RankCoroutine, Sending, Tensors
from autoshard.runtime.transport.window import Chunks, Interval, chunks

ALL_AT_ONCE = RingStep()
"""the only stop: all keys of a chunk are here at once"""
QUERIES, KEYS, VALUES = range(3)

HeadChunk = tuple[Interval, Chunks]
"""interval of the batch, and intervals of heads of queries, keys and values"""


def heads_per_chunk(counts: Sequence[int], pieces: int) -> tuple[Chunks, ...]:
    """Head intervals of every chunk for each operand; ``counts``: heads of the operands."""
    units = max(1, math.gcd(*counts))
    return tuple(
        tuple((start * n // units, length * n // units) for n in counts) for start, length in chunks(units, (pieces,))
    )


def head_chunk_boxes(batch: int, counts: Sequence[int], batches: int, pieces: int) -> tuple[HeadChunk, ...]:
    """Every chunk: :func:`heads_per_chunk`, for each of ``batches`` parts of the batch."""
    return tuple(itertools.product(chunks(batch, (batches,)), heads_per_chunk(counts, pieces)))


class _ChunkedOperands:
    """One rank's operands by chunk."""

    def __init__(self, job: RingTask, query: Tensor, key: Tensor, value: Tensor) -> None:
        self.move, self.keys, self.ranks = job.move, (key, value), len(job.rows) if job.spec.carried else 1
        self.totals = [x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value)]
        self.batch = query.shape[-4] if query.dim() > 3 else 1
        pieces, batches = job.spec.pieces if query.dim() > 2 else 1, job.spec.batches if query.dim() > 3 else 1
        self.boxes = head_chunk_boxes(self.batch, self.totals, batches, pieces)
        ((_, self.length),) = job.columns[0]

    def part(self, number: int, x: Tensor, dim: int = -3, of: int = QUERIES) -> Tensor:
        """Chunk ``number`` of a tensor: heads are ``dim``, the batch is before it."""
        sequences, heads = self.boxes[number]
        return _narrowed_if_full(_narrowed_if_full(x, dim, self.totals[of], heads[of]), dim - 1, self.batch, sequences)

    def gathered(self, number: int) -> Generator[Sending, Arrival, Arrival]:
        """Begin the all-gather of a chunk's keys and values, packed into one tensor by position."""
        return (yield from self._moved("S", "R", _packed_by_position(self._own(number))))

    def summed(self, found: list[Tensor]) -> Generator[Sending, Arrival, Arrival]:
        """Begin the reduce-scatter of gradients of full keys and values, and free ``found``."""
        x = self._in_order(_packed_by_position(found), back=False)
        found.clear()
        return (yield from self._moved("P", "S", x))

    def come(self, number: int, x: Tensor) -> Tensors:
        """The keys and values of a chunk that arrived, in sequence order."""
        return self.unpacked(number, self._in_order(x, back=True))

    def unpacked(self, number: int, x: Tensor) -> Tensors:
        """Keys [..., t, e] and values [..., t, d] of a packed tensor."""
        shapes = [(*own.shape[:-2], own.shape[-1]) for own in self._own(number)]
        columns = x.split([math.prod(shape) for shape in shapes], 1)
        return tuple(c.unflatten(1, shape).movedim(0, -2) for c, shape in zip(columns, shapes, strict=True))

    def _moved(self, source: str, target: str, x: Tensor) -> Generator[Sending, Arrival, Arrival]:
        move = self.move._replace(source=source, target=target, dim=0, size=self.length, order=())
        return (yield Collective(move, x))

    def _in_order(self, x: Tensor, back: bool) -> Tensor:
        """Positions in the order of the ranks' shards; ``back``: in sequence order, for tiles."""
        return zigzag_reordered(x, 0, self.ranks, back) if self.ranks > 1 else x

    def _own(self, number: int) -> Tensors:
        return tuple(self.part(number, x, of=of) for x, of in zip(self.keys, (KEYS, VALUES), strict=True))


class _AllHeads:
    """A tensor with all heads of an operand, filled chunk by chunk; heads are ``dim``."""

    def __init__(self, pieces: _ChunkedOperands, of: int = QUERIES, dim: int = -3) -> None:
        self.pieces, self.of, self.dim = pieces, of, dim
        self.made: list[Tensor] = []

    def put(self, number: int, x: Tensor) -> None:
        """Put chunk ``number``; chunk 0 comes first."""
        if len(self.pieces.boxes) > 1 and not self.made:
            shape = list(x.shape)
            shape[self.dim] = self.pieces.totals[self.of]
            if len(shape) > -self.dim:
                shape[self.dim - 1] = self.pieces.batch
            like = x.new_empty(()).expand(shape)
            self.made = [empty_sequence(like, shape[-2]) if self.dim == -3 else x.new_empty(shape)]
        if self.made:
            self.pieces.part(number, self.made[0], self.dim, self.of).copy_(x)
        else:
            self.made = [x]

    @property
    def tensor(self) -> Tensor:
        """The tensor with all chunks put so far."""
        return self.made[0]


def chunked_forward(
    job: RingTask, query: Tensor, key: Tensor, value: Tensor, sinks: Any, mask: Any, dropout_mask: Any
) -> RankCoroutine:
    """→ result, and what the backward needs."""
    folding: Arrival = tuple
    if job.folded:
        (query,), folding = yield from job.swap((query,), (job.rows,), False)
    pieces, level = _ChunkedOperands(job, query, key, value), job.level(mask)
    result, logs = _AllHeads(pieces), _AllHeads(pieces, dim=-2)
    arrival = yield from pieces.gathered(0)
    folding()
    for i in range(len(pieces.boxes)):
        here = pieces.come(i, *arrival())
        if i + 1 < len(pieces.boxes):
            arrival = yield from pieces.gathered(i + 1)
        of_sinks = None if sinks is None else pieces.part(i, sinks, -1)
        out, sums = _chunk_results(job, here, of_sinks, *_chunk_of_each(pieces, i, query, mask, level, dropout_mask))
        result.put(i, out)
        logs.put(i, sums)
    plain = out = result.tensor
    if job.folded:
        (plain,), unfolding = yield from job.swap((out,), (job.rows,), True)
        unfolding()
    return plain, query, key, value, sinks, mask, dropout_mask, out, logs.tensor


def chunked_backward(job: RingTask, gradient: Tensor, saved: Sequence[Any]) -> RankCoroutine:
    """→ gradients of queries, keys, values and sinks."""
    query, key, value, sinks, mask, dropout_mask, out, sums = saved
    folding: Arrival = tuple
    if job.folded:
        (gradient,), folding = yield from job.swap((gradient,), (job.rows,), False)
    pieces, level = _ChunkedOperands(job, query, key, value), job.level(mask)
    of_rows, of_keys = _AllHeads(pieces), (_AllHeads(pieces, KEYS), _AllHeads(pieces, VALUES))
    arrival = yield from pieces.gathered(0)
    folding()
    behind: Arrival | None = None
    for i in range(len(pieces.boxes)):
        here = pieces.come(i, *arrival())
        if i + 1 < len(pieces.boxes):
            arrival = yield from pieces.gathered(i + 1)
        results = pieces.part(i, gradient), pieces.part(i, out), pieces.part(i, sums, -2)
        mine, *theirs = _chunk_gradients(
            job, here, results, *_chunk_of_each(pieces, i, query, mask, level, dropout_mask)
        )
        of_rows.put(i, mine)
        del here
        if behind is not None:
            _put_key_gradients(pieces, of_keys, i - 1, behind, query.dtype)
            del behind
        behind = yield from pieces.summed(theirs)
    assert behind is not None
    _put_key_gradients(pieces, of_keys, len(pieces.boxes) - 1, behind, query.dtype)
    plain = of_rows.tensor
    if job.folded:
        (plain,), unfolding = yield from job.swap((plain,), (job.rows,), True)
        unfolding()
    of_sinks = sinks_gradient(sinks, level, query, gradient, out, sums)
    return plain, *(x.tensor for x in of_keys), of_sinks


def _chunk_results(
    job: RingTask, here: Tensors, sinks: Any, query: Tensor, mask: Any, level: Any, dropout_mask: Any
) -> Tensors:
    """Result and log-sum-exps of this rank's rows for one chunk; ``here``: its keys and values."""
    rows = MergedRows(job, query, here[1])
    for t, (q, k, v), masking in masked_tiles(
        job._replace(folded=False), ALL_AT_ONCE, query, here[0], here[1], (mask, level), dropout_mask
    ):
        rows.add(t.rows, *tile.tile_forward(q, k, v, masking, job.scale))
    return rows.whole(query.dtype, sink_scores(sinks, level, query))


def _chunk_gradients(
    job: RingTask, here: Tensors, results: Tensors, query: Tensor, mask: Any, level: Any, dropout_mask: Any
) -> Tensors:
    """Of one chunk: gradients of this rank's queries, and its summands for all keys and values."""
    in_order, mine = job._replace(folded=False), GradientSum(query)
    found = masked_tiles(in_order, ALL_AT_ONCE, query, here[0], here[1], (mask, level), dropout_mask)
    theirs = step_gradients(in_order, ALL_AT_ONCE, found, here, results, mine, tuple)
    return mine.whole().to(query.dtype), *theirs


def _narrowed_if_full(x: Tensor, dim: int, total: int, part: Interval) -> Tensor:
    """A slice of ``dim`` if it has its full length ``total``; a broadcast dim stays."""
    return x if x.dim() < -dim or x.shape[dim] != total else x.narrow(dim, *part)


def _chunk_of_each(pieces: _ChunkedOperands, number: int, *xs: Any) -> list[Any]:
    return [x if x is None else pieces.part(number, x) for x in xs]


def _put_key_gradients(
    pieces: _ChunkedOperands, of_keys: Sequence[_AllHeads], number: int, arrival: Arrival, dtype: torch.dtype
) -> None:
    """Put the arrived key and value gradients of a chunk."""
    for whole, x in zip(of_keys, pieces.unpacked(number, *arrival()), strict=True):
        whole.put(number, x.to(dtype))


def _packed_by_position(xs: Sequence[Tensor]) -> Tensor:
    """[..., t, e] and [..., t, d] → [t, all other dims of both]: positions are contiguous."""
    rows = [x.movedim(-2, 0) for x in xs]
    widths = [math.prod(x.shape[1:]) for x in rows]
    out = xs[0].new_empty(len(rows[0]), sum(widths))
    for place, x in zip(out.split(widths, 1), rows, strict=True):
        place.unflatten(1, x.shape[1:]).copy_(x)
    return out
