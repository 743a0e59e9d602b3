"""accelerate's Accelerator on two gloo ranks: the quick tour's script is that of one device."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import world
from accelerate_worker import CASES, outcome

FAST = {"shared"}


@pytest.fixture(scope="session")
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a case came to in a world of two ranks that runs all chosen ones."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_as_one_device]

    @functools.cache
    def results() -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("accelerate")
        names = ",".join([*chosen, "refusals"])
        found: dict[str, Any] = json.loads(world.start("accelerate_worker.py", 2, folder, names, timeout=280))
        return found

    return lambda name: results()[name]


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
