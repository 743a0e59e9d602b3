"""The checks between passes: valid data passes, each kind of damage is named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from harness import ideal
from torch import nn

import autoshard
from autoshard import PlanError, Shard
from autoshard.compiler import Compiled, compile_graph
from autoshard.layout import Layout
from autoshard.passes.capture.export import capture
from autoshard.passes.ir.graph import map_refs
from autoshard.passes.ir.verify import check_graph, check_program
from autoshard.plans.options import CompileOptions


@pytest.fixture(scope="module")
def compiled() -> Compiled:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    graph = capture(model, (torch.randn(4, 8),))
    return compile_graph(graph, ideal({"tp": 2}), CompileOptions(hints={"0": "colwise", "2": "rowwise"}))


def test_a_value_read_before_it_is_defined(compiled: Compiled) -> None:
    graph = compiled.graph
    with pytest.raises(PlanError, match=r"invalid graph: \w+ reads \w+ before it is defined"):
        check_graph(replace(graph, nodes=tuple(reversed(graph.nodes))))


def test_a_value_defined_twice(compiled: Compiled) -> None:
    graph = compiled.graph
    with pytest.raises(PlanError, match="is defined twice"):
        check_graph(replace(graph, nodes=(*graph.nodes, graph.nodes[0])))


def test_a_missing_redistribution(compiled: Compiled) -> None:
    program = compiled.program
    without = tuple(s for s in program.statements if s.step is None)
    assert len(without) < len(program.statements)
    with pytest.raises(PlanError, match="before it is made"):
        check_program(replace(program, statements=without))


def test_a_value_in_another_layout_than_its_reader_was_planned_for(compiled: Compiled) -> None:
    program = compiled.program
    wrong = {**program.layouts, "linear": Layout(program.mesh, [Shard(0)])}
    assert program.layouts["linear"] != wrong["linear"]
    with pytest.raises(PlanError, match="invalid program"):
        check_program(replace(program, layouts=wrong))


def test_a_damaged_plan_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    plan = autoshard.plan(model, ideal({"tp": 2}), (torch.randn(4, 8),), hints={"0": "colwise", "2": "rowwise"})
    wrong = replace(plan, layouts={**plan.layouts, "gelu": Layout(plan.mesh, [Shard(0)])})
    with pytest.raises(PlanError, match="does not make gelu"):
        autoshard.compile(model, ideal({"tp": 2}), (torch.randn(4, 8),), plan=wrong)


def test_a_value_that_its_reader_does_not_take(compiled: Compiled) -> None:
    program = compiled.program
    last = next(s for s in reversed(program.statements) if s.node is not None)
    (own, *others), names = last.node.inputs, [i.name for i in program.graph.inputs]
    stranger = next(n for n in names if n not in (own, *others))
    call = map_refs(last.call, lambda ref: replace(ref, name=stranger if ref.name == own else ref.name))
    statements = tuple(replace(s, call=call) if s is last else s for s in program.statements)
    with pytest.raises(PlanError, match=f"reads {stranger}"):
        check_program(replace(program, statements=statements))
