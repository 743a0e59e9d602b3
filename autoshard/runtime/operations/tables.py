"""Tables that lie whole on one rank each: the owner looks up for all, and the rows of the batch go where they belong.

A rank looks up in all its tables at once, and one all-to-all carries what the ranks looked up (table-wise sharding of
Naumov et al. 2019, DLRM; Ivchenko et al. 2022, TorchRec). Sizes are known beforehand: nothing waits for numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from autoshard.runtime.operations.stacked import OneAfterAnother, are_neighbours
from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.move import Move, Splits


class Bags(NamedTuple):
    """What is looked up in one table: ``indices`` [b, k] or [b], or flat with ``offsets``, where bags start."""

    indices: torch.Tensor
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    """of every index; only where bags are sums"""
    last_offset: bool = False
    """whether the last offset is the end of the last bag"""

    @property
    def number(self) -> int:
        if self.offsets is None:
            return self.indices.shape[0]
        return self.offsets.shape[0] - self.last_offset

    @property
    def starts(self) -> torch.Tensor:
        """Where bags start among the flat indices."""
        if self.offsets is not None:
            return self.offsets[: self.number]
        length = self.indices.numel() // max(1, self.number)
        return torch.arange(self.number, device=self.indices.device) * length


def table_wise(
    tables: Sequence[torch.Tensor],
    indices: Sequence[torch.Tensor],
    owners: Sequence[int],
    axes: Axes,
    mode: str = "sum",
    *,
    offsets: Sequence[torch.Tensor | None] = (),
    weights: Sequence[torch.Tensor | None] = (),
    last_offset: bool = False,
    padding: Sequence[int | None] = (),
    sparse: bool = False,
    summed: bool = False,
) -> tuple[torch.Tensor, ...]:
    """Per table [rows, d], whole on its owner and empty elsewhere, the results [b/n S, d] of the bags in ``indices``.

    Indices are whole along ``axes``, whose ranks the ``owners`` number; results are cut along the batch, or [b, d] P where
    they are ``summed``: for a batch of fewer rows than ranks, the owner's rows and zeros elsewhere. ``mode``: how
    rows of a bag become one, "sum", "mean" or "max". ``padding``: per table a row that is none; of an index outside of a bag
    (``offsets`` absent) one that only gets no gradient.
    """
    comm = current()
    names = comm.active(axes)
    ranks, me = comm.size_of(names), comm.index(names)
    many = len(tables)
    given = [
        Bags(*bag, last_offset)
        for bag in zip(indices, offsets or (None,) * many, weights or (None,) * many, strict=True)
    ]
    pads = tuple(padding) or (None,) * many
    chunks = [comm.chunks(bag.number, names) for bag in given]
    found, order = list[torch.Tensor](), list[Group]()
    for numbers in _alike(tables, pads, given):
        group = _group(numbers, given, tables[numbers[0]].shape[1])
        of = [tables[i] for i in numbers], [given[i] for i in group.owned_by(me, owners)]
        found.append(_looked_up(*of, mode, pads[numbers[0]], sparse, group.by_row))
        order.append(group)
    if summed:
        return _summands(found, order, owners, me, given)
    sent, received = _splits(order, owners, chunks, [t.shape[1] for t in tables], ranks, me)
    cut = [
        group.in_order(out, group.bags, len(group.owned_by(me, owners))).split(
            [length for _, length in chunks[group.numbers[0]]], dim=int(not group.by_row)
        )
        for group, out in zip(order, found, strict=True)
    ]
    parts = [part[k].reshape(-1) for k in range(ranks) for part in cut]
    parts += [x.reshape(-1)[:0] for x in weights if x is not None and x.requires_grad]  # a rank may look up in no table
    whole = len(order) == 1 and order[0].by_row and len(parts) == ranks  # it lies as it is sent
    goes = found[0].reshape(-1) if whole else torch.cat(parts)
    moved = comm.apply(Move("S", "S", names, 0, splits=Splits(sent, received, me)), goes) if names else goes
    rows = [c[me][1] for c in chunks]
    results: tuple[torch.Tensor, ...]
    results = _Placed.apply(moved, lambda x: _placed(x, order, owners, rows, ranks))  # type: ignore[no-untyped-call]
    return results


class Group(NamedTuple):
    """Tables that one look-up serves."""

    numbers: tuple[int, ...]
    bags: int
    width: int
    by_row: bool
    """whether the rows of all tables for one bag lie together, and so those of a part of the batch; else the bags of a table"""

    def owned_by(self, rank: int, owners: Sequence[int]) -> list[int]:
        """The numbers of the tables that lie on a rank."""
        return [i for i in self.numbers if owners[i] == rank]

    def in_order(self, rows: torch.Tensor, bags: int, tables: int) -> torch.Tensor:
        """What was looked up for some bags in some tables as [bags, tables, d], or [tables, bags, d]."""
        return rows.view(*((bags, tables) if self.by_row else (tables, bags)), self.width)


def _group(numbers: Sequence[int], bags: Sequence[Bags], width: int) -> Group:
    """By rows where all bags are of one length."""
    mine = [bags[i] for i in numbers]
    alike = len({bag.indices.shape for bag in mine}) == 1 and all(bag.offsets is None for bag in mine)
    return Group(tuple(numbers), mine[0].number, width, alike)


def _summands(
    found: Sequence[torch.Tensor], order: Sequence[Group], owners: Sequence[int], me: int, bags: Sequence[Bags]
) -> tuple[torch.Tensor, ...]:
    """What was looked up, as the result [b, d] of every table; zeros where its owner is another rank."""
    results: dict[int, torch.Tensor] = {}
    for group, out in zip(order, found, strict=True):
        weights = [bags[i].weights for i in group.numbers]
        joined = [x.reshape(-1)[:0].reshape(0, out.shape[1]) for x in weights if x is not None and x.requires_grad]
        mine = group.owned_by(me, owners)
        here = dict(zip(mine, group.in_order(out, group.bags, len(mine)).unbind(int(group.by_row)), strict=True))
        for i in group.numbers:
            rows = here[i] if i in here else out.new_zeros(group.bags, out.shape[1])
            results[i] = torch.cat([rows, out[:0], *joined])  # tables elsewhere get gradients, too
    return tuple(results[i] for i in range(len(bags)))


def _alike(tables: Sequence[torch.Tensor], padding: Sequence[int | None], bags: Sequence[Bags]) -> list[list[int]]:
    """Tables that one look-up serves, the same on all ranks: of one width, dtype and number of bags, without padding."""
    groups: dict[Any, list[int]] = {}
    for i, (table, pad, bag) in enumerate(zip(tables, padding, bags, strict=True)):
        alone = i if pad is not None and pad >= 0 else -1
        key = alone, table.shape[1], table.dtype, bag.number, bag.weights is None
        groups.setdefault(key, []).append(i)
    return list(groups.values())


def _looked_up(
    tables: Sequence[torch.Tensor],
    bags: Sequence[Bags],
    mode: str,
    padding: int | None,
    sparse: bool,
    by_row: bool,
) -> torch.Tensor:
    """[tables that are here · b, d], in the order of their :class:`Group`. ``tables``: also those that are not here."""
    here = [t for t in tables if t.shape[0]]
    if len(here) > 1 and not are_neighbours(here):  # a copy would take the memory of all of them
        others = [t for t in tables if not t.shape[0]]
        each = zip(([here[0], *others], *([t] for t in here[1:])), bags, strict=True)
        found = [_looked_up(own, [bag], mode, padding, sparse, by_row) for own, bag in each]
        return torch.stack(found, 1).flatten(0, 1) if by_row else torch.cat(found)
    stacked: torch.Tensor = OneAfterAnother.apply(sparse, *tables)  # type: ignore[no-untyped-call]
    if not bags:
        return stacked[:0]
    if padding is not None and padding >= 0 and bags[0].offsets is None:
        rows = F.embedding(bags[0].indices, stacked, padding, sparse=sparse)
        return rows if rows.ndim == 2 else _POOL[mode](rows)
    first = list(itertools.accumulate((t.shape[0] for t in tables if t.shape[0]), initial=0))
    shifted = [bag.indices + n if n else bag.indices for bag, n in zip(bags, first, strict=False)]
    weights = None if bags[0].weights is None else [bag.weights for bag in bags if bag.weights is not None]
    form: dict[str, Any] = {"mode": mode, "sparse": sparse, "padding_idx": padding}
    if by_row:
        shape = len(bags) * bags[0].number, math.prod(bags[0].indices.shape[1:])
        joined = None if weights is None else torch.stack(weights, 1).view(shape)
        indices = torch.stack(shifted, 1).view(shape)
        return F.embedding_bag(indices, stacked, per_sample_weights=joined, **form)
    begin = list(itertools.accumulate((bag.indices.numel() for bag in bags), initial=0))
    offsets = torch.cat([bag.starts + n for bag, n in zip(bags, begin, strict=False)])
    joined = None if weights is None else torch.cat(weights)
    indices = torch.cat([x.reshape(-1) for x in shifted])
    return F.embedding_bag(indices, stacked, offsets, per_sample_weights=joined, **form)


_POOL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda rows: rows.sum(-2),
    "mean": lambda rows: rows.mean(-2),
    "max": lambda rows: rows.amax(-2),
}


def _splits(
    order: Sequence[Group],
    owners: Sequence[int],
    chunks: Sequence[Sequence[tuple[int, int]]],
    widths: Sequence[int],
    ranks: int,
    me: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements that this rank sends to each, and gets from each."""
    every = [i for group in order for i in group.numbers]
    sent = tuple(sum(chunks[i][k][1] * widths[i] for i in every if owners[i] == me) for k in range(ranks))
    received = tuple(sum(chunks[i][me][1] * widths[i] for i in every if owners[i] == k) for k in range(ranks))
    return sent, received


