"""The outer search: what is kept, pruned and refused."""

from __future__ import annotations

import math

import pytest

from autoshard.errors import HintError, PlanError
from autoshard.passes.search.candidates import Candidates


def search(seconds: dict[str, float | Exception], tie: float = 0.0) -> Candidates[str]:
    found = Candidates[str](lambda name: float(seconds[name]), tie)  # type: ignore[arg-type]
    for name, outcome in seconds.items():
        with found.attempt(name):
            if isinstance(outcome, Exception):
                raise outcome
            found.add(name)
    return found


def test_the_cheapest_is_kept_the_earlier_of_equals() -> None:
    assert search({"a": 3.0, "b": 2.0, "c": 2.0, "d": 4.0}).cheapest() == "b"
    assert search({"a": 2.0, "b": 2.0 * (1 - 1e-7)}, tie=1e-6).cheapest() == "a"
    assert search({"a": 2.0, "b": 2.0 * (1 - 1e-5)}, tie=1e-6).cheapest() == "b"


def test_one_without_a_plan_is_noted_and_the_rest_go_on() -> None:
    found = search({"a": PlanError("too large"), "b": 1.0})
    assert (found.cheapest(), found.found, found.notes) == ("b", ["b"], ["a has no plan: too large"])


def test_without_any_plan_the_refusal_is_raised() -> None:
    found = search({"a": PlanError("first"), "b": PlanError("last")})
    for told, text in ((0, "first"), (-1, "last")):
        with pytest.raises(PlanError, match=text):
            found.cheapest(told)


def test_other_errors_are_no_refusals() -> None:
    with pytest.raises(HintError, match="no such module"):
        search({"a": HintError("no such module")})


def test_a_bound_prunes_only_what_cannot_win() -> None:
    assert not search({}).is_pruned(1e9)
    found = search({"a": 2.0})
    assert [found.is_pruned(bound) for bound in (1.9, 2.0, math.inf)] == [False, True, True]
    assert not search({"a": math.inf}).is_pruned(5.0), "one that does not fit prunes nothing"
