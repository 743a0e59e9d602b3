"""Arrays of costs: matrices with equal rows and columns stored once, sums by torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
Classes = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class CompactMatrix:
    """Entry [i, j] is ``values[rows[i], columns[j]]``."""

    values: FloatArray
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

    def whole(self) -> FloatArray:
        return self.values[np.ix_(self.rows, self.columns)]


Matrix = FloatArray | CompactMatrix


def stored_values(matrix: Matrix) -> FloatArray:
    """The stored entries: each entry of the matrix at least once."""
    return matrix.values if isinstance(matrix, CompactMatrix) else matrix


def dense_matrix(matrix: Matrix) -> FloatArray:
    return matrix.whole() if isinstance(matrix, CompactMatrix) else matrix


def map_entries(function: Callable[..., FloatArray], matrix: Matrix, *others: Matrix | None) -> Matrix:
    """``function`` of all entries, with ``others`` of the same classes; keeps None."""
    found = function(stored_values(matrix), *(None if x is None else stored_values(x) for x in others))
    return replace(matrix, values=found) if isinstance(matrix, CompactMatrix) else found


def take_slices(array: FloatArray, indices: Classes, axis: int) -> FloatArray:
    """Indices along an axis; the array itself if these are all, in order."""
    every = len(indices) == array.shape[axis] and np.array_equal(indices, np.arange(len(indices)))
    return array if every else array.take(indices, axis)


def transpose_matrix(matrix: Matrix) -> Matrix:
    return (
        CompactMatrix(matrix.values.T, matrix.columns, matrix.rows) if isinstance(matrix, CompactMatrix) else matrix.T
    )


def weighted_sum(parts: Sequence[tuple[int, Matrix]]) -> Matrix:
    """Σ count × matrix, compact if all are."""
    folded = [(many, matrix) for many, matrix in parts if isinstance(matrix, CompactMatrix)]
    if len(folded) < len(parts):
        return sum((many * dense_matrix(matrix) for many, matrix in parts[1:]), parts[0][0] * dense_matrix(parts[0][1]))
    sides = [joint_classes(maps) for maps in zip(*((matrix.rows, matrix.columns) for _, matrix in folded), strict=True)]
    at = np.ix_(*(first for first, _ in sides))
    terms = [many * matrix[at] for many, matrix in folded]
    return CompactMatrix(sum(terms[1:], terms[0]), *(where for _, where in sides))


def joint_classes(maps: Sequence[Classes]) -> tuple[Classes, Classes]:
    """Common refinement of maps of one axis: (representatives, class of every index)."""
    code = maps[0]
    for other in maps[1:]:
        code = code * (int(other.max()) + 1) + other
        code = np.unique(code, return_inverse=True)[1]
    first, where = np.unique(code, return_index=True, return_inverse=True)[1:]
    return first, where


def by_first_appearance(where: Classes) -> tuple[Classes, Classes]:
    """A map renumbered by first appearance: (used slices in that order, new map)."""
    used, first, inverse = np.unique(where, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return used[order], rank[inverse]


def grid_exponent(used: Iterable[tuple[FloatArray, int]]) -> int:
    """Exponent of the power of two whose multiples add up exactly. ``used``: arrays, and how often they are summed.
    The sum takes 50 of the 53 bits of float64; messages need the rest."""
    total = sum(float(np.abs(array[np.isfinite(array)]).max(initial=0.0)) * times for array, times in used)
    return math.frexp(total)[1] - 50


def on_grid(exponent: int, array: FloatArray) -> FloatArray:
    """``array`` rounded to multiples of that power of two."""
    return np.ldexp(np.rint(np.ldexp(array, -exponent)), exponent)


NUMPY_ENTRIES = 5_000
"""entries up to which the overhead of a torch call exceeds numpy's sum"""


def broadcast_sum(a: FloatArray, b: FloatArray, out: FloatArray | None = None) -> FloatArray:
    entries = np.broadcast(a, b).size if out is None else out.size
    if entries <= NUMPY_ENTRIES:
        return np.add(a, b, out=out)
    found = None if out is None else torch.from_numpy(out)
    return torch.add(torch.from_numpy(a), torch.from_numpy(b), out=found).numpy()


CHECKSUM_WORDS = 509
"""words summed apart: no multiple of a row length, so that exchanged rows change the checksum"""


class ContentNumbers:
    """Numbers for float64 arrays, the same for equal arrays. Bitwise: 0.0 and -0.0 differ."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, list[int]] = {}

    def number(self, array: FloatArray, more: Hashable, at: Callable[[int], FloatArray], new: int) -> int:
        """Number of a contiguous float64 array, equal in ``more``, too; ``new`` if unknown. ``at``:
        the array of a number."""
        words = array.reshape(-1).view(np.uint64)
        rest = len(words) % CHECKSUM_WORDS
        sums = words[rest:].reshape(-1, CHECKSUM_WORDS).sum(axis=0, dtype=np.uint64)
        known = self._numbers.setdefault((array.shape, sums.tobytes(), words[:rest].tobytes(), more), [])
        for number in known:
            other = at(number)
            if other is array or np.array_equal(_words(other), words.reshape(array.shape)):
                return number
        known.append(new)
        return new


def _words(array: FloatArray) -> NDArray[np.uint64]:
    return np.asarray(array, dtype=np.float64).view(np.uint64)
