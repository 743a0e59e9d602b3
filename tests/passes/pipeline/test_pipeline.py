"""Pipeline stages in one process: cuts, and steps that are those of one device."""

from __future__ import annotations

import copy
import json
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import ideal
from microbatch_cases import loss_of
from pipeline_cases import CASES
from pipeline_steps import compare, made
from safetensors.torch import save_file
from state_harness import same_gradients
from torch import nn

import autoshard
from autoshard import runtime
from autoshard.compiler import capture_graph, compile_graph
from autoshard.errors import PlanError
from autoshard.hardware import Hardware, Link
from autoshard.module.programs import pipeline
from autoshard.passes.ir.verify import check_graph
from autoshard.passes.pipeline import SegmentedGraph, cut_into_stages
from autoshard.plans.options import CompileOptions, KnownLayouts
from autoshard.plans.plan import Plan
from autoshard.plans.stages import mesh_without_axis

pytestmark = pytest.mark.usefixtures("remembering")

MESHES = {"pp2": {"pp": 2}, "pp2tp2": {"pp": 2, "tp": 2}, "pp4": {"pp": 4}, "pp2dp2tp2": {"pp": 2, "dp": 2, "tp": 2}}
FAST = {"skips", "other_outputs", "interleaved_without_gradients", "gradients_of_inputs", "refused"}


@pytest.mark.slow_cases("pp2tp2-gradients_of_inputs", "pp2tp2-interleaved_without_gradients", "pp2tp2-refused")
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in CASES])
@pytest.mark.parametrize(
    "mesh", ["pp2tp2", *(pytest.param(m, marks=pytest.mark.slow) for m in MESHES if m != "pp2tp2")]
)
def test_case(mesh: str, name: str) -> None:
    CASES[name](ideal(MESHES[mesh]))


STAGES = """\
stage 0:
  graph(p_down_0_weight: f64[24, 12], p_down_0_bias: f64[24], b_calls: i64[], x: f64[8, 12]):
      add = aten.add.Tensor(b_calls, 1)
      arange = aten.arange.default(12, dtype=float64)
      div = aten.div.Tensor(arange, 12)
      mul = aten.mul.Tensor(x, div)
      linear = aten.linear.default(mul, p_down_0_weight, p_down_0_bias)
      gelu = aten.gelu.default(linear)
      return gelu
      calls ← add
stage 1:
  receives gelu
  graph(p_down_1_weight: f64[16, 24], p_down_1_bias: f64[16], gelu: f64[8, 24]):
      linear_1 = aten.linear.default(gelu, p_down_1_weight, p_down_1_bias)
      gelu_1 = aten.gelu.default(linear_1)
      return gelu, gelu_1, gelu_1
stage 2:
  receives gelu, gelu_1
  graph(p_up_0_weight: f64[24, 16], p_up_0_bias: f64[24], gelu: f64[8, 24], gelu_1: f64[8, 16]):
      linear_2 = aten.linear.default(gelu_1, p_up_0_weight, p_up_0_bias)
      gelu_2 = aten.gelu.default(linear_2)
      add_1 = aten.add.Tensor(gelu_2, gelu)
      return add_1
stage 3:
  receives add_1
  graph(p_up_1_weight: f64[12, 24], p_up_1_bias: f64[12], x: f64[8, 12], y: f64[8, 12], add_1: f64[8, 24]):
      arange = aten.arange.default(12, dtype=float64)
      div = aten.div.Tensor(arange, 12)
      linear_3 = aten.linear.default(add_1, p_up_1_weight, p_up_1_bias)
      mul_1 = aten.mul.Tensor(linear_3, div)
      add_2 = aten.add.Tensor(mul_1, x)
      mse_loss = aten.mse_loss.default(add_2, y)
      return mse_loss, add_2"""


