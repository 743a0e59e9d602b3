"""Table-wise embedding: each table's owner looks up for the full batch, in all its tables at once,
and one all-to-all of known sizes carries the results (DLRM, Naumov et al. 2019; TorchRec,
Ivchenko et al. 2022)."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autoshard.runtime.operations.checks import check_range
from autoshard.runtime.operations.embedding import ADDITIVE_MODES, embedding_bag_of_tables, has_fast_bag_gradient
from autoshard.runtime.operations.stacked import ConcatenatedView, are_adjacent_in_memory, stacked_view
from autoshard.runtime.transport.communicator import Axes, current
from autoshard.runtime.transport.move import Move, Splits
from autoshard.runtime.transport.window import chunks


class Bags(NamedTuple):
    """Look-ups in one table: ``indices`` [b, k] or [b], or flat with ``offsets`` of the bags."""

    indices: Tensor
    offsets: Tensor | None = None
    weights: Tensor | None = None
    """of every index; only for sums"""

    @property
    def number(self) -> int:
        return len(self.indices if self.offsets is None else self.offsets)

    @property
    def starts(self) -> Tensor:
        """Where bags start among the flat indices."""
        if self.offsets is not None:
            return self.offsets
        length = self.indices.numel() // max(1, self.number)
        return torch.arange(self.number, device=self.indices.device) * length


def table_wise(
    tables: Sequence[Tensor],
    indices: Sequence[Tensor],
    owners: Sequence[int],
    axes: Axes,
    mode: str = "sum",
    *,
    offsets: Sequence[Tensor | None] = (),
    weights: Sequence[Tensor | None] = (),
    padding: Sequence[int | None] = (),
    sparse: bool = False,
    summed: bool = False,
) -> tuple[Tensor, ...]:
    """Per table [rows, d], on its owner and empty elsewhere: results [b/n S, d] of its bags.
    ``indices`` are replicated along ``axes``, and ``owners`` number the ranks. Results are sharded
    along the batch, or [b, d] P if ``summed``, for a batch smaller than the ranks: the owner's
    rows, zeros elsewhere. ``mode``: "sum", "mean" or "max". ``padding``: per table a row that does
    not count; without ``offsets`` it only gets no gradient."""
    comm = current()
    names = comm.active(axes)
    many = len(tables)
    given = list(map(Bags, indices, offsets or (None,) * many, weights or (None,) * many))
    pads = tuple(padding) or (None,) * many
    forms = tuple(_lookup_form(*each) for each in zip(tables, pads, given, strict=True))
    me, lengths = comm.index(names), tuple(comm.mesh[a] for a in names)
    order, splits, arrivals = lookup_exchange(forms, tuple(owners), lengths, me)
    mine = [group.owned_by(me, owners) for group in order]
    found = [
        _look_up_group(
            [tables[i] for i in group.numbers], [given[i] for i in own], mode, pads[group.numbers[0]], sparse, group
        )
        for group, own in zip(order, mine, strict=True)
    ]
    if summed:
        return _partial_results(found, order, owners, me, given)
    # weights of a rank that looks up in no table need gradients, too
    without = [x.reshape(-1)[:0] for x in weights if x is not None and x.requires_grad]
    if len(order) == 1 and order[0].by_row and not without:  # the memory order is the sending order
        goes = found[0].reshape(-1)
    else:
        cut = [
            group.in_order(out, group.bags, len(own)).split(group.chunks, dim=int(not group.by_row))
            for group, out, own in zip(order, found, mine, strict=True)
        ]
        goes = torch.cat([*(part[k].reshape(-1) for k in range(len(splits.sent)) for part in cut), *without])
    moved = comm.apply(Move("S", "S", names, 0, splits=splits), goes) if names else goes
    return _UnpackedTables.apply(moved, arrivals)  # type: ignore[no-untyped-call]


class LookupForm(NamedTuple):
    """Static form of a table's look-ups, the same on all ranks."""

    width: int
    dtype: torch.dtype
    bags: int
    shape: torch.Size | None
    """of the indices; None: jagged"""
    weighted: bool
    padded: bool


def _lookup_form(table: Tensor, padding: int | None, bag: Bags) -> LookupForm:
    shape = bag.indices.shape if bag.offsets is None else None
    padded = padding is not None and padding >= 0
    return LookupForm(table.shape[1], table.dtype, bag.number, shape, bag.weights is not None, padded)


