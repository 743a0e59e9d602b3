"""Parameters in buckets: a program in, one with fewer calls out; and a bucket that is damaged is found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from programs import Draft, text
from torch import nn

import autoshard
from autoshard import Link, Mesh, PlanError, Shard, runtime
from autoshard.check.divergence import first_divergence
from autoshard.hardware import PRESETS
from autoshard.layout import Layout, Owned
from autoshard.module.ranks import parameters
from autoshard.module.ranks.parameters import summed_last
from autoshard.passes.ir.graph import Ref
from autoshard.passes.ir.program import LocalCall, Program, Statement, fuse_replica_gather, merge_statements
from autoshard.passes.ir.verify import check_program
from autoshard.passes.lower import bucket as module
from autoshard.passes.lower.blocks import hoist_redistributions
from autoshard.passes.lower.bucket import bucket_parameters, regathered_parameters
from autoshard.passes.propagate.prices import coalescing
from autoshard.runtime.transport.in_process import World

aten = torch.ops.aten


def layers(count: int, stored: str, labels: str, **axes: int) -> Program:
    """Blocks of two products whose parameters lie in ``stored``; the rows of the input are cut along every axis."""
    draft = Draft(**axes)
    rows = " ".join("0" for _ in axes)
    draft.input("x", (8, 16), rows)
    return bucket_parameters(hoist_redistributions(draft.program(**{draft.layers(count, stored, labels): rows})))


def is_valid_and_reads(program: Program, expected: str) -> None:
    check_program(program)
    assert text(program) == expected


def test_fully_sharded() -> None:
    """One gather per block, in front of its first reader."""
    is_valid_and_reads(
        layers(2, "0", "m", dp=2),
        """
  l.0:
    l_0_up__1: R@dp, l_0_out__1: R@dp = runtime.gather_parameters([l_0_up, l_0_out], [0, 0], 'dp', to='R')
        l_0_up__1: all_gather(dp): S(0)@dp → R@dp    1 KiB; backward reduce_scatter 1 KiB
        l_0_out__1: all_gather(dp): S(0)@dp → R@dp    1 KiB; backward reduce_scatter 1 KiB
    up0: S(0)@dp = aten.mm.default(x, l_0_up__1)
    out0: S(0)@dp = aten.mm.default(up0, l_0_out__1)
  l.1:
    l_1_up__1: R@dp, l_1_out__1: R@dp = runtime.gather_parameters([l_1_up, l_1_out], [0, 0], 'dp', to='R')
        l_1_up__1: all_gather(dp): S(0)@dp → R@dp    1 KiB; backward reduce_scatter 1 KiB
        l_1_out__1: all_gather(dp): S(0)@dp → R@dp    1 KiB; backward reduce_scatter 1 KiB
    up1: S(0)@dp = aten.mm.default(out0, l_1_up__1)
    out1: S(0)@dp = aten.mm.default(up1, l_1_out__1)
  return out1
""",
    )


def test_data_parallel() -> None:
    is_valid_and_reads(
        layers(1, "I", "m", dp=2),
        """
  l.0:
    l_0_up__1: R@dp, l_0_out__1: R@dp = runtime.enter_parameters([l_0_up, l_0_out], 'dp')
        l_0_up__1: enter(dp): I@dp → R@dp    local; backward all_reduce 2 KiB
        l_0_out__1: enter(dp): I@dp → R@dp    local; backward all_reduce 2 KiB
    up0: S(0)@dp = aten.mm.default(x, l_0_up__1)
    out0: S(0)@dp = aten.mm.default(up0, l_0_out__1)
  return out0
""",
    )


def test_hybrid_sharded() -> None:
    """Both steps of a parameter are one member: its gradient is summed over the replicas once it is a shard."""
    is_valid_and_reads(
        layers(1, "I 0", "m m", r=2, s=2),
        """
  l.0:
    l_0_up__2: R@r R@s, l_0_out__2: R@r R@s = runtime.gather_parameters([l_0_up, l_0_out], [0, 0], 's', to='R', replicas=['r'])
        l_0_up__1: enter(r): S(0)@s I@r → S(0)@s R@r    local; backward all_reduce 1 KiB
        l_0_up__2: all_gather(s): S(0)@s R@r → R@r R@s    1 KiB; backward reduce_scatter 1 KiB
        l_0_out__1: enter(r): S(0)@s I@r → S(0)@s R@r    local; backward all_reduce 1 KiB
        l_0_out__2: all_gather(s): S(0)@s R@r → R@r R@s    1 KiB; backward reduce_scatter 1 KiB
    up0: S(0)@r S(0)@s = aten.mm.default(x, l_0_up__2)
    out0: S(0)@r S(0)@s = aten.mm.default(up0, l_0_out__2)
  return out0
