"""What users change between calls, on the in-process mesh. tests/distributed runs the same under gloo."""

from __future__ import annotations

import pytest
from harness import ideal
from state_cases import CASES


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("axes", [{"tp": 2}], ids=str)
def test_as_the_unsharded_model(name: str, axes: dict[str, int]) -> None:
    CASES[name](ideal(axes))
