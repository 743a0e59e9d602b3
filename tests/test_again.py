"""What is made again in the backward, in one process: numbers of one device, bytes as planned, functions in the source."""

from __future__ import annotations

import pytest
from again_cases import CASES, MODELS, SETTINGS, compare
from harness import ideal

MESHES = {"tp2": {"tp": 2}, "dp2tp2": {"dp": 2, "tp": 2}, "fsdp3": {"fsdp": 3}}


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    CASES[name](ideal(MESHES["tp2"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mesh", ["dp2tp2", "fsdp3"])
def test_case_on_other_meshes(mesh: str, name: str) -> None:
    CASES[name](ideal(MESHES[mesh]))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_as_one_device(name: str, setting: str, mesh: str) -> None:
    compare(name, ideal(MESHES[mesh]), SETTINGS[setting])
