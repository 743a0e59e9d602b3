"""Process groups that modules share, under gloo."""

from __future__ import annotations

import pytest
import world

CASES = ("do_not_grow", "turns", "one_backward_for_two", "given", "late", "other_order", "initialised_again")


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n} ranks")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case came to: "" or the first failing rank's traceback."""
    chosen = {item.callspec.params["name"] for item in request.session.items if item.function is test_shared}
    folder = tmp_path_factory.mktemp("groups")
    names = [name for name in CASES if name in chosen]
    return world.outcomes("groups_worker.py", request.param, folder, names, timeout=200)


@pytest.mark.slow_cases("4 ranks-*", "*-given", "*-late", "*-other_order")
@pytest.mark.parametrize("name", CASES)
def test_shared(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "", outcomes[name]
