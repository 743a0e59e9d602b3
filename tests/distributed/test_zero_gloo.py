"""Stages of ZeRO under torch.distributed: gloo processes against the unsharded model, to the byte."""

from __future__ import annotations

from collections.abc import Callable

import prefetch_cases
import pytest
import world
import zero_cases

outcome = world.cases("zero_worker.py", __name__, "test_case", ranks=4)


@pytest.mark.slow_cases(
    "zero1_in_4",
    "hsdp_in_4",
    "gathered_in_two_steps",
    "*_in_1",
    "ddp_in_4",
    "one_tensor_is_not_copied",
    "stages_side_by_side",
)
@pytest.mark.parametrize("name", zero_cases.CASES | prefetch_cases.CASES)
def test_case(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
