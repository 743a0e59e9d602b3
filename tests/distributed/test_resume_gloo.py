"""Checkpoints by torch.distributed.checkpoint: saved while training goes on, cut off by a kill, resumed otherwise."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import world

from autoshard.runtime.parameters.gradients import MAX_REDUCE_SCATTERS


@pytest.mark.slow
def test_resume_after_a_kill(tmp_path: Path) -> None:
    """Losses go on: bit for bit as it was, to rounding on another mesh, with another plan, micro-batches, recomputation."""
    command = [
        sys.executable,
        str(world.HERE / "resume_worker.py"),
        "2",
        str(tmp_path / "a"),
        str(tmp_path / "b"),
        "killed",
    ]
    ended = subprocess.run(command, env=world.environment(), capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode, ended.stderr
    assert (tmp_path / "losses.json").exists(), ended.stderr
    assert "the save ended well" not in ended.stderr, ended.stderr
    cut_off = tmp_path / "float64-4"
    assert cut_off.is_dir()
    assert not (cut_off / ".metadata").exists()
    found = json.loads(world.start("resume_worker.py", 2, tmp_path, "resumed", timeout=120))
    assert found.pop("without the checkpoint")[""] > 1e-3, "the control trains alike"
    assert found.pop("fused") == {"parts": 0.0, "under way": MAX_REDUCE_SCATTERS + 1}, "fused steps, reduce-scatters"
    assert found.pop("as it was") == {"torch.float64": 0.0, "torch.float32": 0.0}
    assert all(far["torch.float64"] < 1e-12 for far in found.values()), found