class _Placed(torch.autograd.Function):
    """What came as the result of every table, and the way back: each gradient goes where it is sent from, copied once."""

    @staticmethod
    def forward(ctx: Any, moved: torch.Tensor, place: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]) -> Any:
        ctx.place, ctx.size = place, moved.numel()
        ctx.set_materialize_grads(False)
        return place(moved)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        there = [(i, g) for i, g in enumerate(gradients) if g is not None]
        if not there:
            return None, None
        out = there[0][1].new_empty(ctx.size)
        if torch.is_grad_enabled():  # it is to be differentiated
            parts = ctx.place(out.requires_grad_())
            found, given = [parts[i] for i, _ in there], [g for _, g in there]
            return *torch.autograd.grad(found, out, given, create_graph=True), None
        for part, gradient in zip(ctx.place(out), gradients, strict=True):
            part.zero_() if gradient is None else part.copy_(gradient)
        return out, None


def _placed(
    moved: torch.Tensor, order: Sequence[Group], owners: Sequence[int], rows: Sequence[int], ranks: int
) -> tuple[torch.Tensor, ...]:
    """What came, owner after owner, as the result of every table."""
    arrived = [(group, group.owned_by(k, owners)) for k in range(ranks) for group in order]
    begin = itertools.accumulate((sum(rows[i] * group.width for i in of) for group, of in arrived), initial=0)
    found: dict[int, torch.Tensor] = {}
    for (group, of), (first, last) in zip(arrived, itertools.pairwise(begin), strict=True):
        if of:
            part = group.in_order(moved[first:last], rows[of[0]], len(of))
            found.update((i, part.select(int(group.by_row), n)) for n, i in enumerate(of))
    return tuple(found[i] for i in range(len(rows)))
