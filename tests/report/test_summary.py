"""The first lines of a report: the plan in the field's words, its speed, and what it is compared with."""

from __future__ import annotations

import copy
import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

import autoshard
from autoshard import Mesh, Shard, cli, models
from autoshard.plans.plan import Plan
from autoshard.report.record import Cost
from autoshard.report.summary import (
    STATED_ERRORS,
    compared_text,
    step_tokens,
    strategy_text,
    summary_rows,
    what_if,
)
from autoshard.report.text import plan_text
from autoshard.viz.html import html

pytestmark = pytest.mark.usefixtures("remembering")

COST_MODEL = next((Path(__file__).parents[2] / "docs").rglob("cost_model.md"))


def plan_of(name: str, mesh: dict[str, int], batch: int = 8, **asked: Any) -> Plan:
    """A plan on a network without costs, so that everything is sharded that may be."""
    reference = models.get(name)
    with torch.device("meta"):
        model = reference.model()
    args, kwargs = reference.inputs(batch=batch)
    return autoshard.plan(model, Mesh(mesh, "ideal_network"), args, kwargs, **asked)


STRATEGIES = {
    "ddp": ("data parallel over dp=2", {"dp": 2}),
    "zero1": ("ZeRO-1 over dp=2", {"dp": 2}),
    "zero2": ("ZeRO-2 over dp=2", {"dp": 2}),
    "fsdp": ("ZeRO-3 over dp=2", {"dp": 2}),
    "hsdp": ("data parallel over a=2, ZeRO-3 over b=2", {"a": 2, "b": 2}),
    "megatron": ("tensor parallel over tp=2", {"tp": 2}),
    "megatron-sp": ("tensor + sequence parallel over tp=2", {"tp": 2}),
    "ulysses": ("context parallel (Ulysses) over cp=2", {"cp": 2}),
    "ring": ("context parallel (ring attention) over cp=2", {"cp": 2}),
    "replicate": ("replicated along tp=2 (unused)", {"tp": 2}),
}


@pytest.mark.slow_cases("zero1", "zero2", "hsdp", "megatron", "ring")
@pytest.mark.parametrize("like", STRATEGIES)
def test_a_named_strategy_is_recognised(like: str) -> None:
    text, mesh = STRATEGIES[like]
    assert strategy_text(plan_of("llama", mesh, like=like)) == text


@pytest.mark.slow
@pytest.mark.parametrize("like", ["table-wise", "row-wise", "column-wise"])
def test_tables_are_not_mistaken_for_zero(like: str) -> None:
    found = strategy_text(plan_of("dlrm", {"dp": 2}, batch=64, like=like))
    assert found == "data parallel + sharded embedding tables over dp=2"


@pytest.mark.slow
def test_axes_with_one_role_are_one_product_and_experts_are_named() -> None:
    assert strategy_text(plan_of("llama", {"a": 2, "b": 2}, like="fsdp")) == "ZeRO-3 over 4 ranks (a=2×b=2)"
    experts = plan_of("moe", {"dp": 2, "ep": 2}, like={"dp": "fsdp", "ep": "expert"})
    assert "ZeRO-3 over dp=2" in strategy_text(experts)
    exchanged = plan_of("moe", {"dp": 2, "ep": 2}, like="expert")
    assert "sharded embedding tables" not in strategy_text(exchanged)
    assert experts.mesh.axes == ("dp", "ep")


def test_an_axis_with_the_name_of_another_role_is_a_label() -> None:
    found = strategy_text(plan_of("mlp", {"tp": 2}, like={"tp": "ddp"}))
    assert found == "data parallel over 2 ranks (tp=2; axis names are labels)"
    assert strategy_text(plan_of("mlp", {"data2": 2}, like="ddp")) == "data parallel over data2=2"
    both = strategy_text(plan_of("mlp", {"tp": 2, "dp": 2}, like={"tp": "ddp", "dp": "megatron"}))
    assert both == "data parallel over 2 ranks (tp=2), tensor parallel over 2 ranks (dp=2; axis names are labels)"


def test_recomputation_is_full_selective_or_none() -> None:
    full = plan_of("llama", {"dp": 2}, like="ddp", recompute="blocks")
    some = plan_of("llama", {"dp": 2}, like="ddp", recompute="selective")
    assert strategy_text(full) == "data parallel over dp=2, full recomputation of 2 of 2 blocks"
    assert "selective recomputation in 2 of 2 blocks" in strategy_text(some)
    assert "recomputation" not in strategy_text(plan_of("llama", {"dp": 2}, like="ddp", recompute="none"))


@pytest.mark.slow
def test_stages_and_micro_batches_are_named() -> None:
    staged = plan_of("gpt", {"pp": 2}, stages="pp", micro_batches=4)
    assert strategy_text(staged) == "pipeline parallel over pp=2 (1F1B, 4 micro-batches)"
    accumulated = plan_of("llama", {"dp": 2}, like="ddp", micro_batches=2)
    assert strategy_text(accumulated).endswith("gradient accumulation over 2 micro-batches")
    assert step_tokens(staged) == step_tokens(accumulated) == 8 * 16


