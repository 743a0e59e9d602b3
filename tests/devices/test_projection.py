"""Projections: the rows are those that planning on the larger mesh finds; anchors; what is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import autoshard
from autoshard.hardware import PRESETS
from autoshard.models import Llama, LlamaConfig

CONFIG = replace(LlamaConfig(), layers=2)


def given(rows: int) -> tuple[Any, tuple[Any, ...]]:
    with torch.device("meta"):
        return Llama(CONFIG).bfloat16().train(), (torch.zeros(rows, 2048, dtype=torch.long),) * 2


def projected(axes: dict[str, int], devices: tuple[int, ...], **asked: Any) -> autoshard.Projection:
    model, args = given(2 * axes["dp"])
    return autoshard.project(model, devices, args, mesh=axes, **{"hardware": "h100", **asked})


@pytest.mark.slow_cases("{'dp': 8, 'tp': 8}-{'like': {'dp': 'fsdp', 'tp': 'megatron-sp'}}")
@pytest.mark.parametrize(
    ("axes", "asked"),
    [
        ({"dp": 16}, {"like": "fsdp"}),
        ({"dp": 8, "tp": 8}, {"like": {"dp": "fsdp", "tp": "megatron-sp"}}),
        pytest.param({"dp": 16}, {"like": "zero1"}, marks=pytest.mark.slow),
        pytest.param(
            {"pp": 2, "dp": 8}, {"like": {"dp": "fsdp"}, "stages": "pp", "micro_batches": 2}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_rows_are_what_planning_on_the_larger_mesh_finds(axes: dict[str, int], asked: dict[str, Any]) -> None:
    ranks = math.prod(axes.values())
    row = projected(axes, (ranks, 16 * ranks), **asked)[1]
    model, args = given(2 * 16 * axes["dp"])
    plan = autoshard.plan(model, autoshard.Mesh({**axes, "dp": 16 * axes["dp"]}, "h100"), args, **asked)
    assert row.devices == 16 * ranks
    assert row.step_s == pytest.approx(plan.cost.total_s, rel=0.06)
    assert row.mfu == pytest.approx(plan.cost.mfu, rel=0.06)
    assert row.tokens_per_s == pytest.approx(plan.cost.tokens_per_s, rel=0.06)
    assert row.tokens_per_s_per_device == pytest.approx(row.tokens_per_s / row.devices)
    assert row.memory_bytes == pytest.approx(plan.memory.peak, rel=0.1)
    assert row.device_hours_per_trillion_tokens == pytest.approx(1e12 / row.tokens_per_s_per_device / 3600)


def test_the_first_row_is_the_plan_and_the_table_has_all() -> None:
    found = projected({"dp": 8}, (64, 8), like="fsdp")
    assert [row.devices for row in found] == [8, 64]
    assert found[0].step_s == found.plan.cost.total_s
    assert found[0].memory_bytes == found.plan.memory.peak
    text = str(found)
    assert "Llama on h100" in text
    assert text.count("next lever:") == 2
    assert f"{found[1].tokens_per_s:,.0f}" in text
    small = projected({"dp": 8}, (8, 64), like="fsdp", memory_budget=found[0].memory_bytes * 1.01)
    assert all(row.fits for row in small)


@pytest.mark.slow
def test_a_measured_step_scales_compute() -> None:
    free = projected({"dp": 8}, (8, 64), like="fsdp")
    seconds = 1.3 * free[0].step_s
    for anchor in (seconds, (8, seconds)):
        found = projected({"dp": 8}, (8, 64), like="fsdp", anchor=anchor)
        assert found[0].step_s == pytest.approx(seconds, rel=0.01)
        assert free[1].step_s < found[1].step_s < 1.4 * free[1].step_s
        assert found.compute_factor > 1.2
    later = projected({"dp": 8}, (8, 64), like="fsdp", anchor=(64, 1.2 * free[1].step_s))
    assert later[1].step_s == pytest.approx(1.2 * free[1].step_s, rel=0.01)


def test_a_measured_node_brings_its_rates(tmp_path: Path) -> None:
    slow = replace(PRESETS["h100"], name="mine", efficiency=PRESETS["h100"].efficiency / 2)
    slow.save(tmp_path / "node.json")
    free, found = (projected({"dp": 16}, (16,), like="fsdp", anchor=x) for x in (None, tmp_path / "node.json"))
    assert 1.3 < found[0].cost.compute_s / free[0].cost.compute_s < 2.1
    levels = found.plan.mesh.hardware.levels
    assert (levels[0].link, levels[1].link) == (slow.node, PRESETS["h100"].network)


@pytest.mark.parametrize(
    ("axes", "devices", "asked", "told"),
    [
        ({"dp": 8}, (8, 12), {}, "devices=12 is not a multiple of the 8 of the mesh"),
        ({"dp": 8}, (16, 32), {}, "has 8 ranks, but the smallest number of devices is 16"),
        ({"dp": 8}, (), {}, "needs numbers of devices"),
        ({"dp": 8}, (8, 0), {}, "devices=0"),
        ({"dp": 8}, (8,), {"anchor": -1.0}, "anchor=-1.0: give seconds of a measured step"),
        ({"dp": 8}, (8,), {"anchor": 1e-9}, "is shorter than the predicted communication"),
        ({"dp": 8}, (8, 16), {"like": "megatron"}, "no data-parallel axis that could grow"),
    ],
    ids=str,
)
def test_what_cannot_be_projected_is_refused(
    axes: dict[str, int], devices: tuple[int, ...], asked: dict[str, Any], told: str
) -> None:
    with pytest.raises((autoshard.MeshError, autoshard.PlanError), match=told):
        projected(axes, devices, **{"like": "fsdp", **asked})


@pytest.mark.slow
def test_a_search_ends_in_time_with_what_it_has() -> None:
    with torch.device("meta"):
        model, ids = Llama(LlamaConfig.tiny()).train(), torch.zeros(8, 16, dtype=torch.long)
    asked: dict[str, Any] = {"devices": 8, "hardware": "h100"}
    full, short = (autoshard.plan(model, None, (ids, ids), **asked, time_limit=limit) for limit in (None, 1e-3))
    assert len(short.candidates) < len(full.candidates)
    assert any("the time limit was reached" in note for note in short.notes)
    assert not any("time limit" in note for note in full.notes)
    assert short.lower_bound == 0.0 < full.lower_bound  # none was proven
    for wrong in (0, -1.0, "soon"):
        with pytest.raises(autoshard.PlanError, match="give seconds above 0"):
            autoshard.plan(model, None, (ids, ids), **asked, time_limit=wrong)  # type: ignore[arg-type]
