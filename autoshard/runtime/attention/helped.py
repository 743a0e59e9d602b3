"""A causal ring in the order of the sequence, in which ranks that see few keys help those that see many.

Rank i sees the keys of the i ranks before it. In step t = 1 … n/2 it gets those of rank i - t; the first t ranks, which have
none there, get queries of a late rank instead, compute them over their own keys, and give back the result with its
log-sum-exp (Li et al. 2023, "DistFlashAttn"; which tiles: :func:`~autoshard.runtime.attention.order.shares`). The backward
takes the same steps; what helps gets the result, its gradient and its log-sum-exp, too. What a rank computes for another goes
straight there, in the operands' type, as kernels give it, and is added up in float32 at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch

from autoshard.runtime.attention import tile
from autoshard.runtime.attention.job import Job, Sum, masking_of, sink_of, sinks_gradient
from autoshard.runtime.attention.order import Share, Stretch, exchanged, shares
from autoshard.runtime.operations.softmax import wide
from autoshard.runtime.transport.relay import Arrival, Hop, Journey, Tensors

Shapes = tuple[tuple[int, ...], ...]


class _Way:
    """The messages of one way."""

    def __init__(self, job: Job, of_rows: Tensors, of_keys: Tensors, for_rows: Shapes, for_keys: Shapes) -> None:
        """What goes to other ranks of this one's rows, or of its keys, and the shapes of what comes back for all of these."""
        self.job, self.steps, self.longest = job, shares(job.rows), exchanged(job.rows)
        self.of_rows, self.of_keys = of_rows, of_keys
        self.sent: tuple[Shapes, Shapes] = _shapes(of_rows), _shapes(of_keys)
        self.returned = for_rows, for_keys
        ((self.start, _),) = job.rows[job.me]

    def around(
        self,
        own: Callable[[], None],
        other: Callable[[Share, Tensors], Tensors],
        take: Callable[[Share, Tensors], None],
    ) -> Generator[Hop, Arrival, None]:
        """``own``: computes this rank's tile; ``other``: its share of a step with what came, → what goes back for that;
        ``take``: what another rank made of a share for this one."""
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

    def share(self, step: int, behind: int) -> Share:
        """Of the rank so far behind this one."""
        return self.steps[step][(self.job.me + behind) % len(self.job.rows)]

    def there(self, step: int) -> Hop:
        """What ``step`` computes with: queries to a rank that helps this one, else keys."""
        mine, theirs = self.share(step, 0), self.share(step, step + 1)
        sent = tuple(self.rows(x, theirs) for x in self.of_rows) if theirs.helps else self.of_keys
        return self.hop(step, step + 1, sent, self.sent, mine)

    def back(self, step: int, made: Tensors) -> Hop:
        """What was made of that, to where it came from."""
        return self.hop(step, -step - 1, made, self.returned, self.share(step, step + 1))

    def hop(self, step: int, shift: int, sent: Tensors, shapes: tuple[Shapes, Shapes], share: Share) -> Hop:
        """``shapes``: of all rows, of all keys; some of those, as ``share`` has them, come."""
        n, me, first = len(self.job.rows), self.job.me, self.of_keys[0]
        coming = _long(shapes[0], share.rows[1]) if share.helps else _long(shapes[1], share.columns[1])
        sizes = (sum(map(math.prod, _long(of, length))) for of, length in zip(shapes, self.longest[step], strict=True))
        size = float(max(sizes) * first.element_size())
        none = () if sent else (first.new_empty(0),), () if coming else ((0,),)
        return Hop(self.job.move, (me + shift) % n, (me - shift) % n, (*sent, *none[0]), (*coming, *none[1]), size)

    def rows(self, x: torch.Tensor, share: Share) -> torch.Tensor:
        """Of a tensor with this rank's rows those of a share."""
        return x.narrow(-2, share.rows[0] - self.start, share.rows[1])


