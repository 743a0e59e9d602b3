"""Random walks over what training scripts do between calls, on the in-process mesh; training_worker.py walks under gloo."""

from __future__ import annotations

import pytest
import torch
from walk_steps import STEPS, walk

MESHES = ({"tp": 2}, {"fsdp": 3}, {"dp": 2, "tp": 2}, {"a": 2, "b": 2, "c": 2}, {"tp": 4})


def check(seed: int) -> None:
    told: list[str] = []
    try:
        walk(MESHES[seed % len(MESHES)], seed, told=told)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {told}") from error


@pytest.mark.slow
def test_a_random_walk() -> None:
    check(1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_many_random_walks(seed: int) -> None:
    check(seed)


def test_a_step_that_one_of_the_two_does_not_take_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows of the plain model alone."""

    def step(at: object) -> str:
        with torch.no_grad():
            at.model.head.weight[1] += 1e-6  # type: ignore[attr-defined]
        return ""

    monkeypatch.setitem(STEPS, "wrong", step)
    for name in [name for name in STEPS if name != "wrong"]:
        monkeypatch.delitem(STEPS, name)
    with pytest.raises(AssertionError, match=r"head\.weight: \d"):
        walk(MESHES[0], 0, steps=1)
