"""Random trainings in random settings: each step of a script leaves what it leaves on one device (more: fuzz_many.py)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from fuzz_script import Found, captured_once, kind_of, ran, shrunk
from fuzz_settings import SCRIPTS, Case, Setting, cases
from fuzz_training import Source

import autoshard

REFUSED = (
    "hint '…' asks for",
    "Ask for fewer stages",
)
"""what may be refused: parts of what :func:`kind_of` says"""


def check(seed: int, count: int) -> None:
    with captured_once():
        for number, case in enumerate(cases(seed, count * SCRIPTS)[::SCRIPTS]):
            found = ran(case)
            may = found.kind == "refused" and any(text in kind_of(found) for text in REFUSED)
            assert may or found.kind in ("equal", "no model"), f"{seed}:{number} {found}\n{case}"


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("seed", [2, 9])
def test_random_trainings(seed: int) -> None:
    check(seed, 2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(20, 40))
def test_many_random_trainings(seed: int) -> None:
    check(seed, 12)


PLAIN = Case(
    Source(3, 4, 2, ("h = self.lin0(x)",), ("h = h + self.lin0(h)", "h = self.drop(h)"), (), "loss = (h - x).square().mean()",
           "", "return loss, h", False),
    Setting(chosen="random", micro_batches=2),
    (("call", "train", 0), ("step",), ("zero", True), ("call", "train", 0)),
)  # fmt: skip


@pytest.mark.slow
def test_a_difference_is_seen_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: an all-reduce that leaves every rank its summand."""
    real: Callable[..., Any] = autoshard.runtime.all_reduce
    assert ran(PLAIN) == Found("equal")
    monkeypatch.setattr(autoshard.runtime, "all_reduce", lambda x, *args, **kwargs: real(x, *args, **kwargs) * 1.001)
    found = ran(PLAIN)
    assert found.kind == "different"
    assert "relative error" in found.text
    small, again = shrunk(PLAIN, found, tries=12)
    assert again.kind == "different"
    assert len(small.script) == 1
    assert not small.source.block


def test_errors_and_refusals_are_told_apart() -> None:
    norm = replace(PLAIN, source=replace(PLAIN.source, after=("h = self.bn0(h.transpose(1, 2)).transpose(1, 2)",)))
    found = ran(norm)
    assert found.kind == "refused"
    assert "of the full batch" in found.text
    assert ran(replace(PLAIN, source=replace(PLAIN.source, loss="loss = h.nothing()"))).kind == "no model"
    assert ran(replace(PLAIN, script=(*PLAIN.script, ("nothing",)))).kind == "no model"


def test_forced_plans_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seeds give two plans, the same seed one."""
    plans: list[str] = []
    compiled = autoshard.compile

    def noted(*args: Any, **options: Any) -> Any:
        sharded = compiled(*args, **options)
        plans.append(str(sharded.plan.layouts))
        return sharded

    monkeypatch.setattr(autoshard, "compile", noted)
    for seed in (0, 1, 0):
        assert ran(replace(PLAIN, setting=replace(PLAIN.setting, seed=seed, micro_batches=1))) == Found("equal")
    assert plans[0] == plans[2] != plans[1]
