"""Lightning's Trainer and Fabric on two gloo ranks: losses, weights, checkpoints and resumption of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import world

pytest.importorskip("lightning")

from lightning_worker import CASES, outcome

FAST = {"shared"}

sharded = world.cases("lightning_worker.py", __name__, "test_as_one_device", also=["refusals"])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES])
def test_as_one_device(sharded: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    """Losses, norms, metrics, steps, names of files, weights and moments; autocast rounds sums in another order."""
    found, expected = sharded(name), outcome(name, str(tmp_path), whole=True)
    tolerance = 2e-2 if name == "bf16" else 1e-9
    assert [len(found["told"]), found["files"]] == [len(expected["told"]), expected["files"]]
    assert found["told"] == pytest.approx(expected["told"], rel=tolerance, abs=tolerance)
    assert found["weights"].keys() == expected["weights"].keys()
    for entry, values in expected["weights"].items():
        assert flat(found["weights"][entry]) == pytest.approx(flat(values), rel=tolerance, abs=tolerance)


def test_refused(sharded: Callable[[str], Any]) -> None:
    """A module that is not sharded, and one beside it whose gradient nobody would sum."""
    plain, beside = sharded("refusals")
    assert "needs a module that autoshard.compile made for all 2 processes" in plain
    assert "'head.weight' is not in the sharded module" in beside


def flat(value: Any) -> list[float]:
    return [t for v in value for t in flat(v)] if isinstance(value, list) else [float(value)]
