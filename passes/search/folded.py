"""Compact matrices: equal rows and columns, common in edges of layouts, are stored once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Classes = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Folded:
    """Entry [i, j] is ``values[rows[i], columns[j]]``."""

    values: Values
    rows: Classes
    columns: Classes

    @property
    def shape(self) -> tuple[int, int]:
        """Of the full matrix."""
        return len(self.rows), len(self.columns)

    @property
    def size(self) -> int:
        """Entries of the full matrix."""
        return len(self.rows) * len(self.columns)

    def __getitem__(self, at: tuple[Any, ...]) -> Any:
        return self.values[self.rows[at[0]], self.columns[at[1]]]

    def whole(self) -> Values:
        return self.values[np.ix_(self.rows, self.columns)]


Matrix = Values | Folded


def stored(matrix: Matrix) -> Values:
    """The stored entries: each entry of the matrix at least once."""
    return matrix.values if isinstance(matrix, Folded) else matrix


def whole(matrix: Matrix) -> Values:
    """The full matrix."""
    return matrix.whole() if isinstance(matrix, Folded) else matrix


def mapped(function: Callable[..., Values], matrix: Matrix, *others: Matrix | None) -> Matrix:
    """``function`` of all entries, with ``others`` of the same classes; keeps None."""
    found = function(stored(matrix), *(None if x is None else stored(x) for x in others))
    return replace(matrix, values=found) if isinstance(matrix, Folded) else found


def taken(array: Values, indices: Classes, axis: int) -> Values:
    """Indices along an axis; the array itself if these are all, in order."""
    every = len(indices) == array.shape[axis] and np.array_equal(indices, np.arange(len(indices)))
    return array if every else array.take(indices, axis)


def transposed(matrix: Matrix) -> Matrix:
    return Folded(matrix.values.T, matrix.columns, matrix.rows) if isinstance(matrix, Folded) else matrix.T


def summed(parts: Sequence[tuple[int, Matrix]]) -> Matrix:
    """Σ count × matrix, compact if all are."""
    folded = [(many, matrix) for many, matrix in parts if isinstance(matrix, Folded)]
    if len(folded) < len(parts):
        return sum((many * whole(matrix) for many, matrix in parts[1:]), parts[0][0] * whole(parts[0][1]))
    sides = [joint(maps) for maps in zip(*((matrix.rows, matrix.columns) for _, matrix in folded), strict=True)]
    at = np.ix_(*(first for first, _ in sides))
    terms = [many * matrix[at] for many, matrix in folded]
    return Folded(sum(terms[1:], terms[0]), *(where for _, where in sides))


def joint(maps: Sequence[Classes]) -> tuple[Classes, Classes]:
    """Common refinement of maps of one axis: (representatives, class of every index)."""
    code = maps[0]
    for other in maps[1:]:
        code = code * (int(other.max()) + 1) + other
        code = np.unique(code, return_inverse=True)[1]
    first, where = np.unique(code, return_index=True, return_inverse=True)[1:]
    return first, where


def in_order(where: Classes) -> tuple[Classes, Classes]:
    """A map renumbered by first appearance: (used slices in that order, new map)."""
    used, first, inverse = np.unique(where, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return used[order], rank[inverse]
