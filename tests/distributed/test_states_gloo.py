"""What users change between calls, under torch.distributed: two gloo processes, each comparing with the unsharded model."""

from __future__ import annotations

import functools
import json
import subprocess
from collections.abc import Callable

import pytest
import world
from state_cases import CASES

AT_ONCE = 15
"""cases of one world: one that hangs costs these, and a launch ends well before its limit"""


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a case came to in a world of two ranks that runs it and others: "" or the first failing rank's traceback."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_as_the_unsharded_model]

    @functools.cache
    def results(launch: int) -> dict[str, str]:
        names = chosen[launch * AT_ONCE :][:AT_ONCE]
        folder = tmp_path_factory.mktemp("states")
        try:  # a launch that failed is not started again for every case in it
            found: dict[str, str] = json.loads(
                world.start("training_worker.py", 2, folder, ",".join(names), timeout=400)
            )
        except AssertionError as error:
            found = dict.fromkeys(names, f"in the world of {', '.join(names)}: {error}")
        except subprocess.TimeoutExpired as error:
            result = folder / "result.json"
            done = json.loads(result.read_text("utf-8")) if result.exists() else {}
            found = {name: done.get(name, str(error)) for name in names}
        return found

    return lambda name: results(chosen.index(name) // AT_ONCE)[name]


@pytest.mark.parametrize("name", CASES)
def test_as_the_unsharded_model(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