class LookupGroup(NamedTuple):
    """Tables that share one look-up."""

    numbers: tuple[int, ...]
    bags: int
    width: int
    by_row: bool
    """whether memory is [bags, tables, d], with contiguous batch slices, or [tables, bags, d]"""
    chunks: tuple[int, ...] = ()
    """bags of each rank"""

    def owned_by(self, rank: int, owners: Sequence[int]) -> list[int]:
        return [i for i in self.numbers if owners[i] == rank]

    def in_order(self, rows: Tensor, bags: int, tables: int) -> Tensor:
        """Results ``rows`` as [bags, tables, d], or [tables, bags, d] unless ``by_row``."""
        return rows.view(*((bags, tables) if self.by_row else (tables, bags)), self.width)


class LookupArrival(NamedTuple):
    """What a rank sends of a group: ``size`` elements, for ``bags`` bags in tables ``numbers``."""

    group: LookupGroup
    numbers: tuple[int, ...]
    bags: int
    size: int


@functools.lru_cache(maxsize=256)
def lookup_exchange(
    forms: tuple[LookupForm, ...], owners: tuple[int, ...], axes: tuple[int, ...], me: int
) -> tuple[tuple[LookupGroup, ...], Splits, tuple[LookupArrival, ...]]:
    """(groups, all-to-all splits, what arrives) on rank ``me`` of axes of these lengths. One
    look-up serves tables of one width, dtype and number of bags; a table with padding is
    alone."""
    found: dict[Any, list[int]] = {}
    for i, form in enumerate(forms):
        key = i if form.padded else -1, form.width, form.dtype, form.bags, form.weighted
        found.setdefault(key, []).append(i)
    order = []
    for numbers in found.values():
        first = forms[numbers[0]]
        by_row = first.shape is not None and len({forms[i].shape for i in numbers}) == 1
        cuts = tuple(length for _, length in chunks(first.bags, axes))
        order.append(LookupGroup(tuple(numbers), first.bags, first.width, by_row, cuts))
    ranks = math.prod(axes)
    sent = [[g.chunks[k] * g.width * len(g.owned_by(me, owners)) for g in order] for k in range(ranks)]
    arrivals = [
        LookupArrival(g, tuple(of), g.chunks[me], g.chunks[me] * g.width * len(of))
        for of, g in ((g.owned_by(k, owners), g) for k in range(ranks) for g in order)
    ]
    received = (sum(a.size for a in arrivals[k * len(order) : (k + 1) * len(order)]) for k in range(ranks))
    splits = Splits(tuple(map(sum, sent)), tuple(received), me)
    return tuple(order), splits, tuple(a for a in arrivals if a.numbers)


def _partial_results(
    found: Sequence[Tensor], order: Sequence[LookupGroup], owners: Sequence[int], me: int, bags: Sequence[Bags]
) -> tuple[Tensor, ...]:
    """Look-ups as the result [b, d] of every table; zeros for tables of other owners."""
    results: dict[int, Tensor] = {}
    for group, out in zip(order, found, strict=True):
        weights = [bags[i].weights for i in group.numbers]
        joined = [x.reshape(-1)[:0].reshape(0, out.shape[1]) for x in weights if x is not None and x.requires_grad]
        mine = group.owned_by(me, owners)
        here = dict(zip(mine, group.in_order(out, group.bags, len(mine)).unbind(int(group.by_row)), strict=True))
        for i in group.numbers:
            rows = here[i] if i in here else out.new_zeros(group.bags, out.shape[1])
            results[i] = torch.cat([rows, out[:0], *joined])  # keeps gradients
    return tuple(results[i] for i in range(len(bags)))


