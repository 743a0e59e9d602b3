"""Collective matmul (asynchronous tensor parallelism): products overlapped with ring messages.
All-gather + matmul, and matmul + reduce-scatter, decomposed (Wang et al. 2023, "Overlap
communication with dependent computation via decomposition in large deep learning models"). A rank
multiplies one chunk while the next is on its way. n ranks send n - 1 messages of the same bytes.
Each is the gradient of the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.coroutine_autograd import CoroutinePair, apply_coroutines
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.profiling import with_module
from autoshard.runtime.transport.rank_coroutines import Arrival, Hop, RankCoroutine, Tensors
from autoshard.runtime.transport.window import Chunks

Tensor = torch.Tensor
Biases = Sequence[Tensor | None]


def gather_products(
    x: Tensor,
    weights: Sequence[Tensor],
    dim: int,
    axes: Axes,
    *,
    size: int | None = None,
    biases: Biases | None = None,
    again: bool = False,
) -> Tensors:
    """``F.linear(full x, w, b)`` per weight [n, k], bias [n]; x [..., k] sharded by ``dim``: S → R.
    ``dim``: not the last; ``size``: its global length if chunks may differ. Chunks of x go around a
    ring and are multiplied by all weights. If weights need a gradient, the full x is saved; with
    ``again`` the backward sends the chunks around once more instead. No second derivative."""
    way = _RingAxis.along(axes, x, dim, size)
    biases = (None,) * len(weights) if biases is None else biases
    keeps = not again and torch.is_grad_enabled() and any(w.requires_grad for w in weights)
    ahead, back = (
        partial(_gather_products_steps, way, len(weights), keeps),
        partial(_gather_products_backward, way, again),
    )
    name = f"products whose operand is gathered along {', '.join(way.move.axes)}"
    return apply_coroutines(current(), CoroutinePair(name, ahead, back, len(weights)), x, *weights, *biases)


def scatter_product(x: Tensor, weight: Tensor, dim: int, axes: Axes, *, bias: Tensor | None = None) -> Tensor:
    """``F.linear(x, weight, bias)``, summed over the ranks and sharded along ``dim`` (not the
    last): P → S. x [..., k], weight [n, k], bias [n] (a summand, too). A chunk's summand is
    computed while the chunk before is on its way. No second derivative."""
    way = _RingAxis.along(axes, x, dim, x.shape[dim])
    name = f"a product whose sums are scattered along {', '.join(way.move.axes)}"
    ahead, back = partial(_scatter_product_steps, way), partial(_scatter_product_backward, way)
    return apply_coroutines(current(), CoroutinePair(name, ahead, back), x, weight, bias)[0]


class _RingAxis(NamedTuple):
    """A ring along mesh axes, and the sharded operand."""

    move: Move
    me: int
    chunks: Chunks
    """of the sharded dim, on every rank"""
    dim: int
    shape: tuple[int, ...]
    """of the local operand"""

    @classmethod
    def along(cls, axes: Axes, x: Tensor, dim: int, size: int | None) -> _RingAxis:
        """The ring along ``axes``, which shard ``dim`` of x; ``size``: its global length."""
        comm = current()
        names = comm.active(axes)
        move = with_module(Move("S", "S", names, order=names), always=True)
        size = x.shape[dim] * comm.size_of(names) if size is None else size
        return cls(move, comm.index(names), comm.chunks(size, names), dim, tuple(x.shape))

    def before(self, distance: int) -> int:
        """The rank ``distance`` before this one."""
        return (self.me - distance) % len(self.chunks)

    def shaped(self, length: int, features: int) -> tuple[int, ...]:
        """The operand's shape with another length of the dim and other features."""
        return (*self.shape[: self.dim], length, *self.shape[self.dim + 1 : -1], features)

    def whole(self, like: Tensor, features: int) -> Tensor:
        """An empty tensor of all chunks."""
        return like.new_empty(self.shaped(sum(length for _, length in self.chunks), features))

    def hop(self, x: Tensor, distance: int, number: int, into: Tensor | None = None) -> Hop:
        """Send ``x`` to the rank ``distance`` behind, get chunk ``number`` from the one before."""
        shape, longest = (self.shaped(n, x.shape[-1]) for n in (self.chunks[number][1], self.chunks[0][1]))
        size = float(math.prod(longest) * x.element_size())
        return Hop(self.move, self.before(-distance), self.before(distance), (x,), (shape,), size, into)

    def rows(self, x: Tensor) -> Tensor:
        """``x`` as [dims before, the dim and those behind it, features]; chunks are along dim 1."""
        return x.reshape(math.prod(x.shape[: self.dim]), math.prod(x.shape[self.dim : -1]), x.shape[-1])

    def part(self, rows: Tensor, number: int) -> Tensor:
        """Chunk ``number`` of the :meth:`rows` of a full tensor."""
        each = math.prod(self.shape[self.dim + 1 : -1])
        start, length = self.chunks[number]
        return rows.narrow(1, start * each, length * each)


RingPassSteps = Generator[Hop, Arrival, None]
ReduceScatterSteps = Generator[Hop, Arrival, Tensor]


def _ring_pass(way: _RingAxis, x: Tensor, visit: Callable[[int, Tensor], object]) -> RingPassSteps:
    """Ring pass: ``visit(number, x)`` for every rank's ``x`` while the next one arrives."""
    for distance in range(len(way.chunks)):
        arrival = None
        if distance + 1 < len(way.chunks):
            arrival = yield way.hop(x, 1, way.before(distance + 1))
        visit(way.before(distance), way.rows(x))
        if arrival is not None:
            (x,) = arrival()


