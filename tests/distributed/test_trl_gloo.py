"""TRL's trainers, as they are, and PEFT's adapters on two gloo ranks: losses, weights and files of one device."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import world

pytest.importorskip("trl")
pytest.importorskip("peft")

from trl_worker import CASES, outcome


@pytest.fixture(scope="session")
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a case came to in a world of two ranks that runs all chosen ones."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_as_one_device]

    @functools.cache
    def results() -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("trl")
        found: dict[str, Any] = json.loads(world.start("trl_worker.py", 2, folder, ",".join(chosen), timeout=1200))
        return found

    return lambda name: results()[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_as_one_device(sharded: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    """Losses, norms, metrics, weights and saved tensors; three steps have changed something."""
    found, expected = flat(sharded(name)), flat(outcome(name, str(tmp_path), whole=True))
    losses = [
        value for path, value in expected.items() if path.split("/")[-1] in ("loss", "grad_norm") or "/losses/" in path
    ]
    assert len({*losses}) >= 3
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        assert found[path] == pytest.approx(value, rel=1e-9, abs=1e-9), path


def flat(value: Any, path: str = "") -> dict[str, float]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else None
    return {path: value} if items is None else {p: x for k, v in items for p, x in flat(v, f"{path}/{k}").items()}
