"""Arrays by what they hold. A sum finds those that may be equal several times as fast as a digest, and a look tells."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

WIDTH = 509
"""words that are summed apart: no multiple of a row's length, so that tables whose rows are exchanged differ"""


class Contents:
    """Numbers of arrays, equal ones alike: bit by bit, so that zeros of either sign differ."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, list[int]] = {}

    def number(self, array: Array, more: Hashable, at: Callable[[int], Array], new: int) -> int:
        """Of a contiguous float64 array, and of what else it has to agree in; ``new`` where there is no equal one.

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
