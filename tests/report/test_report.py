"""The report that ``print(plan)`` shows: against the plan it reports on."""

from __future__ import annotations

import copy
import dataclasses
import re

import pytest
import torch
from picture_samples import ODD_NAMES, chain, planned
from torch import nn

from autoshard import Mesh, models
from autoshard.api import plan
from autoshard.passes.ir.text import show_bytes, show_seconds
from autoshard.plans.plan import Plan
from autoshard.report.summary import utilisation
from autoshard.report.text import (
    collective_rows,
    hot_spots,
    layer_glob,
    layer_numbers,
    local_bytes,
    memory_parts,
    parameter_rows,
    plan_text,
    show_layout,
)
from autoshard.viz.drawing import layout_change


@pytest.fixture(scope="module")
def llama() -> Plan:
    return planned("llama", dp=2, tp=2)


def test_every_parameter_stands_in_one_row(llama: Plan) -> None:
    rows = parameter_rows(llama)
    stored = [n for n, kind in llama.kinds.items() if kind in ("parameter", "buffer", "input")]
    assert sorted(n for row in rows for n in row.names) == sorted(stored)
    for row in rows:
        assert {str(llama.layouts[n]) for n in row.names} == {str(row.layout)}
        assert {layer_glob(n) for n in row.names} == {layer_glob(row.names[0])}


def test_equal_layers_are_folded_and_unequal_ones_are_numbered(llama: Plan) -> None:
    text = plan_text(llama)
    assert re.search(r"blocks\.\*\.feed_forward\.up\.weight +×2 ", text)
    name = "blocks.1.feed_forward.up.weight"
    other = llama.layouts["embedding.weight"]
    assert other != llama.layouts[name]
    changed = dataclasses.replace(llama, layouts={**llama.layouts, name: other})
    assert name in plan_text(changed)  # the negative control: a layout of its own is no longer folded


def test_collectives_add_up(llama: Plan) -> None:
    rows = collective_rows(llama.collectives)
    assert sum(r.count for r in rows) == len(llama.collectives) > 0
    assert sum(r.bytes for r in rows) == pytest.approx(sum(c.bytes for c in llama.collectives))
    assert [r.seconds for r in rows] == sorted((r.seconds for r in rows), reverse=True)
    for kind in {c.kind for c in llama.collectives}:
        assert kind in plan_text(llama)


def test_memory_adds_up(llama: Plan) -> None:
    parts = memory_parts(llama)
    assert sum(parts.values()) == pytest.approx(llama.cost.memory_bytes)
    stored = sum(local_bytes(llama, n) for n, kind in llama.kinds.items() if kind == "parameter")
    assert parts["parameters"] == stored
    assert parts["optimizer state (adamw)"] == 2 * stored  # float32 parameters: two float32 moments


def test_mfu_counts_the_models_flops_only(llama: Plan) -> None:
    mfu, hfu = utilisation(llama)
    peak = llama.mesh.hardware.flops / 2  # float32
    assert mfu == pytest.approx(llama.cost.flops / (4 * peak * llama.cost.total_s))
    assert hfu == pytest.approx(llama.cost.flops_per_rank / (peak * llama.cost.total_s))


def test_what_dominates_is_the_most_expensive(llama: Plan) -> None:
    spots = hot_spots(llama, 1000)
    seconds = sum(c.seconds for c in llama.choices.values()) + sum(c.seconds for c in llama.collectives)
    assert sum(s for _, _, s in spots) == pytest.approx(seconds)
    assert [s for _, _, s in spots] == sorted((s for _, _, s in spots), reverse=True)


def test_says_that_an_axis_is_not_used_and_what_using_it_would_cost() -> None:
    reference = models.get("mlp")
    args, kwargs = reference.inputs()
    whole = plan(reference.model(), Mesh({"tp": 2}, hardware="h100"), args, kwargs)
    (note,) = whole.notes
    assert "axis tp is not used" in note
    assert re.search(r"[\d.]+ µs more for aten\.linear\.default in blocks\.\d", note)
    assert note.split(":")[0] in plan_text(whole).replace("\n", " ")
    used = plan(reference.model(), Mesh({"tp": 2}, hardware="ideal_network"), args, kwargs)
    assert used.notes == ()


