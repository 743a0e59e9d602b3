"""Symbolic sizes: ints that know how they follow from the lengths of a program's inputs."""

from __future__ import annotations

import copy
import math

import pytest
import sympy

from autoshard.passes.ir.sizes import always_reaches, gcd, length_symbol, make_size, python_text, record_conditions


def test_sizes_are_ints_with_expressions() -> None:
    b, s = length_symbol("batch"), length_symbol("seq")
    example = {b: 4, s: 16}
    batch, seq = make_size(b, example), make_size(s, example)
    assert isinstance(batch, int)
    assert int(batch) == 4
    assert f"{batch}" == "batch"
    assert batch != 4
    assert batch == make_size(b, example)
    assert batch * seq == seq * batch
    assert batch % 2 != 0
    assert bool(batch % 2)
    assert (4 * batch) % 2 == 0
    assert type((4 * batch) // 4 - batch) is int
    assert str(batch * seq - 2) == "batch * seq - 2"
    assert str(-(-batch // 2)) == "-((-batch) // 2)"
    assert math.prod([batch, seq, 3]) == 3 * batch * seq
    assert (batch * seq) // seq == batch
    assert gcd(batch, batch * seq) == batch
    assert gcd(6 * batch, 4) == 2
    assert int(gcd(batch * seq, seq)) == 16
    assert always_reaches(2**63 - 1, batch)
    assert not always_reaches(batch, 3)
    assert always_reaches(batch * seq, batch)
    assert copy.deepcopy(batch) == batch
    assert hash(batch) == hash(4)


def test_an_order_that_is_not_sure_is_noted() -> None:
    b, s = length_symbol("batch"), length_symbol("seq")
    example = {b: 4, s: 16}
    batch, seq = make_size(b, example), make_size(s, example)
    with record_conditions() as noted:
        assert batch >= 1
        assert batch <= batch * seq
        assert batch - batch == 0
        assert batch < 2**63 - 1
    assert not noted
    with record_conditions() as noted:
        assert batch < seq
        assert not batch > 5
        assert batch / 2 == 2.0
        assert batch * 0.5 == 2.0
    assert [python_text(c) for c in noted] == ["seq > batch", "batch <= 5", "batch == 4"]


@pytest.mark.parametrize(
    "text", ["2 * b * s - s + 1", "(b + 1) * s // 3", "max(b, s - 4) % 3", "(b // 2) ** 2 - b", "-b // s"]
)
def test_printed_expressions_mean_what_they_say(text: str) -> None:
    from torch.utils._sympy.functions import FloorDiv, Max, PythonMod

    b, s = length_symbol("b"), length_symbol("s")
    meant: dict[str, sympy.Expr] = {
        "2 * b * s - s + 1": 2 * b * s - s + 1,
        "(b + 1) * s // 3": FloorDiv((b + 1) * s, 3),
        "max(b, s - 4) % 3": PythonMod(Max(b, s - 4), 3),
        "(b // 2) ** 2 - b": FloorDiv(b, 2) ** 2 - b,
        "-b // s": FloorDiv(-b, s),
    }
    for values in ({"b": 3, "s": 7}, {"b": 8, "s": 2}, {"b": 1, "s": 5}):
        assert eval(python_text(meant[text]), {"max": max}, values) == eval(text, {"max": max}, values)
