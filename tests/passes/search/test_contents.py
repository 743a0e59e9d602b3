"""Equal arrays have one number, others have different ones, whatever they sum to."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.passes.search.arrays import CHECKSUM_WORDS, ContentNumbers


def numbers(arrays: list[np.ndarray], more: object = None) -> list[int]:
    contents, known, found = ContentNumbers(), list[np.ndarray](), []
    for array in arrays:
        number = contents.number(array, more, known.__getitem__, len(known))
        if number == len(known):
            known.append(array)
        found.append(number)
    return found


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, CHECKSUM_WORDS), (40, 50), (2, 30, 40)])
def test_equal_arrays_have_one_number(shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).random(shape)
    other = array + 1.0
    assert numbers([array, other, array.copy(), array, other.copy()]) == [0, 1, 0, 0, 1]


def test_arrays_of_equal_sums_are_told_apart() -> None:
    array = np.random.default_rng(0).random(4 * CHECKSUM_WORDS)
    exchanged = array.copy()
    exchanged[[5, 5 + CHECKSUM_WORDS]] = exchanged[[5 + CHECKSUM_WORDS, 5]]
    assert numbers([array, exchanged, exchanged.copy(), array.copy()]) == [0, 1, 1, 0]


def test_shapes_signs_and_what_is_beside_count() -> None:
    array = np.zeros((4, 6))
    assert numbers([array, array.reshape(6, 4), -array, array.copy()]) == [0, 1, 2, 0]
    contents = ContentNumbers()
    assert contents.number(array, "a", [array].__getitem__, 0) == 0
    assert contents.number(array, "b", [array].__getitem__, 1) == 1
