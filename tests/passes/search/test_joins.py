"""Joins of tables: the minimum of a sum, in blocks and in one go."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.passes.search.exact import elimination


@pytest.mark.parametrize("alone", [0, 2, 3])
@pytest.mark.parametrize("most", [0, elimination.MOST_SUMMED])
def test_joins_in_blocks(alone: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Along the axis ``alone`` one part differs, which is constant along all others; equal to the whole sum at once."""
    monkeypatch.setattr(elimination, "AT_ONCE", 0)
    monkeypatch.setattr(elimination, "MOST_SUMMED", most)
    monkeypatch.setattr(elimination, "BLOCK", 100)
    shape, generator = (5, 4, 6, 3), np.random.default_rng(alone)
    first, second, third = [k for k in range(4) if k != alone]
    parts = []
    for axes in ((first, second), (second, third), (alone,), ()):
        part = generator.integers(0, 6, [7, *(n if k in axes else 1 for k, n in enumerate(shape))]).astype(np.float64)
        parts.append(np.where(generator.random(part.shape) < 0.1, np.inf, part))
    assert np.array_equal(elimination.min_sum(parts, shape), sum(parts[1:], parts[0]).min(axis=0))
