"""Training loops in the manner of well-known repositories, on two gloo ranks, against the same script on one device."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import loops
import pytest
import world
from largest_error import differences

FAST = {"nanogpt"}
MOST_LINES = 5
"""lines that a script may change or add to be sharded"""

sharded = world.cases("loops_worker.py", __name__, "test_as_one_device")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in loops.LOOPS])
def test_as_one_device(sharded: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    """Losses, norms, metrics and final weights, after a resume, too; few lines differ."""
    if name == "ignite":
        pytest.importorskip("ignite")
    expected = json.loads(json.dumps(loops.run(name, str(tmp_path), sharded=False)))
    assert differences(sharded(name), expected) == []


@pytest.mark.parametrize("name", loops.LOOPS)
def test_few_lines_change(name: str) -> None:
    """Lines of the sharded script that the one-device script lacks, and its import."""
    one, many = (loops.script(name, sharded).splitlines() for sharded in (False, True))
    added = [line for line in difflib.ndiff(one, many) if line.startswith("+ ")]
    assert 0 < len(added) + len(["import autoshard"]) <= MOST_LINES
