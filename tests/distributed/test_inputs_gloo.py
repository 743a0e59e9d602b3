"""Local inputs and accumulation on a mesh of two axes, under torch.distributed: four gloo processes."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import world

NAMES = (
    "local_inputs",
    "one_input_is_local",
    "parts_differ_along_an_axis_that_does_not_cut",
    "hybrid_sharding_with_no_sync",
    "no_sync_after_a_summed_gradient",
    "a_loss_outside_of_the_model",
    "full_weights_loaded",
    "optimizers_of_torch",
)


@functools.cache
def outcomes(folder: Path) -> dict[str, str]:
    found: dict[str, str] = json.loads(world.start("training_worker.py", 4, folder, ",".join(NAMES), timeout=280))
    return found


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inputs")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_on_two_axes(folder: Path, name: str) -> None:
    assert outcomes(folder)[name] == "", outcomes(folder)[name]
