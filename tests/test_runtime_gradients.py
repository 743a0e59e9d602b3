"""Parts of one gradient that are summands over different axes come together as one summand, and nothing counts twice."""

from __future__ import annotations

import torch

from autoshard.runtime.gradients import Gradients
from autoshard.runtime.in_process import World

MESH = {"dp": 2, "tp": 2}


def test_parts_over_different_axes() -> None:
    random = torch.Generator().manual_seed(0)
    whole = torch.randn(3, generator=random, dtype=torch.float64)
    by_dp = torch.randn(2, 3, generator=random, dtype=torch.float64)
    by_rank = torch.randn(4, 3, generator=random, dtype=torch.float64)
    found = []
    for rank in range(4):
        gradients = Gradients(World(MESH).ranks[rank])
        gradients.parts = [(1, by_dp[rank // 2], ("dp",)), (1, by_rank[rank], ("dp", "tp"))]
        out = gradients.finish([whole, whole, None])
        assert gradients.summands == {1: ("dp", "tp")}
        assert out[0] is whole
        assert out[2] is None
        assert out[1] is not None
        found.append(out[1])
    torch.testing.assert_close(sum(found), whole + by_dp.sum(0) + by_rank.sum(0), rtol=1e-12, atol=1e-12)


def test_one_kind_of_parts_stays_as_it_is() -> None:
    gradients = Gradients(World(MESH).ranks[3])
    part = torch.ones(2)
    gradients.parts = [(0, part, ("dp",))]
    assert gradients.finish([None])[0] is part
    assert gradients.summands == {0: ("dp",)}
    assert gradients.finish([part])[0] is part
    assert gradients.summands == {}
