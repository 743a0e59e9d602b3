"""Models in parts under torch.distributed: two gloo processes against one device, in float64."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import parts_cases
import pytest
import world


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a case came to in a world of two ranks that runs all chosen ones: "" or the first failing rank's traceback."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_trains_as_on_one_device]

    @functools.cache
    def results() -> dict[str, str]:
        folder = tmp_path_factory.mktemp("parts")
        found: dict[str, str] = json.loads(world.start("parts_worker.py", 2, folder, ",".join(chosen), timeout=280))
        return found

    return lambda name: results()[name]


@pytest.mark.slow_cases(
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