def test_says_what_an_axis_would_save_that_was_asked_to_stay_whole() -> None:
    reference = models.get("mlp")
    args, kwargs = reference.inputs()
    whole = plan(reference.model(), Mesh({"tp": 2}, hardware="ideal_network"), args, kwargs, like="replicate")
    (note,) = (n for n in whole.notes if "axis tp is not used" in n)
    assert re.search(
        r"asked for, or found: sharding would save [\d.]+ [mµn]?s for aten\.linear\.default in blocks\.\d", note
    )
    assert "take longer" not in note


def test_no_alternative_to_an_optimal_plan_saves_time(llama: Plan) -> None:
    extra = [seconds for c in llama.choices.values() for _, seconds in c.alternatives]
    assert extra
    assert min(extra) >= -1e-12


def test_reports_operations_without_a_rule() -> None:
    text = plan_text(chain(("layers.0", "layers.1"), rule=False))
    assert re.search(r"aten\.linear\.default +×2 +layers\.\* +model\.py:1 +2 µs", text)
    assert "no rule" not in plan_text(chain(("layers.0", "layers.1")))


def test_names_are_never_read_as_markup() -> None:
    text = plan_text(chain(ODD_NAMES), width=400)
    for name in ODD_NAMES:
        if "\n" not in name:
            assert name in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1536, "1.54 kB"), (999_999, "1.00 MB"), (26.5e9, "26.5 GB")],
)
def test_bytes(value: float, shown: str) -> None:
    assert show_bytes(value) == shown


def test_a_peak_just_over_its_budget_does_not_read_alike() -> None:
    assert (show_bytes(80e9, 4), show_bytes(80.04e9, 4), show_bytes(1e6, 4)) == ("80 GB", "80.04 GB", "1 MB")


@pytest.mark.parametrize(
    ("value", "shown"), [(0, "0"), (1.5e-6, "1.50 µs"), (0.139, "139 ms"), (2, "2 s"), (3e-9, "3 ns")]
)
def test_seconds(value: float, shown: str) -> None:
    assert show_seconds(value) == shown


def test_names_and_layouts_in_short(llama: Plan) -> None:
    assert layer_glob("model.layers.11.mlp.3.weight") == "model.layers.*.mlp.*.weight"
    assert layer_numbers(["a.0.b", "a.1.b", "a.2.b", "a.7.b"]) == "0-2,7"
    assert "I@" not in "".join(show_layout(x) for x in llama.layouts.values())


def test_collectives_that_go_together_are_one_row() -> None:
    net = nn.Sequential(nn.Linear(100, 333), nn.BatchNorm1d(333), nn.ReLU(), nn.Linear(333, 50))
    together = plan(net, Mesh({"a": 3}, hardware="ideal_network"), (torch.randn(30, 100),))
    assert "S(0)@a → R@a and 1 more" in plan_text(together)
    (two,) = [c for c in together.collectives if len(c.reasons) > 1 and c.phase == "forward"]
    assert layout_change(two) == ("S(0)@a", "R@a")


def test_numbers_stand_at_every_place() -> None:
    """Matrices of one stack whose shapes differ are told apart, layers of all blocks or not."""
    block = (nn.Linear(8, 16), nn.Linear(16, 24), nn.Linear(24, 16), nn.Linear(16, 8))
    net = nn.Sequential(*(nn.Sequential(*map(copy.deepcopy, block)) for _ in range(3)))
    rows = parameter_rows(plan(net, Mesh({"a": 2}, hardware="ideal_network"), (torch.randn(8, 8),), like="ddp"))
    assert [r.glob for r in rows if r.glob.endswith("weight")] == [f"{{0-2}}.{i}.weight" for i in range(4)]
    assert [r.glob for r in rows if len(r.names) == 6] == ["{0-2}.{0,2}.bias"]
