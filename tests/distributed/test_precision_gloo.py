"""Mixed precision under torch.distributed: two gloo processes against eager emulations, and against FSDP2."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import pytest
import world
from precision_cases import CASES, SLOW

OWN = ("as_fsdp2", "gpt_as_fsdp2", "replicas_as_fsdp2", "sums_in_bfloat16_are_seen", "policy_of_one_rank")


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a case came to in a world of two ranks that runs all chosen ones: "" or the first failing rank's traceback."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_in_mixed_precision]

    @functools.cache
    def results() -> dict[str, str]:
        folder = tmp_path_factory.mktemp("precision")
        found: dict[str, str] = json.loads(world.start("precision_worker.py", 2, folder, ",".join(chosen), timeout=280))
        return found

    return lambda name: results()[name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*OWN, *(pytest.param(n, marks=[pytest.mark.slow] * (n in {*SLOW, "free", "refused"})) for n in CASES)]
)
def test_in_mixed_precision(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
