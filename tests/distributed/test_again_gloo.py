"""What is made again in the backward, under torch.distributed: two gloo processes against the unsharded model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest
import world
from again_cases import CASES

FAST = {"normed_blocks", "twice", "changed_in_place", "as_planned", "two_ranks_differ"}


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a case came to in a world of two ranks that runs all chosen ones: "" or the first failing rank's traceback."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_as_one_device]

    @functools.cache
    def results() -> dict[str, str]:
        folder = tmp_path_factory.mktemp("again")
        found: dict[str, str] = json.loads(world.start("again_worker.py", 2, folder, ",".join(chosen), timeout=280))
        return found

    return lambda name: results()[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES])
def test_as_one_device(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