""",
    )


def test_sharded_over_two_axes() -> None:
    """One gather after another, each in a bucket of its own."""
    is_valid_and_reads(
        layers(1, "0 1", "m m", a=2, b=2),
        """
  l.0:
    l_0_up__1: S(1)@b R@a, l_0_out__1: S(1)@b R@a = runtime.gather_parameters([l_0_up, l_0_out], [0, 0], 'a', to='R')
        l_0_up__1: all_gather(a): S(0)@a S(1)@b → S(1)@b R@a    512 B; backward reduce_scatter 512 B
        l_0_out__1: all_gather(a): S(0)@a S(1)@b → S(1)@b R@a    512 B; backward reduce_scatter 512 B
    l_0_up__2: R@a R@b, l_0_out__2: R@a R@b = runtime.gather_parameters([l_0_up__1, l_0_out__1], [1, 1], 'b', to='R')
        l_0_up__2: all_gather(b): S(1)@b R@a → R@a R@b    1 KiB; backward reduce_scatter 1 KiB
        l_0_out__2: all_gather(b): S(1)@b R@a → R@a R@b    1 KiB; backward reduce_scatter 1 KiB
    up0: S(0)@a S(0)@b = aten.mm.default(x, l_0_up__2)
    out0: S(0)@a S(0)@b = aten.mm.default(up0, l_0_out__2)
  return out0
""",
    )


def test_shards_that_have_another_reader_are_entered_by_themselves() -> None:
    """The second product is of them, the first of what they are gathered to."""
    draft = Draft(r=2, s=2)
    draft.input("x", (8, 16), "0 0")
    draft.input("y", (8, 16), "0 1")
    draft.parameter("w", (16, 32), "I 0")
    draft.op("whole", aten.mm.default, ("x", "w"), "m m")
    draft.op("part", aten.mm.default, ("y", "w"), "m k")
    is_valid_and_reads(
        bucket_parameters(draft.program(whole="0 0", part="0 P")),
        """
  (root):
    w__1: S(0)@s R@r = runtime.enter_parameters([w], 'r')
        w__1: enter(r): S(0)@s I@r → S(0)@s R@r    local; backward all_reduce 1 KiB
    w__2: R@r R@s = runtime.gather_parameters([w__1], [0], 's', to='R')
        w__2: all_gather(s): S(0)@s R@r → R@r R@s    1 KiB; backward reduce_scatter 1 KiB
    whole: S(0)@r S(0)@s = aten.mm.default(x, w__2)
    part: S(0)@r P@s = aten.mm.default(y, w__1)
  return whole, part
