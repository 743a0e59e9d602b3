"""Tokens of every kind of model under torch.distributed, as the unsharded model's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import world
from generating_models import MODELS


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
@pytest.mark.parametrize("name", MODELS)
def test_as_one_device(name: str, mesh: str, tmp_path: Path) -> None:
    case = f"{name}-{mesh}"
    assert json.loads(world.start("generating_worker.py", 2, tmp_path, case, timeout=800)) == {case: ""}


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("mesh", ["tp4", "dp2tp2"])
def test_on_four_ranks(mesh: str, tmp_path: Path) -> None:
    """All models in one launch; with more ranks than key-value heads, or with requests over ranks as well."""
    cases = [f"{name}-{mesh}" for name in MODELS]
    found = json.loads(world.start("generating_worker.py", 4, tmp_path, ",".join(cases), timeout=1900))
    assert found == dict.fromkeys(cases, "")


@pytest.mark.slow
def test_every_way(tmp_path: Path) -> None:
    assert json.loads(world.start("generating_worker.py", 2, tmp_path, "every_way", timeout=280)) == {"every_way": ""}
