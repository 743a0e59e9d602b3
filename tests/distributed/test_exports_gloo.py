"""Exported source of torch with ours: layouts, gradients, bytes; and logits of transformers: gloo processes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import world

TWO = "sequence tensor fsdp fsdp_recomputed ddp_selective replicated_norm stages_1f1b stages_interleaved".split()
TWO += ["llama", "qwen3", "llama_fsdp", "llama_stages"]
FOUR = ["four_sequence", "four_tensor", "four_stages"]
FAST = {"sequence", "fsdp_recomputed", "llama"}


@pytest.fixture(scope="session")
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """What a case came to: "" or the first failing rank's traceback; chosen cases of as many ranks share a world."""
    chosen = [i.callspec.params["name"] for i in request.session.items if i.function is test_exported]

    @functools.cache
    def results(ranks: int) -> dict[str, str]:
        names = [n for n in chosen if (n in FOUR) == (ranks == 4)]
        return world.outcomes("exports_worker.py", ranks, tmp_path_factory.mktemp("exports"), names, timeout=400)

    return lambda name: results(4 if name in FOUR else 2)[name]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in (*TWO, *FOUR)])
def test_exported(outcome: Callable[[str], str], name: str) -> None:
    found = outcome(name)
    assert found == "", found
