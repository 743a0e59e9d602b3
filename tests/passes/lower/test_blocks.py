"""Cutting a program into blocks: what belongs to which, and what flows in and out."""

from __future__ import annotations

import pytest
import torch
from programs import Draft, text

from autoshard.passes.ir.verify import check_program
from autoshard.passes.lower.blocks import block_path, hoist_redistributions, program_segments

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("fqn", "path"),
    [
        ("model.layers.3.mlp.up", "model.layers.3"),
        ("layers.3", "layers.3"),
        ("layers.3.experts.7.up", "layers.3"),
        ("0.weight", "0"),
        ("head", ""),
        ("conv2d.weight", ""),
        ("", ""),
    ],
)
def test_the_outermost_numbered_module_is_the_block(fqn: str, path: str) -> None:
    assert block_path(fqn) == path


def draft() -> Draft:
    """A block that reads a value and a parameter of the root, and a parameter of its own."""
    draft = Draft(tp=2)
    draft.input("x", (8, 16), "0", grad=True)
    draft.parameter("scale", (16, 16), "I")
    draft.parameter("l.0.up", (16, 16), "I")
    draft.op("a", aten.mm.default, ("x", "l_0_up"), "R", "l.0")
    draft.op("b", aten.mm.default, ("a", "scale"), "R", "l.0.mlp")
    draft.op("c", aten.relu.default, ("b",), "...0", "l.0")
    draft.op("y", aten.relu.default, ("c",), "...0", "l.1")
    return draft


def test_conversions_of_outside_values_stand_in_front_of_the_block() -> None:
    """Those of its own parameters, and of what it makes itself, stay."""
    program = draft().program(y="0")
    assert (
        text(program)
        == """
  l.0:
    x__1: R@tp = runtime.all_gather(x, 0, 'tp', to='R')
    l_0_up__1: R@tp = runtime.enter(l_0_up, 'tp')
    a: R@tp = aten.mm.default(x__1, l_0_up__1)
    scale__1: R@tp = runtime.enter(scale, 'tp')
    b: R@tp = aten.mm.default(a, scale__1)
    b__1: S(0)@tp = runtime.slice(b, 0, 'tp', of='R')
    c: S(0)@tp = aten.relu.default(b__1)
  l.1:
    y: S(0)@tp = aten.relu.default(c)
  return y
"""
    )
    moved = hoist_redistributions(program)
    check_program(moved)
    assert (
        text(moved)
        == """
  (root):
    x__1: R@tp = runtime.all_gather(x, 0, 'tp', to='R')
    scale__1: R@tp = runtime.enter(scale, 'tp')
  l.0:
    l_0_up__1: R@tp = runtime.enter(l_0_up, 'tp')
    a: R@tp = aten.mm.default(x__1, l_0_up__1)
    b: R@tp = aten.mm.default(a, scale__1)
    b__1: S(0)@tp = runtime.slice(b, 0, 'tp', of='R')
    c: S(0)@tp = aten.relu.default(b__1)
  l.1:
    y: S(0)@tp = aten.relu.default(c)
  return y
"""
    )
    assert hoist_redistributions(moved) == moved


def test_what_flows_in_and_out() -> None:
    """Inputs in order of first use; a block's own parameters are no inputs of it."""
    found = [
        (s.path, s.inputs, s.outputs) for s in program_segments(hoist_redistributions(draft().program(y="0", b="R")))
    ]
    assert found == [
        ("", ("x", "scale"), ("x__1", "scale__1")),
        ("l.0", ("x__1", "scale__1"), ("b", "c")),
        ("l.1", ("c",), ("y",)),
    ]


def test_cutting_keeps_every_statement_in_its_place() -> None:
    program = hoist_redistributions(draft().program(y="0"))
    assert tuple(s for segment in program_segments(program) for s in segment.statements) == program.statements


def test_equal_blocks_have_equal_segments() -> None:
    """But for the numbers in their names; so they print as one class."""
    several = Draft(dp=2)
    several.input("x", (8, 16), "0")
    last = several.layers(3, "0", "m")
    program = hoist_redistributions(several.program(**{last: "0"}))
    calls = [[str(s.call.fn) for s in segment.statements] for segment in program_segments(program)]
    assert [s.path for s in program_segments(program)] == ["l.0", "l.1", "l.2"]
    assert calls[0] == calls[1] == calls[2]
