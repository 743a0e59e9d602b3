"""Transfers between sharded modules under gloo: the same, other, and some of the ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import world

CASES = (
    *("same_ranks", "small_buffers_and_dtypes", "fused_names", "a_wrapped_model", "optimizers", "disjoint_ranks"),
    *("replicas", "beside_training", "stages", "folders", "stages_in_folders", "refused"),
)

SOON = 8.0
"""seconds within which ranks must know that another one is gone"""


@pytest.fixture(scope="module", params=[2, 4], ids=lambda n: f"{n} ranks")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each case came to: "" or the first failing rank's traceback."""
    chosen = {item.callspec.params["name"] for item in request.session.items if item.function is test_transfer}
    names = [name for name in CASES if name in chosen]
    return world.outcomes("transfer_worker.py", request.param, tmp_path_factory.mktemp("transfers"), names, timeout=280)


@pytest.mark.slow_cases(
    "4 ranks-small_buffers_and_dtypes",
    "4 ranks-folders",
    "4 ranks-beside_training",
    "2 ranks-*",
    "*-fused_names",
    "*-a_wrapped_model",
    "*-stages*",
)
@pytest.mark.parametrize("name", CASES)
def test_transfer(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == "", outcomes[name]


@pytest.mark.parametrize("into", ["kill", pytest.param("kill, into a folder", marks=pytest.mark.slow)])
def test_a_rank_is_killed_in_the_middle(tmp_path: Path, into: str) -> None:
    """The others end soon, with an error that says so; modules have their old weights, folders their old files."""
    with pytest.raises(AssertionError):
        world.start("transfer_worker.py", 4, tmp_path, into, timeout=120)
    for rank in range(3):
        text, weights = (tmp_path / f"result.json.{rank}").read_text("utf-8").splitlines()[::1][-2:]
        found = re.match(r"(\d+\.\d+) s: ", text)
        assert found, text
        assert float(found[1]) < SOON
        assert re.search(r"another rank ended, was killed|rank \d failed: CommunicationError", text), text
        assert weights == "old weights"