def test_tokens_and_what_follows_from_them() -> None:
    cost = plan_of("llama", {"dp": 2}).cost
    assert (cost.tokens, cost.devices) == (8 * 16, 2)
    assert cost.tokens_per_s == pytest.approx(128 / cost.total_s)
    assert cost.tokens_per_s_per_device == pytest.approx(64 / cost.total_s)
    assert cost.device_hours_per_token == pytest.approx(2 * cost.total_s / 128 / 3600)
    assert plan_of("vit", {"dp": 2}).cost.tokens == 0  # images
    assert plan_of("dlrm", {"dp": 2}).cost.tokens_per_s == 0  # categories are no tokens
    assert math.isnan(Cost(1.0, 0.0, 1.0, 0.0, 0.0, 0.0).device_hours_per_token)
    assert "samples/s" in dict(summary_rows(plan_of("vit", {"dp": 2})))["speed"]


def test_the_dtype_is_that_of_most_work() -> None:
    reference = models.get("mlp")
    args, kwargs = reference.inputs()
    half = autoshard.plan(reference.model().bfloat16(), {"tp": 2}, tuple(x.bfloat16() for x in args), kwargs)
    assert (half.dtype, plan_of("mlp", {"tp": 2}).dtype) == ("bfloat16", "float32")
    assert ", bfloat16, training step" in str(half).splitlines()[0]


