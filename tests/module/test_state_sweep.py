"""The cases of states in micro-batches and in stages, on the in-process mesh."""

from __future__ import annotations

import re

import pytest
from state_cases import CASES
from state_sweep import OTHERWISE, outcome


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("way", OTHERWISE)
def test_as_the_unsharded_model_or_refused(way: str, name: str) -> None:
    found, expected = outcome(way, name), OTHERWISE[way].get(name, "")
    assert re.fullmatch(expected, found, re.DOTALL) if expected else not found, found
