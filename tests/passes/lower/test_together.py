"""Small collectives of one kind that are ready together: a program in, one with fewer calls out."""

from __future__ import annotations

import pytest
import torch
from programs import Draft, text

from autoshard.passes.ir.verify import check_program
from autoshard.passes.lower import coalescing as module
from autoshard.passes.lower.coalescing import coalesce_collectives

aten = torch.ops.aten


def sums(*fqns: str, shape: tuple[int, int] = (8, 16)) -> Draft:
    """A sum over the cut rows per entry, in the module it names, each of a value of its own."""
    draft = Draft(dp=4)
    draft.input("x", shape, "0", grad=True)
    for i, fqn in enumerate(fqns):
        draft.op(f"v{i}", aten.relu.default, ("x",), "...0", fqn)
        draft.op(f"s{i}", aten.sum.dim_IntList, (f"v{i}", [0]), "d0", fqn)
    return draft


def merged(draft: Draft, **outputs: str) -> str:
    program = coalesce_collectives(draft.program(**outputs))
    check_program(program)
    return text(program)


def test_sums_that_are_ready_together_are_one_call() -> None:
    """Where the first stood; the backward of P → R sums as well, so both must count for the same outputs."""
    draft = sums("", "")
    assert text(draft.program(s0="I", s1="I")).count("runtime.all_reduce(") == 2
    assert (
        merged(draft, s0="I", s1="I")
        == """
  (root):
    v0: S(0)@dp = aten.relu.default(x)
    s0: P@dp = aten.sum.dim_IntList(v0, [0])
    v1: S(0)@dp = aten.relu.default(x)
    s1: P@dp = aten.sum.dim_IntList(v1, [0])
    s0__1: I@dp, s1__1: I@dp = runtime.all_reduce_together([s0, s1], 'dp', to='I')
        s0__1: all_reduce(dp): P@dp → I@dp    96 B
        s1__1: all_reduce(dp): P@dp → I@dp    96 B
  return s0__1, s1__1
"""
    )
    assert "together" not in merged(draft, s0="R", s1="R")


def test_maxima_are_not_summed() -> None:
    """The calls that go together add up."""
    draft = Draft(dp=4)
    draft.input("x", (8, 16), "0")
    for i in range(2):
        draft.op(f"m{i}", aten.amax.default, ("x", [0]), "d0")
    found = merged(draft, m0="R", m1="R")
    assert found.count("op='max'") == 2
    assert "together" not in found


def test_a_call_waits_for_no_operand() -> None:
    """The second sum is made after the first has been read, so it cannot go with it; the third can."""
    draft = sums("")
    draft.op("half", aten.mul.Tensor, ("s0", 0.5), "I")
    draft.op("w", aten.relu.default, ("x",), "...0")
    draft.op("t", aten.sum.dim_IntList, ("w", [0]), "d0")
    draft.op("u", aten.sum.dim_IntList, ("x", [0]), "d0")
    assert (
        merged(draft, half="I", t="I", u="I")
        == """
  (root):
    v0: S(0)@dp = aten.relu.default(x)
    s0: P@dp = aten.sum.dim_IntList(v0, [0])
    s0__1: I@dp = runtime.all_reduce(s0, 'dp', to='I')
    half: I@dp = aten.mul.Tensor(s0__1, 0.5)
    w: S(0)@dp = aten.relu.default(x)
    t: P@dp = aten.sum.dim_IntList(w, [0])
    u: P@dp = aten.sum.dim_IntList(x, [0])
    t__1: I@dp, u__1: I@dp = runtime.all_reduce_together([t, u], 'dp', to='I')
        t__1: all_reduce(dp): P@dp → I@dp    96 B
        u__1: all_reduce(dp): P@dp → I@dp    96 B
  return half, t__1, u__1
"""
    )


def readers(*fqns: str) -> Draft:
    """Two values of different kinds of cut, each gathered for a reader in the module that is named."""
    draft = Draft(dp=4)
    for name in ("x", "y"):
        draft.input(name, (8, 16), "0")
    for name, fqn in zip(("x", "y"), fqns, strict=True):
        draft.op(f"of_{name}", aten.relu.default, (name,), "R", fqn)
    return draft


@pytest.mark.parametrize(
    ("fqns", "calls"), [(("l.0", "l.0.mlp"), 1), (("l.0", "l.1"), 2), (("", ""), 1), (("l.0", ""), 2)]
)
def test_calls_go_together_within_a_block(fqns: tuple[str, str], calls: int) -> None:
    assert merged(readers(*fqns), of_x="R", of_y="R").count("runtime.all_gather") == calls


def test_large_ones_stay_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their time is bandwidth: from a megabyte on a rank. Negative control: with another bound they go together."""
    draft = sums("", "", shape=(4, 1 << 19))
    assert "together" not in merged(draft, s0="I", s1="I")
    monkeypatch.setattr(module, "SMALL_BYTES", 1 << 21)
    assert "together" in merged(draft, s0="I", s1="I")


def test_other_axes_are_another_call() -> None:
    draft = Draft(dp=2, tp=2)
    draft.input("x", (8, 16), "0 R")
    draft.input("y", (8, 16), "R 0")
    draft.op("a", aten.relu.default, ("x",), "R R")
    draft.op("b", aten.relu.default, ("y",), "R R")
    assert "together" not in merged(draft, a="R R", b="R R")


def test_parameters_are_left_to_their_buckets() -> None:
    draft = Draft(dp=2)
    draft.input("x", (8, 16), "0")
    draft.layers(1, "0", "m")
    assert "together" not in merged(draft, out0="0")
