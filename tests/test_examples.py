"""The scripts of docs/examples, as a reader would run them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2")


def run(*command: str) -> str:
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def evaluations(text: str) -> list[str]:
    return re.findall(r"evaluation: (\S+)", text)


@pytest.mark.slow
def test_trainer_stopped_and_resumed_on_another_mesh(tmp_path: Path) -> None:
    """Two ranks, then four in one process; the same as transformers' own Trainer with the plain model."""
    script = str(ROOT / "docs" / "examples" / "trainer.py")
    half = evaluations(run(*TORCHRUN, script, str(tmp_path / "a"), "--steps", "4"))
    resumed = evaluations(run(script, str(tmp_path / "a"), "--steps", "8", "--resume"))
    whole = evaluations(run(script, str(tmp_path / "b"), "--steps", "8", "--whole"))
    assert half[0] == half[1] != resumed[0]
    assert resumed == whole