def forward(
    job: Job, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: Any, mask: Any, kept: Any
) -> Journey:
    """→ result, and what the backward needs."""
    level, result = job.level(mask), list[torch.Tensor]()
    of_rows = (*query.shape[:-1], _ratio(query)), (*query.shape[:-1], value.shape[-1])
    way = _Way(job, (query,), (key, value), of_rows, ())

    def computed(share: Share, q: Any, k: Any, v: Any, *, aligned: bool = False) -> Tensors:
        if not share.rows[1]:
            rows = wide(q[..., 0])
            return rows.new_zeros((*rows.shape, value.shape[-1])), rows
        masking = masking_of(job, *_stretch(share, aligned), query, (mask, level), None)
        return tile.forward(q, k, v, masking, job.scale)

    def own() -> None:
        result.extend(computed(_own(job), query, key, value, aligned=True))

    def merged(share: Share, out: torch.Tensor, sums: torch.Tensor) -> None:
        rows, its_sums = way.rows(result[0], share), way.rows(result[1].unsqueeze(-1), share).squeeze(-1)
        _, more = tile.merge(rows, its_sums, out, sums)
        its_sums.copy_(more)

    def other(share: Share, came: Tensors) -> Tensors:
        q, (k, v) = (came[0], (key, value)) if share.helps else (way.rows(query, share), came)
        out, sums = computed(share, q, k, v)
        if share.helps:
            return _bits(sums, query.dtype), out.to(query.dtype)
        merged(share, out, sums)
        return ()

    def take(share: Share, came: Tensors) -> None:
        if share.helps:
            merged(share, came[1].to(result[0].dtype), _sums(came[0], result[1].dtype))

    yield from way.around(own, other, take)
    out, sums = result
    if sinks is not None:
        out, sums = tile.merge(out, sums, torch.zeros_like(out), sink_of(job, sinks, level, query))
    out = out.to(query.dtype)
    return out, query, key, value, sinks, mask, kept, out, sums


def backward(job: Job, gradient: torch.Tensor, saved: Sequence[Any]) -> Journey:
    """→ gradients of queries, keys, values and sinks."""
    query, key, value, sinks, mask, _, out, sums = saved
    level, of_query, of_keys = job.level(mask), Sum(query), (Sum(key), Sum(value))
    of_rows = _bits(sums, query.dtype), query, gradient, out
    way = _Way(job, of_rows, (key, value), _shapes((query,)), _shapes((key, value)))

    def computed(share: Share, k: Any, v: Any, bits: Any, *rows: torch.Tensor, aligned: bool = False) -> Tensors:
        if not share.rows[1]:
            return rows[0], torch.zeros_like(k), torch.zeros_like(v)
        masking, (q, g, o) = masking_of(job, *_stretch(share, aligned), query, (mask, level), None), rows
        return tile.backward(g, q, k, v, o, _sums(bits, sums.dtype), masking, job.scale)

    def add(share: Share, of_rows: Tensors, of_columns: Tensors) -> None:
        for x in of_rows:
            of_query.add((share.rows[0] - way.start, share.rows[1]), x)
        for total, x in zip(of_keys, of_columns, strict=False):
            total.add((0, x.shape[-2]), x)

    def own() -> None:
        first, *rest = computed(_own(job), key, value, *of_rows, aligned=True)
        add(_own(job), (first,), tuple(rest))

    def other(share: Share, came: Tensors) -> Tensors:
        k_v, rows = ((key, value), came) if share.helps else (came, tuple(way.rows(x, share) for x in of_rows))
        first, *rest = computed(share, *k_v, *rows)
        mine, theirs = ((), (first,)) if share.helps else ((first,), tuple(rest))
        add(share, mine, tuple(rest) if share.helps else ())
        return tuple(x.to(query.dtype) for x in theirs)

    def take(share: Share, came: Tensors) -> None:
        add(share, came if share.helps else (), () if share.helps else came)

    yield from way.around(own, other, take)
    found = [x.whole().to(query.dtype) for x in (of_query, *of_keys)]
    return *found, sinks_gradient(job, sinks, level, query, gradient, out, sums)


def _own(job: Job) -> Share:
    """This rank's tile."""
    (span,) = job.rows[job.me]
    return Share(span, span)


def _stretch(share: Share, aligned: bool) -> tuple[Stretch, tuple[int, int]]:
    """A tile, and where its rows lie in a mask, which has none."""
    return Stretch((share.rows,), (share.columns,), aligned), (0, share.rows[1])


def _shapes(xs: Tensors) -> Shapes:
    return tuple(tuple(x.shape) for x in xs)


def _long(shapes: Shapes, length: int) -> Shapes:
    """``shapes`` of another length of the sequence."""
    return tuple((*lead, length, last) for *lead, _, last in shapes)


def _ratio(x: torch.Tensor) -> int:
    """Elements of ``x`` that take as many bytes as one of a log-sum-exp."""
    return torch.promote_types(x.dtype, torch.float32).itemsize // x.dtype.itemsize


def _bits(sums: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Log-sum-exps [..., s] as elements [..., s, 1 or 2] of what travels with them: no digit is lost."""
    return sums.contiguous().unsqueeze(-1).view(dtype)


def _sums(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The log-sum-exps again."""
    return bits.contiguous().view(dtype).squeeze(-1)
