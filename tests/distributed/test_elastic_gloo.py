"""The example of elastic training: ranks are killed, the others go on as an undisturbed run on their mesh does."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import world

EXAMPLE = world.HERE.parent.parent / "docs/examples/elastic.py"


def printed(folder: Path, *options: str) -> str:
    command = [sys.executable, str(EXAMPLE), "--folder", str(folder), *options]
    ended = subprocess.run(command, env=world.environment(), capture_output=True, text=True, timeout=600, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def losses(text: str) -> list[tuple[str, str]]:
    return re.findall(r"step (\d+): loss (\S+)", text)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [["3"], ["1", "3"]], ids=["from memory", "from the checkpoint"])
def test_the_others_go_on(tmp_path: Path, killed: list[str]) -> None:
    text, left = printed(tmp_path / "killed", "--kill", *killed), 4 - len(killed)
    how = "from memory" if left == 3 else "from step000004"
    assert f"{left} ranks resume {how} at step 4" in text
    assert ("no rank that is left holds all of" in text) == (left == 2)
    alone = printed(tmp_path / "alone", "--ranks", str(left), "--start", str(tmp_path / "killed/step000004"))
    assert [step for step, _ in losses(text)] == [str(n) for n in range(7)]
    assert losses(text)[4:] == losses(alone)
