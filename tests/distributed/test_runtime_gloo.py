"""The runtime on torch.distributed: one gloo world of 2 and one of 4 processes run all checks of runtime_worker.py."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import world

HERE = Path(__file__).parent
CHECKS = re.findall(r"^def check_(\w+)", (HERE / "runtime_worker.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n} ranks")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each check came to: the empty string, or the first rank's traceback."""
    folder = tmp_path_factory.mktemp("gloo")
    result: dict[str, str] = json.loads(world.start("runtime_worker.py", request.param, folder, timeout=240))
    return result


@pytest.mark.slow_cases("4 ranks-*")
@pytest.mark.parametrize("check", CHECKS)
def test_gloo(outcomes: dict[str, str], check: str) -> None:
    assert outcomes[check] == "", outcomes[check]
