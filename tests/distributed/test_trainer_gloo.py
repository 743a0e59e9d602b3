"""transformers' own Trainer on two gloo ranks, with datasets that its batches do not divide."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import world
from largest_error import differences
from trainer_worker import CASES, flat, outcome

FAST = {"metrics", "stream", "first", "recomputed"}


@pytest.fixture(scope="session")
def sharded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What a case came to in a world of two ranks that runs all chosen ones."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_as_one_device]

    @functools.cache
    def results() -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("trainer")
        found: dict[str, Any] = json.loads(world.start("trainer_worker.py", 2, folder, ",".join(chosen), timeout=280))
        return found

    return lambda name: results()[name]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES])
def test_as_one_device(sharded: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    """Losses, metrics, rows and weights are those of transformers' own Trainer with the whole model."""
    expected = json.loads(json.dumps(outcome(name, str(tmp_path), whole=True)))
    assert [len(expected["metrics"]), bool(expected["told"])] == [3, "steps" in CASES[name]]
    if "bf16" in CASES[name]:
        exact = torch.tensor(flat(outcome("exact", str(tmp_path), whole=True)["weights"]))
        theirs, ours = (torch.tensor(flat(found["weights"])).sub(exact).norm() for found in (expected, sharded(name)))
        assert float(theirs / exact.norm()) > 1e-4  # it was rounded
        assert ours < 1.5 * theirs
    else:
        assert differences(sharded(name), expected) == []
