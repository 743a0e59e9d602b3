"""Balanced causal ring attention in sequence order: early ranks compute tiles of late ranks.
Rank i sees the keys of the i ranks before it. In step t = 1 … n/2 it receives the keys of rank i -
t. The first t ranks have none to receive. They get queries of a late rank, compute them over their
own keys, and return the result with its log-sum-exp (Li et al. 2023, DistFlashAttn; tiles:
:func:`~autoshard.runtime.attention.ring_geometry.helper_shares`). The backward takes the same steps; helpers also
get the result, its gradient and its log-sum-exp. Results for another rank go straight there in the
operands' dtype, and are accumulated in float32 or wider."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.attention import tile
from autoshard.runtime.attention.ring_geometry import HelperShare, TileGroup, helper_shares, longest_exchanged
from autoshard.runtime.attention.ring_task import GradientSum, RingTask, masking_of, sink_scores, sinks_gradient
from autoshard.runtime.operations.reductions import upcast
from autoshard.runtime.transport.rank_coroutines import Arrival, Hop, RankCoroutine, Tensors

TensorShapes = tuple[tuple[int, ...], ...]


class _BalancedRing:
    """Messages of one direction: forward or backward."""

    def __init__(
        self, job: RingTask, of_rows: Tensors, of_keys: Tensors, for_rows: TensorShapes, for_keys: TensorShapes
    ) -> None:
        """``of_…``: what this rank sends of its rows or keys; ``for_…``: shapes of what returns."""
        self.job, self.steps, self.longest = job, helper_shares(job.rows), longest_exchanged(job.rows)
        self.of_rows, self.of_keys = of_rows, of_keys
        self.sent: tuple[TensorShapes, TensorShapes] = _tensor_shapes(of_rows), _tensor_shapes(of_keys)
        self.returned = for_rows, for_keys
        ((self.start, _),) = job.rows[job.me]

    def around(
        self,
        own: Callable[[], None],
        other: Callable[[HelperShare, Tensors], Tensors],
        take: Callable[[HelperShare, Tensors], None],
    ) -> Generator[Hop, Arrival, None]:
        """Run all steps: ``own`` computes this rank's tile, ``other`` a share, which ``take``
        receives on its rank."""
        steps, behind = range(len(self.steps)), None
        arrival = (yield self.there(0)) if steps else None
        own()
        for step in steps:
            following = (yield self.there(step + 1)) if step + 1 in steps else None
            assert arrival is not None
            made = other(self.share(step, 0), arrival())
            returned = yield self.back(step, made)
            if behind is not None:
                take(self.share(step - 1, step), behind())
            arrival, behind = following, returned
        if behind is not None:
            take(self.share(steps[-1], len(steps)), behind())

    def share(self, step: int, behind: int) -> HelperShare:
        """The share, in ``step``, of the rank ``behind`` positions after this one."""
        return self.steps[step][(self.job.me + behind) % len(self.job.rows)]

    def there(self, step: int) -> Hop:
        """The operands of ``step``: queries to a rank that helps this one, else keys."""
        mine, theirs = self.share(step, 0), self.share(step, step + 1)
        sent = tuple(self.rows(x, theirs) for x in self.of_rows) if theirs.helps else self.of_keys
        return self.hop(step, step + 1, sent, self.sent, mine)

    def back(self, step: int, made: Tensors) -> Hop:
        """Results of ``step``, to the rank that its operands came from."""
        return self.hop(step, -step - 1, made, self.returned, self.share(step, step + 1))

    def hop(
        self, step: int, shift: int, sent: Tensors, shapes: tuple[TensorShapes, TensorShapes], share: HelperShare
    ) -> Hop:
        """A hop in which rows or keys of ``share`` arrive; ``shapes``: of all rows, all keys."""
        n, me, first = len(self.job.rows), self.job.me, self.of_keys[0]
        coming = (
            _shapes_with_length(shapes[0], share.rows[1])
            if share.helps
            else _shapes_with_length(shapes[1], share.columns[1])
        )
        sizes = (
            sum(map(math.prod, _shapes_with_length(of, length)))
            for of, length in zip(shapes, self.longest[step], strict=True)
        )
        size = float(max(sizes) * first.element_size())
        none = () if sent else (first.new_empty(0),), () if coming else ((0,),)
        return Hop(self.job.move, (me + shift) % n, (me - shift) % n, (*sent, *none[0]), (*coming, *none[1]), size)

    def rows(self, x: Tensor, share: HelperShare) -> Tensor:
        """Rows of ``share`` in a tensor that holds this rank's rows."""
        return x.narrow(-2, share.rows[0] - self.start, share.rows[1])


