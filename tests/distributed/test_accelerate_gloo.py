"""accelerate's Accelerator on two gloo ranks: the quick tour's script is that of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import world
from accelerate_worker import CASES, outcome

FAST = {"shared"}

sharded = world.cases("accelerate_worker.py", __name__, "test_as_one_device", also=["refusals"])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES])
def test_as_one_device(sharded: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    """Norms, losses, rates, each row's prediction once, files and weights; a state that is loaded goes on as before."""
    found, expected = sharded(name), outcome(name, str(tmp_path), whole=True)
    assert found["files"] == expected["files"]
    assert flat(found["told"]) == pytest.approx(flat(expected["told"]), rel=1e-9, abs=1e-9)
    assert found["weights"].keys() == expected["weights"].keys()
    assert flat(list(found["weights"].values())) == pytest.approx(
        flat(list(expected["weights"].values())), rel=1e-9, abs=1e-9
    )


def test_refused(sharded: Callable[[str], Any]) -> None:
    """Before anything is prepared; the last is not refused."""
    plain, loader, good = sharded("refusals")
    assert "Use autoshard.accelerate.Accelerator" in plain
    assert "a data loader was prepared, which takes other parts of the batch" in loader
    assert good == ""


def flat(value: Any) -> list[float]:
    return [t for v in value for t in flat(v)] if isinstance(value, list) else [float(value)]