""",
    )


def test_gathers_along_axes_in_another_order_go_apart() -> None:
    """In one bucket for each axis, each would have to come before the other."""
    draft = Draft(a=2, b=2)
    draft.input("x", (8, 3), "0 0")
    draft.parameter("up", (3, 32), "0 1")
    draft.parameter("out", (32, 3), "0 1")
    draft.op("h", aten.mm.default, ("x", "up"), "m m")
    draft.op("y", aten.mm.default, ("h", "out"), "m m")
    program = bucket_parameters(draft.program(y="0 0"))
    check_program(program)
    gathers = [(s.value, s.call.args[-1]) for s in program.statements if s.members]
    assert gathers == [("up", "a"), ("up", "b"), ("out", "b"), ("out", "a")]


def test_a_gather_over_replicas_casts_where_their_sum_does() -> None:
    """In mixed precision, where the gather sums no gradient, it is the step over the replicas that casts."""
    (first, *_) = layers(1, "I 0", "m m", r=2, s=2).statements
    members = [s for s in first.members if s.step is not None]
    enter, gather = (replace(members[0], members=()), replace(members[-1], members=()))
    cast = {"dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    enter = replace(enter, call=replace(enter.call, kwargs=cast))
    assert fuse_replica_gather(enter, gather).call.kwargs.items() >= cast.items()


def test_uneven_shards_have_their_lengths() -> None:
    (first, *_) = layers(1, "0", "m", dp=3).statements
    assert first.call.kwargs == {"to": "R", "sizes": (16, 32)}
    uneven, even = first.members
    assert even.step is not None
    src = Layout(Mesh({"dp": 3, "tp": 2}), {"dp": Shard(0), "tp": Owned()})
    call = replace(even.call, kwargs={"to": "R"})
    owned = replace(even, call=call, step=replace(even.step, src=src))  # a rank may have no row of it
    assert merge_statements("gather_parameters", (uneven, owned)).call.kwargs["sizes"] == (16, None)


def test_a_full_bucket_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text(layers(1, "0", "m", dp=2)).count("gather_parameters") == 1
    monkeypatch.setattr(module, "bucket_bytes", lambda mesh, axes: 16 * 32 * 4)  # what one gathered parameter holds
    assert text(layers(1, "0", "m", dp=2)).count("gather_parameters") == 2


def test_buckets_are_as_large_as_their_link_asks_for() -> None:
    """A gather of 1 MB/s and 9 s: at 81 MB on the wire, of 108 MB among 4 ranks, latency is a tenth. Without, DDP's size."""
    device = PRESETS["h100"]
    slow = replace(device, node=Link(9.0 / 1.75, 1e6), kernel_latency=0.0)
    assert coalescing.bucket_bytes(Mesh({"dp": 4}, slow), "dp") == pytest.approx(108e6)
    wire = replace(device, node=Link(0.0, 1e9), kernel_latency=0.0)
    assert coalescing.bucket_bytes(Mesh({"dp": 4}, wire), ("dp",)) == 25 * 2**20
    gather = next(r for r in PRESETS["cpu"].node.rates if (r.kind, r.ranks) == ("all_gather", 4))
    expected = gather.latency * gather.bandwidth * 9 * 4 / 3
    assert coalescing.bucket_bytes(Mesh({"dp": 4}, "cpu"), "dp") == pytest.approx(expected, rel=0.1)


def test_a_bucket_stands_after_what_its_members_are_made_from() -> None:
    """Where the first product's parameter entered, and after the slice of the second one's."""
    draft = Draft(a=2, b=2)
    draft.input("x", (8, 16), "0 R")
    draft.parameter("up", (16, 32), "I I")
    draft.parameter("out", (32, 16), "I I")
    draft.op("h", aten.mm.default, ("x", "up"), "m n")
    draft.op("y", aten.mm.default, ("h", "out"), "m k")
    is_valid_and_reads(
        bucket_parameters(hoist_redistributions(draft.program(y="0 P"))),
        """
  (root):
    up__1: S(1)@b I@a = runtime.slice(up, 1, 'b', of='I')
    out__1: S(0)@b I@a = runtime.slice(out, 0, 'b', of='I')
    up__2: S(1)@b R@a, out__2: S(0)@b R@a = runtime.enter_parameters([up__1, out__1], 'a')
        up__2: enter(a): S(1)@b I@a → S(1)@b R@a    local; backward all_reduce 1 KiB
        out__2: enter(a): S(0)@b I@a → S(0)@b R@a    local; backward all_reduce 1 KiB
    h: S(0)@a S(1)@b = aten.mm.default(x, up__2)
    y: S(0)@a P@b = aten.mm.default(h, out__2)
  return y
""",
    )


def test_what_gets_no_gradient_stays_alone() -> None:
    """Frozen weights: nothing is to be overlapped with a backward."""
    draft = Draft(dp=2)
    draft.input("x", (8, 16), "0")
    draft.layers(1, "0", "m")
    draft.types |= {name: replace(t, grad=False) for name, t in draft.types.items()}
    program = bucket_parameters(draft.program(out0="0"))
    assert "gather_parameters" not in text(program)
    assert text(program).count("runtime.all_gather(") == 2


def test_gathered_again_is_what_the_backward_reads() -> None:
    """The first product's input needs no gradient, so its weight is gathered again only for company in its bucket."""
    both = layers(1, "0", "m", dp=2)
    assert regathered_parameters(both) == {"l_0_up__1", "l_0_out__1"}
    draft = Draft(dp=2)
    draft.input("x", (8, 16), "0")
    draft.parameter("up", (16, 32), "0")
    draft.op("y", aten.mm.default, ("x", "up"), "m")
    assert regathered_parameters(bucket_parameters(draft.program(y="0"))) == set()


# --- damage ---