def balanced_forward(
    job: RingTask, query: Tensor, key: Tensor, value: Tensor, sinks: Any, mask: Any, dropout_mask: Any
) -> RankCoroutine:
    """→ result, and what the backward needs."""
    level, result = job.level(mask), list[Tensor]()
    of_rows = (*query.shape[:-1], _elements_per_log_sum(query)), (*query.shape[:-1], value.shape[-1])
    way = _BalancedRing(job, (query,), (key, value), of_rows, ())

    def computed(share: HelperShare, q: Any, k: Any, v: Any, *, aligned: bool = False) -> Tensors:
        if not share.rows[1]:
            rows = upcast(q[..., 0])
            return rows.new_zeros((*rows.shape, value.shape[-1])), rows
        masking = masking_of(job, *_tile_of_share(share, aligned), query, (mask, level), None)
        return tile.tile_forward(q, k, v, masking, job.scale)

    def own() -> None:
        result.extend(computed(_own_tile(job), query, key, value, aligned=True))

    def merged(share: HelperShare, out: Tensor, sums: Tensor) -> None:
        rows, its_sums = way.rows(result[0], share), way.rows(result[1].unsqueeze(-1), share).squeeze(-1)
        _, more = tile.merge_by_log_sum_exp(rows, its_sums, out, sums)
        its_sums.copy_(more)

    def other(share: HelperShare, came: Tensors) -> Tensors:
        q, (k, v) = (came[0], (key, value)) if share.helps else (way.rows(query, share), came)
        out, sums = computed(share, q, k, v)
        if share.helps:
            return _log_sums_as_bits(sums, query.dtype), out.to(query.dtype)
        merged(share, out, sums)
        return ()

    def take(share: HelperShare, came: Tensors) -> None:
        if share.helps:
            merged(share, came[1].to(result[0].dtype), _log_sums_from_bits(came[0], result[1].dtype))

    yield from way.around(own, other, take)
    out, sums = result
    if sinks is not None:
        out, sums = tile.merge_by_log_sum_exp(out, sums, torch.zeros_like(out), sink_scores(sinks, level, query))
    out = out.to(query.dtype)
    return out, query, key, value, sinks, mask, dropout_mask, out, sums


def balanced_backward(job: RingTask, gradient: Tensor, saved: Sequence[Any]) -> RankCoroutine:
    """→ gradients of queries, keys, values and sinks."""
    query, key, value, sinks, mask, _, out, sums = saved
    level, of_query, of_keys = job.level(mask), GradientSum(query), (GradientSum(key), GradientSum(value))
    of_rows = _log_sums_as_bits(sums, query.dtype), query, gradient, out
    way = _BalancedRing(job, of_rows, (key, value), _tensor_shapes((query,)), _tensor_shapes((key, value)))

    def computed(share: HelperShare, k: Any, v: Any, bits: Any, *rows: Tensor, aligned: bool = False) -> Tensors:
        if not share.rows[1]:
            return rows[0], torch.zeros_like(k), torch.zeros_like(v)
        masking, (q, g, o) = masking_of(job, *_tile_of_share(share, aligned), query, (mask, level), None), rows
        return tile.tile_backward(g, q, k, v, o, _log_sums_from_bits(bits, sums.dtype), masking, job.scale)

    def add(share: HelperShare, of_rows: Tensors, of_columns: Tensors) -> None:
        for x in of_rows:
            of_query.add((share.rows[0] - way.start, share.rows[1]), x)
        for total, x in zip(of_keys, of_columns, strict=False):
            total.add((0, x.shape[-2]), x)

    def own() -> None:
        first, *rest = computed(_own_tile(job), key, value, *of_rows, aligned=True)
        add(_own_tile(job), (first,), tuple(rest))

    def other(share: HelperShare, came: Tensors) -> Tensors:
        k_v, rows = ((key, value), came) if share.helps else (came, tuple(way.rows(x, share) for x in of_rows))
        first, *rest = computed(share, *k_v, *rows)
        mine, theirs = ((), (first,)) if share.helps else ((first,), tuple(rest))
        add(share, mine, tuple(rest) if share.helps else ())
        return tuple(x.to(query.dtype) for x in theirs)

    def take(share: HelperShare, came: Tensors) -> None:
        add(share, came if share.helps else (), () if share.helps else came)

    yield from way.around(own, other, take)
    found = [x.whole().to(query.dtype) for x in (of_query, *of_keys)]
    return *found, sinks_gradient(sinks, level, query, gradient, out, sums)


def _own_tile(job: RingTask) -> HelperShare:
    """This rank's own (diagonal) tile."""
    (span,) = job.rows[job.me]
    return HelperShare(span, span)


def _tile_of_share(share: HelperShare, aligned: bool) -> tuple[TileGroup, tuple[int, int]]:
    """The tile of a share, and its rows in a mask (there is none)."""
    return TileGroup((share.rows,), (share.columns,), aligned), (0, share.rows[1])


def _tensor_shapes(xs: Tensors) -> TensorShapes:
    return tuple(tuple(x.shape) for x in xs)


def _shapes_with_length(shapes: TensorShapes, length: int) -> TensorShapes:
    """``shapes`` with another sequence length."""
    return tuple((*lead, length, last) for *lead, _, last in shapes)


def _elements_per_log_sum(x: Tensor) -> int:
    """How many elements of ``x`` take the bytes of one log-sum-exp."""
    return torch.promote_types(x.dtype, torch.float32).itemsize // x.dtype.itemsize


def _log_sums_as_bits(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """Log-sum-exps [..., s] as bits of ``dtype`` [..., s, 1 or 2], to be sent without rounding."""
    return sums.contiguous().unsqueeze(-1).view(dtype)


def _log_sums_from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse of :func:`_log_sums_as_bits`."""
    return bits.contiguous().view(dtype).squeeze(-1)
