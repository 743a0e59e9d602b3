"""What two ranks do where they come with other weights, inputs, plans or gradients: the checks of :data:`FILES`."""

from __future__ import annotations

import json
import re

import pytest
import world

FILES = ("agreement_worker.py", "agreement_calls.py", "agreement_gradients.py")
CHECKS = [c for f in FILES for c in re.findall(r"^def (\w+)\(\) -> None", (world.HERE / f).read_text(), re.MULTILINE)]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    chosen = [item.callspec.params["check"] for item in request.session.items if item.function is test_agreement]
    folder = tmp_path_factory.mktemp("gloo")
    found: dict[str, str] = json.loads(world.start("agreement_worker.py", 2, folder, ",".join(chosen), timeout=270))
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_agreement(outcomes: dict[str, str], check: str) -> None:
    assert outcomes[check] == "", outcomes[check]
