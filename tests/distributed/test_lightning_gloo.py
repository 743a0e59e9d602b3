"""Lightning's Trainer and Fabric on two gloo ranks: losses, weights, checkpoints and resumption of one device."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import world

pytest.importorskip("lightning")

from lightning_worker import CASES, outcome

FAST = {"shared"}


@pytest.fixture(scope="session")
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a case came to in a world of two ranks that runs all chosen ones."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_as_one_device]

    @functools.cache
    def results() -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("lightning")
        names = ",".join([*chosen, "refusals"])
        found: dict[str, Any] = json.loads(world.start("lightning_worker.py", 2, folder, names, timeout=280))
        return found

    return lambda name: results()[name]


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
