"""Interned cost tables: equal tables share a number, so equal subproblems are computed once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from autoshard.passes.search.broadcast import added
from autoshard.passes.search.contents import Contents
from autoshard.passes.search.folded import Classes, Folded, Matrix, in_order, joint, stored, taken, transposed
from autoshard.passes.search.network import Array

# Entries per block of a join, so that temporaries stay in cache.
BLOCK = 1 << 16
# Entries of a join without blocks.
AT_ONCE = 2 * BLOCK
# Entries up to which a partial sum is materialised.
MOST_SUMMED = 1 << 20

Span = tuple[int, tuple[int, ...]]
"""a table and the ascending axes of a join that it spans"""


class Unfolded(list[Array]):
    """Arrays by number; a compact one (``folded``) is expanded on first access."""

    def __init__(self) -> None:
        super().__init__()
        self.folded: dict[int, Folded] = {}

    def __getitem__(self, number: int) -> Array:  # type: ignore[override]
        array: Array = super().__getitem__(number)
        if number in self.folded and not array.size:
            array = self[number] = self.folded[number].whole()
        return array


class Tables:
    """Float64 tables of any rank, numbered by first appearance, with memoised operations."""

    def __init__(self) -> None:
        self.arrays: list[Array] = Unfolded()
        self._by_id: dict[int, tuple[Matrix, int]] = {}  # keeps the array alive, so that its id is unique
        self._contents = Contents()
        self._memo: dict[tuple[object, ...], int] = {}
        self._classes: dict[tuple[int, int], Classes] = {}
        self._compact: dict[int, Array] = {}

    def intern(self, array: Matrix) -> int:
        """Number of a table, by identity or content. The array must not change afterwards."""
        known = self._by_id.get(id(array))
        if known is not None:
            return known[1]
        array_c = np.asarray(stored(array), dtype=np.float64, order="C")
        maps = (array.rows.tobytes(), array.columns.tobytes()) if isinstance(array, Folded) else None
        number = self._contents.number(array_c, maps, lambda n: stored(self.matrix(n)), len(self.arrays))
        if number == len(self.arrays) and isinstance(self.arrays, Unfolded) and isinstance(array, Folded):
            self.arrays.folded[number] = array
            self.arrays.append(np.empty((0, 0)))
        elif number == len(self.arrays):
            self.arrays.append(array_c)
        self._by_id[id(array)] = (array, number)
        return number

    def matrix(self, a: int) -> Matrix:
        """A table as given, maybe compact."""
        folded = self.arrays.folded.get(a) if isinstance(self.arrays, Unfolded) else None
        return self.arrays[a] if folded is None else folded

    def at(self, a: int, index: tuple[int | None, ...]) -> Array:
        """The entries along the only axis whose index is None."""
        row: Array = self.arrays[a][tuple(slice(None) if i is None else i for i in index)]
        return row

    def add(self, a: int, b: int) -> int:
        a, b = min(a, b), max(a, b)
        return self._remember(("add", a, b), lambda: self.arrays[a] + self.arrays[b])

    def transpose(self, a: int) -> int:
        return self._remember(("transpose", a), lambda: transposed(self.matrix(a)))

    def move_last(self, a: int, axis: int) -> int:
        """The table with one axis moved to the end."""
        key = "move", a, axis
        if key not in self._memo and axis == self.arrays[a].ndim - 1:
            self._memo[key] = a
        return self._remember(key, lambda: np.moveaxis(self.arrays[a], axis, -1))

    def squeeze(self, a: int, axis: int) -> int:
        """The table without an axis of length 1."""
        return self._remember(("squeeze", a, axis), lambda: self.arrays[a].squeeze(axis))

    def take(self, a: int, kept: Sequence[Classes | None]) -> int:
        """The sub-table of ``kept`` indices per axis (None: all)."""
        key = ("take", a, *(None if k is None else k.tobytes() for k in kept))

        def compute() -> Array:
            array = self.matrix(a)
            if isinstance(array, Folded):
                sides = zip((array.rows, array.columns), kept, strict=True)
                return array.values[np.ix_(*(side if k is None else side[k] for side, k in sides))]
            for axis, k in enumerate(kept):
                array = array if k is None else array.take(k, axis)
            return array

        return self._remember(key, compute)

    def _remember(self, key: tuple[object, ...], compute: Callable[[], Matrix]) -> int:
        number = self._memo.get(key)
        if number is None:
            number = self._memo[key] = self.intern(compute())
        return number

    def classes(self, a: int, axis: int) -> Classes:
        """Class of equal slices of every index along ``axis``, in order of appearance."""
        known = self._classes.get((a, axis))
        if known is None:
            matrix = self.matrix(a)
            rows = np.ascontiguousarray(np.moveaxis(stored(matrix), axis, 0))
            seen: dict[bytes, int] = {}
            known = np.array([seen.setdefault(row.tobytes(), len(seen)) for row in rows], dtype=np.intp)
            if isinstance(matrix, Folded):
                known = in_order(known[(matrix.rows, matrix.columns)[axis]])[1]
            self._classes[a, axis] = known
        return known

    def compact(self, a: int) -> Array:
        """The matrix with one slice of each class."""
        if a not in self._compact:
            matrix = self.matrix(a)
            maps = (matrix.rows, matrix.columns) if isinstance(matrix, Folded) else tuple(map(np.arange, matrix.shape))
            first = [np.unique(self.classes(a, axis), return_index=True)[1] for axis in (0, 1)]
            self._compact[a] = np.ascontiguousarray(
                taken(taken(stored(matrix), maps[0][first[0]], 0), maps[1][first[1]], 1)
            )
        return self._compact[a]

    def eliminate(self, factors: tuple[Span, ...], rank: int) -> int:
        """min over the last of ``rank`` + 1 axes of the sum of ``factors``.

        A factor is (table, ascending axes that it spans); each spans the last axis.
        """
        return self._remember(("eliminate", factors, rank), lambda: self._eliminate(factors, rank))

    def _eliminate(self, factors: tuple[Span, ...], rank: int) -> Array:
        kept, where = zip(*(self._representatives(factors, axis, rank) for axis in range(rank + 1)), strict=True)
        parts = []
        for table, axes in factors:
            part = self.arrays[table]
            for position, axis in enumerate(axes):
                part = part.take(kept[axis], position)
            # the eliminated axis first, the others broadcast
            part = np.moveaxis(part, -1, 0)
            shape = [part.shape[0]] + [1] * rank
            for position, axis in enumerate(axes[:-1]):
                shape[axis + 1] = part.shape[position + 1]
            parts.append(np.ascontiguousarray(part).reshape(shape))
        reduced = min_sum(parts, tuple(len(k) for k in kept[:-1]))
        for axis in range(rank):
            if len(kept[axis]) != len(where[axis]):
                reduced = reduced.take(where[axis], axis)
        return reduced

    def _representatives(self, factors: tuple[Span, ...], axis: int, rank: int) -> tuple[Classes, Classes]:
        """(representatives of the classes along one axis, class of every index).

        On the eliminated axis a vector only decides which member of a class is cheapest.
        """
        spanning = [(t, axes) for t, axes in factors if axis in axes]
        keys = [self.classes(t, axes.index(axis)) for t, axes in spanning if len(axes) > 1]
        size = self.arrays[spanning[0][0]].shape[spanning[0][1].index(axis)]
        same = joint(keys)[1] if keys else np.zeros(size, dtype=np.intp)
        if axis < rank:
            order = np.arange(size)
        else:
            own: Array = sum((self.arrays[t] for t, axes in spanning if len(axes) == 1), np.zeros(size))
            order = np.argsort(own, kind="stable")
        where = np.empty(size, dtype=np.intp)
        where[order] = in_order(same[order])[1]
        return order[np.unique(where[order], return_index=True)[1]], where


def min_sum(parts: list[Array], shape: tuple[int, ...]) -> Array:
    """min over axis 0 of the broadcast sum of ``parts``; their other axes are 1 or full."""
    if not shape:
        return np.asarray(sum(parts[1:], parts[0]).min(), dtype=np.float64)
    parts = sorted(parts, key=lambda part: part.size)  # small sums first, large broadcasts once
    if len(parts[0]) * math.prod(shape) <= AT_ONCE:
        return np.asarray(
            added(sum(parts[1:-1], parts[0]), parts[-1]).min(axis=0) if len(parts) > 1 else parts[0].min(axis=0)
        )
    # Lead with an axis along which most parts are constant: their sum is computed once.
    spans = [{k for k, length in enumerate(part.shape[1:]) if length > 1} for part in parts]
    differ = [set[int]().union(*(span for span in spans if k in span)) - {k} for k in range(len(shape))]
    lead = min(range(len(shape)), key=lambda k: (shape[k] == 1, math.prod(shape[i] for i in differ[k])))
    parts = [np.moveaxis(part, 1 + lead, 1) for part in parts]
    shape = (shape[lead], *shape[:lead], *shape[lead + 1 :])
    inner = math.prod(shape[1:])
    same = [part for part in parts if part.shape[1] == 1]
    if len(same) > 1 and len(parts[0]) * inner <= MOST_SUMMED:
        parts = [*(part for part in parts if part.shape[1] > 1), sum(same[1:], same[0])]
        parts.sort(key=lambda part: part.size)
    result = np.empty(shape)
    step = max(1, BLOCK // max(inner, 1))
    for start in range(0, shape[0], step):
        block = slice(start, min(start + step, shape[0]))
        cut = [part[:, block] if part.shape[1] > 1 else part for part in parts]
        out = result[block]
        out.fill(np.inf)
        temporary = np.empty_like(out)
        for s in range(parts[0].shape[0]):
            small = sum((part[s] for part in cut[1:-1]), cut[0][s])
            if len(cut) > 1:
                added(small, cut[-1][s], out=temporary)
                np.minimum(out, temporary, out=out)
            else:
                np.minimum(out, small, out=out)
    return np.moveaxis(result, 0, lead)
