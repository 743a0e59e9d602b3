"""Steps of several micro-batches under torch.distributed: two gloo processes against the unsharded model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest
import world
from microbatch_cases import CASES

SLOW = {"llama_in_2", "gpt_in_4", "moe_in_4", "weighted_in_4", "draws_go_on", "refused"}


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a case came to in a world of two ranks that runs all chosen ones: "" or the first failing rank's traceback."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_as_the_whole_batch]

    @functools.cache
    def results() -> dict[str, str]:
        folder = tmp_path_factory.mktemp("microbatches")
        found: dict[str, str] = json.loads(
            world.start("microbatch_worker.py", 2, folder, ",".join(chosen), timeout=280)
        )
        return found

    return lambda name: results()[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in CASES])
def test_as_the_whole_batch(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
