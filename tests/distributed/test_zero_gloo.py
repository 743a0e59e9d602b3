"""Stages of ZeRO under torch.distributed: gloo processes against the unsharded model, to the byte."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import prefetch_cases
import pytest
import world
import zero_cases


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a case came to in a world of four ranks that runs all chosen ones: "" or the first failing rank's traceback."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_case]

    @functools.cache
    def results() -> dict[str, str]:
        folder = tmp_path_factory.mktemp("zero")
        found: dict[str, str] = json.loads(world.start("zero_worker.py", 4, folder, ",".join(chosen), timeout=280))
        return found

    return lambda name: results()[name]


@pytest.mark.slow_cases("*_in_1", "ddp_in_4", "one_tensor_is_not_copied", "stages_side_by_side")
@pytest.mark.parametrize("name", zero_cases.CASES | prefetch_cases.CASES)
def test_case(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
