"""Mixed precision under torch.distributed: two gloo processes against eager emulations, and against FSDP2."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import world
from precision_cases import CASES, SLOW

OWN = ("as_fsdp2", "gpt_as_fsdp2", "replicas_as_fsdp2", "sums_in_bfloat16_are_seen", "policy_of_one_rank")

outcome = world.cases("precision_worker.py", __name__, "test_in_mixed_precision")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*OWN, *(pytest.param(n, marks=[pytest.mark.slow] * (n in {*SLOW, "free", "refused"})) for n in CASES)]
)
def test_in_mixed_precision(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
