"""Parts of one gradient that are summands over different axes come together as one summand, and nothing counts twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autoshard.runtime.parameters.flat_bucket import FlatBucket
from autoshard.runtime.parameters.gradients import Gradients
from autoshard.runtime.transport.in_process import World
from autoshard.runtime.transport.move import Move
from autoshard.runtime.transport.spare import CALLS, LEAST, Spare

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


class Arriving:
    """A sum under way: it adds up when it is waited for."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def wait(self) -> None:
        self.x += 1.0


def test_only_what_is_added_up_is_waited_for() -> None:
    for brought, at_once in ((None, False), (torch.ones(2), True)):
        gradients, part = Gradients(World(MESH).ranks[0]), torch.zeros(2)
        gradients.works, gradients.parts = [Arriving(part)], [(0, part, ())]
        (found,) = gradients.finish([brought])
        assert found is not None
        assert found.tolist() == ([2.0, 2.0] if at_once else [0.0, 0.0])
        gradients.wait()
        assert found.tolist() == ([2.0, 2.0] if at_once else [1.0, 1.0])
        assert not gradients.works


@pytest.mark.parametrize("size", [1, LEAST // 4])
@pytest.mark.parametrize("count", [1, 2])
def test_what_is_summed_in_place_is_no_gradients_own_memory(count: int, size: int) -> None:
    """Autograd may have given a gradient to others, too."""
    comm: Any = SimpleNamespace(deferred=False, buffer=lambda like, size, dtype: like.new_empty(size, dtype=dtype))
    gradients = [torch.ones(size) for _ in range(count)]
    flat = FlatBucket(comm, [Move("I", "R", ("dp",))] * count)._flat(gradients, torch.float32)
    assert flat.tolist() == [1.0] * count * size
    flat.zero_()
    assert all(g.min() == 1.0 for g in gradients)


def test_a_buffer_is_used_again_when_nobody_sees_it() -> None:
    spare, like, size = Spare(), torch.empty(0), LEAST // 4

    def take(call: int) -> torch.Tensor:
        return spare.take(like, size, torch.float32, call)

    first = take(1)
    place, gradient = first.data_ptr(), first[8:12].view(2, 2).detach()
    del first
    second = take(1)
    assert second.data_ptr() != place, "a gradient is still there"
    gradient.fill_(7.0)
    second.zero_()
    assert gradient.tolist() == [[7.0, 7.0], [7.0, 7.0]]
    del gradient
    assert take(2).data_ptr() == place
    del second
    take(2 + CALLS + 1)
    assert [call for kept in spare._kept.values() for call, _ in kept] == [2 + CALLS + 1], "what nobody takes is freed"
    spare.clear()
    assert not spare._kept
    assert take(9).numel() == size
    assert spare.take(like, 4, torch.float32, 1).data_ptr() not in {
        x.data_ptr() for k in spare._kept.values() for _, x in k
    }
