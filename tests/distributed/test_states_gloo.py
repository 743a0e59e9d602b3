"""What users change between calls, under torch.distributed: two gloo processes, each comparing with the unsharded model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest
import state_cases_inputs  # noqa: F401  more of them
import state_cases_outputs  # noqa: F401
import world
from state_cases import CASES


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a case came to in a world of two ranks that runs all chosen ones: "" or the first failing rank's traceback."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_as_the_unsharded_model]

    @functools.cache
    def results() -> dict[str, str]:
        folder = tmp_path_factory.mktemp("states")
        found: dict[str, str] = json.loads(world.start("training_worker.py", 2, folder, ",".join(chosen), timeout=280))
        return found

    return lambda name: results()[name]


@pytest.mark.parametrize("name", CASES)
def test_as_the_unsharded_model(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
