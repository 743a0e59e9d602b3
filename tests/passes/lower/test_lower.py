"""Lowering: a graph and its chosen layouts in, a printed program on local tensors out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from programs import Draft, text

from autoshard import PlanError
from autoshard.passes.ir.verify import check_program
from autoshard.passes.lower.lowering import lower_graph

aten = torch.ops.aten


def test_a_redistribution_stands_where_a_use_differs_from_its_definition() -> None:
    """Data and tensor parallel: the rows are cut, the parameter's shards gathered, the columns put together at the end."""
    draft = Draft(dp=2, tp=2)
    draft.input("x", (8, 16), "R R")
    draft.parameter("up", (16, 32), "0 1")
    draft.op("y", aten.mm.default, ("x", "up"), "m n", "mlp")
    program = draft.program(y="0 I")
    check_program(program)
    assert str(program) == (
        "program(x: f32[8, 16] R@dp R@tp, up: f32[16, 32] S(0)@dp S(1)@tp):\n"
        "  (root):\n"
        "    x__1: f32[8, 16] S(0)@dp R@tp = runtime.slice(x, 0, 'dp', of='R')"
        "    # slice(dp): R@dp R@tp → S(0)@dp R@tp    local\n"
        "    up__1: f32[16, 32] S(1)@tp R@dp = runtime.all_gather(up, 0, 'dp', to='R')"
        "    # all_gather(dp): S(0)@dp S(1)@tp → S(1)@tp R@dp    512 B; backward reduce_scatter 512 B\n"
        "    y: f32[8, 32] S(0)@dp S(1)@tp = aten.mm.default(x__1, up__1)    # mlp  model.py:1\n"
        "    y__1: f32[8, 32] S(0)@dp I@tp = runtime.all_gather(y, 1, 'tp', to='I')"
        "    # all_gather(tp): S(0)@dp S(1)@tp → S(0)@dp I@tp    256 B\n"
        "  return y__1"
    )


def test_nothing_is_redistributed_where_layouts_agree() -> None:
    """Megatron's pair of products: column, row, and one all-reduce where the sum is returned whole."""
    draft = Draft(tp=2)
    draft.input("x", (8, 16), "R")
    draft.parameter("up", (16, 32), "1")
    draft.parameter("down", (32, 16), "0")
    draft.op("h", aten.mm.default, ("x", "up"), "n")
    draft.op("g", aten.relu.default, ("h",), "...1")
    draft.op("y", aten.mm.default, ("g", "down"), "k")
    assert (
        text(draft.program(y="I"))
        == """
  (root):
    h: S(1)@tp = aten.mm.default(x, up)
    g: S(1)@tp = aten.relu.default(h)
    y: P@tp = aten.mm.default(g, down)
    y__1: I@tp = runtime.all_reduce(y, 'tp', to='I')
  return y__1
"""
    )


def test_one_redistribution_serves_all_readers_of_a_layout() -> None:
    draft = Draft(tp=2)
    draft.input("x", (8, 16), "0", grad=True)
    draft.op("a", aten.relu.default, ("x",), "...1")
    draft.op("b", aten.sin.default, ("x",), "...1")
    draft.op("c", aten.add.Tensor, ("a", "b"), "...1")
    assert (
        text(draft.program(c="1"))
        == """
  (root):
    x__1: S(1)@tp = runtime.all_to_all(x, 0, 1, 'tp')
    a: S(1)@tp = aten.relu.default(x__1)
    b: S(1)@tp = aten.sin.default(x__1)
    c: S(1)@tp = aten.add.Tensor(a, b)
  return c
"""
    )


def test_a_further_layout_is_made_from_the_cheapest_there_is() -> None:
    """The slice is taken from the gathered value, not by a second collective."""
    draft = Draft(tp=2)
    draft.input("x", (8, 16), "0")
    draft.op("a", aten.relu.default, ("x",), "R")
    draft.op("b", aten.relu.default, ("x",), "...1")
    assert (
        text(draft.program(a="R", b="1"))
        == """
  (root):
    x__1: R@tp = runtime.all_gather(x, 0, 'tp', to='R')
    a: R@tp = aten.relu.default(x__1)
    x__2: S(1)@tp = runtime.slice(x__1, 1, 'tp', of='R')
    b: S(1)@tp = aten.relu.default(x__2)
  return a, b
"""
    )


def test_readers_convert_from_the_shared_layout() -> None:
    """The plan has chosen a layout that every reader starts from; it is made once, in front of the first."""
    draft = Draft(tp=2)
    draft.input("x", (8, 16), "0", grad=True)
    draft.op("a", aten.relu.default, ("x",), "...1")
    draft.op("b", aten.sin.default, ("x",), "R")
    draft.shared["x"] = draft.layout("R")
    assert (
        text(draft.program(a="1", b="R"))
        == """
  (root):
    x__1: R@tp = runtime.all_gather(x, 0, 'tp', to='R')
    x__2: S(1)@tp = runtime.slice(x__1, 1, 'tp', of='R')
    a: S(1)@tp = aten.relu.default(x__2)
    b: R@tp = aten.sin.default(x__1)
  return a, b
"""
    )


def test_global_lengths_become_local() -> None:
    """Eight rows on three ranks: 3, 3 and 2; the length is that of this rank."""
    draft = Draft(tp=3)
    draft.input("x", (8, 4, 4), "0")
    draft.op("y", aten.view.default, ("x", [8, 16]), "d0")
    assert (
        text(draft.program(y="0"))
        == """
  (root):
    y: S(0)@tp = aten.view.default(x, [Local(size=8, axes=('tp',)), 16])
  return y
"""
    )


def test_new_values_of_buffers_are_whole() -> None:
    draft = Draft(dp=2)
    draft.input("x", (8, 16), "0")
    draft.op("y", aten.sum.dim_IntList, ("x", [0]), "d0")
    graph = replace(draft.graph(["y"]), mutations={"count": "y"})
    assert (
        text(lower_graph(graph, draft.assignment(y="P")))
        == """
  (root):
    y: P@dp = aten.sum.dim_IntList(x, [0])
    y__1: R@dp = runtime.all_reduce(y, 'dp', to='R')
  return y
  count ← y__1
"""
    )


def test_a_program_without_a_redistribution_it_needs_is_invalid() -> None:
    """Negative control."""
    draft = Draft(tp=2)
    draft.input("x", (8, 16), "0", grad=True)
    draft.op("a", aten.relu.default, ("x",), "...1")
    program = draft.program(a="1")
    check_program(program)
    (step, op) = program.statements
    with pytest.raises(PlanError, match="reads x__1 before it is made"):
        check_program(replace(program, statements=(op,)))
    direct = replace(op, call=replace(op.call, args=step.call.args[:1]))
    with pytest.raises(PlanError, match=r"reads x as S\(0\)@tp, its strategy differs"):
        check_program(replace(program, statements=(direct,)))