def test_a_faster_dtype_is_named_on_gpus_alone() -> None:
    """In the first line of the report and on the page; not beside mixed precision."""
    plans = {name: on_hardware(name) for name in ("h100", "cpu")}
    hint = "float32 (67 TFLOP/s; in bfloat16 989 TFLOP/s), training step"
    assert hint in plans["h100"].report("short").splitlines()[0]
    assert hint in html(plans["h100"])
    assert "float32, training step" in str(plans["cpu"])
    mixed = on_hardware("h100", mixed_precision=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert "in bfloat16" not in str(mixed)


def on_hardware(name: str, **asked: Any) -> Plan:
    reference = models.get("mlp")
    args, kwargs = reference.inputs()
    return autoshard.plan(reference.model(), Mesh({"tp": 2}, name), args, kwargs, **asked)


# --- what if ---

COMMANDS = (
    ["mlp", "--mesh", "dp=2,tp=2", "--hardware", "h100"],
    ["mlp", "--mesh=dp=2,tp=2", "--hardware=h100", "--dtype=float32", "--like=dp=fsdp,tp=megatron", "--batch=8"],
    [
        "gpt",
        "--mesh=tp=2",
        "--hardware=a100",
        "--memory-budget=3.5GB",
        "--optimizer=sgd",
        "--micro-batches=2",
        "--seq=8",
    ],
    ["mlp", "--mesh=tp=2", "--hardware=h100", "--hint=*up.weight=S(0)", "--hint=*.bias=replicate", "--strict"],
    ["mlp", "--mesh=tp=2", "--hardware=h100", "--inference", "--recompute=none", "--dynamic"],
    ["mlp", "--mesh=tp=2", "--hardware=h100", "--mixed-precision=bfloat16", "--recompute=blocks"],
    ["gpt", "--mesh=pp=2,tp=2", "--hardware=h100", "--stages=pp", "--schedule=interleaved", "--micro-batches=2"],
)


@pytest.mark.slow_cases("command2", "command4", "command5", "command6")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_what_if_command_has_all_options_of_its_plan(command: list[str]) -> None:
    """Read by the parser of the command line, it differs in what the question asks, and only there."""
    asked = cli._parser().parse_args(["plan", *command])
    plan = cli._resulting_plan(asked)
    changes = {"twice the batch": "batch", "half the memory": "memory_budget", "other hardware": "hardware"}
    assert Plan.from_json(plan.to_json()).asked == plan.asked
    for question, line in what_if(plan):
        again = cli._parser().parse_args(shlex.split(line)[1:])
        differs = {name for name, value in vars(asked).items() if vars(again)[name] != value} - {"mesh", "dtype"}
        assert differs == {changes.get(question)} - {None}, line
        assert cli._dtype_name(again) == cli._dtype_name(asked)
        meshes = [cli._mesh(options) for options in (again, asked)]
        assert meshes[0].size == meshes[1].size * (2 if question == "twice the devices" else 1)
        assert again.batch == (2 * (asked.batch or 4) if question == "twice the batch" else asked.batch)


def test_a_what_if_command_of_a_plan_in_python() -> None:
    """The model has no name there; what the command line cannot express is a comment."""
    plan = on_hardware("h100", hints={"*.up.weight": {"tp": Shard(0)}})
    lines = dict(what_if(plan))
    assert lines["other hardware"] == (
        "autoshard plan MODEL --mesh tp=2 --hardware a100 --dtype float32 --batch 2 # without hints by axis"
    )
    assert "--memory-budget 36e9" in lines["half the memory"]
    assert "within the budget" not in str(plan)
    assert ", within the budget of 20 GB; most of it" in str(on_hardware("h100", memory_budget=20e9))


def test_a_short_report_is_a_screen_and_a_full_one_has_every_row() -> None:
    deep = plan_of("dlrm", {"dp": 2}, batch=64)
    short, full = str(deep).splitlines(), deep.report().splitlines()
    assert len(short) <= 48
    assert len(full) > len(short)
    assert short[0] == full[0]
    assert re.search(r'plan\.report\("full"\): memory by use, \d+ more rows of', short[-1])
    with pytest.raises(autoshard.PlanError, match='"short" or "full", not \'long\''):
        plan_text(deep, level="long")


# --- compared ---


def mlp(mesh: dict[str, int], **asked: Any) -> Plan:
    return plan_of("mlp", mesh, **asked)


@pytest.fixture(scope="module")
def free() -> Plan:
    return mlp({"dp": 2})


def test_named_strategies_are_planned_when_they_are_read(free: Plan) -> None:
    fresh = mlp({"dp": 2})
    assert compared_text(fresh).startswith("free ")
    assert compared_text(fresh).endswith("; plan.compared plans the named strategies, too")
    assert "baselines" not in json.loads(fresh.to_json())
    assert copy.copy(fresh).baselines == ()  # a copy plans nothing
    rows = {name: (seconds, peak, why) for name, seconds, peak, why in free.compared}
    assert {"free", "ddp", "fsdp", "megatron"} <= set(rows)
    assert rows["free"] == (free.cost.total_s, free.cost.memory_bytes, "")
    assert min(seconds for seconds, _, _ in rows.values() if seconds) >= rows["free"][0] * (1 - 1e-9)
    assert "plan.compared plans" not in compared_text(free)


def test_compared_plans_are_kept_in_files_once_they_are_known(free: Plan) -> None:
    again = Plan.from_json(free.to_json() if free.compared else "")
    assert again.compared == free.compared
    assert again == free
    assert again.strategies_are_compared


def test_what_does_not_fit_says_so(free: Plan) -> None:
    needs = {name: peak for name, _, peak, _ in free.compared}
    tight = mlp({"dp": 2}, memory_budget=0.75 * needs["ddp"])
    rows = {name: row for name, *row in tight.compared}
    assert rows["ddp"][0] is None
    assert rows["ddp"][2].startswith("does not fit: ")
    assert 0 < rows["ddp"][1] <= needs["ddp"]
    assert tight.compared[0][2] <= 0.75 * needs["ddp"]
    assert "ddp does not fit: " in compared_text(tight, most=20)


@pytest.mark.slow
def test_a_compared_strategy_costs_what_its_plan_costs() -> None:
    """On two axes, beside a search and beside another named strategy."""
    mesh = {"dp": 2, "tp": 2}
    free, asked = plan_of("llama", mesh), plan_of("llama", mesh, like="fsdp")
    names = [name for name, *_ in free.compared]
    assert "fsdp + megatron-sp" in names
    (fsdp,) = (row for row in free.compared if row[0] == "fsdp")
    assert fsdp[1:3] == pytest.approx((asked.cost.total_s, asked.memory.peak))
    names = [name for name, *_ in asked.compared]
    assert names[0] == "like='fsdp'"
    assert "free" in names
    assert "fsdp" not in names


@pytest.mark.slow
def test_meshes_that_lost_are_compared() -> None:
    reference = models.get("mlp:large")
    with torch.device("meta"):
        model = reference.model()
    args, kwargs = reference.inputs(batch=64)
    plan = autoshard.plan(model, None, args, kwargs, devices=4, hardware="h100")
    assert {f"mesh {c.mesh}" for c in plan.candidates} <= {name for name, *_ in plan.known_compared}
    assert any(name == "fsdp" for name, *_ in plan.compared)


# --- how sure ---


def test_stated_errors_are_those_of_the_pages() -> None:
    """The errors of the tables of published steps, by ``like=`` alone."""
    text = COST_MODEL.read_text("utf-8")
    text = text[
        text.index("| published step (`benchmarks/planner.py`)") : text.index("Pipelines (`benchmarks/pipeline.py`)")
    ]
    errors: dict[str, list[float]] = {"h100": [], "a100": []}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        found = [[float(x.replace("−", "-")) for x in re.findall(r"([−+][\d.]+) %", cell)] for cell in cells]
        if len(cells) == 6 and found[5]:
            if not cells[0].startswith("the same"):
                device = "h100" if "H100" in cells[0] else "a100"
            errors[device] += found[5]
        elif len(cells) == 3 and (found[1] or found[2]):
            errors["h100"] += found[1]
            errors["a100"] += found[2]
    for name, stated in STATED_ERRORS.items():
        assert stated == (
            f"−{-min(errors[name]):.0f}% to +{max(errors[name]):.0f}% on {len(errors[name])} published training steps"
        )
