"""Models in parts under torch.distributed: two gloo processes against one device, in float64."""

from __future__ import annotations

from collections.abc import Callable

import parts_cases
import pytest
import world

outcome = world.cases("parts_worker.py", __name__, "test_trains_as_on_one_device")


@pytest.mark.slow_cases(
    "a_solver",
    "an_adaptive_weight",
    "an_inner_step",
    "triplets",
    "references_to_parameters",
    "parameters_put_in_place",
    "forces",
    "momentum_in_place",
    "gradients_per_sample",
    "layerdrop",
    "sparse_inputs",
    "a_function_in_the_forward",
    "duals",
    "a_part_that_returns_a_method",
    "clones_that_share_attributes",
)
@pytest.mark.parametrize("name", parts_cases.CASES)
def test_trains_as_on_one_device(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
