"""What users change between calls, under torch.distributed: two gloo processes, each comparing with the unsharded model."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import world
from state_cases import CASES, IN_ONE_PROCESS, SLOW

FAST = {*CASES} - IN_ONE_PROCESS - SLOW
AT_ONCE = 15
"""cases of one world: one that hangs costs these, and a launch ends well before its limit"""


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a case came to in a world of two ranks that runs it and others: "" or the first failing rank's traceback."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_as_the_unsharded_model]

    @functools.cache
    def results(launch: int) -> dict[str, str]:
        names = chosen[launch * AT_ONCE :][:AT_ONCE]
        return world.outcomes("training_worker.py", 2, tmp_path_factory.mktemp("states"), names, timeout=400)

    return lambda name: results(chosen.index(name) // AT_ONCE)[name]


@pytest.mark.slow_cases(
    "wrapped_in_ddp",
    "prepared_by_accelerate",
    "optimizers_load_whole_states",
    "a_save_beside_training",
    "pruned_after_compiling",
    "places_in_the_full_tensor",
    "draws_in_weights_gradients_and_outputs",
    "backwards_under_vmap_are_refused",
    "views_of_parameters_that_were_written_since",
    "shards_are_written_to_no_file",
)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES])
def test_as_the_unsharded_model(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
