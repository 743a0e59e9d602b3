"""Training loops in the manner of well-known repositories, on two gloo ranks, against the same script on one device."""

from __future__ import annotations

import difflib
import functools
import importlib.util
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


@pytest.fixture(scope="session")
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a loop came to in a world of two ranks that runs all chosen ones."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_as_one_device]
    chosen = [name for name in chosen if name != "ignite" or importlib.util.find_spec("ignite")]

    @functools.cache
    def results() -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("loops")
        found: dict[str, Any] = json.loads(world.start("loops_worker.py", 2, folder, ",".join(chosen), timeout=280))
        return found

    return lambda name: results()[name]


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
