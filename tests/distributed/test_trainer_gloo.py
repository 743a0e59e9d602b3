"""transformers' own Trainer on two gloo ranks, with datasets that its batches do not divide."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import world
from largest_error import differences
from trainer_worker import CASES, flat, outcome

FAST = {"metrics", "first", "recomputed"}

sharded = world.cases("trainer_worker.py", __name__, "test_as_one_device")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES])
def test_as_one_device(sharded: Callable[[str], Any], tmp_path: Path, name: str) -> None:
    """Losses, metrics, rows and weights are those of transformers' own Trainer with the whole model."""
    expected = json.loads(json.dumps(outcome(name, str(tmp_path), whole=True)))
    if "refused" in expected:
        assert name not in {"adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop"}
        assert sharded(name) == expected
        return
    assert [len(expected["metrics"]), bool(expected["told"])] == [3, "steps" in CASES[name]]
    if "bf16" in CASES[name]:
        exact = torch.tensor(flat(outcome("exact", str(tmp_path), whole=True)["weights"]))
        theirs, ours = (torch.tensor(flat(found["weights"])).sub(exact).norm() for found in (expected, sharded(name)))
        assert float(theirs / exact.norm()) > 1e-4  # it was rounded
        assert ours < 1.5 * theirs
    else:
        assert differences(sharded(name), expected) == []
