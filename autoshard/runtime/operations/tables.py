"""Tables that lie whole on one rank each: the owner looks up for all, and the rows of the batch go where they belong.

A rank looks up in all its tables at once, and one all-to-all carries what the ranks looked up (table-wise sharding of
Naumov et al. 2019, DLRM; Ivchenko et al. 2022, TorchRec). Sizes are known beforehand: nothing waits for numbers.
"""

from __future__ import annotations

import itertools
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
    found: list[torch.Tensor] = []
    order: list[tuple[int, ...]] = []
    for group in _alike(tables, pads, given):
        mine = [i for i in group if owners[i] == me]
        found.append(_looked_up([tables[i] for i in group], [given[i] for i in mine], mode, pads[group[0]], sparse))
        order.append(tuple(group))
    if summed:
        return _summands(found, order, [owner == me for owner in owners], given)
    sent, received = _splits(order, owners, chunks, [t.shape[1] for t in tables], ranks, me)
    parts = [
        out.view(out.shape[0] // given[group[0]].number, given[group[0]].number, out.shape[1])[
            :, start : start + length
        ].reshape(-1)
        for k in range(ranks)
        for group, out in zip(order, found, strict=True)
        for start, length in (chunks[group[0]][k],)
    ]
    parts += [x.reshape(-1)[:0] for x in weights if x is not None and x.requires_grad]  # a rank may look up in no table
    moved = (
        comm.apply(Move("S", "S", names, 0, splits=Splits(sent, received, me)), torch.cat(parts))
        if names
        else (torch.cat(parts))
    )
    return _placed(moved, order, owners, [c[me][1] for c in chunks], [t.shape[1] for t in tables], ranks)


def _summands(
    found: Sequence[torch.Tensor], order: Sequence[Sequence[int]], mine: Sequence[bool], bags: Sequence[Bags]
) -> tuple[torch.Tensor, ...]:
    """What was looked up, as the result [b, d] of every table; zeros where its owner is another rank."""
    results: dict[int, torch.Tensor] = {}
    for group, out in zip(order, found, strict=True):
        number, start = bags[group[0]].number, 0
        weights = [bags[i].weights for i in group]
        joined = [x.reshape(-1)[:0].reshape(0, out.shape[1]) for x in weights if x is not None and x.requires_grad]
        for i in group:
            length = number * mine[i]
            zeros = out.new_zeros(number - length, out.shape[1])
            results[i] = torch.cat(
                [out.narrow(0, start, length), zeros, *joined]
            )  # tables elsewhere get gradients, too
            start += length
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
    tables: Sequence[torch.Tensor], bags: Sequence[Bags], mode: str, padding: int | None, sparse: bool
) -> torch.Tensor:
    """[tables that are here · b, d]: the bags of one table after those of another. ``tables``: also those that are not here."""
    here = [t for t in tables if t.shape[0]]
    if len(here) > 1 and not are_neighbours(here):  # a copy would take the memory of all of them
        others = [t for t in tables if not t.shape[0]]
        each = zip(([here[0], *others], *([t] for t in here[1:])), bags, strict=True)
        return torch.cat([_looked_up(own, [bag], mode, padding, sparse) for own, bag in each])
    stacked: torch.Tensor = OneAfterAnother.apply(sparse, *tables)  # type: ignore[no-untyped-call]
    if not bags:
        return stacked[:0]
    if padding is not None and padding >= 0 and bags[0].offsets is None:
        rows = F.embedding(bags[0].indices, stacked, padding, sparse=sparse)
        return rows if rows.ndim == 2 else _POOL[mode](rows)
    first = list(itertools.accumulate((t.shape[0] for t in tables if t.shape[0]), initial=0))
    begin = list(itertools.accumulate((bag.indices.numel() for bag in bags), initial=0))
    indices = torch.cat([bag.indices.reshape(-1) + n for bag, n in zip(bags, first, strict=False)])
    offsets = torch.cat([bag.starts + n for bag, n in zip(bags, begin, strict=False)])
    weights = None if bags[0].weights is None else torch.cat([bag.weights for bag in bags if bag.weights is not None])
    return F.embedding_bag(
        indices, stacked, offsets, mode=mode, sparse=sparse, per_sample_weights=weights, padding_idx=padding
    )


_POOL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda rows: rows.sum(-2),
    "mean": lambda rows: rows.mean(-2),
    "max": lambda rows: rows.amax(-2),
}


def _splits(
    order: Sequence[Sequence[int]],
    owners: Sequence[int],
    chunks: Sequence[Sequence[tuple[int, int]]],
    widths: Sequence[int],
    ranks: int,
    me: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Elements that this rank sends to each, and gets from each."""
    every = [i for group in order for i in group]
    sent = tuple(sum(chunks[i][k][1] * widths[i] for i in every if owners[i] == me) for k in range(ranks))
    received = tuple(sum(chunks[i][me][1] * widths[i] for i in every if owners[i] == k) for k in range(ranks))
    return sent, received


def _placed(
    moved: torch.Tensor,
    order: Sequence[Sequence[int]],
    owners: Sequence[int],
    rows: Sequence[int],
    widths: Sequence[int],
    ranks: int,
) -> tuple[torch.Tensor, ...]:
    """What came, owner after owner, as the result of every table."""
    arrived = [i for k in range(ranks) for group in order for i in group if owners[i] == k]
    parts = moved.split([rows[i] * widths[i] for i in arrived])
    found = {i: part.view(rows[i], widths[i]) for i, part in zip(arrived, parts, strict=True)}
    return tuple(found[i] for i in range(len(rows)))