def _ring_reduce_scatter(way: _RingAxis, summand: Callable[[int], Tensor]) -> ReduceScatterSteps:
    """Ring reduce-scatter: the sum of all ranks' ``summand`` for this rank's chunk."""
    arrivals, found = list[Arrival](), None
    for distance in range(1, len(way.chunks)):
        part = summand(way.before(-distance))
        if found is None:
            found = part.new_empty((len(way.chunks), *way.shaped(way.chunks[way.me][1], part.shape[-1])))
        arrivals.append((yield way.hop(part, distance, way.me, found[distance])))
    own = summand(way.me)
    if found is None:
        return own
    found[0] = own
    for arrival in arrivals:
        arrival()
    return found.sum(0)


def _interleaved(*journeys: RingPassSteps | ReduceScatterSteps) -> Generator[Hop, Arrival, Any]:
    """Interleave coroutines, so that one computes while another's message is on its way."""
    arrivals: dict[Any, Arrival | None] = dict.fromkeys(journeys)
    result = None
    while arrivals:
        for journey in list(arrivals):
            try:
                hop = journey.send(arrivals[journey])
            except StopIteration as end:
                del arrivals[journey]
                result = end.value if journey is journeys[-1] else result
            else:
                arrivals[journey] = yield hop
    return result


def _batched_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """rows [b, m, k] @ weight [n, k].mT + bias; reads and writes slices without copies."""
    columns = weight.mT.expand(len(rows), *weight.mT.shape)
    if bias is None:
        return torch.bmm(rows, columns, out=out)
    return torch.baddbmm(bias, rows, columns, out=out)


def _weight_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return dy.flatten(0, -2).mT @ x.flatten(0, -2)


def _gather_products_steps(way: _RingAxis, count: int, keeps: bool, x: Tensor, *operands: Tensor) -> RankCoroutine:
    """→ products; the full x if ``keeps``, else its chunk; the weights."""
    weights, biases = operands[:count], operands[count:]
    outs = [way.whole(x, len(w)) for w in weights]
    whole = way.whole(x, x.shape[-1]) if keeps else None

    def visit(number: int, here: Tensor) -> None:
        for w, b, out in zip(weights, biases, outs, strict=True):
            _batched_linear(here, w, b, way.part(way.rows(out), number))
        if whole is not None:
            way.part(way.rows(whole), number).copy_(here)

    yield from _ring_pass(way, x, visit)
    return *outs, x if whole is None else whole, *weights


def _gather_products_backward(
    way: _RingAxis, again: bool, gradients: Tensors, saved: Sequence[Any], wanted: Sequence[bool]
) -> RankCoroutine:
    """→ gradients of x, reduce-scattered, of weights and of biases."""
    x, *weights = saved
    count = len(weights)
    of_weights, of_biases = wanted[1 : 1 + count], wanted[1 + count :]
    given = [way.rows(g) for g in gradients]

    def summand(number: int) -> Tensor:
        parts = [way.part(g, number) for g in given]
        total = _batched_linear(parts[0], weights[0].mT)
        for part, w in zip(parts[1:], weights[1:], strict=True):
            total.baddbmm_(part, w.expand(len(part), *w.shape))
        return total.view(way.shaped(way.chunks[number][1], total.shape[-1]))

    going: list[RingPassSteps | ReduceScatterSteps] = []
    if again and any(of_weights):
        whole = way.whole(x, x.shape[-1])
        rows = way.rows(whole)
        going.append(_ring_pass(way, x, lambda number, here: way.part(rows, number).copy_(here)))
        x = whole
    dx = yield from _interleaved(*going, *([_ring_reduce_scatter(way, summand)] if wanted[0] else []))
    dws = [_weight_gradient(g, x) if wants else None for g, wants in zip(gradients, of_weights, strict=True)]
    dbs = [g.flatten(0, -2).sum(0) if wants else None for g, wants in zip(gradients, of_biases, strict=True)]
    return dx, *dws, *dbs


def _scatter_product_steps(way: _RingAxis, x: Tensor, weight: Tensor, bias: Tensor | None) -> RankCoroutine:
    """→ this rank's chunk of the sum; x and the weight."""
    rows = way.rows(x)

    def summand(number: int) -> Tensor:
        found = _batched_linear(way.part(rows, number), weight, bias)
        return found.view(way.shaped(way.chunks[number][1], len(weight)))

    own = yield from _ring_reduce_scatter(way, summand)
    return own, x, weight


def _scatter_product_backward(
    way: _RingAxis, gradients: Tensors, saved: Sequence[Any], wanted: Sequence[bool]
) -> RankCoroutine:
    """→ gradients of x, of the weight and of the bias."""
    (g,), (x, weight) = gradients, saved
    dy = way.whole(g, g.shape[-1]) if any(wanted[1:]) else None
    dx = way.whole(g, x.shape[-1]) if wanted[0] else None

    def visit(number: int, here: Tensor) -> None:
        if dx is not None:
            _batched_linear(here, weight.mT, None, way.part(way.rows(dx), number))
        if dy is not None:
            way.part(way.rows(dy), number).copy_(here)

    yield from _ring_pass(way, g, visit)
    dw = _weight_gradient(dy, x) if wanted[1] and dy is not None else None
    db = dy.flatten(0, -2).sum(0) if wanted[2] and dy is not None else None
    return dx, dw, db  # type: ignore[return-value]
