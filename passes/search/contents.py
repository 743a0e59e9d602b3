"""Deduplication of arrays by content: a checksum finds candidates, a comparison decides."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WIDTH = 509
"""words summed apart: no multiple of a row length, so that exchanged rows change the checksum"""


class Contents:
    """Numbers for float64 arrays, the same for equal arrays. Bitwise: 0.0 and -0.0 differ."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, list[int]] = {}

    def number(self, array: Array, more: Hashable, at: Callable[[int], Array], new: int) -> int:
        """Number of a contiguous float64 array, equal in ``more``, too; ``new`` if unknown.

        ``at``: the array of a number.
        """
        words = array.reshape(-1).view(np.uint64)
        rest = len(words) % WIDTH
        sums = words[rest:].reshape(-1, WIDTH).sum(axis=0, dtype=np.uint64)
        known = self._numbers.setdefault((array.shape, sums.tobytes(), words[:rest].tobytes(), more), [])
        for number in known:
            other = at(number)
            if other is array or np.array_equal(_words(other), words.reshape(array.shape)):
                return number
        known.append(new)
        return new


def _words(array: Array) -> NDArray[np.uint64]:
    return np.asarray(array, dtype=np.float64).view(np.uint64)
