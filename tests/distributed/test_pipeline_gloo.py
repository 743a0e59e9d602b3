"""Pipeline stages under torch.distributed: gloo processes against the unsharded model."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import world
from pipeline_cases import CASES
from state_sweep import IN_PROCESSES

FAST = {
    "gpt_1f1b",
    "one_verdict",
    "what_users_do_with_their_own",
}
OWN = (
    "beside_a_module_on_these_ranks",
    "resumed_elsewhere",
    "one_fails",
    "local_inputs",
    "saved",
    "generates",
    "caches_stay",
    "in_flight",
    "in_two_parts",
    "reduced_once",
    "tied_in_some_stages",
    "tied_tables",
    "read_in_fewer_stages",
    "what_users_do_with_their_own",
    "t5",
    "whisper",
    "gradients_of_inputs_in_parts",
    "drawn_again",
)
"""cases of pipeline_worker.py alone"""
WORLDS = [pytest.param(2, id="world2"), pytest.param(4, id="world4", marks=pytest.mark.slow)]
AT_ONCE = 11
"""cases of one world, so that it ends well before the limit of a test"""


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, str], str]:
    """What a case came to in a world that runs it and others: "" or the first failing rank's traceback."""
    chosen: dict[int, list[str]] = {2: [], 4: []}
    for item in request.session.items:
        if item.function is test_as_on_one_device:
            chosen[item.callspec.params["ranks"]].append(item.callspec.params["name"])

    @functools.cache
    def results(ranks: int, names: tuple[str, ...]) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("pipeline")
        return world.outcomes("pipeline_worker.py", ranks, folder, [*names], timeout=280)

    return lambda ranks, name: results(ranks, next(w for w in in_worlds(chosen[ranks]) if name in w))[name]


def in_worlds(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Cases that run in one world; none after the one that leaves its ranks out of step."""
    found: list[str] = []
    for name in names:
        found.append(name)
        if len(found) == AT_ONCE or name == "one_fails":
            yield tuple(found)
            found = []
    if found:
        yield tuple(found)


@pytest.mark.parametrize("ranks", WORLDS)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in (*CASES, *OWN)])
def test_as_on_one_device(outcome: Callable[[int, str], str], name: str, ranks: int) -> None:
    found = outcome(ranks, name)
    assert found == "", found


@pytest.mark.slow
def test_states(tmp_path: Path) -> None:
    """Cases of tests/support/states/state_*.py in two stages, a process each."""
    names = ",".join(f"state {name}" for name in IN_PROCESSES)
    found = json.loads(world.start("pipeline_worker.py", 2, tmp_path, names, timeout=600))
    assert not any(found.values()), found