def _look_up_group(
    tables: Sequence[Tensor],
    bags: Sequence[Bags],
    mode: str,
    padding: int | None,
    sparse: bool,
    group: LookupGroup,
) -> Tensor:
    """[local tables · b, d], in the group's order. ``tables``: also those without local rows."""
    here = [t for t in tables if t.shape[0]]
    if len(here) > 1 and not are_adjacent_in_memory(here):  # concatenation would copy all tables
        others = [t for t in tables if not t.shape[0]]
        each = zip(([here[0], *others], *([t] for t in here[1:])), bags, strict=True)
        found = [_look_up_group(own, [bag], mode, padding, sparse, group) for own, bag in each]
        return torch.stack(found, 1).flatten(0, 1) if group.by_row else torch.cat(found)
    weighted, jagged = bool(bags) and bags[0].weights is not None, bool(bags) and bags[0].offsets is not None
    sizes = [len(t) for t in here]
    first = [*itertools.accumulate(sizes, initial=0)][: len(bags)]
    if group.by_row and bags and not weighted and mode in ADDITIVE_MODES:
        indices = _fused_bag_indices([bag.indices for bag in bags], first, sizes)
        if has_fast_bag_gradient(here[0], indices, sparse):
            return embedding_bag_of_tables(indices, mode, -1 if padding is None else padding, *tables)
    stacked: Tensor = ConcatenatedView.apply(sparse, *tables)
    if not bags:
        return stacked[:0]
    if padding is not None and padding >= 0 and not jagged:
        rows = F.embedding(bags[0].indices, stacked, padding, sparse=sparse)
        return rows if rows.ndim == 2 else _REDUCE_BAG[mode](rows)
    weights = [bag.weights for bag in bags if bag.weights is not None]
    form: dict[str, Any] = {"mode": mode, "sparse": sparse, "padding_idx": padding}
    if group.by_row:
        indices = _fused_bag_indices([bag.indices for bag in bags], first, sizes)
        joined = torch.stack(weights, 1).view(indices.shape) if weighted else None
        return F.embedding_bag(indices, stacked, per_sample_weights=joined, **form)
    begin = list(itertools.accumulate((bag.indices.numel() for bag in bags), initial=0))
    for bag, size in zip(bags, sizes if len(bags) > 1 else (), strict=False):
        check_range(bag.indices, size)
    offsets = torch.cat([bag.starts + n for bag, n in zip(bags, begin, strict=False)])
    joined = torch.cat(weights) if weighted else None
    indices = torch.cat(
        [(bag.indices + n if n else bag.indices).reshape(-1) for bag, n in zip(bags, first, strict=True)]
    )
    return F.embedding_bag(indices, stacked, offsets, per_sample_weights=joined, **form)


def _fused_bag_indices(indices: Sequence[Tensor], first: Sequence[int], sizes: Sequence[int]) -> Tensor:
    """Indices [b, …] of tables of ``sizes`` rows, offset by ``first``: [b · tables, k]."""
    shape, length = indices[0].shape, math.prod(indices[0].shape[1:])
    if len(indices) > 1:
        one = stacked_view(indices)
        every = torch.stack(list(indices), 1) if one is None else one.transpose(0, 1)
        starts, rows = (every.new_tensor(x).view(-1, *[1] * (len(shape) - 1)) for x in (first, sizes))
        check_range(every, rows)  # an index beyond its table would read the next one
        return (every + starts).reshape(len(indices) * shape[0], length)
    return indices[0].reshape(shape[0], length)


_REDUCE_BAG: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda rows: rows.sum(-2),
    "mean": lambda rows: rows.mean(-2),
    "max": lambda rows: rows.amax(-2),
}


class _UnpackedTables(torch.autograd.Function):
    """Arrived rows as each table's result; backward: gradients copied into the send buffer."""

    @staticmethod
    def forward(ctx: Any, moved: Tensor, arrivals: Sequence[LookupArrival]) -> Any:
        ctx.arrivals, ctx.size = arrivals, moved.numel()
        ctx.set_materialize_grads(False)
        return unpack_tables(moved, arrivals)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        there = [(i, g) for i, g in enumerate(gradients) if g is not None]
        if not there:
            return None, None
        out = there[0][1].new_empty(ctx.size)
        if torch.is_grad_enabled():  # create_graph
            parts = unpack_tables(out.requires_grad_(), ctx.arrivals)
            found, given = [parts[i] for i, _ in there], [g for _, g in there]
            return *torch.autograd.grad(found, out, given, create_graph=True), None
        for block, numbers, dim in _arrived_blocks(out, ctx.arrivals):
            of = [g for i in numbers if (g := gradients[i]) is not None]
            if len(of) == len(numbers) and (one := stacked_view(of)) is not None:  # slices of one
                block.copy_(one.movedim(0, dim))
                continue
            for part, i in zip(block.unbind(dim), numbers, strict=True):
                g = gradients[i]
                part.zero_() if g is None else part.copy_(g)
        return out, None


def _arrived_blocks(moved: Tensor, arrivals: Sequence[LookupArrival]) -> Iterator[tuple[Tensor, tuple[int, ...], int]]:
    """(arrived block, table numbers, the dim along which tables are stacked)."""
    sizes = [a.size for a in arrivals]
    for part, (group, numbers, bags, _) in zip(moved.split(sizes), arrivals, strict=True):
        yield group.in_order(part, bags, len(numbers)), numbers, int(group.by_row)


def unpack_tables(moved: Tensor, arrivals: Sequence[LookupArrival]) -> tuple[Tensor, ...]:
    """The rows that arrived from each owner, as the result of every table."""
    found: dict[int, Tensor] = {}
    for block, numbers, dim in _arrived_blocks(moved, arrivals):
        found.update(zip(numbers, block.unbind(dim), strict=True))
    return tuple(found[i] for i in range(len(found)))