def test_cuts() -> None:
    """What a skip reads goes through the stages between; what is cheap and of inputs alone does not cross."""
    model, args = made("skips")
    graph = capture_graph(model, args, {}, training=True)
    linear = [i for i, n in enumerate(graph.nodes) if n.op is torch.ops.aten.linear.default]
    mesh = ideal({"pp": 4})
    found = cut_into_stages(SegmentedGraph(graph, mesh_without_axis(mesh, "pp"), mesh.link("pp")), linear[1:])
    for stage in found.each:
        check_graph(stage.graph)
    assert [line.partition("    #")[0].rstrip() for line in str(found).splitlines()] == STAGES.splitlines()


class Graphs(nn.Module):
    """Layers over the second neighbours of nodes: products of an input that all layers read."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        near = edges @ edges
        for layer in self.layers:
            x = near @ F.gelu(layer(x))
        return x.square().mean()


@pytest.mark.parametrize(("bandwidth", "times"), [(1e11, 1), (1e6, 4)])
def test_values_of_inputs_are_passed_on_or_made_again(bandwidth: float, times: int) -> None:
    """A product of inputs takes 0.2 ms; its message 1 µs, or 0.1 s."""
    link = Link(0.0, bandwidth)
    hardware = Hardware("slow", 1e11, 1e12, 1e12, link, link, efficiency=1.0, kernel_latency=0.0)
    torch.manual_seed(0)
    model = Graphs().double()
    args = torch.randn(128, 8).double(), torch.rand(128, 128).double() / 128
    asked: dict[str, Any] = {"stages": "pp", "micro_batches": 1}
    sharded = autoshard.compile(copy.deepcopy(model), autoshard.Mesh({"pp": 4}, hardware), args, **asked)
    staged = sharded.plan.staged
    assert staged is not None
    made = [sum(c.inputs == ("edges", "edges") for c in p.choices.values()) for p in staged.plans]
    assert sum(made) == times
    assert staged.messages[-1] == 8 * (128 * 8 + (times == 1) * 128 * 128)
    for m in (model, sharded):
        m(*args).backward()
    same_gradients(sharded, model)
    again = autoshard.compile(model, sharded.plan.mesh, args, plan=Plan.from_json(sharded.plan.to_json()), **asked)
    assert again.source == sharded.source


@pytest.mark.slow
def test_a_plan_in_stages_is_followed() -> None:
    model, args = made("skips")
    mesh = ideal({"pp": 2, "tp": 2})
    searched = autoshard.plan(model, mesh, args, stages="pp", micro_batches=2).staged
    graph = capture_graph(model, args, {}, training=True)
    plan = compile_graph(graph, mesh, CompileOptions(stages="pp", micro_batches=2), KnownLayouts(boundaries=(5,))).plan
    again = Plan.from_json(plan.to_json())
    assert again == plan
    sharded = autoshard.compile(model, mesh, args, stages="pp", micro_batches=2, plan=again)
    assert sharded.plan.staged is not None
    assert searched is not None
    assert sharded.plan.staged.boundaries == (5,) != searched.boundaries
    assert "2 stages along pp, schedule 1f1b, 2 micro-batches" in str(plan)
    with pytest.raises(PlanError, match="the given plan has no stages"):
        autoshard.compile(model, mesh, args, stages="pp", plan=autoshard.plan(model, mesh, args))


@pytest.mark.slow
def test_one_file_has_all_stages() -> None:
    model, args = made("gpt")
    source = autoshard.compile(model, ideal({"pp": 2, "tp": 2}), args, stages="pp", micro_batches=1).source
    assert [line for line in source.splitlines() if line.startswith("class Stage")] == [
        f"class Stage{n}(runtime.RankModule):" for n in range(2)
    ]
    assert source.count("(runtime.Block):") <= 3  # equal blocks of several stages are one class


@pytest.mark.slow
def test_verify_looks_into_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages and micro-batches are verified like a whole; what differs is named, of whatever stage it is."""
    model, args = made("skips")
    hints = {"down.*.weight": "rowwise", "up.*.weight": "rowwise"}
    asked: dict[str, Any] = {"stages": "pp", "micro_batches": 2, "hints": hints}
    report = autoshard.verify(model, ideal({"pp": 2, "tp": 2}), args, **asked)
    assert report.ok, report
    assert report.plan.staged is not None
    why = report.plan.explain("up.1.weight").splitlines()[1]
    assert "in stage 1 of 2: " in why
    assert " on each of its ranks; asked for by a hint" in why
    right = runtime.reduce_scatter

    def wrong(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return right(x, *args, **kwargs) * (1 + 1e-3 * (x.shape[-1] == 12))  # what the second stage makes of up.1

    monkeypatch.setattr(runtime, "reduce_scatter", wrong)
    report = autoshard.verify(model, ideal({"pp": 2, "tp": 2}), args, **asked)
    assert not report.ok
    assert str(report.first_divergence).startswith("aten.mul.Tensor in (root) at pipeline_steps.py")


def test_a_wrong_message_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a value that crosses without its gradient."""
    through = pipeline.run_stages_in_order
    monkeypatch.setattr(
        "autoshard.module.sharded_module.run_stages_in_order",
        lambda executable, inputs, run: through(
            executable, inputs, lambda part, xs: run(part, [x.detach() if x.is_floating_point() else x for x in xs])
        ),
    )
    with pytest.raises(AssertionError):
        compare("gpt", ideal({"pp": 2}), 2, steps=1)


@pytest.mark.slow_cases("stages")
@pytest.mark.parametrize(
    ("name", "axes", "asked"),
    [("gpt", {"tp": 2, "pp": 2}, {"stages": "pp", "schedule": "interleaved"}), ("skips", {"dp": 2}, {})],
    ids=["stages", "micro_batches"],
)
def test_a_saved_step_is_the_same(
    name: str,
    axes: Any,
    asked: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Micro-batches, stages, tied parameters, buffers and dropout, without the model's code."""
    model, args = made(name)
    sharded = autoshard.compile(model, ideal(axes), args, micro_batches=4, **asked)
    sharded.save(tmp_path)
    inputs = json.loads((tmp_path / "inputs.json").read_text())
    save_file({n: x.clone() for n, x in zip(inputs, args, strict=True)}, tmp_path / "inputs.safetensors")
    optimizer = torch.optim.AdamW(sharded.parameters(), 1e-2)
    expected = []
    for step in range(2):
        torch.manual_seed(step)
        loss = loss_of(sharded(*args))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(f"step {step}: loss {loss.item():.6f}")
    options = ["--inputs", str(tmp_path / "inputs.safetensors"), "--steps", "2", "--lr", "1e-2"]
    monkeypatch.setattr(sys, "argv", ["rank_module.py", *options])
    capsys.readouterr()
    runpy.run_path(str(tmp_path / "rank_module.py"), run_name="__main__")
    assert capsys.readouterr().out.splitlines() == expected


def test_a_saved_step_sends_back_what_the_loss_leads_to(tmp_path: Path) -> None:
    """Else a parameter without a gradient would get one of zeros, which AdamW takes for one."""
    model, args = made("aside")
    autoshard.compile(model, ideal({"pp": 4}), args, stages="pp", micro_batches=2).save(tmp_path)
    saved = json.loads((tmp_path / "step.json").read_text())
    assert saved["tied"] == {}  # the first and the last stage read `outside`
    carried = [[m["grad"] for m in sent] for sent in saved["messages"][:-1]]
    assert all(sum(sent) == 1 < len(sent) for sent in carried), carried


class Counted(nn.Module):
    """Samples weigh by how many are positive so far: that is known before the first micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 12)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.layer(x) * (y > 0).cumsum(0), y)


def test_what_is_made_beforehand_cannot_be_saved(tmp_path: Path) -> None:
    sharded = autoshard.compile(Counted(), ideal({"dp": 2}), (torch.randn(8, 12), torch.randn(8, 12)), micro_batches=2)
    with pytest.raises(PlanError, match=r"values that depend on inputs alone \(y\) are computed from the full batch"):
        sharded.save(tmp_path / "folder")
    assert not (tmp_path / "folder").exists()
