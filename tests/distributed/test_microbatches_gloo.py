"""Steps of several micro-batches under torch.distributed: two gloo processes against the unsharded model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import world
from microbatch_cases import CASES

SLOW = {"llama_in_2", "gpt_in_4", "moe_in_4", "weighted_in_4", "draws_go_on", "refused"}

outcome = world.cases("microbatch_worker.py", __name__, "test_as_the_whole_batch")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
def test_as_the_whole_batch(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
