"""The runtime on torch.distributed: one gloo world of 2 and one of 4 processes run all checks of runtime_worker.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CHECKS = re.findall(r"^def check_(\w+)", (HERE / "runtime_worker.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n} ranks")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each check came to: the empty string, or the first rank's traceback."""
    folder, ranks = tmp_path_factory.mktemp("gloo"), request.param
    paths = [str(HERE.parent), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "runtime_worker.py")]
    workers = [
        subprocess.Popen(
            [*command, str(r), str(ranks), str(folder / "rendezvous"), str(folder / "result.json")],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(ranks)
    ]
    try:
        logs = [worker.communicate(timeout=120)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert not any(worker.returncode for worker in workers), "\n".join(logs)
    result: dict[str, str] = json.loads((folder / "result.json").read_text())
    return result


@pytest.mark.parametrize("check", CHECKS)
def test_gloo(outcomes: dict[str, str], check: str) -> None:
    assert outcomes[check] == "", outcomes[check]
