"""What NCCL would run, as far as a machine without a GPU can: a device that is not the CPU, collectives without values.

No host may wait for the device inside a step, and nothing on the CPU may meet what is on the device.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import world

SCRIPT = Path(__file__).parent / "device_worker.py"
CHECKS = [
    name
    for name in re.findall(r"^def ([a-z]\w+)\(\) -> None", SCRIPT.read_text("utf-8"), re.MULTILINE)
    if name != "main"
]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> dict[str, str]:
    """What each check came to: the empty string, or a traceback."""
    items = (item for item in request.session.items if item.function is test_steps_on_a_device)
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *(item.callspec.params["check"] for item in items)],
        env=world.environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow_cases("llama_in_shards", "dlrm", "local_inputs", "convolutions", "inputs_on_the_device")
@pytest.mark.parametrize("check", CHECKS)
def test_steps_on_a_device(outcomes: dict[str, str], check: str) -> None:
    assert outcomes[check] == "", outcomes[check]
