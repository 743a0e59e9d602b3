"""What two ranks do where they come with other weights, inputs, plans or gradients: the checks of :data:`FILES`."""

from __future__ import annotations

import json
import re

import pytest
import world

FILES = ("agreement_worker.py", "agreement_calls.py", "agreement_gradients.py")
CHECKS = [c for f in FILES for c in re.findall(r"^def (\w+)\(\) -> None", (world.HERE / f).read_text(), re.MULTILINE)]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    chosen = [item.callspec.params["check"] for item in request.session.items if item.function is test_agreement]
    folder = tmp_path_factory.mktemp("gloo")
    found: dict[str, str] = json.loads(world.start("agreement_worker.py", 2, folder, ",".join(chosen), timeout=270))
    return found


SLOW = {
    "a_copy_is_compared_anew",
    "a_hook_of_one_rank",
    "alike_failures_leave_nothing",
    "an_evaluation_with_other_batches",
    "arguments_without_a_repr_of_their_own",
    "clipping_in_any_order",
    "inputs_are_always_compared_where_asked",
    "named_arguments_in_another_order",
    "numbers_are_compared_whole",
    "one_other_number",
    "other_constants",
    "other_meetings",
    "repeated_calls_are_not_compared",
    "drifted_replicas",
    "meta_everywhere",
    "rank_0_plans",
    "time_stolen_from_one",
    "weights_on_rank_0_only",
    "scaled_steps",
    "tables_of_one_owner_are_no_replicas",
    "weights_on_rank_1_only",
}
"""what only --run-slow runs: others of these worlds check the same of another value, call or rank"""


@pytest.mark.parametrize("check", [pytest.param(c, marks=[pytest.mark.slow] * (c in SLOW)) for c in CHECKS])
def test_agreement(outcomes: dict[str, str], check: str) -> None:
    assert outcomes[check] == "", outcomes[check]
