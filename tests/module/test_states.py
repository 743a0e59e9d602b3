"""What users change between calls, on the in-process mesh. tests/distributed runs the same under gloo."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from harness import ideal
from state_cases import CASES, IN_ONE_PROCESS, SLOW

FAST = IN_ONE_PROCESS - SLOW


@pytest.mark.slow_cases(
    "{'tp': 2}-draws_that_nobody_reads",
    "{'tp': 2}-questions_that_are_refused",
    "{'tp': 2}-a_dict_that_the_forward_changes",
    "{'tp': 2}-globals_that_are_parts",
    "{'tp': 2}-a_count_that_decides",
    "{'tp': 2}-parameters_of_others_are_trained",
    "{'tp': 2}-questions_about_torch_and_tensors",
    "{'tp': 2}-what_is_built_otherwise_is_refused",
    "{'tp': 2}-deterministic_algorithms",
    "{'tp': 2}-frozen_from_the_beginning",
    "{'tp': 2}-checkpointed",
    "{'tp': 2}-outputs_that_share_memory",
    "{'tp': 2}-cached_parametrizations",
    "{'tp': 2}-autocast_around_the_call",
)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES])
@pytest.mark.parametrize("axes", [{"tp": 2}], ids=str)
def test_as_the_unsharded_model(name: str, axes: dict[str, int]) -> None:
    CASES[name](ideal(axes))


def test_the_table_has_a_row_for_every_case() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reference" / "what_happens_if.md").read_text(encoding="utf-8")
    named = {case for row in re.findall(r"\| (`[`\w, ]+`) \|\n", text) for case in re.findall(r"\w+", row)}
    assert named == set(CASES)
