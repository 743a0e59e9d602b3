"""Sums that are broadcast are numpy's to the last bit, whoever computes them."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.passes.search.arrays import NUMPY_ENTRIES, broadcast_sum


@pytest.mark.parametrize("rows", [3, NUMPY_ENTRIES])
@pytest.mark.parametrize("given", [False, True])
def test_sums_are_those_of_numpy(rows: int, given: bool) -> None:
    random = np.random.default_rng(0)
    a, b = random.random((rows, 1)), random.random((1, 7)) * 1e-9
    a[1], b[0, 2] = np.inf, np.inf
    out = np.empty((rows, 7)) if given else None
    found = broadcast_sum(a, b, out)
    assert np.array_equal(found, a + b)
    assert out is None or np.array_equal(out, a + b)
