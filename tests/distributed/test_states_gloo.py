"""What users change between calls, under torch.distributed: two gloo processes, each comparing with the unsharded model."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
from state_cases import CASES
from test_training_gloo import run_world


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a case came to in a world of two ranks that runs all chosen ones: "" or the first failing rank's traceback."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_as_the_unsharded_model]
    world = functools.cache(lambda: run_world(2, chosen, tmp_path_factory.mktemp("states"), seconds=900))

    def look_up(name: str) -> str:
        return world()[name]

    return look_up


@pytest.mark.parametrize("name", CASES)
def test_as_the_unsharded_model(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
