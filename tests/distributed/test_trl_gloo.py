"""TRL's trainers, as they are, and PEFT's adapters on two gloo ranks: losses, weights and files of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import world

pytest.importorskip("trl")
pytest.importorskip("peft")

from trl_worker import CASES, outcome

sharded = world.cases("trl_worker.py", __name__, "test_as_one_device", timeout=1200)


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