def swap(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return values[::-1]


def in_layout(s: Statement, words: str) -> Statement:
    layout = s.layouts[0]
    assert layout is not None
    wrong = Layout(layout.mesh, [Shard(int(words))])
    return replace(s, layouts=(wrong, *s.layouts[1:]))


DAMAGE: dict[str, Callable[[Statement], Statement]] = {
    "a member is gone": lambda s: replace(s, members=s.members[:1]),
    "all members are gone": lambda s: replace(s, members=()),
    "an operand is gone": lambda s: replace(s, call=replace(s.call, args=(s.call.args[0][:1], *s.call.args[1:]))),
    "operands are swapped": lambda s: replace(s, call=replace(s.call, args=(swap(s.call.args[0]), *s.call.args[1:]))),
    "a dim is wrong": lambda s: replace(s, call=replace(s.call, args=(s.call.args[0], (0, 1), *s.call.args[2:]))),
    "another target": lambda s: replace(s, call=LocalCall(s.call.fn, s.call.args, {"to": "I"})),
    "results are swapped": lambda s: replace(s, outputs=swap(s.outputs)),
    "a layout is wrong": lambda s: in_layout(s, "0"),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_bucket_is_found(how: str) -> None:
    program = layers(1, "0", "m", dp=2)
    check_program(program)
    first, *rest = program.statements
    with pytest.raises(PlanError, match="invalid program"):
        check_program(replace(program, statements=(DAMAGE[how](first), *rest)))


def test_a_member_from_another_layout_is_found() -> None:
    """The parameter lies in another layout than the bucket starts from."""
    program = layers(1, "0", "m", dp=2)
    stored = {**program.layouts, "l_0_out": Layout(program.mesh, [Shard(1)])}
    with pytest.raises(PlanError, match=r"starts from a value of layout S\(1\)@dp"):
        check_program(replace(program, layouts=stored))


# --- the program that is dumped, checked and searched is the one that runs ---


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).double()


def sharded(model: nn.Module, x: torch.Tensor) -> Any:
    mesh = autoshard.Mesh({"dp": 2}, hardware="ideal_network")
    hints = {"input": Shard(0), "*weight": Shard(0), "*bias": "replicate"}
    return autoshard.compile(copy.deepcopy(model), mesh, (x,), hints=hints)


def test_the_first_difference_is_looked_for_in_the_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mlp(), torch.randn(256, 8).double()
    made = sharded(model, x)
    program = made.specialise((x,), {}).compiled.program
    calls = [s.call.fn for s in program.statements]
    assert {"gather_parameters", "enter_parameters"} <= set(calls)
    assert all(f"runtime.{fn}(" in made.source for fn in calls if isinstance(fn, str))
    assert first_divergence(model, made, (x,), {}, 1e-9) is None
    gather = runtime.gather_parameters
    monkeypatch.setattr(runtime, "gather_parameters", lambda *a, **k: tuple(2 * t for t in gather(*a, **k)))
    found = first_divergence(model, made, (x,), {}, 1e-9)
    assert found is not None
    assert found.startswith("aten.linear.default in 0 at")


def test_few_gradients_are_summed_when_the_backward_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them over one group of axes; not where a parameter is read whole, too: what that brings is no summand; nor beside
    others, whose gradients come later, unless experts read them."""
    program, comm = layers(2, "I", "m", dp=2), World({"dp": 2}).ranks[0]
    names = {i.fqn for i in program.graph.inputs if i.kind == "parameter"}
    assert len(names) == 4
    assert summed_last(program, comm) == (names, ("dp",))
    none = frozenset(), ()
    assert summed_last(layers(2, "0", "m", dp=2), comm) == none
    assert summed_last(replace(program, outputs=(*program.outputs, Ref("l_0_up"))), comm) == none
    reader = Statement(("_",), LocalCall(aten.sum.default, (Ref("l_0_up"),), {}), (None,))
    assert summed_last(replace(program, statements=(*program.statements, reader)), comm) == none
    assert summed_last(program, World({"dp": 1}).ranks[0]) == none
    last = [s for s in program.statements if s.call.fn == "enter_parameters"][-1]
    without = replace(program, statements=tuple(s for s in program.statements if s is not last))
    assert summed_last(without, comm) == none
    read = {ref.name for ref in last.call.args[0]}
    experts = Statement(("_",), LocalCall("experts", last.call.args[0], {}), (None,))
    others = frozenset(i.fqn for i in program.graph.inputs if i.fqn in names and i.name not in read)
    assert summed_last(replace(without, statements=(*without.statements, experts)), comm) == (others, ("dp",))
    monkeypatch.setattr(parameters, "MIN_BUCKET_BYTES", 4 * 16 * 16 * 4)
    assert summed_last(program, comm) == none
