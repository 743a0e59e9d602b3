"""What two ranks do where they come with other weights, inputs, plans or gradients: the checks of agreement_worker.py."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_training_gloo import HERE, run_world

CHECKS = re.findall(r"^def (\w+)\(\) -> None", (HERE / "agreement_worker.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    chosen = [item.callspec.params["check"] for item in request.session.items if item.function is test_agreement]
    folder: Path = tmp_path_factory.mktemp("gloo")
    return run_world(2, chosen, folder, "agreement_worker.py")


@pytest.mark.parametrize("check", CHECKS)
def test_agreement(outcomes: dict[str, str], check: str) -> None:
    assert outcomes[check] == "", outcomes[check]
