"""What is made again in the backward, under torch.distributed: two gloo processes against the unsharded model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import world
from again_cases import CASES

FAST = {"normed_blocks", "twice", "changed_in_place", "as_planned", "two_ranks_differ"}

outcome = world.cases("again_worker.py", __name__, "test_as_one_device")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES])
def test_as_one_device(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
